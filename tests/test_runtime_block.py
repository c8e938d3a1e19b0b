"""Drafts of masked blocks (DFlash): the layers by hand, the same text, one call, learning."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onnxruntime_helpers import without_own_attention
from safetensors.torch import save_file
from selection import on_backends
from test_runtime_parallel import same_to_the_end
from test_runtime_skipping import same_texts
from test_training import TEXT
from tiny import PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program
from graftwork.ir.execution.executable import Executable
from graftwork.model import Model
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.dflash import BlockDraft, BlockProposer
from graftwork.passes.drafting.dflash.graph import DraftDflash, spread
from graftwork.passes.drafting.dflash.objective import anchors, block_loss, seen
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.speculate.committed import block_sees
from graftwork.training import fit
from graftwork.training.objectives.base import Batch

ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
LAYERS, MASKS, DEPTH = 6, 3, 2
CHAIN = named("tree_chain", depth=MASKS)
FLASH = DraftDflash(masks=MASKS, depth=DEPTH)
DRAFTS: dict[str, tuple[Pass, ...]] = {
    "block": (FLASH, CHAIN),
    "a token of its own": (DraftDflash(masks=MASKS, depth=1, token=5), CHAIN),
    "after copies": (named("draft_suffix", shortest=1), FLASH, CHAIN),
    "in int8": (FLASH, CHAIN, in_int8()),
}


def made(*passes: Pass) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax(), AcceptTrees())
    return run_passes(tiny_llama(LAYERS), [Step(p) for p in every])[0]


@cache
def compiled(backend: str, which: str) -> Executable:
    passes = DRAFTS[which] if which else ()
    return compile(made(*passes), Target(backend, "cpu", threads=1))


@pytest.mark.parametrize(
    ("which", "backend"), on_backends(DRAFTS, {"block"}, rare=["after copies", "in int8"])
)
def test_the_text_is_the_targets_own(which: str, backend: str) -> None:
    plain = made(in_int8()) if which == "in int8" else None
    whole = compile(plain, Target(backend, "cpu", threads=1)) if plain else compiled(backend, "")
    assert same_texts(whole, compiled(backend, which))


def test_a_draft_goes_to_the_end_of_the_context() -> None:
    assert same_to_the_end(compiled("eager", ""), compiled("eager", "block"))


class ByHand:
    """The published layers in plain torch, on a program's weights."""

    def __init__(self, program: Program) -> None:
        self.weights = {name: weight.load() for name, weight in program.weights.items()}
        self.program = program

    def of(self, name: str) -> torch.Tensor:
        return self.weights[f"dflash.{name}"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.of(f"{name}.weight"), 1e-6)

    def heads(self, x: torch.Tensor, layer: str, kind: str) -> torch.Tensor:
        y = x @ self.of(f"{layer}.self_attn.{kind}_proj.weight").T
        y = y.unflatten(-1, (-1, 8))
        return y if kind == "v" else self.norm(y, f"{layer}.self_attn.{kind}_norm")

    @staticmethod
    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None] * 100.0 ** -(torch.arange(4) / 4)
        cos, sin = (f(torch.cat([angle, angle], -1))[:, None] for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def said(self, text: torch.Tensor, features: torch.Tensor, levels: int) -> torch.Tensor:
        """Logits [levels,V] of the masks behind a text i64[N], whose features are f[N-1,5H]."""
        count = len(text) - 1
        context = self.norm(features @ self.of("fc.weight").T, "hidden_norm")
        embedding = self.weights["embed"]
        x = torch.cat([embedding[text[-1:]], self.of("mask").expand(levels, -1)])
        places = torch.arange(count + 1 + levels)
        for index in range(DEPTH):
            layer = f"layers.{index}"
            normed = self.norm(x, f"{layer}.input_layernorm")
            rows = torch.cat([context, normed])
            q = self.turned(self.heads(normed, layer, "q"), places[count:])
            k = self.turned(self.heads(rows, layer, "k"), places)
            v = self.heads(rows, layer, "v")
            each = q.shape[1] // k.shape[1]
            k, v = (part.repeat_interleave(each, 1) for part in (k, v))
            weights = torch.einsum("thd,chd->htc", q, k).mul(8**-0.5).softmax(-1)
            read = torch.einsum("htc,chd->thd", weights, v).flatten(1)
            x = x + read @ self.of(f"{layer}.self_attn.o_proj.weight").T
            normed = self.norm(x, f"{layer}.post_attention_layernorm")
            gate, up, down = (
                self.of(f"{layer}.mlp.{kind}_proj.weight") for kind in ("gate", "up", "down")
            )
            x = x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return self.norm(x, "norm")[1:] @ self.weights["head"].T


def features_of(executable: Executable, text: torch.Tensor) -> torch.Tensor:
    """What the target makes of a text i64[N], f[N,5H]."""
    draft = executable.program.plan.draft
    assert isinstance(draft, BlockDraft) and draft.output
    executable.begin(1, 128)
    places = torch.arange(len(text))[None]
    fed = {"tokens": text[None], "positions": places, "past": torch.tensor([0]), "select": places}
    return executable.run("step", fed, (draft.output,))[draft.output][0].clone()


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("own", [True, False])
def test_layers_by_hand(backend: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, the rows of a text and a block; in two, where the first rows are there already.
    Without own kernels ONNX Runtime's attention, which lets none see those behind it, is avoided.
    """
    if not own and backend == "onnxruntime":
        without_own_attention(monkeypatch)
    fast = compile(made(*DRAFTS["block"]), Target(backend, "cpu", threads=1))
    draft = fast.program.plan.draft
    assert isinstance(draft, BlockDraft) and draft.entry
    text = torch.tensor([3, 9, 4, 27, 11, 6, 30])
    joined = features_of(fast, text[:-1])
    wanted = ByHand(fast.program).said(text, joined, MASKS)
    hidden = fast.run(draft.entry, {"hidden": joined[None]}, ("hidden",))["hidden"].clone()
    for ready in (0, 4):
        fast.begin(1, 128)
        if ready:
            run(fast, draft, hidden[:, :ready], 0, torch.empty(1, 0, dtype=torch.int64))
        block = torch.tensor([[int(text[-1]), *[draft.token] * MASKS]])
        found = run(fast, draft, hidden[:, ready:], ready, block)[0, -MASKS:]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def run(
    fast: Executable, draft: BlockDraft, hidden: torch.Tensor, past: int, block: torch.Tensor
) -> torch.Tensor:
    """Logits of every column of a call: features, then a block."""
    rows, behind = hidden.shape[1], block.shape[1]
    width = rows + behind
    places = torch.arange(width)[None]
    given = {
        "tokens": torch.cat([torch.full((1, rows), draft.blank), block], 1),
        "positions": past + places,
        "past": torch.tensor([past]),
        "select": places,
        # What lies beside a block must not matter.
        "hidden": torch.cat([hidden, torch.full((1, behind, hidden.shape[-1]), 7.0)], 1),
    }
    if behind:
        given["ancestors"] = torch.from_numpy(block_sees([rows], width, behind))
    return fast.run(draft.function, given, ("draft_logits",))["draft_logits"].clone()


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_one_call_drafts_a_block(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted is what the layers say by hand, after every step of a text."""
    fast, prompt = compiled(backend, "block"), PROMPTS[2:3]
    hand, drafts = ByHand(fast.program), []
    root = BlockProposer.root

    def noted(self: BlockProposer, count: int) -> Any:
        level = root(self, count)
        drafts.append((list(self.committed.texts[0]), self.said.tokens[0, :, 0].tolist()))
        return level

    monkeypatch.setattr(BlockProposer, "root", noted)
    generate(fast, prompt, **ASKED)
    assert len(drafts) > 5
    for text, tokens in drafts:
        whole = torch.tensor(text)
        said = hand.said(whole, features_of(fast, whole[:-1]), MASKS)
        assert said.argmax(-1).tolist() == tokens


def test_what_columns_see() -> None:
    found = seen(4, torch.tensor([1, 3]), 2).int().tolist()
    assert found == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]
    assert block_sees([1, 2], 5, 2).astype(int).tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    ]


