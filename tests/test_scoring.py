"""`fast(input_ids)`: the logits of whole texts, on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import cached_llama, drafting_llama, tiny_llama

import graftwork as gw
from graftwork.backends.target import Target
from graftwork.ir import InputError, Program, UnsupportedError, run
from graftwork.model import Model
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.numerics.quantize_weights import QuantizeWeights

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


@pytest.mark.parametrize("backend", TARGETS)
def test_logits_of_quantized_weights(backend: str) -> None:
    program = QuantizeWeights(bits=8, group=8, embedding=True).run(cached_llama()).program
    ids = texts(2, 7)
    found, wanted = model(program, backend)(ids), reference(ids)
    assert 1e-4 < (found - wanted).abs().max() / wanted.abs().max() < 0.05


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
    with pytest.raises(UnsupportedError, match="has no KV cache"):
        model(tiny_llama(), "eager")(texts(1, 2))
    assert isinstance(fast, gw.Model)
