"""A draft over what all layers of the target keep: the text stays the target's, drafts are what
whole sequences give, training shows what drafting shows, and teaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_recipe import made_by, steps_of
from recorded import Recorded, whole
from test_runtime_cached import BEST, CHAIN, PROMPTS, WIDE, decode, drafting, plainly
from tiny import in_int8, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program
from graftwork.passes.drafting.glide import rows_seen
from graftwork.passes.drafting.mixture import MixtureDraft, MixtureProposer
from graftwork.passes.drafting.mixture.graph import DraftMixture
from graftwork.passes.drafting.mixture.objective import block_of, mixture_loss
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.recipe import Recipe
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch
from graftwork.training.teacher_cache import Teacher

EAGER = Target("eager", "cpu")
INFERRED = {0: DraftMixture(), 1: DraftMixture(inference=1)}


@pytest.mark.parametrize(
    "backend", ["eager", "onnxruntime", pytest.param("torch", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("layers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_text_is_the_targets_own(layers: int, backend: str) -> None:
    executable = compile(drafting(INFERRED[layers], BEST), Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 10)
        assert torch.equal(result.sequences, plainly(executable, prompts, 10))
        assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_the_text_of_int8_is_its_own(backend: str) -> None:
    program = drafting(DraftMixture(), WIDE, None, in_int8())
    executable = compile(program, Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 24)
        assert torch.equal(result.sequences, plainly(executable, prompts, 24))


# -- what the layers say


class ByHand:
    """The published layers in plain torch, on a program's weights: heads of 8 channels."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.weights = {name: weight.load() for name, weight in program.weights.items()}

    def of(self, name: str) -> torch.Tensor:
        return self.weights[f"mixture.{name}.weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.of(name), 1e-6)

    def mlp(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        normed = self.norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (self.of(f"{layer}.mlp.{kind}_proj").T for kind in ("gate", "up", "down"))
        return x + (F.silu(normed @ gate) * (normed @ up)) @ down

    @staticmethod
    def turned(x: torch.Tensor, base: float = 100.0) -> torch.Tensor:
        """Heads [T,H,D] at the places 0..T-1."""
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None] * base ** -(torch.arange(half) / half)
        cos, sin = (f(torch.cat([angle, angle], -1))[:, None] for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    @staticmethod
    def read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """q [T,H,D] on k, v [N,G,D]: [T,H*D]."""
        k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in (k, v))
        scores = torch.einsum("thd,nhd->htn", q, k) * q.shape[-1] ** -0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return torch.einsum("htn,nhd->thd", scores.softmax(-1), v).flatten(1)

    def row(self, kept: torch.Tensor) -> torch.Tensor:
        """What is made of what the layers keep of a token, f[L,W]: [H]."""
        layer = "layer_attention"
        normed = self.norm(kept, f"{layer}.input_layernorm")
        q, k, v = (
            (normed @ self.of(f"{layer}.self_attn.{kind}_proj").T).unflatten(-1, (2, -1))
            for kind in "qkv"
        )
        read = self.read(self.turned(q, 1e4), self.turned(k, 1e4), v)
        x = self.mlp(kept + read @ self.of(f"{layer}.self_attn.o_proj").T, layer).mean(0)
        return x @ self.of("joined").T + self.weights["mixture.joined.bias"]

    def memory(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N,G,8] of a text's memory."""
        found = whole(self.program, "step", text)
        numbers = range(sum(name.endswith(".key") for name in found))
        parts = [found[f"kv.{n}.{part}"][0] for n in numbers for part in ("key", "value")]
        rows = torch.stack([part.transpose(0, 1).flatten(1) for part in parts], 1)
        kept = rows.unflatten(1, (len(numbers), 2)).flatten(2)
        x = torch.stack([self.row(one) for one in kept])
        normed = self.norm(x, "layers.1.input_layernorm")
        key, value = (
            (normed @ self.of(f"layers.1.cross_attn.{kind}_proj").T).unflatten(-1, (-1, 8))
            for kind in "kv"
        )
        return self.turned(key), value

    def state(self, text: Sequence[int], known: Sequence[int], seen: Sequence[int]) -> torch.Tensor:
        """The states [T,H] of a text, whose memory is that of `known`."""
        x, layer = self.weights["embed"][list(text)], "layers.0"
        normed = self.norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (normed @ self.of(f"{layer}.self_attn.{kind}_proj").T).unflatten(-1, (-1, 8))
            for kind in "qkv"
        )
        before = torch.ones(len(text), len(text), dtype=torch.bool).tril()
        read = self.read(self.turned(q), self.turned(k), v, before)
        x = self.mlp(x + read @ self.of(f"{layer}.self_attn.o_proj").T, layer)
        key, value = self.memory(known)
        normed = self.norm(x, "layers.1.input_layernorm")
        q = self.turned((normed @ self.of("layers.1.cross_attn.q_proj").T).unflatten(-1, (-1, 8)))
        mask = torch.tensor([[row < number for row in range(len(key))] for number in seen])
        read = self.read(q, key, value, mask)
        return self.mlp(x + read @ self.of("layers.1.cross_attn.o_proj").T, "layers.1")

    def said(self, *given: Sequence[int]) -> torch.Tensor:
        """Logits [T,V] by the target's head."""
        return self.state(*given) @ self.weights["head"].T