def test_blocks_begin_at_places_drawn_from_the_text() -> None:
    tokens = torch.arange(40)[None]
    places = anchors(tokens, 3, 0.25)
    assert len(places) == 9 and torch.equal(places, anchors(tokens, 3, 0.25))
    assert int(places.min()) >= 1 and int(places.max()) + 3 < 40 and bool((places.diff() > 0).all())


def test_the_loss_by_hand() -> None:
    """Each column's logits are a table's row of its token, position and what it sees."""
    vocabulary, width, levels = 7, 12, 3
    tokens = torch.arange(width)[None] % vocabulary
    teacher = torch.randn(1, width, vocabulary, generator=torch.Generator().manual_seed(0))
    record = BlockDraft(
        "dflash", "hidden", levels, token=vocabulary, blank=vocabulary + 1, decay=0.7788
    )
    fed: dict[str, torch.Tensor] = {}

    def say(function: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        fed.update(inputs)
        generator = torch.Generator().manual_seed(2)
        table = torch.randn(2 + vocabulary, vocabulary, generator=generator)
        own = table[inputs["tokens"]] + inputs["positions"][..., None]
        own = own * inputs["ancestors"].sum(-1, keepdim=True)
        return {"draft_logits": own[:, inputs["select"][0]]}

    states = torch.randn(1, width, 4, generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens, {"hidden": states}, teacher)
    found = block_loss(record, say, batch)
    logits = say(None, **fed)["draft_logits"][0].log_softmax(-1)
    starts = anchors(tokens, levels, record.anchors).tolist()
    assert fed["tokens"][0, :width].eq(record.blank).all()
    assert torch.equal(fed["hidden"][:, :width], states)
    total = torch.zeros(())
    for block, start in enumerate(starts):
        column = block * (1 + levels)
        assert fed["tokens"][0, width + column].item() == tokens[0, start].item()
        for level in range(levels):
            said = logits[column + 1 + level]
            loss = -said[tokens[0, start + level + 1]]
            total += 0.7788**level / (1 + 0.7788 + 0.7788**2) * loss / len(starts)
    torch.testing.assert_close(found.total, total)
    assert len(found.hits) == levels


def test_layers_learn_blocks(tmp_path: Path) -> None:
    program = made(DraftDflash(masks=2, depth=1), named("tree_chain", depth=2))
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    states: list[Any] = []
    options = {"steps": 60, "batch": 6, "window": 24, "own": 0.0, "rate": 1e-2}
    done = fit(model, TEXT, out=tmp_path, progress=states.append, **options)
    hits = [state.hits for state in states if state.hits]
    assert len(hits[0]) == 2 and sum(hits[-1]) > sum(hits[0]) + 0.2
    after = done.model.program.weights
    moved = {n for n, w in program.weights.items() if not torch.equal(w.load(), after[n].load())}
    assert all(name.startswith("dflash.") for name in moved)
    assert {"dflash.mask", "dflash.fc.weight", "dflash.hidden_norm.weight"} <= moved
    again = made(DraftDflash(masks=2, depth=1, weights=str(tmp_path)))
    assert again.plan.draft.trained  # type: ignore[attr-defined]
    for name in moved:
        torch.testing.assert_close(again.weights[name].load(), after[name].load())


def test_published_layers_are_read(tmp_path: Path) -> None:
    """A published draft has no mask of its own: the tokenizer's id is one."""
    passes = DraftDflash(masks=MASKS, depth=1, token=5), CHAIN
    ours = {n: w.load() for n, w in made(*passes).weights.items() if n.startswith("dflash.")}
    theirs = {n.partition(".")[2]: torch.randn_like(w) for n, w in ours.items()}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= set(theirs)
    assert "layers.0.self_attn.q_norm.weight" in theirs and "mask" not in theirs
    save_file(theirs, tmp_path / "model.safetensors")
    given = DraftDflash(masks=MASKS, depth=1, token=5, weights=str(tmp_path))
    read = made(given, CHAIN)
    for name, tensor in theirs.items():
        assert torch.equal(read.weights[f"dflash.{name}"].load(), tensor)


def test_a_config_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    """The taps, the layers and the mask that published drafts were trained with."""
    passes = DraftDflash(masks=MASKS, depth=1, token=5), CHAIN
    ours = {n: w.load() for n, w in made(*passes).weights.items() if n.startswith("dflash.")}
    save_file({n.partition(".")[2]: w for n, w in ours.items()}, tmp_path / "model.safetensors")
    config = {"num_hidden_layers": 1, "dflash_config": {"target_layer_ids": [3]}}
    given = DraftDflash(masks=MASKS, depth=1, token=5, weights=str(tmp_path))
    for more, said in (
        ({"mask_token_id": 5}, ""),
        ({"mask_token_id": 6}, "says mask_token_id=6, expected 5"),
        ({"target_layer_ids": [2]}, r"says target_layer_ids=\[2\], expected \[3\]"),
        ({"num_hidden_layers": 2}, "says num_hidden_layers=2, expected 1"),
    ):
        told = {**config, "dflash_config": {**config["dflash_config"], **more}}
        (tmp_path / "config.json").write_text(json.dumps(told))
        with pytest.raises(PassError, match=said) if said else nullcontext():
            made(given, CHAIN)


@pytest.mark.parametrize(
    ("count", "depth", "found"),
    [
        (2, 5, (0, 1)),
        (4, 5, (1,)),
        (6, 5, (1, 2, 3)),
        (6, 2, (1, 3)),
        (28, 1, (14,)),
        (36, 5, (1, 9, 17, 25, 33)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
    ],
)
def test_as_many_layers_are_read_as_the_draft_has(
    count: int, depth: int, found: tuple[int, ...]
) -> None:
    """The published drafts of targets of 36 and 48 layers have five and eight layers."""
    assert spread(list(range(count)), depth) == found


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ((DraftDflash(layers=(3, 9)),), "expected layers of the target, each once"),
        ((DraftDflash(layers=(2, 2)),), "expected layers of the target, each once"),
        ((DraftDflash(token=999),), "token=999 is no token"),
    ],
)
def test_what_is_refused(passes: tuple[Pass, ...], said: str) -> None:
    with pytest.raises(PassError, match=said):
        made(*passes)


def test_a_function_that_takes_no_ancestors_cannot_draft_blocks() -> None:
    every = (FLASH, InsertKvCache(), PickLogits(), AddArgmax())
    with pytest.raises(PassError, match="needs a function dflash that takes ancestors"):
        run_passes(tiny_llama(LAYERS), [Step(p) for p in every])
