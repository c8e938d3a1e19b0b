"""Drafts of the target's own layers are what their papers say: equations in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tiny import MASK, PROMPTS, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import Program, run
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.adapter.graph import DraftAdapter
from graftwork.passes.drafting.clasp import LikestSkippingProposer
from graftwork.passes.drafting.s3d import MaskedProposer
from graftwork.passes.drafting.s3d.graph import DraftS3d
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate

HEADS, GROUPS, DIM = 4, 2, 8
LAYERS = 6


class Rows(NamedTuple):
    """Keys and values of tokens, f32[T,groups,dim] each."""

    keys: torch.Tensor
    values: torch.Tensor

    def before(self, place: int) -> Rows:
        return Rows(self.keys[:place], self.values[:place])


NO_ROWS = Rows(torch.empty(0, GROUPS, DIM), torch.empty(0, GROUPS, DIM))


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [T,heads,dim] turned by its positions."""
    rates = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angle = (positions[:, None] * rates)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Plain:
    """`tiny_llama` written out. names: what a layer's weights are called."""

    def __init__(self, program: Program) -> None:
        self.weights = program.weights

    def weight(self, name: str) -> torch.Tensor:
        return self.weights[name].load()

    def attended(
        self, x: torch.Tensor, names: dict[str, str], positions: torch.Tensor, before: Rows
    ) -> tuple[torch.Tensor, Rows]:
        """x + attention(norm(x)), and the rows of x alone; it sees those before, and itself."""
        normed = rms_norm(x, self.weight(names["norm1"]))
        q, k, v = ((normed @ self.weight(names[part]).T).unflatten(-1, (-1, DIM)) for part in "qkv")
        own = Rows(rotated(k, positions), v)
        keys, values = (torch.cat(pair) for pair in zip(before, own, strict=True))
        each = HEADS // GROUPS
        keys, values = keys.repeat_interleave(each, 1), values.repeat_interleave(each, 1)
        scores = torch.einsum("thd,shd->hts", rotated(q, positions), keys) * DIM**-0.5
        hidden = torch.ones(len(x), len(keys)).triu(len(keys) - len(x) + 1).bool()
        heard = torch.einsum(
            "hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values
        )
        return x + heard.flatten(1) @ self.weight(names["o"]).T, own

    def layer(
        self, index: int, x: torch.Tensor, positions: torch.Tensor, before: Rows
    ) -> tuple[torch.Tensor, Rows]:
        """What a layer makes of states [T,H], and their rows."""
        parts = ("norm1", "q", "k", "v", "o", "norm2", "gate", "up", "down")
        names = {part: f"layers.{index}.{part}" for part in parts}
        x, rows = self.attended(x, names, positions, before)
        normed = rms_norm(x, self.weight(names["norm2"]))
        gate, up = (normed @ self.weight(names[part]).T for part in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.weight(names["down"]).T, rows

    def whole(self, tokens: Sequence[int], layers: int) -> tuple[list[torch.Tensor], list[Rows]]:
        """The states before each layer and behind the last, [T,H] each, and each layer's rows."""
        states, rows = [self.weight("embed")[list(tokens)]], []
        for index in range(layers):
            x, made = self.layer(index, states[-1], torch.arange(len(tokens)), NO_ROWS)
            states.append(x)
            rows.append(made)
        return states, rows

    def said(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of states."""
        return rms_norm(x, self.weight("norm")) @ self.weight("head").T


def made(*passes: Pass) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(tiny_llama(LAYERS), [Step(p) for p in every])[0]


def likest_layers(plain: Plain, texts: Sequence[Sequence[int]], count: int) -> list[int]:
    """CLaSp's layers that draft: g(i, j) is the likest to h(i) of f_i(g(i - 1, j)) and of
    g(i - 1, j - 1), h being the states of each text's last token; by the mean cosine of the texts.
    """
    wholes = [plain.whole(text, LAYERS) for text in texts]

    def through(index: int, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = []
        for x, text, (_, rows) in zip(states, texts, wholes, strict=True):
            place = len(text) - 1
            before = rows[index].before(place)
            made.append(plain.layer(index, x[None], torch.tensor([place]), before)[0][0])
        return made

    best: dict[int, tuple[list[torch.Tensor], list[int]]] = {
        0: ([states[0][-1] for states, _ in wholes], [])
    }
    for index in range(LAYERS):
        goal = torch.stack([states[index + 1][-1] for states, _ in wholes])
        found = {}
        for skipped in range(count + 1):
            options = []
            if skipped in best:
                states, kept = best[skipped]
                options.append((through(index, states), [*kept, index]))
            if skipped - 1 in best and 0 < index < LAYERS - 1:  # the first and the last one stay
                options.append(best[skipped - 1])
            if options:
                found[skipped] = max(
                    options,
                    key=lambda o: float(F.cosine_similarity(torch.stack(o[0]), goal).mean()),
                )
        best = found
    return best[count][1]


@pytest.mark.parametrize("rows", [slice(2, 3), slice(0, 4)], ids=["one text", "four texts"])
def test_clasp_leaves_out_what_its_dynamic_program_says(
    rows: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = made(AcceptTrees(), CutDepth(every=1), named("draft_likest_skipping", share=0.5))
    seen: list[tuple[list[list[int]], list[int]]] = []
    chosen = LikestSkippingProposer.chosen

    def noted(self: LikestSkippingProposer) -> list[int]:
        # The last token was not fed yet: the one before it is the last with states.
        texts = [text.tokens[:-1] for text in self.texts if not text.done]
        seen.append((texts, kept := chosen(self)))
        return kept

    monkeypatch.setattr(LikestSkippingProposer, "chosen", noted)
    asked: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}
    fast = compile(program, Target("eager", "cpu"))
    generate(fast, PROMPTS[rows], attention_mask=MASK[rows], **asked)
    plain = Plain(program)
    assert len({tuple(kept) for _, kept in seen}) > 1
    for texts, kept in seen:
        assert kept == likest_layers(plain, texts, 2)


def test_s3d_asks_the_outer_layers_alone_and_all_places_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last token and three masks through layers 0, 4 and 5; they hear the text by the rows that
    the whole model made of it, and one another."""
    program = made(CutDepth(exits=(1, 4)), DraftS3d(masks=3), named("tree_chain", depth=4))
    seen: list[tuple[list[int], torch.Tensor]] = []
    root = MaskedProposer.root

    def noted(self: MaskedProposer, count: int) -> Any:
        level = root(self, count)
        seen.append((list(self.texts[0].tokens), self.said[0]))
        return level

    monkeypatch.setattr(MaskedProposer, "root", noted)
    fast = compile(program, Target("eager", "cpu"))
    generate(fast, PROMPTS[2:3], max_new_tokens=12, eos_token_id=[])
    plain = Plain(program)
    for text, said in seen:
        _, rows = plain.whole(text, LAYERS)
        place = len(text) - 1
        x = torch.cat([plain.weight("embed")[text[-1:]], plain.weight("s3d.masks")])
        for index in (0, 4, 5):
            positions = torch.arange(place, place + 4)
            x, _ = plain.layer(index, x, positions, rows[index].before(place))
        torch.testing.assert_close(said, plain.said(x)[: len(said)], atol=1e-4, rtol=1e-4)
    assert len(seen) > 1 and max(len(said) for _, said in seen) == 4


@pytest.mark.parametrize("copied", [False, True], ids=["kangaroo", "eesd"])
def test_an_adapter_continues_the_first_layers(copied: bool) -> None:
    """Kangaroo's: x + attention(norm(x)), with weights of its own. EESD's: a layer that starts as
    the target's last one. Both: a norm that starts as the target's, and the target's head."""
    program = DraftAdapter(exit=2, copied=copied).run(tiny_llama(LAYERS)).program
    plain, tokens = Plain(program), torch.tensor([[5, 9, 2, 7, 7]])
    positions = torch.arange(5)
    given = run(program, "step", {"tokens": tokens, "positions": positions[None]})["hidden.1"]
    states, _ = plain.whole(tokens[0].tolist(), 2)
    torch.testing.assert_close(given[0], states[2], atol=1e-4, rtol=1e-4)
    fed = {"positions": positions[None], "hidden": given, "select": positions[None]}
    found = run(program, "adapter", fed)["draft_logits"][0]
    if copied:
        x, _ = plain.layer(LAYERS - 1, states[2], positions, NO_ROWS)
    else:
        names = {part: f"adapter.self_attn.{part}_proj.weight" for part in "qkvo"}
        names["norm1"] = "adapter.input_layernorm.weight"
        x, _ = plain.attended(states[2], names, positions, NO_ROWS)
    torch.testing.assert_close(found, plain.said(x), atol=1e-4, rtol=1e-4)
