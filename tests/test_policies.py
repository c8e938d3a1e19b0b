"""A policy is declared once: its record is found, and so is the class that carries it out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from tiny import cached_llama, named

import graftwork.ir.plan as plan_package
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, ParseError, PassError
from graftwork.ir.plan import (
    RECORDS,
    CachedDraft,
    DecodePlan,
    FirstDraft,
    FullDepth,
    FusedDraft,
    HeadsDraft,
    KeepAll,
    UnrolledDraft,
    untrained,
)
from graftwork.ir.plan.base import POLICIES, record
from graftwork.ir.plan.length import LengthRecord
from graftwork.ir.support.discovery import import_methods
from graftwork.ir.text.parser import parse_record
from graftwork.ir.text.printer import record_text
from graftwork.passes import all_passes
from graftwork.passes.drafting.ppd import PromptDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.base import PassDefinitionError
from graftwork.passes.policies import RecordPass, builds, derived
from graftwork.recipe import Recipe
from graftwork.runtime.cache import CACHES
from graftwork.runtime.depth import DEPTHS
from graftwork.runtime.feeding.feed import Feeder
from graftwork.training.net import _marked

CASES = Path(__file__).parent / "cases"
import_methods()


def test_two_records_of_one_kind_are_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Other(LengthRecord):
        kind: ClassVar[str] = "svip"

    with pytest.raises(InputError, match=r"Other cannot be length=svip: .*length\.SvipLength is"):
        record(Other)
    assert RECORDS["length", "svip"] is plan_package.SvipLength


def test_the_defaults_of_depth_and_cache_are_policies() -> None:
    executable = compile(cached_llama(), Target.parse("eager"))
    cache, depth = KeepAll(), FullDepth()
    CACHES.find(cache)(cache, executable).begin(2)
    whole = DEPTHS.find(depth)(depth, executable)
    whole.begin(Feeder(executable, 2, "step"), [])
    assert whole.record == depth and whole.ran == whole.total == 2
    assert CACHES.find(KeepAll())(KeepAll(), executable).room([3, 5]) is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_is_its_record(name: str) -> None:
    """The pass that puts it into plans says what the record says, and has a case file."""
    cls, made = POLICIES[name], all_passes()[name]
    assert (made.contract, made.requires, made.provides) == (
        cls.contract,
        cls.requires,
        cls.provides,
    )
    assert made.__doc__ is not None and f"{cls.slot} = {cls()}" in made.__doc__
    assert not cls.__doc__ or cls.__doc__[:40] in made.__doc__
    assert (CASES / f"{name}.test").is_file()


def test_fields_that_others_fill_are_no_options() -> None:
    known = set(RecordPass.model_fields)
    assert set(all_passes()["length_goodput"].model_fields) - known == {"loss"}


def test_options_have_the_bounds_of_the_record() -> None:
    """Those that the pass does not repeat, too: the largest value is the record's."""
    for options, message in (
        ({"nodes": 5000}, "option 'nodes': Input should be less than or equal to 4096"),
        ({"nodse": 5}, "no option 'nodse'; did you mean 'nodes'"),
        ({"depth": "5"}, "option 'depth': Input should be a valid integer; got '5'"),
    ):
        with pytest.raises(InputError, match=message):
            Recipe.load({"passes": [{"tree_best_first": options}]})


def test_options_that_contradict_each_other_are_refused_where_they_are_written() -> None:
    with pytest.raises(InputError, match=r"^recipe: pass 'tree_widened': widened chain: expected"):
        Recipe.load({"passes": [{"tree_widened": {"bounds": [0.8, 0.3], "counts": [3, 2, 1]}}]})


def test_a_policy_that_contradicts_the_plan_is_refused_by_its_pass() -> None:
    draft = CachedDraft("draft", levels=2)
    unrolled = replace(cached_llama().plan, draft=UnrolledDraft(draft))
    program = cached_llama().replace(plan=unrolled)
    with pytest.raises(PassError, match=r"length_svip: draft=unrolled.* makes all levels"):
        named("length_svip").run(program)


def test_fields_that_passes_use_for_something_else_are_refused() -> None:
    @dataclass(frozen=True)
    class Named(LengthRecord):
        name: str = "x"
        kind: ClassVar[str] = "named"

    with pytest.raises(PassDefinitionError, match="Named: the field 'name' cannot be an option"):
        derived("length_named", Named)


def test_drafters_hold_the_one_whose_chain_they_make() -> None:
    """What it reads, needs and is trained for is the inner one's; its text reads back."""
    eagle = CachedDraft("eagle", "hidden", levels=3, entry="eagle.entry")
    fused = FusedDraft(UnrolledDraft(eagle, "eagle.chain"))
    assert (fused.reads, fused.levels, fused.tells) == (("hidden",), 3, False)
    assert fused.cached == ("eagle", "eagle.chain")
    assert untrained([fused, SuffixDraft()]) == [eagle]
    plan = DecodePlan(draft=FirstDraft((SuffixDraft(tokens=7), fused)))
    assert plan.most == 7 and DecodePlan(draft=fused).most == 3
    assert parse_record(record_text(fused), "draft") == fused
    with pytest.raises(ParseError, match="staged has no chain that one call could make"):
        parse_record("unrolled(draft=staged())", "draft")


def test_every_trained_record_is_found_and_marked_in_its_place() -> None:
    heads, eagle = HeadsDraft(), CachedDraft("eagle", "hidden")
    draft = FirstDraft((heads, FusedDraft(UnrolledDraft(eagle))))
    assert draft.trains == (heads, eagle)
    marked = _marked(draft, [eagle])
    assert marked == FirstDraft((heads, FusedDraft(UnrolledDraft(replace(eagle, trained=True)))))


def test_options_of_a_pass_that_builds_are_the_records_fields() -> None:
    """But those that it fills, with its own defaults; a field that is none is refused."""
    options = all_passes()["draft_ppd"].model_fields
    assert set(options) == {"weights", "candidates", "prompts", "after", "decay", "aim"}
    assert options["aim"].default == "distribution" != PromptDraft().aim
    with pytest.raises(InputError, match="less than or equal to 256"):
        Recipe.load({"passes": [{"draft_ppd": {"prompts": 300}}]})
    with pytest.raises(
        PassDefinitionError, match="'weight' is no option that PromptDraft gives it; those are"
    ):
        builds(PromptDraft, weight="x")(RecordPass)


def test_what_a_pass_builds_is_a_record() -> None:
    class Stray(PromptDraft):
        kind = "stray"

    policy = "a @policy, whose pass is derived,"
    for cls, now in ((Stray, "not a @record"), (plan_package.SvipLength, policy)):
        message = f"{cls.__name__} is {now} and RecordPass builds it: decorate it with @record"
        with pytest.raises(PassDefinitionError, match=message):
            builds(cls)(RecordPass)
