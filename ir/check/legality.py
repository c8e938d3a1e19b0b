"""Checks whether the parts of a decode plan fit each other and the program, after all passes.

Records declare their needs (`plan.DraftRecord`, `plan.TreeRecord`, ...); no record is known by name
here. `unmet` finds faults that would fail in decoding, `idle` parts without effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan import DecodePlan, DepthRecord, DraftRecord, TreeRecord
from ..plan.inputs import ANCESTORS
from ..program import Program

DEFAULT = DecodePlan()
APART = "holds rows that texts share apart"


def unmet(program: Program) -> tuple[str, str] | None:
    """The first unmet need of the plan, and the fact whose passes provide it, or ""; None if there
    is none."""
    return next(_unmet(program), None)


def misfit(plan: DecodePlan) -> str | None:
    """Description of the first contradiction between parts of a plan; None if there is none."""
    return next(_misfits(plan), None)


def idle(plan: DecodePlan) -> str | None:
    """Description of the first part of a plan without effect; None if there is none."""
    return next(_idle(plan), None)


def _unmet(program: Program) -> Iterator[tuple[str, str]]:
    plan, step = program.plan, program.step
    leaves, cached = plan.draft.leaves, step.has_input("past")
    ways = [(step.name,), (plan.step.read(argmax=False)[0],), plan.step.parts]
    for names in dict.fromkeys(way for way in ways if way):
        returned = {output for name in names for output in program.function(name).outputs}
        for leaf in leaves:
            for output in leaf.reads:
                if output not in returned:
                    run = f"{names[0]} does" if len(names) == 1 else f"{', '.join(names)} do"
                    yield f"draft={leaf.brief} reads {output!r}, which {run} not return", output
    if plan.depth.stops and plan.depth.parted and not plan.step.in_parts:
        yield f"depth={plan.depth.brief} needs a step that is cut into segments", "segments"
    elif plan.depth.stops:
        head = program.function(plan.depth.ending(plan)).outputs
        for leaf in leaves:
            if missing := [output for output in leaf.reads if output not in head]:
                fault = (
                    f"draft={leaf.brief} reads {missing[0]!r}, which deeper layers make, and depth="
                    f"{plan.depth.brief} leaves some out: leave one of the two out"
                )
                yield fault, ""
    exiting: tuple[DraftRecord | DepthRecord, ...] = (*leaves, plan.depth)
    for part in exiting:
        yield from _uncut(plan, part)
    for leaf in leaves:
        if leaf.in_parts and not plan.step.in_parts:
            yield f"draft={leaf.brief} needs a step that is cut into segments", "segments"
    records: tuple[TreeRecord | DraftRecord, ...] = (plan.tree, *leaves, plan.draft)
    for record in records:
        if record.branches and not step.has_input(ANCESTORS):
            yield f"{record.slot}={record.brief} needs a step that takes ancestors", "trees"
    for leaf in leaves:
        for name in leaf.cached:
            function = program.functions.get(name)
            if function is not None and cached and not function.has_input("past"):
                what = f"draft={leaf.brief}: its function {name} has no KV cache"
                yield f"{what}: it has no attention that insert_kv_cache could give one", ""
        for name in leaf.mutual:
            if cached and not program.function(name).has_input(ANCESTORS):
                yield f"draft={leaf.brief} needs a function {name} that takes ancestors", "trees"
    if plan.verify.begun and not plan.draft.begins:
        yield (
            (
                f"verify={plan.verify.brief} is for drafts that begin with the target's tokens, "
                f"and draft={plan.draft.brief} begins otherwise: run draft_target_first"
            ),
            "",
        )
    yield from ((fault, "") for fault in _unshared(program))
    yield from ((fault, "") for fault in _unkept(program))
    yield from ((fault, "") for fault in _misfits(plan))


def _unshared(program: Program) -> Iterator[str]:
    """States of the target that functions which draft read, and that do not hold a row for every
    token of the text when they do."""
    plan = program.plan
    for name in program.functions:
        for state in program.shared_with(name):
            what = f"{name} drafts and reads a row of {state} for every token of the text"
            if plan.depth.stops:
                yield (
                    f"{what}, and depth={plan.depth.brief} leaves out layers that make some: leave "
                    f"one of the two out"
                )
            moved = plan.cache.settles or not plan.cache.aligned
            if moved or program.states[state].capacity in plan.cache.held:
                yield (
                    f"{what}, and cache={plan.cache.brief} does not keep them all where they are: "
                    f"leave one of the two out, or draft by a layer of its own, such as eagle2"
                )


def _unkept(program: Program) -> Iterator[str]:
    """States of drafts that are among those that lose rows where they must not, or are apart from
    them where the step makes the draft."""
    plan = program.plan
    if not plan.cache.whole:
        return
    for leaf in plan.draft.leaves:
        own = {name for fn in leaf.cached for name in program.states_of(fn)}
        apart = {program.states[name].capacity in plan.cache.whole for name in own}
        if own and apart != {not leaf.in_step}:
            yield (
                f"draft={leaf.brief} came to the program behind cache={plan.cache.brief}, which "
                f"does not know its states: run the passes that make drafts first"
            )


def _uncut(plan: DecodePlan, part: DraftRecord | DepthRecord) -> Iterator[tuple[str, str]]:
    """A cut of the step that a part needs and that is missing."""
    exit: int | None = getattr(part, "exit", None)
    if exit is not None and exit not in plan.step.cuts:
        there = ", ".join(map(str, plan.step.cuts)) or "nowhere"
        fault = (
            f"{part.slot}={part.brief} needs a step that is cut after {exit} layers; it is cut "
            f"after {there}: set cut_depth.exits"
        )
        yield fault, "" if plan.step.in_parts else "segments"


def _misfits(plan: DecodePlan) -> Iterator[str]:
    """Parts of a plan that contradict each other."""
    draft, tree = plan.draft, plan.tree
    for leaf in draft.leaves:
        yield from leaf.misfits(plan)
        if leaf.narrow and tree.breadth > 1:
            yield (
                f"draft={leaf.brief} predicts what follows one node a level, and tree={tree.brief} "
                f"asks for up to {tree.breadth}: draw a chain, or leave its own drafter out"
            )
    if plan.depth.stops:
        yield from _undecided(plan)
    moves = plan.cache.settles or not plan.cache.aligned
    if plan.depth.stops and not plan.depth.parted and moves:
        does = "moves rows after steps" if plan.cache.settles else APART
        yield (
            f"cache={plan.cache.brief} {does}, and depth={plan.depth.brief} makes "
            f"some of them later: leave one of the two out"
        )
    if plan.step.in_parts and plan.cache.settles:
        yield (
            f"cache={plan.cache.brief} moves rows after steps, and step={plan.step.brief} hands "
            f"rows on from call to call: leave one of the two out"
        )
    if plan.step.ahead:
        yield from _unread(plan)
    for leaf in draft.leaves:
        apart = not plan.cache.aligned and not plan.cache.whole
        if apart and leaf.cached and not leaf.in_step:
            keeps = f"keeps {plan.cache.most} rows at most"
            if plan.cache.most is None:
                keeps = APART
            yield (
                f"draft={leaf.brief} has a cache with a row for every token of the text, and "
                f"cache={plan.cache.brief} {keeps}: draft inside the "
                f"step (unroll_draft, fuse_draft), or with a drafter without a cache"
            )
    for part in (plan.step, tree, plan.length, plan.verify, plan.depth, plan.cache):
        yield from part.misfits(plan)


def _unread(plan: DecodePlan) -> Iterator[str]:
    """Parts that read outputs or rows of prompts which a separate prompt function does not
    provide."""
    for leaf in plan.draft.leaves:
        if leaf.reads or leaf.cached:
            yield (
                f"draft={leaf.brief} reads what a step returns of every token, and step="
                f"{plan.step.brief} runs prompts through {plan.step.ahead}, which returns nothing: "
                f"draft by copying, such as suffix does"
            )
    if plan.cache.settles or not plan.cache.aligned:
        yield (
            f"cache={plan.cache.brief} moves rows, or holds them apart, and step="
            f"{plan.step.brief} writes those of prompts by another function: leave one of the two "
            f"out"
        )


def _undecided(plan: DecodePlan) -> Iterator[str]:
    """Parts that need layers which a depth policy may skip, and cuts that do not fit it."""
    if plan.step.in_parts and plan.step.halves and not plan.depth.halves:
        yield (
            f"depth={plan.depth.brief} runs whole layers, and step={plan.step.brief} is cut inside "
            f"some: leave cut_depth.sublayers out"
        )
    if plan.step.in_parts and plan.depth.halves and not plan.step.halves:
        yield (
            f"depth={plan.depth.brief} runs attention without MLPs, and step={plan.step.brief} is "
            f"not cut between them: set cut_depth.sublayers"
        )
    for leaf in plan.draft.leaves:
        if leaf.in_parts:
            yield (
                f"draft={leaf.brief} verifies by all layers, and depth={plan.depth.brief} leaves "
                f"some out: leave one of the two out"
            )


def _idle(plan: DecodePlan) -> Iterator[str]:
    draft, tree, length, verify = plan.draft, plan.tree, plan.length, plan.verify
    who = f"draft={draft.brief}"
    if not plan.speculates:
        asked = (tree, length) if verify.stays else (tree, length, verify)
        for record in asked:
            if record != getattr(DEFAULT, record.slot):
                yield f"{record.slot}={record.brief} is never asked: nothing drafts"
    growing = [leaf for leaf in draft.leaves if leaf.grows]
    if tree != DEFAULT.tree and not growing:
        yield f"tree={tree.brief} is never followed: {who} decides the shape of its drafts itself"
    deepest = tree.deepest
    if deepest is not None and growing and all(0 < leaf.levels < deepest for leaf in growing):
        reached = max(leaf.levels for leaf in growing)
        yield (
            f"tree={tree.brief} is {deepest} levels deep, of which {who} predicts {reached} at "
            f"most: let it predict more (levels, heads or masks of its pass), or set the tree's "
            f"depth to {reached}"
        )
    if length.by_level and not growing:
        yield f"length={length.brief} is never asked: {who} predicts nothing level by level"
    if verify.siblings and (not tree.samples or tree.chain):
        yield (
            f"verify={verify.brief} never does anything: no draft of tree={tree.brief} has "
            f"siblings that were sampled independently"
        )
    yield from _never_asked(draft, plan)


def _never_asked(draft: DraftRecord, plan: DecodePlan) -> Iterator[str]:
    """Drafters after one that always drafts, or drafts wherever they do."""
    parts: Sequence[DraftRecord] = draft.parts
    for index, part in enumerate(parts):
        yield from _never_asked(part, plan)
        if part in parts[:index]:
            yield f"draft={part.brief} is there twice: the second one never has another draft"
        covering = [other for other in parts[:index] if other != part and other.covers(part)]
        if covering and draft.in_turn:
            yield (
                f"draft={part.brief} is never asked: draft={covering[0].brief} comes before it and "
                f"has a draft wherever it has one; put the stricter one first"
            )
        before = [other for other in parts[:index] if _always(other, plan.tree.sure)]
        if before and draft.in_turn:
            yield (
                f"draft={part.brief} is never asked: draft={before[0].brief} comes before it and "
                f"has a draft in every step; put the one that may have none first, or let both "
                f"draft (draft_merged)"
            )


def _always(draft: DraftRecord, sure: bool) -> bool:
    return draft.always and (sure or not any(leaf.grows for leaf in draft.leaves))