class Noted(Recorded, MixtureProposer):
    pass


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_drafts_are_what_whole_sequences_give(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Texts of several lengths in one batch, whose memories grow by other numbers of rows."""
    from graftwork.runtime.speculate.drafters import grown

    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: Noted)
    Noted.notes = []
    program = drafting(DraftMixture(), WIDE)
    decode(compile(program, Target.parse(backend)), [PROMPTS[0], PROMPTS[1]], 8)
    assert {len(path) for _, path, _ in Noted.notes} == {0, 1, 2}
    hand = ByHand(program)
    for text, path, logits in Noted.notes[::7]:
        known = len(text) - 1
        seen = [max(1, min(place, known)) for place in range(len(text) + len(path))]
        wanted = hand.said([*text, *path], text[:-1], seen)[-1]
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-4, rtol=2e-4)


# -- training


def test_a_training_step_by_hand() -> None:
    """SmoothL1 to what the target's head reads, and a tenth of the cross entropy."""
    program = drafting(DraftMixture(block=2, longest=4), CHAIN)
    draft = program.plan.draft
    assert isinstance(draft, MixtureDraft)
    tokens = torch.tensor([[5, 9, 2, 7, 7, 30, 1, 4], [3, 3, 8, 0, 12, 6, 19, 2]])
    net = Net(program, [], torch.device("cpu"))
    teacher = Teacher(net)
    states = teacher.states(tokens)
    taps = {name: states[name] for name in teacher.taps}
    run = net.sharing({name: states[name] for name in teacher.shared})
    loss = mixture_loss(draft, run, Batch(tokens, taps, teacher.logits(states)))
    hand, far, entropy = ByHand(program), [], []
    for text in tokens:
        size = block_of(text, draft)
        assert 2 <= size <= 4
        seen = rows_seen(8, size).clamp(min=1).tolist()
        state = hand.state(text.tolist(), text.tolist(), seen)
        target = whole(program, "step", text.tolist())
        far.append(F.smooth_l1_loss(state[1:], target["hidden.normed"][0, 1:]))
        p = target["logits"][0, 1:].softmax(-1)
        logits = state[1:] @ hand.weights["head"].T
        entropy.append(-(p * logits.log_softmax(-1)).sum(-1).mean())
    wanted = torch.stack(far).mean() + 0.1 * torch.stack(entropy).mean()
    torch.testing.assert_close(loss.total, wanted, atol=1e-5, rtol=1e-5)


# -- what is refused


OTHERS = {
    "streaming_llm": r"evict_cache: mixture_memory drafts and reads a row of kv\.0\.key",
    "calm": r"mixture_memory drafts and reads a row of kv\.0\.key .*leaves out layers",
    "kv_int8": r"of mixture_memory .* reads kv\.3\.value as it is, and only attention can",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_the_targets_rows_is_refused_by_name(name: str, tmp_path: Path) -> None:
    other = steps_of(name, tmp_path)
    there = {step.pass_.name for step in other}
    own = [s for s in Recipe.load("mixture_of_attentions").steps if s.pass_.name not in there]
    with pytest.raises(PassError, match=OTHERS[name]):
        made_by([*other, *own])


def test_bad_options() -> None:
    with pytest.raises((InputError, ValueError), match="expected longest=6 or more"):
        DraftMixture(longest=3).made()
    with pytest.raises(PassError, match=r"inference=2 of the target's 2 layers"):
        run_passes(tiny_llama(2), [Step(DraftMixture(inference=2))])
