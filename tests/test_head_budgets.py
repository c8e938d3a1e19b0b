"""Heads with caches of their own, and budgets for them by what they look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from evidence import evidence_for
from handmade import Shape, cached_llama
from selection import mostly_long
from test_eviction import (
    BLOCK,
    BUDGET,
    LAYERS,
    SHAPE,
    TEXT,
    Reference,
    asked,
    base,
    executable_of,
)
from test_runtime_cached import padded

from graftwork.ir import PassError, Program, Weight, run, verify
from graftwork.ir.plan import DraftRecord, NoDraft
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.passes.caching.budgets.adaptive import chosen
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.split_heads import SplitHeads
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.runtime import generate

G = torch.ops.graftwork
RECENT, WINDOWS, LENGTH = 6, 3, 64
OPTIONS = {
    "method": "snapkv",
    "layers": "adaptive",
    "budget": BUDGET,
    "block": BLOCK,
    "recent": RECENT,
    "windows": WINDOWS,
    "length": LENGTH,
}


def sharp() -> Program:
    """A model whose layers' first head of keys is looked at sharply, at few rows."""
    program = base()
    names = [name for name in program.weights if name.endswith("attention.q_k_v.weight")]
    assert len(names) == LAYERS
    made = []
    for name in names:
        whole = program.weights[name].load().clone()
        whole[: 2 * SHAPE.dim] *= 12
        made.append(Weight.of(name, whole))
    return program.replace(weights=program.weights.replacing(*made))


def adaptive(
    draft: DraftRecord | None = None, split: SplitHeads | None = None, **more: object
) -> Program:
    """A model whose heads have budgets of their own, found on text."""
    program = with_plan(AddTopTokens().run(sharp()).program, draft=draft or NoDraft())
    steps = [Step(split or SplitHeads()), Step(EvictCache.model_validate({**OPTIONS, **more}))]
    made = run_passes(program, steps, evidence=evidence_for(program, 4096))[0]
    verify(made)
    return made


def budgets_of(program: Program, heads: int = 2) -> list[list[int]]:
    """Of each layer and head."""
    plan = program.plan.cache
    rows = dict(zip(plan.capacities, plan.budgets, strict=True))  # type: ignore[attr-defined]
    most: int = plan.budget  # type: ignore[attr-defined]
    keys = [[program.states[f"kv.{n}.{g}.key"] for g in range(heads)] for n in range(LAYERS)]
    return [[rows.get(key.capacity or "", most) for key in layer] for layer in keys]


def seen(window: torch.Tensor) -> Iterator[list[list[float]]]:
    """For each layer, what the last queries give each row of each of its heads' keys."""
    program = sharp()
    fn = program.step.copy()
    attends = fn.calls(G.attend.default)
    taps = {f"q.{n}": attend.args[0] for n, attend in enumerate(attends)}
    taps |= {f"k.{n}": attend.args[1] for n, attend in enumerate(attends)}
    fn.set_outputs({**fn.outputs, **taps})
    empty = {name: torch.zeros(1, 2, LENGTH, SHAPE.dim) for name in program.states}
    given = chain_inputs(window[None]) | empty
    wanted = {str(node.target): given[str(node.target)] for node in fn.inputs}
    found = run(program.with_function(fn), fn.name, wanted)
    for n, attend in enumerate(attends):
        queries, keys = found[f"q.{n}"][0].double(), found[f"k.{n}"][0].double()
        layer = []
        for group in range(2):
            line = [0.0] * LENGTH
            for head in (2 * group, 2 * group + 1):
                for place in range(LENGTH - RECENT, LENGTH):
                    logits = (
                        keys[group][: place + 1] @ queries[head, place] * attend.kwargs["scale"]
                    )
                    for row, weight in enumerate(torch.softmax(logits, 0).tolist()):
                        line[row] += weight / (2 * RECENT)
            line = [0.0, 0.0, *line[: LENGTH - RECENT], *[0.0] * (RECENT + 2)]
            layer.append([sum(line[row : row + 5]) / 5 for row in range(LENGTH - RECENT)])
        yield layer


