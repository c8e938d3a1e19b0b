"""Chimera: trigrams ask the target's states, heads read both; and what the training teaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recorded import Recorded, whole
from safetensors.torch import save_file
from test_continued_by_hand import taught
from test_methods_by_hand import random_weights
from test_runtime_cached import CHAIN, PROMPTS, WIDE, decode, drafting, plainly
from tiny import tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, VerifyError, verify
from graftwork.ir.plan import NoDraft
from graftwork.passes.drafting.chimera import ChimeraProposer
from graftwork.passes.drafting.chimera.graph import DraftChimera
from graftwork.passes.drafting.chimera.objective import chimera_loss
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.runtime.speculate.drafters import grown

LAYER = "chimera.layers.0"


class ByHand:
    """The published parts in plain torch, on a program's weights."""

    def __init__(self, program: Program) -> None:
        self.weights = {name: weight.load() for name, weight in program.weights.items()}

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{LAYER}.{name}.weight"], 1e-6)

    def trigram(self, tokens: Sequence[int]) -> torch.Tensor:
        """[H] of a text's last three tokens."""
        three = [tokens[max(len(tokens) - back, 0)] for back in (3, 2, 1)]
        x = self.weights["embed"][three].flatten()
        first = "chimera.trigram.0.linear"
        x = x + F.silu(self.linear(x, first) + self.weights[f"{first}.bias"])
        return self.linear(x, "chimera.trigram.1")

    def turned(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Heads [N,H,8] at these positions."""
        angle = places[:, None] * 100.0 ** -(torch.arange(4) / 4)
        cos, sin = (f(torch.cat([angle, angle], -1))[:, None] for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def made(self, text: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """What stands in [H] for the state of a text's last token. states [N,H]: of those before,
        or what stands in for them."""
        x, places = self.trigram(text), torch.arange(len(states))
        asks, told = self.norm(x[None], "input_layernorm"), self.norm(states, "input_layernorm")
        q, k, v = (
            self.linear(rows, f"{LAYER}.self_attn.{kind}_proj").unflatten(-1, (-1, 8))
            for kind, rows in (("q", asks), ("k", told), ("v", told))
        )
        q, k = self.turned(q, places[-1:]), self.turned(k, places)
        k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in (k, v))
        weights = (torch.einsum("thd,nhd->htn", q, k) * 8**-0.5).softmax(-1)
        read = torch.einsum("htn,nhd->thd", weights, v).flatten()
        x = x + self.linear(read, f"{LAYER}.self_attn.o_proj")
        normed = self.norm(x, "post_attention_layernorm")
        gate, up = (self.linear(normed, f"{LAYER}.mlp.{kind}_proj") for kind in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, f"{LAYER}.mlp.down_proj")

    def said(self, text: Sequence[int], path: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """Logits [V] after a text and a path below it; states [N-1,H]: of all but its last one."""
        last = states[-1]
        for length in range(len(path) + 1):
            made = self.made([*text, *path[:length]], states)
            states = torch.cat([states, made[None]])
        return self.linear(torch.cat([last, made]), f"chimera.heads.{len(path)}")


class Noted(Recorded, ChimeraProposer):
    """Notes what it predicts."""


def knowing(folder: Path, tree: Pass) -> Program:
    """A program that drafts three levels, with random weights."""
    save_file(random_weights(DraftChimera, levels=3), folder / "model.safetensors")
    return drafting(DraftChimera(weights=str(folder), levels=3), tree)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("tree", [CHAIN, WIDE], ids=["chain", "tree"])
def test_drafts_are_what_the_published_parts_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, tree: Pass
) -> None:
    """In a batch of texts of several lengths, of one token, too."""
    program = knowing(tmp_path, tree)
    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: Noted)
    Noted.notes = []
    executable = compile(program, Target.parse(backend))
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    result = decode(executable, prompts, 10)
    assert torch.equal(result.sequences, plainly(executable, prompts, 10))
    assert {len(path) for _, path, _ in Noted.notes} == {0, 1, 2}
    hand = ByHand(program)
    for text, path, logits in Noted.notes[::5]:
        states = whole(program, "step", text)["hidden.normed"][0, :-1]
        wanted = hand.said(text, path, states)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-3, rtol=1e-3)


def test_a_prompt_of_many_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows are made in calls of a few; the two tokens before each are the text's in any case."""
    program, prompt, found = knowing(tmp_path, CHAIN), [[(i * i + 3) % 32 for i in range(29)]], []
    begin = ChimeraProposer.begin
    for most in (None, 1, 4):

        def narrow(
            self: ChimeraProposer, prompts: list[list[int]], most: int | None = most
        ) -> None:
            self.committed.cache.widest = most or self.committed.cache.widest
            begin(self, prompts)

        monkeypatch.setattr(ChimeraProposer, "begin", narrow)
        result = decode(compile(program, Target("eager", "cpu")), prompt, 12)
        found.append((result.sequences.tolist(), result.stats.accepted_tokens))
    assert found[0] == found[1] == found[2]


def test_a_training_step_by_hand(tmp_path: Path) -> None:
    """Half the cross entropy against the target's distribution and half that of the text's token,
    each level on the states that the levels above made, all levels alike."""
    program, batch, net = taught(DraftChimera, tmp_path, levels=3)
    loss = chimera_loss(program.plan.draft, net.run, batch)
    hand, states = ByHand(program), batch.hidden["hidden.normed"][0]
    text, wanted = batch.tokens[0].tolist(), torch.zeros(())
    after = [*text, int(batch.best[0, -1])]
    for level in range(3):
        missed = []
        for known in range(2, len(text) + 1 - level):
            path = text[known : known + level]
            chances = hand.said(text[:known], path, states[: known - 1]).log_softmax(-1)
            soft = -(batch.teacher[0, known + level - 1] * chances).sum()
            missed.append(0.5 * soft - 0.5 * chances[after[known + level]])
        wanted = wanted + torch.stack(missed).mean()
    torch.testing.assert_close(loss.total, wanted, atol=1e-3, rtol=1e-3)
    assert len(loss.hits) == 3


def test_untrained_heads_say_what_the_target_says_of_its_last_state() -> None:
    """The half that reads the layer counts nothing at first."""
    program = DraftChimera(levels=2).run(tiny_llama()).program
    assert program.plan.draft != NoDraft()
    head = program.weights["head"].load()
    for level in range(2):
        found = program.weights[f"chimera.heads.{level}.weight"].load()
        assert torch.equal(found[:, : head.shape[1]], head)
        assert not found[:, head.shape[1] :].any()


def test_a_plan_with_fewer_heads_than_levels_is_refused() -> None:
    program = drafting(DraftChimera(levels=3), CHAIN)
    draft = replace(program.plan.draft, heads=("chimera_0",))
    with pytest.raises(VerifyError, match=r"names 1 heads: expected one for each of its 3 levels"):
        verify(with_plan(program, draft=draft))


def test_heads_of_other_depths_are_refused(tmp_path: Path) -> None:
    save_file(random_weights(DraftChimera, levels=3), tmp_path / "model.safetensors")
    with pytest.raises(PassError, match=r"has 'chimera\.heads\.2\.weight'.*no place"):
        DraftChimera(weights=str(tmp_path), levels=2).run(tiny_llama())
    with pytest.raises(PassError, match=r"has no 'chimera\.heads\.3\.weight'"):
        DraftChimera(weights=str(tmp_path), levels=4).run(tiny_llama())
