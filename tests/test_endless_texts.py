"""Texts longer than a model's context, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from archs import ARCHS, build
from handmade import Shape, cached_llama
from selection import one_in
from test_eviction import BLOCK, BUDGET, SHAPE, TEXT, asked, evicting, executable_of
from test_runtime_cached import padded

from graftwork.frontends import import_model
from graftwork.ir import InputError, PassError, Program, TensorType, arguments, verify
from graftwork.ir.plan import NoDraft
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.scoring import score

A, G = torch.ops.aten, torch.ops.graftwork
SHORT, LONG = 96, 512
WINDOWED = Shape(layers=3, context=SHORT, window=21, whole=(1,), sinks=True)


class Streamed:
    """StreamingLLM by hand, in layers that see all rows (Xiao et al. 2024).

    All rows stay where they are, and which a token sees is said by a bias. Keys are kept as they
    were before their rotation, and rotated for where they stand among those that are held each time
    that this changes. Layers that look back over a window run as in the plain program, positions
    without end.
    """

    def __init__(self, program: Program, budget: int, sinks: int = 4) -> None:
        self.budget, self.sinks, fn = budget, sinks, program.step.copy()
        outputs, places = dict(fn.outputs), fn.add_input("places", TensorType.parse("i64[B,T]"))
        self.names, self.tables = [], []
        for attend in fn.calls(G.attend.default):
            given = arguments(attend)
            if arguments(given["mask"])["window"] is not None:
                continue
            layer, new = len(self.names), given["k"].args[1]
            tables = [str(angles.args[0].target) for angles in new.args[1:3]]
            for rotated in (given["q"], new):
                with fn.graph.inserting_before(rotated):
                    found = [fn.weight(program.weights[name]) for name in tables]
                    angles = [fn.call(A.embedding.default, table, places) for table in found]
                rotated.args = (rotated.args[0], *angles)
            heads = given["q"].meta["type"].dims[1]
            hidden = fn.add_input(f"hidden.{layer}", TensorType.parse(f"f32[B,{heads},T,C]"))
            place = list(given).index("bias")
            attend.args = (*attend.args[:place], hidden, *attend.args[place + 1 :])
            outputs[f"raw.{layer}"] = new.args[0]
            self.names.append(str(given["k"].args[0].target))
            self.tables.append([program.weights[name].load() for name in tables])
            self.heads = heads
        fn.set_outputs(outputs)
        self.executable = executable_of(program.with_function(fn))
        self.executable.begin(1, LONG)
        self.executable.reserve(LONG)
        self.raw: list[list[torch.Tensor]] = [[] for _ in self.names]
        self.held: list[int] = []
        self.fed = 0

    def feed(self, token: int) -> torch.Tensor:
        hidden = torch.full((1, self.heads, 1, self.executable.capacity), -1e9)
        hidden[..., [*self.held, self.fed]] = 0
        inputs = {
            "tokens": torch.tensor([[token]]),
            "positions": torch.tensor([[self.fed]]),
            "places": torch.tensor([[len(self.held)]]),
            "past": torch.tensor([self.fed]),
            "select": torch.tensor([[0]]),
        }
        raws = [f"raw.{n}" for n in range(len(self.names))]
        inputs |= {name.replace("raw", "hidden"): hidden for name in raws}
        found = self.executable.run("step", inputs, ("logits", *raws))
        for kept, name in zip(self.raw, raws, strict=True):
            kept.append(found[name][0, :, 0].clone())
        self.held.append(self.fed)
        self.fed += 1
        if len(self.held) == self.budget + BLOCK:
            self.drop()
        return found["logits"][0, 0].clone()

    def drop(self) -> None:
        self.held = self.held[: self.sinks] + self.held[self.sinks - self.budget :]
        for name, raw, tables in zip(self.names, self.raw, self.tables, strict=True):
            cos, sin = (table[: self.budget][None] for table in tables)
            keys = G.rotary(torch.stack([raw[row] for row in self.held], 1)[None], cos, sin)[0]
            for place, row in enumerate(self.held):
                self.executable.write_rows(0, row, {name: keys[:, place : place + 1]})

    def decode(self, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """The text, and the logits [S,V] of all its tokens but the last."""
        text, logits = list(prompt), []
        for place in range(len(prompt) + count - 1):
            logits.append(self.feed(text[place]))
            if place + 1 == len(text):
                text.append(int(logits[-1].argmax()))
        return text, torch.stack(logits)


@pytest.mark.parametrize("backend", one_in(2, ["onnxruntime", "eager"]))
def test_texts_are_endless_in_constant_memory(backend: str) -> None:
    """Twice as long as the model's context, and token for token what the method by hand gives."""
    program = evicting("window", positions="cache")
    executable = executable_of(program, backend)
    count = 2 * SHAPE.context - TEXT.shape[1]
    wanted, _ = Streamed(cached_llama(replace(SHAPE, context=LONG)), BUDGET).decode(
        TEXT[0].tolist(), count
    )
    assert generate(executable, TEXT, **asked(count))[0].tolist() == wanted
    assert max(executable.buffers.capacities.values()) == (64 if backend == "onnxruntime" else 256)
    # A long text is scored, too, and is a prompt as good as any.
    fast = executable_of(program, backend)
    whole = torch.tensor([wanted])
    scored = score(fast, whole)
    best = scored[0, TEXT.shape[1] - 1 : -1].argmax(-1)
    assert best.tolist() == wanted[TEXT.shape[1] :]
    more = generate(fast, whole[:, :400], **asked(len(wanted) - 400))
    assert more[0].tolist() == wanted
    with pytest.raises(InputError, match="the model's context is 256"):
        score(executable_of(evicting("window"), backend), whole)


