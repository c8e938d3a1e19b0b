"""Parts of drafting that could never act are refused when a program is made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import named, tiny_llama

from graftwork.ir import PassError
from graftwork.ir.check.legality import idle
from graftwork.ir.plan import (
    BestFirst,
    CachedDraft,
    Chain,
    DecodePlan,
    DraftRecord,
    DynamicSample,
    FirstDraft,
    HeadsDraft,
    SampledShape,
    StaticTree,
    StochasticBeam,
    TreeRecord,
    WidenedChain,
)
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.manager import Step, run_passes

FOUR = HeadsDraft(levels=4)


@pytest.mark.parametrize(
    ("tree", "levels"),
    [
        (Chain(5), 5),
        (Chain(4), None),
        (Chain(), None),
        (BestFirst(depth=6), 6),
        (BestFirst(depth=4), None),
        (StaticTree.of([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0,) * 5]), 5),
        (SampledShape(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0,) * 5)), 5),
        (DynamicSample(depth=6), 6),
        (StochasticBeam(depth=5), 5),
        (WidenedChain(depth=7), 7),
    ],
    ids=str,
)
def test_a_tree_is_no_deeper_than_what_its_drafter_predicts(
    tree: TreeRecord, levels: int | None
) -> None:
    fault = idle(DecodePlan(draft=FOUR, tree=tree))
    if levels is None:
        assert fault is None
    else:
        assert fault is not None and f"is {levels} levels deep" in fault
        assert "predicts 4 at most" in fault and "depth to 4" in fault


def test_one_drafter_that_reaches_the_last_level_is_enough() -> None:
    longer = CachedDraft(levels=6, context=99)  # it may have no draft
    assert idle(DecodePlan(draft=FirstDraft((longer, FOUR)), tree=Chain(6))) is None
    assert "predicts 6 at most" in str(
        idle(DecodePlan(draft=FirstDraft((longer, FOUR)), tree=Chain(7)))
    )


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (SuffixDraft(tokens=4), SuffixDraft(tokens=8), True),
        (SuffixDraft(shortest=2), SuffixDraft(tokens=4, shortest=5), True),
        (SuffixDraft(shortest=5), SuffixDraft(tokens=4, shortest=2), False),
        (SuffixDraft(), SuffixDraft(), True),
        (FOUR, SuffixDraft(), True),
        (SuffixDraft(), FOUR, False),
    ],
    ids=str,
)
def test_a_drafter_that_never_gets_a_turn_is_refused(
    first: DraftRecord, second: DraftRecord, refused: bool
) -> None:
    fault = idle(DecodePlan(draft=FirstDraft((first, second))))
    assert (fault is not None) is refused
    if refused and first != second:
        assert "is never asked" in str(fault) and second.brief in str(fault)


def test_passes_say_so_at_once() -> None:
    cache = InsertKvCache()
    made = [DraftMedusa(heads=2), cache, named("tree_chain", depth=5)]
    with pytest.raises(
        PassError, match=r"5 levels deep, of which draft=heads.* predicts 2 at most"
    ):
        run_passes(tiny_llama(), [Step(p) for p in made])
    twice = [cache, named("draft_suffix"), named("draft_suffix", tokens=4, shortest=3)]
    with pytest.raises(PassError, match="has a draft wherever it has one"):
        run_passes(tiny_llama(), [Step(p) for p in twice])


def test_the_same_depth_is_none_too_many() -> None:
    plan = DecodePlan(draft=replace(FOUR, levels=5), tree=Chain(5))
    assert idle(plan) is None
