"""Plans: what cannot be carried out, and what would never act, is refused before anything runs."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import NAMES, program_of
from selection import one_in
from tiny import MASK, PROMPTS, cached_llama, tiny_llama

from graftwork.artifact.saved import load, save
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import GraftworkError, InputError, PassError, Program
from graftwork.ir.check.legality import idle, misfit, unmet
from graftwork.ir.plan import DecodePlan, FirstDraft, GoodputLength, MergedDraft, StaticTree
from graftwork.ir.plan.decode import sizes_up_to
from graftwork.passes import Contract, Pass, all_passes
from graftwork.passes.depth.deferred import DeferredDepth
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.recipe import Recipe
from graftwork.runtime import generate

BASE = ("fuse_qkv", "fuse_gate_up", "insert_kv_cache", "pick_logits", "add_argmax")
TREES = ("accept_trees",)
BOTH = ("accept_trees", "add_top_tokens")
COPYING = "suffix(tokens=3, longest=8, shortest=1)"
MODEL: dict[str, Any] = {"model": "other", "levels": 4}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "suffix": ("draft_suffix", {"tokens": 4, "shortest": 1}),
    "input": ("draft_input", {"tokens": 4}),
    "jacobi": ("draft_jacobi", {"tokens": 4}),
    "lookahead": ("draft_lookahead", {"window": 3, "ngram": 3, "pool": 3}),
    "recycling": ("draft_recycling", {"nodes": 8, "depth": 4}),
    "medusa": ("draft_medusa", {}),
    "hydra": ("draft_hydra", {"prefix": True}),
    "eagle": ("draft_eagle", {"inner": 0}),
    "clover": ("draft_clover", {}),
    "ppd": ("draft_ppd", {}),
    "model": ("draft_model", MODEL),
    "short model": ("draft_model", {**MODEL, "model": "short"}),
    "model, copying": ("draft_model", {**MODEL, "drafter": COPYING}),
    "model, recycling": ("draft_model", {**MODEL, "drafter": "recycling(nodes=8, depth=4)"}),
    "model, guessing": ("draft_model", {**MODEL, "drafter": "jacobi()"}),
}
TREES_AND_CHAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("tree_chain", {"depth": 3}),
    "static": ("tree_static", {"paths": [[0], [1], [0, 0], [1, 0]]}),
    "static chain": ("tree_static", {"paths": [[0], [0, 0], [0, 0, 0]]}),
    "best": ("tree_best_first", {"nodes": 8, "depth": 3, "width": 3}),
    "sampled": ("tree_sampled", {"widths": [3, 2]}),
    "sampled chain": ("tree_sampled", {"widths": [1, 1, 1]}),
    "independent": ("tree_sampled", {"widths": [3, 2], "replacement": True}),
    "widened": ("tree_widened", {"depth": 3}),
}
LENGTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "acceptance": ("length_acceptance", {"levels": 3}),
    "draft acceptance": ("length_draft_acceptance", {}),
    "confidence": ("length_confidence", {"threshold": 0.05}),
    "goodput": ("length_goodput", {}),
    "svip": ("length_svip", {"threshold": 0.1}),
    "thompson": ("length_thompson", {}),
}
VERIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (f"verify_{name}", {}) for name in ("contrastive", "judge", "spectr", "top_k", "typical")
}
PARTS = {**DRAFTERS, **TREES_AND_CHAINS, **LENGTHS, **VERIFIERS}
EAGER = Target.parse("eager")
ASKED = {"attention_mask": MASK, "max_new_tokens": 16, "pad_token_id": 0}


def made(name: str) -> Pass:
    """A part of `PARTS`, or a pass without options."""
    kind, options = PARTS.get(name, (name, {}))
    return all_passes()[kind].model_validate_json(json.dumps(options))


def planned(*names: str, base: tuple[str, ...] = BASE) -> tuple[Program, Contract]:
    """A tiny model after these parts and what every model gets, and the weakest contract."""
    guests = {"other": tiny_llama(1, seed=1), "short": tiny_llama(1, seed=1, context=12)}
    steps = [Step(made(name), name in BASE) for name in (*base, *names)]
    contract = max((step.pass_.contract for step in steps), key=lambda c: c.rank)
    return run_passes(tiny_llama(2).replace(guests=guests), steps)[0], contract


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("model, guessing",), r"drafts by jacobi\(tokens=10\): expected a drafter that copies"),
        (("model, recycling",), r"reads 'top_tokens', which step does not return; add add_top_tok"),
        (
            ("model, copying", "best", *TREES),
            r"predicts what follows one node a level, and tree=be",
        ),
        (("ppd",), r"draft=prompts\(.* takes ancestors; add accept_trees"),
        (("suffix", "medusa", "sampled", *TREES, "contrastive"), "has no distributions to weigh"),
        (("medusa", "suffix"), r"draft=suffix\(.* is never asked: draft=heads.*comes before it"),
        (("jacobi", "recycling", *BOTH), r"draft=recycling\(.* is never asked: draft=jacobi"),
        (("suffix", "chain"), r"tree=chain\(depth=3\) is never followed: draft=suffix"),
        (("suffix", "best", *TREES), r"tree=best_first\(.* is never followed: draft=suffix"),
        (("recycling", "static", *BOTH), r"tree=static\(.* is never followed: draft=recycling"),
        (("suffix", "svip"), r"length=svip\(.* is never asked: draft=suffix"),
        (("lookahead", "confidence", *TREES), r"length=confidence\(.* is never asked"),
        (("chain",), r"tree=chain\(depth=3\) is never asked: nothing drafts; leave it out"),
        (("medusa", "sampled", *TREES, "spectr"), "expected a tree of independently sampled"),
        (("suffix", "eagle", "draft_merged", "unroll_draft", "fuse_draft", *TREES), "makes trees"),
        (("recycling", "eagle", "unroll_draft", "fuse_draft", *BOTH), "makes trees: leave fuse_d"),
    ],
)
def test_what_cannot_be_or_never_acts_is_refused_by_name(
    names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PassError, match=message):
        planned(*names)


def test_the_same_drafter_twice_has_nothing_to_add() -> None:
    with pytest.raises(PassError, match="is there twice"):
        planned("suffix", "suffix")


def test_layers_without_attention_are_refused() -> None:
    with pytest.raises(InputError, match=r"option 'layers'.*greater than or equal to 1"):
        Recipe.load({"extends": "clover", "passes": [{"draft_clover": {"layers": 0}}]})


def test_errors_name_a_tree_without_listing_it() -> None:
    tree = StaticTree(tuple((rank,) for rank in range(63)))
    assert tree.brief == "static(paths=((0,), (1,), ... 63 in all))"
    assert len(str(tree)) > 300


@pytest.mark.parametrize("name", one_in(6, NAMES))
def test_every_recipe_makes_a_plan_whose_parts_all_act(name: str, tmp_path: Path) -> None:
    program = program_of(name, tmp_path)
    assert unmet(program) is None and misfit(program.plan) is None and idle(program.plan) is None


def test_recycled_trees_are_narrow_unless_asked_for() -> None:
    """A step of eight columns costs a CPU little more than one of one; wide ones lose to copying.

    What a step costs is measured, not tested: here only that nobody widens it unasked.
    """
    start = tiny_llama()
    for name, columns in {"recycling": 7, "copyspec_recycling": 7 + 16}.items():
        assert run_passes(start, Recipe.load(name).steps)[0].plan.columns == columns


@pytest.mark.parametrize("drafter", ["jacobi", "lookahead", "recycling"])
def test_heads_that_judge_go_with_drafters_that_need_a_cache(drafter: str) -> None:
    """The head is grafted on before there is a cache, the drafter put into the plan after."""
    program, _ = planned(drafter, "judge", *BOTH)
    assert program.plan.verify.kind == "judge" and same_as_plain(program, False)
    with pytest.raises(PassError, match=r"verify=judge\(.* is never asked: nothing drafts"):
        planned("judge")


def test_a_chain_is_a_chain_whatever_draws_it() -> None:
    """One node a level, the likeliest: a chain that one call makes serves all of these."""
    for chain in ("static chain", "sampled chain"):
        program, _ = planned("eagle", chain, *TREES, "unroll_draft")
        assert program.plan.draft.unrolled and program.plan.draft.levels == 3
        assert same_as_plain(program, True)


def test_drafters_that_draft_together_may_be_unrolled() -> None:
    program, _ = planned("suffix", "eagle", "chain", *TREES, "draft_merged", "unroll_draft")
    assert [part.kind for part in program.plan.draft.parts] == ["suffix", "unrolled"]
    assert same_as_plain(program, True)


def test_a_recipe_may_have_a_drafter_several_times() -> None:
    """The example of `draft_merged`."""
    lengths = {"longest": 16, "shortest": 4}, {"longest": 3, "shortest": 1}
    copying = [{"draft_suffix": options} for options in lengths]
    merging = ["accept_trees", *copying, {"draft_merged": {"nodes": 64}}]
    recipe = Recipe.load({"extends": "baseline", "passes": merging})
    draft = run_passes(tiny_llama(), recipe.steps)[0].plan.draft
    assert draft.kind == "merged" and draft.nodes == 64
    assert [(part.longest, part.shortest) for part in draft.parts] == [(16, 4), (3, 1)]
    assert Recipe.load(recipe.as_dict()).as_dict() == recipe.as_dict()
    with pytest.raises(InputError, match="has pass 'draft_suffix' 2 times, and a setting cannot"):
        recipe.with_options(["draft_suffix.tokens=4"])
    with pytest.raises(InputError, match="pass 'accept_trees' is given twice"):
        Recipe.load({"extends": "baseline", "passes": ["accept_trees", "accept_trees"]})


def test_an_artifact_with_such_a_plan_is_refused(tmp_path: Path) -> None:
    program, _ = planned("jacobi")
    plan = replace(program.plan, draft=RecyclingDraft())
    save(program.replace(plan=plan), tmp_path / "out", target=EAGER, recipe={"name": "x"})
    with pytest.raises(InputError, match="top_tokens"):
        load(tmp_path / "out")


def same_as_plain(program: Program, exact: bool) -> bool:
    """Whether a program decodes, greedily and sampling, and greedily as without drafts."""
    executable = compile(program, EAGER)
    found = generate(executable, PROMPTS, **ASKED)
    generate(executable, PROMPTS, **ASKED, do_sample=True, seed=1)
    return not exact or torch.equal(found, plain_text())


@cache
def plain_text() -> torch.Tensor:
    """What decoding without drafts says."""
    return generate(compile(cached_llama(), EAGER), PROMPTS, **ASKED)


def combinations() -> list[tuple[str, ...]]:
    """Pairs of drafter and tree, length or verifier, pairs of drafters, and some of everything."""
    kinds = (TREES_AND_CHAINS, LENGTHS, VERIFIERS)
    pairs = [(d, o, *BOTH) for d in DRAFTERS for kind in kinds for o in kind]
    several = [(*two, *BOTH) for two in itertools.permutations(DRAFTERS, 2)]
    rng = random.Random(0)
    mixed = []
    for _ in range(90):
        drafters = rng.sample(list(DRAFTERS), rng.choice((1, 2)))
        others = [rng.choice(list(kind)) for kind in kinds if rng.random() < 0.5]
        extras = ("draft_merged", "unroll_draft", "fuse_draft", "quantize_weights")
        mixed.append((*drafters, *others, *(e for e in extras if rng.random() < 0.3), *BOTH))
    bare = [(d, *x) for d in DRAFTERS for x in ((), ("unroll_draft",), ("draft_merged", *BOTH))]
    return [*rng.sample(pairs, 45), *rng.sample(several, 30), *mixed, *bare]


@pytest.mark.long
def test_what_is_not_refused_decodes_and_keeps_its_promise() -> None:
    """No recipe crashes, none is refused once it was optimized, none that is lossless differs."""
    legal = 0
    for names in combinations():
        try:
            program, contract = planned(*names)
        except GraftworkError:
            continue
        exact = contract is not Contract.APPROXIMATE
        assert same_as_plain(program, exact), names
        legal += 1
    assert legal > 60


def test_steps_are_made_for_each_drafter_alone_and_for_all() -> None:
    copied, recycled = SuffixDraft(tokens=16), RecyclingDraft(nodes=7)
    assert DecodePlan().widths == (1,)
    assert DecodePlan(draft=copied).widths == (1, 17)
    assert DecodePlan(draft=FirstDraft((copied, recycled))).widths == (1, 8, 17)
    assert DecodePlan(draft=MergedDraft((copied, recycled))).widths == (1, 8, 17, 24)


def test_steps_of_drafts_that_may_end_early_have_widths_between() -> None:
    copied = SuffixDraft(tokens=16)
    assert DecodePlan(draft=copied).between == ()
    assert DecodePlan(draft=copied, length=GoodputLength()).between == (2, 3, 5, 7, 9, 13, 17)
    assert DecodePlan(length=GoodputLength()).between == ()
    assert DecodePlan(depth=DeferredDepth(pending=7)).between == (2, 3, 5, 7, 8)
    for most in range(1, 200):
        sizes = sizes_up_to(most)
        assert sizes[-1] == most
        assert all(2 * min(s for s in sizes if s >= n) < 3 * n for n in range(1, most + 1))
