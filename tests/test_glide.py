"""Drafters that read the target's keys and values: the text stays the target's, drafts are what
whole sequences give, nothing is seen that a draft would not have, training teaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_recipe import made_by, steps_of
from handmade import Shape, llama
from recorded import Recorded, whole
from test_runtime_cached import (
    BEST,
    CHAIN,
    PROMPTS,
    WIDE,
    decode,
    drafting,
    plainly,
)
from tiny import in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, UnsupportedError, VerifyError, verify
from graftwork.passes.caching.hold_windows import HoldWindows
from graftwork.passes.drafting.glide import GlideDraft, GlideProposer, rows_seen
from graftwork.passes.drafting.glide.graph import DraftGlide
from graftwork.passes.drafting.glide.objective import glide_loss
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.recipe import Recipe
from graftwork.training.net import Net
from graftwork.training.objectives.acceptance import agreements
from graftwork.training.objectives.base import Batch
from graftwork.training.teacher_cache import Teacher

EAGER = Target("eager", "cpu")
CAPE = named("tree_widened", depth=3)
TREES = {"chain": CHAIN, "cape": CAPE, "static": WIDE, "best": BEST}
LAYER = "glide.layers.0"


@pytest.mark.parametrize(
    "backend", ["eager", "onnxruntime", pytest.param("torch", marks=pytest.mark.long)]
)
def test_the_text_is_the_targets_own(backend: str) -> None:
    executable = compile(drafting(DraftGlide(), CAPE), Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 10)
        assert torch.equal(result.sequences, plainly(executable, prompts, 10))
        assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("cache", ["", "quantize_cache"])
def test_the_text_of_few_bits_is_its_own(tree: str, backend: str, cache: str) -> None:
    """Weights, and the rows that the draft reads."""
    more = [in_int8(), *([named(cache, bits=8)] if cache else [])]
    program = drafting(DraftGlide(), TREES[tree], None, *more)
    executable = compile(program, Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 24)
        assert torch.equal(result.sequences, plainly(executable, prompts, 24))
        assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


# -- what the layer says


class ByHand:
    """The published layer in plain torch, on a program's weights."""

    def __init__(self, program: Program) -> None:
        self.weights = {name: weight.load() for name, weight in program.weights.items()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-6)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{LAYER}.{name}.weight"].T

    @staticmethod
    def turned(x: torch.Tensor) -> torch.Tensor:
        """Heads [T,H,8] at the positions 0..T-1."""
        angle = torch.arange(len(x))[:, None] * 100.0 ** -(torch.arange(4) / 4)
        cos, sin = (f(torch.cat([angle, angle], -1))[:, None] for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    @staticmethod
    def read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """q [T,H,8] on k, v [N,G,8]: [T,H*8]."""
        k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in (k, v))
        scores = torch.einsum("thd,nhd->htn", q, k) * 8**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("htn,nhd->thd", weights, v).flatten(1)

    def said(self, text: Sequence[int], rows: Any, seen: Sequence[int]) -> torch.Tensor:
        """Logits [T,V] after each token of a text. rows: keys and values of the target's layer,
        [G,N,8]; seen: how many of them each token sees."""
        count = len(text)
        x = self.weights["embed"][list(text)]
        normed = self.norm(x, f"{LAYER}.input_layernorm")
        q, k, v = (
            self.linear(normed, f"self_attn.{kind}_proj").unflatten(-1, (-1, 8)) for kind in "qkv"
        )
        before = torch.ones(count, count, dtype=torch.bool).tril()
        read = self.read(self.turned(q), self.turned(k), v, before)
        x = x + self.linear(read, "self_attn.o_proj")
        asked = self.turned(self.linear(x, "cross_attn.q_proj").unflatten(-1, (-1, 8)))
        key, value = (part.transpose(0, 1) for part in rows)
        mask = torch.tensor([[row < number for row in range(len(key))] for number in seen])
        x = x + self.linear(self.read(asked, key, value, mask), "cross_attn.o_proj")
        normed = self.norm(x, f"{LAYER}.post_attention_layernorm")
        gate, up = (self.linear(normed, f"mlp.{kind}_proj") for kind in ("gate", "up"))
        x = x + self.linear(F.silu(gate) * up, "mlp.down_proj")
        return self.norm(x, "glide.norm") @ self.weights["glide.lm_head.weight"].T


