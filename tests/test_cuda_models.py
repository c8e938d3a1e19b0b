"""On a GPU: models with recurrences, models that write from a source, and pictures in prompts.
Skipped without one; that they are transformers' on the CPU, `test_recurrent`, `test_sources` and
`test_pictures` show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from archs import ARCHS, build, error, tokens_and_positions
from source_models import TYPES, model, sources, written
from test_architectures import same_tokens
from test_pictures import ASKED, expected, model_of, prompt_of, read_of
from test_recurrent import NEW, WIDTHS, _in_steps, imported, prompts

import graftwork as gw
from graftwork.ir import UnsupportedError
from graftwork.passes.engine.manager import run_passes

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
BACKENDS = ["torch", "onnxruntime"]
FAMILIES = ["qwen3_5_text", "mamba2", "lfm2", "recurrent_gemma", "bamba", "jamba", "kimi_linear"]
DRAFTED = [("qwen3_5_text", "recycling"), ("mamba2", "copyspec"), ("lfm2", "recycling")]


def target(backend: str) -> str:
    return f"{backend}:{DEVICE}:float32"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_recurrences_give_transformers_logits(name: str, backend: str) -> None:
    """In steps of all widths, some of whose rows are taken back."""
    reference, program = imported(name)
    ids, _ = tokens_and_positions(tokens=sum(WIDTHS))
    with torch.no_grad():
        want = reference(input_ids=ids, use_cache=False).logits
    cached, _ = run_passes(program, gw.Recipe.load("baseline").steps)
    assert error(_in_steps(cached, target(backend), ids, 1), want) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "recipe"), DRAFTED)
def test_drafts_change_no_text_of_a_recurrence(name: str, recipe: str, backend: str) -> None:
    reference, _ = imported(name)
    fast = gw.optimize(reference, recipe, target=target(backend))
    for given, want in zip(*prompts(name), strict=True):
        found = fast.generate(given, max_new_tokens=NEW, pad_token_id=0)
        assert same_tokens(reference, found[0], want[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["baseline", "copyspec"])
@pytest.mark.parametrize("name", TYPES)
def test_texts_from_a_source_are_transformers(name: str, recipe: str, backend: str) -> None:
    given = sources(name, 3)
    want = written(model(name), given, max_new_tokens=24)
    found = gw.optimize(model(name), recipe, target=target(backend))
    assert torch.equal(found.generate(**given, max_new_tokens=24), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_texts_about_pictures_are_transformers(name: str, backend: str) -> None:
    ids = torch.tensor([prompt_of(name, [1, 7], 1, [9, 30])])
    fast = gw.optimize(model_of(name), target=target(backend))
    assert torch.equal(
        fast.generate(ids, **read_of(name, 1), **ASKED), expected(name, ids, None, 1)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_states_generate(backend: str) -> None:
    """As they do on the CPU, or refused by name."""
    reference, _ = imported("mamba2")
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(3, 128, (80, 64), generator=generator).tolist()
    given: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0}
    ids = prompts("mamba2")[0][0]
    want = gw.optimize(reference, "quamba2", target="eager", data=data).generate(ids, **given)
    try:
        fast = gw.optimize(reference, "quamba2", target=target(backend), data=data)
    except UnsupportedError as refused:
        assert "CPU" in str(refused)
        return
    found = fast.generate(ids, **given)
    assert found.shape == want.shape
    assert torch.equal(found, fast.generate(ids, **given))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_mixtures_give_transformers_logits(name: str, backend: str, dtype: str) -> None:
    """Of a prompt, of which many experts are needed, and of one token; most of them, as what is
    rounded may choose another expert where two are nearly as good."""
    reference = build(ARCHS[name])
    ids, _ = tokens_and_positions(tokens=40)
    with torch.no_grad():
        want = reference(input_ids=ids, use_cache=False).logits
    fast = gw.optimize(reference, "baseline", target=f"{backend}:{DEVICE}:{dtype}")
    bound = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    for width in (40, 1):
        got = fast(ids[:, :width]).float().cpu()
        off = (got - want[:, :width]).abs().amax(-1) / want.abs().max()
        assert off.median() < bound
    text = fast.generate(ids[:1], max_new_tokens=8, pad_token_id=0)
    assert torch.equal(text, fast.generate(ids[:1], max_new_tokens=8, pad_token_id=0))
