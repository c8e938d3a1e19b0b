"""Layers that predict several tokens ahead (MTP): read from the checkpoint, run as drafters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import FAMILIES, LAYERS, Made, rising, taught, write
from safetensors.torch import load_file, save_file
from selection import rarely
from tiny import MASK, PROMPTS, tiny_llama

import graftwork as gw
from graftwork.frontends import import_part
from graftwork.ir import InputError, PassError, run
from graftwork.model import Model
from graftwork.optimizing import trace
from graftwork.passes.drafting.draft_mtp import DraftMtp

ASKED = {"attention_mask": MASK, "max_new_tokens": 16, "eos_token_id": [], "pad_token_id": 0}


def optimized(
    folder: Path, recipe: str = "mtp", target: str = "eager", **settings: object
) -> Model:
    given = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    return gw.optimize(str(folder), gw.Recipe.load(recipe).with_options(given), target=target)


def changed(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint, or leave them out; a name is a part of theirs."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for part, value in changes.items():
        (name,) = [name for name in tensors if part in name and "mtp" in name]
        del tensors[name]
        if value is not None:
            tensors[name] = value
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("family", rarely(FAMILIES, 2, keep=("glm4_moe",)))
def test_draft_logits_are_those_of_transformers_own_layer(family: str, tmp_path: Path) -> None:
    made = write(tmp_path, family)
    program = trace(str(tmp_path), gw.Recipe.load("mtp"), target="eager", after="draft_mtp")
    tokens, hidden = torch.randint(3, 128, (2, 11)), torch.randn(2, 11, 32)
    places = torch.arange(11).expand(2, 11)
    given = {"tokens": tokens, "hidden": hidden, "positions": places, "select": places}
    found = run(program, "mtp", given)
    with torch.no_grad():
        wanted = made.logits(tokens, hidden)
        other = made.logits(tokens, hidden.roll(1, 1))
    scale = float(wanted.abs().max())
    assert float((other - wanted).abs().max()) > 0.1 * scale  # it reads the states
    torch.testing.assert_close(found["draft_logits"], wanted, atol=1e-4 * scale, rtol=0)


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("glm4_moe", "eager"),
        pytest.param("qwen3_5_text", "onnxruntime", marks=pytest.mark.long),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ("glm4_moe", "onnxruntime"),
                ("glm4_moe", "torch"),
                ("qwen3_5_text", "eager"),
                ("qwen3_5_text", "torch"),
            )
        ),
    ],
)
def test_the_text_is_the_targets_own(family: str, target: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    plain = optimized(tmp_path, "baseline", target)
    fast = optimized(tmp_path, "mtp", target)
    assert torch.equal(fast.generate(PROMPTS, **ASKED), plain.generate(PROMPTS, **ASKED))
    alone: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": []}
    made = fast.generate(PROMPTS[2:3], return_dict_in_generate=True, **alone)
    assert torch.equal(made.sequences, plain.generate(PROMPTS[2:3], **alone))
    assert made.stats.draft_tokens > made.stats.steps


@pytest.fixture(name="learned", scope="module")
def _learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Made]:
    """A checkpoint whose layer knows its text."""
    folder = tmp_path_factory.mktemp("learned")
    torch.manual_seed(0)
    return folder, write(folder, "glm4_moe", taught("glm4_moe", 150))


@pytest.mark.long
def test_drafts_of_a_trained_layer_are_kept(learned: tuple[Path, Made]) -> None:
    fast, prompts = optimized(learned[0]), rising(4, 8)
    found = fast.generate(prompts, max_new_tokens=24, return_dict_in_generate=True)
    plain = optimized(learned[0], "baseline").generate(prompts, max_new_tokens=24)
    assert torch.equal(found.sequences, plain)
    assert found.stats.accepted_per_step > 1.5


@pytest.mark.long
def test_levels_below_the_first_read_the_layers_own_states(learned: tuple[Path, Made]) -> None:
    folder, made = learned
    program = trace(str(folder), gw.Recipe.load("mtp"), target="eager", after="draft_mtp")
    tokens, hidden = rising(1, 6), torch.randn(1, 6, 32)
    places = torch.arange(6)[None]
    given = {"tokens": tokens, "hidden": hidden, "positions": places, "select": places}
    first = run(program, "mtp", given)
    with torch.no_grad():
        head = made.model.lm_head(first["hidden"])
    torch.testing.assert_close(head, first["draft_logits"], atol=1e-4, rtol=1e-4)
    assert program.plan.draft.levels == 3 and program.plan.draft.output == "hidden.normed"


@pytest.mark.long
def test_a_layer_is_trained_further_and_read_back(
    learned: tuple[Path, Made], tmp_path: Path
) -> None:
    fast = optimized(learned[0])
    text = rising(24, 40).tolist()
    few = {"steps": 2, "batch": 2, "window": 16, "own": 0.0}
    fitted = gw.fit(fast, text, out=tmp_path / "heads", **few)
    names = set(load_file(tmp_path / "heads" / "heads.safetensors"))
    assert any("proj" in name for name in names) and all(n.startswith("mtp.") for n in names)
    again = optimized(learned[0], draft_mtp__weights=tmp_path / "heads")
    prompts = rising(2, 8)
    kept = again.generate(prompts, max_new_tokens=12)
    assert torch.equal(kept, fitted.model.generate(prompts, max_new_tokens=12))
    before, after = (m.program.weights["mtp.mtp.proj.weight"].load() for m in (fast, again))
    assert not torch.equal(before, after)


@pytest.mark.long
def test_models_in_memory_are_read_from_where_they_were_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write(tmp_path, "glm4_moe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    asked: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": []}
    found = gw.optimize(model, "mtp", target="eager").generate(PROMPTS[2:3], **asked)
    wanted = optimized(tmp_path, "baseline").generate(PROMPTS[2:3], **asked)
    assert torch.equal(found, wanted)
    model.config._name_or_path = ""
    with pytest.raises(InputError, match="a model in memory has none; got 'Glm4MoeForCausalLM'"):
        gw.optimize(model, "mtp", target="eager")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q_proj.weight": None},
            r"flash: the checkpoint lacks model\.layers\.0\.self_attn\.q_proj\.weight$",
        ),
        ({"eh_proj.weight": None}, r"flash: the checkpoint lacks mtp\.proj\.weight$"),
        (
            {"q_proj.weight": torch.zeros(7, 32)},
            r"'model\.mtp\..*q_proj\.weight' is f32\[7,32\], but the c",
        ),
        (
            {"final_layernorm.weight": torch.zeros(31)},
            r"final_layernorm.weight' is f32\[31\], but the c",
        ),
    ],
    ids=["block lacks", "parts lack", "block's shape", "norm's shape"],
)
def test_layers_that_do_not_fit_are_refused_by_tensor(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "mimo_v2_flash")
    changed(tmp_path, **change)
    with pytest.raises(InputError, match=message):
        import_part(tmp_path, "mtp.0")


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mimo_v2_flash")
    path = tmp_path / "model.safetensors"
    strange = {"model.mtp.layers.0.mixer.weight": torch.zeros(2)}
    save_file(load_file(path) | strange, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"mtp\.layers\.0\.mixer\.weight has no place in it"):
        import_part(tmp_path, "mtp.0")


def test_checkpoints_without_a_layer_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe")
    with pytest.raises(InputError, match=r"layer 1; it has 0: looked for the tensors layers\.3"):
        import_part(tmp_path, "mtp.1")
    path, end = tmp_path / "model.safetensors", f"layers.{LAYERS}."
    held = {name: tensor for name, tensor in load_file(path).items() if end not in name}
    save_file(held, path, {"format": "pt"})
    with pytest.raises(InputError, match="no multi-token-prediction layer 0; it has none"):
        import_part(tmp_path, "mtp.0")
    with pytest.raises(PassError, match=r"the checkpoint's layer mtp\.0 beside the program"):
        DraftMtp().run(tiny_llama())