def rows_of(program: Program, text: Sequence[int]) -> list[torch.Tensor]:
    """The keys and values that the draft reads, of a text, each [G,N,8]."""
    found = whole(program, "step", text)
    return [found[name][0] for name in program.shared_with("glide")]


class Noted(Recorded, GlideProposer):
    pass


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("layer", [None, pytest.param(0, marks=pytest.mark.long)])
def test_drafts_are_what_whole_sequences_give(
    monkeypatch: pytest.MonkeyPatch, backend: str, layer: int | None
) -> None:
    """Texts of several lengths; all nodes of a draft see the rows of the committed text."""
    from graftwork.runtime.speculate.drafters import grown

    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: Noted)
    Noted.notes = []
    program = drafting(DraftGlide(layer=layer), WIDE)
    decode(compile(program, Target.parse(backend)), [PROMPTS[0], PROMPTS[1]], 6)
    assert {len(path) for _, path, _ in Noted.notes} == {0, 1, 2}
    hand, read = ByHand(program), 1 if layer is None else layer
    assert program.shared_with("glide") == (f"kv.{read}.key", f"kv.{read}.value")
    for text, path, logits in Noted.notes[::7]:
        known = len(text) - 1
        rows = rows_of(program, text[:-1])
        seen = [max(1, min(place, known)) for place in range(len(text) + len(path))]
        wanted = hand.said([*text, *path], rows, seen)[-1]
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-4, rtol=2e-4)


# -- training


def test_a_block_sees_what_a_draft_that_begins_there_would() -> None:
    """By hand, blocks of 3: a draft from the text's token at 1, 4 or 7, and those that follow."""
    assert rows_seen(9, 3).tolist() == [0, 1, 1, 1, 4, 4, 4, 7, 7]
    mask = torch.ops.graftwork.seen_mask(rows_seen(9, 3)[None], 9)[0, 0]
    for place in range(1, 9):
        begins = 1 + (place - 1) // 3 * 3
        assert mask[place].nonzero().flatten().tolist() == list(range(begins))
    near = torch.ops.graftwork.seen_mask(rows_seen(9, 3)[None], 9, window=2)[0, 0]
    assert near[8].nonzero().flatten().tolist() == [5, 6]
    assert near[1].nonzero().flatten().tolist() == [0]


def batch_of(program: Program, tokens: torch.Tensor) -> tuple[Net, Any, Batch]:
    net = Net(program, [], torch.device("cpu"))
    teacher = Teacher(net)
    states = teacher.states(tokens)
    assert set(teacher.shared) == set(program.shared_with("glide"))
    run = net.sharing({name: states[name] for name in teacher.shared})
    return net, run, Batch(tokens, {}, teacher.logits(states))


@pytest.mark.parametrize("aim", ["text", "distribution"])
def test_a_training_step_by_hand(aim: Any) -> None:
    """Cross entropy of every token but the first, each seeing the target's rows before its block;
    to the text's next token, and after the last to the target's."""
    program = drafting(DraftGlide(block=3, aim=aim), CHAIN)
    tokens = torch.tensor([[5, 9, 2, 7, 7, 30, 1, 4], [3, 3, 8, 0, 12, 6, 19, 2]])
    _, given, batch = batch_of(program, tokens)
    loss = glide_loss(program.plan.draft, given, batch)
    hand, total, count = ByHand(program), 0.0, 0
    hits = [[0, 0] for _ in range(3)]
    for index, text in enumerate(tokens.tolist()):
        logits = hand.said(text, rows_of(program, text), [1, 1, 1, 1, 4, 4, 4, 7])
        teacher = whole(program, "step", text)["logits"][0]
        for place in range(1, 8):
            following = (text[place + 1 :] or [int(teacher[place].argmax())])[0]
            p = F.one_hot(torch.tensor(following), 32).float()
            p = p if aim == "text" else teacher[place].softmax(-1)
            total -= float((p * logits[place].log_softmax(-1)).sum())
            count += 1
            if index == 0:
                right = logits[place].argmax() == teacher[place].argmax()
                hits[(place - 1) % 3][0] += int(right)
                hits[(place - 1) % 3][1] += 1
    torch.testing.assert_close(float(loss.total), total / count, atol=1e-5, rtol=1e-5)
    assert loss.hits == pytest.approx([right / each for right, each in hits])


