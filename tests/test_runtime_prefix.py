"""Hydra++: heads behind a layer with a cache, whose rows are those of the whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import whole
from test_runtime_cached import CHAIN, PROMPTS, WIDE, decode, drafting, plainly
from test_training import taught
from tiny import tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.model import Model
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.runtime.speculate.proposers.recurrent import RecurrentProposer

DRAFT = DraftHydra(heads=3, layers=1, prefix=True, aim="distribution")


class Noted(RecurrentProposer):
    """Notes the state that each draft starts from, and after which text."""

    notes: list[tuple[list[int], torch.Tensor]]

    def start(self, tokens: Any, states: torch.Tensor, count: int) -> Any:
        assert self.committed is not None
        for index, text in enumerate(self.committed.texts):
            Noted.notes.append((list(text), states[index, 0].clone()))
        return super().start(tokens, states, count)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_text_is_the_targets_own_and_rows_are_the_whole_texts(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    from graftwork.runtime.speculate.drafters import grown

    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: Noted)
    program = drafting(DRAFT, WIDE)
    executable = compile(program, Target.parse(backend))
    Noted.notes = []
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 10)
        assert torch.equal(result.sequences, plainly(executable, prompts, 10))
        assert result.stats.draft_tokens > 2 * result.stats.sequence_steps
    for text, state in Noted.notes[::6]:
        hidden = whole(program, "step", text[:-1])["hidden"]
        wanted = whole(program, "hydra_prefix", text[:-1], hidden=hidden)["hidden"][0, -1]
        torch.testing.assert_close(state, wanted, atol=2e-4, rtol=2e-4)


def test_up_to_the_end_of_the_context() -> None:
    program = drafting(DRAFT, CHAIN, tiny_llama(context=24))
    executable = compile(program, Target.parse("eager"))
    count = 24 - len(PROMPTS[0])
    result = decode(executable, PROMPTS[:2], count)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:2], count))


def test_training_teaches_prefix_and_heads(tmp_path: Path) -> None:
    model = Model(drafting(DRAFT, CHAIN), Target("eager", "cpu"), {"name": "test"})
    fitted, hits = taught(model, tmp_path, 120)
    assert len(fitted.hits) == 3 and min(fitted.hits) > max(hits) + 0.1
    name = "hydra.prefix.self_attn.q_proj.weight"
    before, after = (m.program.weights[name].load() for m in (model, fitted.model))
    assert not torch.equal(before, after)
