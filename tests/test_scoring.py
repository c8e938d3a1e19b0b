"""`fast(input_ids)`: the logits of whole texts, on every backend."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import NAMES, program_of
from exits import acting
from selection import rarely
from test_pairs import ASKED
from tiny import MASK, PROMPTS, cached_llama, drafting_llama, tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import GraftworkWarning, InputError, Program, UnsupportedError, run
from graftwork.ir.execution.executable import Planned
from graftwork.ir.plan import FullDepth
from graftwork.measuring.agreement import plain_plan
from graftwork.model import Model
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.stepping.contrast_layers import ContrastLayers
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime.generation import generate
from graftwork.runtime.scoring import score

TARGETS = ("eager", pytest.param("torch", marks=pytest.mark.long), "onnxruntime")


def model(program: Program, backend: str) -> Model:
    return Model(program, Target(backend, "cpu"), {"name": "test"})


def reference(ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return run(tiny_llama(), "step", {"tokens": ids, "positions": positions})["logits"]


def texts(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, tiny_llama().info.vocab_size, (batch, length), generator=generator)


@pytest.mark.parametrize("backend", TARGETS)
def test_logits_are_those_of_a_forward_pass(backend: str) -> None:
    fast, context = model(cached_llama(), backend), tiny_llama().info.context
    for ids in (texts(1, 1), texts(2, 5), texts(1, context)):
        found = fast(ids)
        assert found.dtype == torch.float32 and found.device.type == "cpu"
        torch.testing.assert_close(found, reference(ids), atol=2e-5, rtol=1e-4)
    assert torch.equal(fast(ids.tolist()), fast(ids))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_scoring_and_generating_do_not_disturb_each_other(backend: str) -> None:
    fast = model(drafting_llama(DraftMedusa()), backend)
    ids = texts(2, 6)
    text = fast.generate(ids, max_new_tokens=8)
    scored = fast(text)
    torch.testing.assert_close(scored, reference(text), atol=2e-5, rtol=1e-4)
    assert torch.equal(scored[:, 5:-1].argmax(-1), text[:, 6:])
    assert torch.equal(fast.generate(ids, max_new_tokens=8), text)
    assert torch.equal(fast(text), scored)


def test_texts_longer_than_a_step_are_fed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from graftwork.runtime.feeding import feed

    monkeypatch.setattr(feed, "CHUNK", 4)
    ids = texts(2, 11)
    found = model(cached_llama(), "onnxruntime")(ids)
    torch.testing.assert_close(found, reference(ids), atol=2e-5, rtol=1e-4)


def test_wide_logits_are_read_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of several layers, of a large vocabulary, would otherwise take all memory there is."""
    from graftwork.runtime import scoring

    plain = cached_llama()
    contrasting = ContrastLayers(layers=(1,)).run(PickLogits().run(plain).program).program
    vocabulary = plain.info.vocab_size
    assert scoring.row_bytes(plain) == scoring.COPIES * vocabulary * 4
    assert scoring.row_bytes(contrasting) == 2 * scoring.row_bytes(plain)
    ids, fast = texts(2, 11), model(contrasting, "onnxruntime")
    whole = fast(ids)
    monkeypatch.setattr(scoring, "READ", 3 * 2 * scoring.row_bytes(contrasting) + 1)
    widths: list[int] = []
    piece = scoring._Scoring._piece

    def noted(self: Any, feeder: Any, ids: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        widths.append(ids.shape[1])
        return piece(self, feeder, ids, *rest)

    monkeypatch.setattr(scoring._Scoring, "_piece", noted)
    torch.testing.assert_close(fast(ids), whole, atol=2e-5, rtol=1e-4)
    assert widths == [1, 3, 3, 3, 1]


@pytest.mark.parametrize("backend", TARGETS)
def test_logits_of_quantized_weights(backend: str) -> None:
    program = QuantizeWeights(bits=8, group=8, embedding=True).run(cached_llama()).program
    ids = texts(2, 7)
    found, wanted = model(program, backend)(ids), reference(ids)
    assert 1e-4 < (found - wanted).abs().max() / wanted.abs().max() < 0.05


EARLY: dict[str, dict[str, Any]] = {
    "calm": {"threshold": 0.05, "decay": 4.0},
    "free": {"threshold": 0.05, "decay": 4.0},
    "self_supervised_exits": {"threshold": 0.05, "decay": 2.0},
    "ffn_skipllm": {"similarity": 0.7, "warm": 2},
    "mixture_of_depths": {"threshold": 0.88},
    "entropy_adaptive": {"threshold": 4.45, "pending": 5},
    "skipdecode": {"tokens": 20},
    "d3": {"alpha": 0.98},
}
"""What makes the tiny model run fewer layers for some tokens and not for others."""

APPROXIMATE = [r.name for r in gw.recipes() if r.contract == "approximate" and r.name in NAMES]


@pytest.mark.parametrize(
    "name",
    rarely(
        APPROXIMATE,
        1,
        keep=("calm", "ffn_skipllm", "mixture_of_depths", "unified_skipping", "snapkv", "kvquant"),
    ),
)
def test_scores_are_those_of_the_path_that_generates(name: str, tmp_path: Path) -> None:
    """Of every approximate recipe: how deep tokens run, what caches lose, how they are read."""
    program = program_of(name, tmp_path)
    early = replace(acting(program).plan.depth, **EARLY.get(name, {}))
    executable = compile(program, Target("eager", "cpu"))
    fast = Planned(executable, replace(plain_plan(program.plan), depth=early))
    left = []
    for row, mask in zip(PROMPTS, MASK, strict=True):
        ids = row[None, mask.bool()]
        count = ids.shape[1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraftworkWarning)  # what judges drafts is untrained
            made = generate(fast, ids, return_dict_in_generate=True, **ASKED)
        scored = score(fast, made.sequences, prompt=count)
        assert scored.shape == (1, count + 40, 32) and not scored[:, count - 1 :].isnan().any()
        assert torch.equal(scored[0, count - 1 : -1].argmax(-1), made.sequences[0, count:])
        if made.stats.layers < made.stats.target_layers:
            left.append((made.sequences, count, scored))
        assert torch.equal(score(fast, made.sequences, count).nan_to_num(), scored.nan_to_num())
    assert bool(left) == (name in EARLY)
    full = Planned(executable, replace(fast.program.plan, depth=FullDepth()))
    for text, count, scored in left:
        assert not torch.allclose(score(full, text, count), scored, atol=1e-3)


def test_texts_of_a_batch_are_scored_each_alone(tmp_path: Path) -> None:
    """A batch leaves early together; that is not what one text's perplexity is about."""
    program = program_of("calm", tmp_path)
    plan = replace(program.plan, depth=replace(program.plan.depth, **EARLY["calm"]))
    fast = Planned(compile(program, Target("onnxruntime", "cpu")), plan)
    ids = texts(3, 30)
    alone = torch.cat([score(fast, row[None], 4) for row in ids])
    torch.testing.assert_close(score(fast, ids, 4), alone)


@pytest.mark.long
def test_scoring_teaches_nothing(tmp_path: Path) -> None:
    """Where a threshold is learnt, it is by what is generated."""
    program = program_of("free", tmp_path)
    learning = replace(program.plan.depth, posterior=0.4, threshold=0.05)
    made = []
    for scores in (False, True):
        executable = compile(program, Target("eager", "cpu"))
        fast = Planned(executable, replace(program.plan, depth=learning))
        for seed in range(3):
            if scores:
                score(fast, texts(1, 60))
            made.append(generate(fast, texts(1, 5 + seed), **ASKED).tolist())
    assert made[:3] == made[3:]


def test_few_bits_come_back_from_an_artifact(tmp_path: Path) -> None:
    program = QuantizeWeights(bits=3, group=8, embedding=6).run(cached_llama()).program
    fast = Model(program, Target("eager", "cpu"), {"name": "test", "contract": "approximate"})
    back, ids = gw.load(fast.save(tmp_path / "out")), texts(2, 7)
    assert torch.equal(back(ids), fast(ids))
    types = {name: str(weight.type) for name, weight in back.program.weights.items()}
    assert types == {name: str(weight.type) for name, weight in program.weights.items()}
    assert back.report is None and any(type.startswith("u8") for type in types.values())


def test_what_cannot_be_scored_is_refused() -> None:
    fast = model(cached_llama(), "eager")
    context = tiny_llama().info.context
    with pytest.raises(InputError, match=f"a text of {context + 1} tokens.*score it in windows"):
        fast(texts(1, context + 1))
    with pytest.raises(InputError, match="holds the token id 999"):
        fast([[1, 999]])
    with pytest.raises(InputError, match="at least one token"):
        fast(torch.empty(1, 0, dtype=torch.int64))
    for prompt in (0, 3, True, 1.0):
        with pytest.raises(InputError, match=r"prompt: expected a number of tokens in 1..2"):
            fast([[1, 2]], prompt=prompt)
    with pytest.raises(UnsupportedError, match="has no KV cache"):
        model(tiny_llama(), "eager")(texts(1, 2))
    assert isinstance(fast, gw.Model)