def plain_of(name: str, context: int) -> Program:
    """Models whose layers look back over a window, but for one."""
    if name == "handmade":
        return cached_llama(replace(WINDOWED, context=context))
    return _imported(name, context)


@cache
def _imported(name: str, context: int) -> Program:
    known, kinds = ARCHS[name], ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"layer_types": kinds, "num_hidden_layers": 3, "sliding_window": 21}
    made = build(
        replace(known, config={**known.config, **sizes, "max_position_embeddings": context})
    )
    program = run_passes(import_model(made), Recipe.load("baseline").steps)[0]
    return AddTopTokens().run(program).program


@pytest.mark.parametrize(
    ("name", "budget", "backend"),
    [
        ("handmade", 16, "eager"),
        ("handmade", 24, "eager"),
        ("gemma3_text", 16, "onnxruntime"),
        pytest.param("handmade", 40, "onnxruntime", marks=pytest.mark.long),
        pytest.param("gpt_oss", 40, "eager", marks=pytest.mark.long),
        pytest.param("gemma3_text", 40, "torch", marks=pytest.mark.long),
        pytest.param("gpt_oss", 16, "onnxruntime", marks=pytest.mark.long),
    ],
)
def test_windows_see_what_they_saw_in_texts_without_end(
    name: str, budget: int, backend: str
) -> None:
    """Budgets below a window's rows, as many, and more: the others' rows are those of the paper."""
    count = 2 * SHORT - TEXT.shape[1]
    wanted, logits = Streamed(plain_of(name, LONG), budget).decode(TEXT[0].tolist(), count)
    evict = EvictCache(budget=budget, block=BLOCK, positions="cache", sinks=4)
    program = evict.run(plain_of(name, SHORT)).program
    verify(program)
    executable = executable_of(program, backend)
    assert generate(executable, TEXT, **asked(count))[0].tolist() == wanted
    assert max(executable.buffers.capacities.values()) <= 256
    found = score(executable_of(program, backend), torch.tensor([wanted[:-1]]))[0]
    torch.testing.assert_close(found, logits, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", one_in(3, ["handmade", "gemma3_text", "gpt_oss"]))
def test_budgets_that_no_text_fills_change_nothing_beside_windows(name: str) -> None:
    """Where each layer's rows are the plain program's, so is what they come to."""
    plain = plain_of(name, SHORT)
    program = EvictCache(budget=88, block=BLOCK, positions="cache").run(plain).program
    found, wanted = (score(executable_of(p), TEXT) for p in (program, plain))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("budget", "backend"), one_in(3, product([16, 40], ["onnxruntime", "eager"]))
)
def test_drafts_and_batches_change_nothing_in_texts_without_end(budget: int, backend: str) -> None:
    prompts = [TEXT[0].tolist(), TEXT[0, 9:20].tolist(), TEXT[0, 3:53].tolist()]
    ids, mask = padded(prompts)
    start = AddTopTokens().run(plain_of("handmade", SHORT)).program
    evict = EvictCache(budget=budget, block=BLOCK, positions="cache")
    plain = executable_of(evict.run(start).program)
    wanted = [generate(plain, torch.tensor([p]), **asked(90))[0].tolist() for p in prompts]
    for draft in (NoDraft(), SuffixDraft(tokens=5), RecyclingDraft(nodes=7)):
        fast = executable_of(evict.run(with_plan(start, draft=draft)).program, backend)
        found = generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **asked(90))
        assert (found.stats.accepted_tokens > 10) is not isinstance(draft, NoDraft)
        for row, text in zip(found.sequences.tolist(), wanted, strict=True):
            assert row[len(row) - len(text) :] == text


def test_rows_of_each_layer_have_places_of_their_own() -> None:
    """Also where budgets differ for another reason. A layer without rotations has none to give."""
    plain = cached_llama(replace(SHAPE, layers=3, context=SHORT))
    options = {"method": "snapkv", "layers": "pyramid", "recent": 4, "budget": BUDGET}
    program = EvictCache(block=BLOCK, positions="cache", **options).run(plain).program
    executable = executable_of(program)
    found = generate(executable, TEXT, **asked(SHORT))
    assert torch.equal(generate(executable_of(program, "onnxruntime"), TEXT, **asked(SHORT)), found)
    with pytest.raises(
        PassError, match="is not what a rotation by the tokens' own positions gives"
    ):
        EvictCache(budget=16, block=BLOCK, positions="cache").run(
            cached_llama(replace(WINDOWED, rotary=0))
        )
