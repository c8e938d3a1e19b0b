"""What nobody trained drafts nothing, and approximate drafts go on as long as they earn it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_proposers import FakeDraft, taken
from recorded import calls_of
from tiny import MASK, PROMPTS, drafting_llama, named

from graftwork.backends import Target, compile
from graftwork.ir import GraftworkWarning, Program
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan import (
    CachedDraft,
    Chain,
    DecodePlan,
    EarnedLength,
    FirstDraft,
    FixedLength,
    GoodputLength,
    HeadsDraft,
    NoDraft,
)
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.adapter.graph import DraftAdapter
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.base import Pass
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.feeding.draft import NO_DRAFT, Draft
from graftwork.runtime.speculate.lengths.earned import FIRST, EarnedPolicy

pytestmark = [pytest.mark.measured, pytest.mark.untrained]
ASKED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
HEADS = DraftMedusa(heads=3, candidates=4)


def taught(program: Program) -> Program:
    """The same with drafters that count as trained."""
    draft = program.plan.draft.with_leaves(lambda leaf: replace(leaf, trained=True))  # type: ignore[call-arg]
    return program.replace(plan=replace(program.plan, draft=draft))


def test_plans_whose_drafts_nobody_taught() -> None:
    length = GoodputLength()
    assert DecodePlan(draft=HeadsDraft(), length=length).untaught
    assert DecodePlan(draft=HeadsDraft(), length=EarnedLength()).untaught
    assert not DecodePlan(draft=HeadsDraft()).untaught  # of a size that was asked for
    assert not DecodePlan(draft=HeadsDraft(trained=True), length=length).untaught
    assert not DecodePlan(draft=SuffixDraft(), length=length).untaught
    assert not DecodePlan(draft=FirstDraft((SuffixDraft(), HeadsDraft())), length=length).untaught
    assert DecodePlan(draft=FirstDraft((CachedDraft(), HeadsDraft())), length=length).untaught
    assert not DecodePlan(draft=NoDraft(), length=length).untaught


DRAFTERS: dict[str, tuple[Pass, ...]] = {
    "heads": (HEADS,),
    "layer": (DraftEagle(levels=3),),
    "adapter": (DraftAdapter(exit=1), CutDepth(exits=(1,))),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", ["length_goodput", "length_earned"])
def test_the_untrained_are_not_asked(
    drafter: str, length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = drafting_llama(*DRAFTERS[drafter], named(length))
    fast, plain = (compile(p, Target("eager")) for p in (program, drafting_llama()))
    called = calls_of(fast, monkeypatch)
    with pytest.warns(GraftworkWarning, match="nothing is drafted until they do"):
        found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **ASKED)
    assert torch.equal(found.sequences, generate(plain, PROMPTS, attention_mask=MASK, **ASKED))
    assert found.stats.draft_tokens == 0 and set(called) <= {program.plan.step.plain}
    told = compile(taught(program), Target("eager"))
    asked = generate(told, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **ASKED)
    if length == "length_earned":  # which tries at once; how soon goodput does, time decides
        assert asked.stats.draft_tokens > 0
    assert torch.equal(asked.sequences, found.sequences)


# -- drafts that earn what they cost


def policy(batch: int = 1, worth: float = 1.5) -> EarnedPolicy:
    plan = DecodePlan(draft=FakeDraft(4), tree=Chain())
    executable: Any = SimpleNamespace(program=SimpleNamespace(plan=plan))
    return EarnedPolicy(EarnedLength(worth=worth), executable, batch)


def play(made: EarnedPolicy, accepted: Sequence[int]) -> list[int]:
    """The sizes of drafts of which so many tokens are accepted, step by step."""
    sizes = []
    for count in accepted:
        (size,) = made.limits([9])
        draft = Draft(list(range(size))) if size else NO_DRAFT
        made.observe(taken([draft], [range(min(count, size))]), 0, 0)
        sizes.append(size)
    return sizes


def test_drafts_that_bring_nothing_end_soon_and_are_tried_ever_more_rarely() -> None:
    sizes = play(policy(), [0] * 200)
    tries = [n for n, size in enumerate(sizes) if size]
    # Half a token is lost each time: two tries are covered, and the third is not.
    assert tries == [0, 1, 2, 2 + FIRST + 1, 20 + 2 * FIRST, 53 + 4 * FIRST]
    assert len(tries) * 0.5 < 0.02 * 200


def test_drafts_that_were_asked_for_and_not_made_cost_as_much() -> None:
    made = policy()
    asked = []
    for _ in range(4):
        asked += made.limits([9])
        made.observe(taken([NO_DRAFT], [range(0)]), 0, 0)
    assert asked == [4, 4, 4, 0]


def test_drafts_that_earn_go_on_and_come_back() -> None:
    assert all(play(policy(), [1] * 50))
    assert all(play(policy(), [0, 2] * 50))  # in the mean
    assert sum(map(bool, play(policy(worth=3.0), [1] * 50))) < 4
    made = policy()
    play(made, [0] * 3)
    assert made.rest() == FIRST
    made.rested(FIRST, 1.0)
    assert made.rest() == 0 and all(play(made, [3] * 5))  # one try told
    play(made, [0] * 20)
    assert made.rest() and made.until[0] - made.steps[0] <= FIRST  # patience as at first


def test_texts_of_a_batch_have_accounts_of_their_own() -> None:
    made = policy(2)
    for _ in range(6):
        limits = made.limits([9, 9])
        drafts = [Draft([1] * size) if size else NO_DRAFT for size in limits]
        made.observe(taken(drafts, [range(0), range(len(drafts[1].tokens))]), 0, 0)
    assert made.limits([9, 9]) == [0, 4] and made.rest() == 0
    assert made.limits([9, 0]) == [0, 0]


def typical(length: bool) -> Executable:
    passes = [HEADS, named("tree_chain", depth=3), named("verify_typical", share=1.0)]
    return compile(
        taught(drafting_llama(*passes, *[named("length_earned", worth=3.0)] * length)),
        Target("eager"),
    )


def test_an_approximate_text_does_not_depend_on_its_batch_or_on_earlier_calls() -> None:
    fast, always = typical(True), typical(False)
    asked = {**ASKED, "max_new_tokens": 40, "return_dict_in_generate": True}
    batch = generate(fast, PROMPTS, attention_mask=MASK, **asked)
    every = generate(always, PROMPTS, attention_mask=MASK, **asked)
    assert 0 < batch.stats.draft_tokens < every.stats.draft_tokens
    for _ in range(2):
        alone = generate(fast, PROMPTS[2:3], **asked).sequences
        assert torch.equal(alone[0, -40:], batch.sequences[2, -40:])


def test_recipes_whose_text_depends_on_drafts_count_tokens() -> None:
    for name in ("medusa_typical", "judge", "generalized_aggressive"):
        assert "length_earned" in [use.name for use in Recipe.load(name).passes], name
    plan = drafting_llama(named("draft_suffix"), named("verify_typical"), named("length_earned"))
    assert plan.plan.length == EarnedLength() != FixedLength()