def test_training_sees_nothing_of_its_own_block() -> None:
    """The target's rows from a block's start on change nothing of what is said in the block."""
    program = drafting(DraftGlide(block=3), CHAIN)
    tokens = torch.tensor([[5, 9, 2, 7, 7, 30, 1, 4]])
    found = []
    for spoilt in (False, True):
        net = Net(program, [], torch.device("cpu"))
        states = Teacher(net).states(tokens)
        if spoilt:
            for name in program.shared_with("glide"):
                states[name][:, :, 4:] = 1e3
        given = net.sharing(states)
        seen = rows_seen(8, 3)[None]
        found.append(given("glide", tokens=tokens, seen=seen)["draft_logits"][0])
    assert torch.equal(found[0][:7], found[1][:7])
    assert not torch.equal(found[0][7], found[1][7])


# -- what is refused


OTHERS = {
    "streaming_llm": r"evict_cache: glide drafts and reads a row of kv\.3\.key .*such as eagle2",
    "kivi": r"quantize_old_rows: glide drafts and reads a row of kv\.3\.key",
    "hydragen": r"share_prefix: glide drafts and reads a row of kv\.3\.key",
    "shadowkv": r"glide drafts and reads a row of kv\.3\.key .*cache=marked.* does not keep them",
    "calm": r"glide drafts and reads a row of kv\.3\.key .*leaves out layers that make some",
    "pie": r"glide\.kv\.4\.key holds something else",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_moves_the_targets_rows_is_refused_by_name(name: str, tmp_path: Path) -> None:
    other = steps_of(name, tmp_path)
    there = {step.pass_.name for step in other}
    own = [step for step in Recipe.load("glide").steps if step.pass_.name not in there]
    with pytest.raises(PassError, match=OTHERS[name]):
        made_by([*other, *own])


def test_a_chain_is_not_unrolled() -> None:
    with pytest.raises(PassError, match="draft=glide"):
        drafting(DraftGlide(), CHAIN, None, UnrollDraft())


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_layer_with_a_window_is_read_as_far_as_it_looks(backend: str) -> None:
    start = llama(Shape(layers=2, window=3))
    program = drafting(DraftGlide(), CAPE, start)
    assert "graftwork.seen_mask(%seen, C, window=3)" in str(program)
    executable = compile(program, Target.parse(backend))
    result = decode(executable, PROMPTS, 16)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS, 16))
    assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


def test_a_ring_of_a_window_is_refused_and_another_layer_read() -> None:
    """A window's ring holds no row for every token; a layer that sees all rows may be read."""
    start = llama(Shape(layers=2, window=21, whole=(0,), context=256))
    with pytest.raises(PassError, match=r"hold_windows|evict_cache: glide drafts and reads"):
        drafting(DraftGlide(), CHAIN, start, HoldWindows(block=16))


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(PassError, match=r"no attention in layer 9 of the target; there is in 0, 1"):
        run_passes(tiny_llama(2), [Step(DraftGlide(layer=9))])


def test_a_draft_may_not_write_what_it_reads_of_the_target() -> None:
    program = drafting(DraftGlide(), CHAIN)
    fn = program.function("glide").copy()
    fn.set_outputs({**fn.outputs, "kv.1.key": fn.input("kv.1.key")})
    with pytest.raises(VerifyError, match="glide drafts and writes kv"):
        verify(program.with_function(fn))


def test_acceptance_is_not_learned_of_it() -> None:
    program = drafting(DraftGlide(), CHAIN)
    batch = Batch(torch.zeros(1, 2), {}, torch.zeros(1, 2, 5))
    assert isinstance(program.plan.draft, GlideDraft)
    with pytest.raises(UnsupportedError, match="draft=glide"):
        agreements(program.plan.draft, lambda *_, **__: {}, batch, 2)