def test_budgets_are_what_the_paper_gives() -> None:
    """Feng et al. (2024), algorithm 1: of all heads' rows together the best, but of each a fifth of
    an even share; the mean of some windows, in whole blocks."""
    program = sharp()
    total = torch.zeros(LAYERS, 2)
    even = BUDGET - RECENT
    windows = evidence_for(program, 4096).tokens
    last = len(windows) - LENGTH
    for start in (last * n // (WINDOWS - 1) for n in range(WINDOWS)):
        for layer, scores in enumerate(seen(windows[start : start + LENGTH])):
            order = [sorted(range(len(s)), key=lambda r: -s[r]) for s in scores]
            kept = {(g, row) for g in range(2) for row in order[g][: int(0.2 * even)]}
            rest = sorted(
                ((g, row) for g in range(2) for row in order[g] if (g, row) not in kept),
                key=lambda at: -scores[at[0]][at[1]],
            )
            for group, _ in [*kept, *rest[: 2 * even - len(kept)]]:
                total[layer, group] += 1 / WINDOWS
    wanted = [[max(round((n + RECENT) / BLOCK), 1) * BLOCK for n in row] for row in total.tolist()]
    assert budgets_of(adaptive()) == wanted
    assert len({n for row in wanted for n in row}) > 1


def test_a_head_that_looks_at_few_rows_keeps_few() -> None:
    """By hand: 3 rows a head, of which none may fall below a fifth."""
    scores = torch.tensor([[9.0, 8, 7, 6, 1, 1], [5.0, 0, 0, 0, 0, 0]])
    assert chosen(scores, 3).tolist() == [5, 1] or chosen(scores, 3).tolist() == [4, 2]
    flat = torch.tensor([[9.0] * 10, [0.0] * 10])
    assert chosen(flat, 5).tolist() == [9, 1]


class AdaptiveReference(Reference):
    """Rows are kept by the rule of snapkv, so many as each head's budget is."""

    def __init__(self, budgets: list[list[int]]) -> None:
        super().__init__("snapkv, shared" if len(budgets[0]) == 2 else "snapkv", start=sharp())
        self.budgets = budgets


@pytest.mark.parametrize("backend", mostly_long(("eager", "onnxruntime"), keep=("eager",)))
def test_heads_keep_their_own_rows(backend: str) -> None:
    program, prompt = adaptive(), TEXT[0].tolist()
    reference = AdaptiveReference(budgets_of(program))
    wanted = reference.decode(prompt, 33)
    executable = executable_of(program, backend)
    assert generate(executable, TEXT, **asked(33))[0, len(prompt) :].tolist() == wanted
    for layer in range(LAYERS):
        values = reference.executable.states[f"kv.{layer}.value"][0]
        for group, held in enumerate(reference.held[layer]):
            rows = executable.buffers.tensors[f"kv.{layer}.{group}.value"][0, 0, : len(held)]
            torch.testing.assert_close(rows, values[group][held], atol=2e-5, rtol=1e-4)


def test_heads_of_queries_keep_their_own_rows() -> None:
    """Each of four, where pairs share keys."""
    program = adaptive(split=SplitHeads(heads="own"))
    budgets, prompt = budgets_of(program, heads=4), TEXT[0].tolist()
    assert len({rows for layer in budgets for rows in layer}) > 1
    wanted = AdaptiveReference(budgets).decode(prompt, 33)
    assert generate(executable_of(program), TEXT, **asked(33))[0, len(prompt) :].tolist() == wanted


def test_windows_keep_one_cache_for_all_heads_of_queries() -> None:
    shape = Shape(heads=4, groups=1, context=256, window=21, whole=(1,))
    whole = cached_llama(shape)
    outcome = SplitHeads(heads="own").run(whole)
    verify(outcome.program)
    assert outcome.matches == 2 and "4 times the bytes" in outcome.remarks[0]
    assert {"kv.0.key", "kv.1.0.key", "kv.1.3.value"} < outcome.program.states.keys()
    found = generate(executable_of(outcome.program), TEXT, **asked(30))
    assert torch.equal(found, generate(executable_of(whole), TEXT, **asked(30)))


@pytest.mark.parametrize("draft", [SuffixDraft(tokens=5), RecyclingDraft(nodes=7)])
def test_drafts_and_batches_change_nothing(draft: DraftRecord) -> None:
    prompts = [TEXT[0].tolist(), TEXT[0, 9:20].tolist(), TEXT[0, 3:53].tolist()]
    plain, fast = executable_of(adaptive()), executable_of(adaptive(draft))
    ids, mask = padded(prompts)
    found = generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **asked(40))
    assert found.stats.accepted_tokens > 2
    for row, prompt in zip(found.sequences.tolist(), prompts, strict=True):
        wanted = generate(plain, torch.tensor([prompt]), **asked(40))[0].tolist()
        assert row[len(row) - len(wanted) :] == wanted


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("split", [SplitHeads(), SplitHeads(heads="own")])
@pytest.mark.parametrize(
    "shape", [Shape(context=256), Shape(context=256, sinks=True, slopes=True, softcap=9.0)]
)
def test_heads_apart_change_nothing(shape: Shape, split: SplitHeads, backend: str) -> None:
    whole = cached_llama(shape)
    apart = split.run(whole).program
    verify(apart)
    assert {str(state.type.dims[1]) for state in apart.states.values()} == {"1"}
    found = generate(executable_of(apart, backend), TEXT, **asked(30))
    assert torch.equal(found, generate(executable_of(whole), TEXT, **asked(30)))


@pytest.mark.long
def test_it_runs_compiled() -> None:
    plain = generate(executable_of(adaptive()), TEXT, **asked(20))
    assert torch.equal(generate(executable_of(adaptive(), "torch"), TEXT, **asked(20)), plain)


def test_what_would_go_wrong_is_refused() -> None:
    with pytest.raises(PassError, match="layers='adaptive' shares rows among caches of heads"):
        run_passes(
            base(), [Step(EvictCache.model_validate(OPTIONS))], evidence=evidence_for(base(), 4096)
        )
    with pytest.raises(PassError, match="asks what queries look at, as method='snapkv' does"):
        adaptive(method="norm")
    with pytest.raises(PassError, match="windows of 24 tokens hold no more than budget=24"):
        adaptive(length=24)
    with pytest.raises(PassError, match="needs text to calibrate on"):
        run_passes(base(), [Step(SplitHeads()), Step(EvictCache.model_validate(OPTIONS))])
    one = cached_llama(Shape(heads=2, groups=1, context=256))
    assert SplitHeads().run(one).matches == 0
    with pytest.raises(PassError, match="one head of keys and values each: there is nothing to sh"):
        EvictCache.model_validate(OPTIONS).apply(one, evidence_for(one, 4096))
