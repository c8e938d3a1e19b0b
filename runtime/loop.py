"""The decode loop: rounds of steps, until every sequence is done."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

from ..ir import GraftworkWarning, InputError, UnsupportedError
from ..ir.check.legality import unmet
from ..ir.execution.executable import Executable, Planned
from ..ir.plan import Fused, Whole
from .asking.input_embeds import rows_read
from .asking.request import Request
from .edits import edits, put_together
from .rounds import ROUNDS, Decoding
from .shared import shared_request
from .stats import Stats


def decode(executable: Executable, request: Request) -> Stats:
    """Decode until every text of the request is done; the texts grow in place.

    Errors: `UnsupportedError` for a plan, or a program, that the loop cannot carry out;
    `InputError` for logits that are NaN.
    """
    if fault := unmet(executable.program):
        lacks = f"; the program lacks a pass that provides {fact!r}" if (fact := fault[1]) else ""
        raise UnsupportedError(f"{fault[0]}{lacks}")
    prepared, executable = executable.preparing, settled(executable)
    if request.embeds and not rows_read(executable.program):
        executable = _undrafted(executable)
    decoding = Decoding(executable, request)
    if any(text.unknown for text in request.texts):
        if decoding.depth.reads:
            raise InputError(
                f"inputs_embeds: the recipe's depth={executable.program.plan.depth.brief} reads "
                f"the prompts' tokens: give input_ids besides"
            )
        if decoding.drafter.reads:
            executable = _undrafted(executable)
            decoding = Decoding(executable, request)
    edited = [put_together(executable, e, partial(_decoded, executable)) for e in edits(decoding)]
    shared = shared_request(decoding)
    before = Stats() if shared is None else decode(executable, shared)
    stats = _finished(decoding)
    if before.prefill_seconds:
        stats.shared_tokens = stats.reused_tokens - before.reused_tokens
        stats.reused_tokens = before.reused_tokens
        stats.prefill_seconds += before.prefill_seconds
    for other in edited:
        stats.turned_tokens += other.turned_tokens
        stats.reused_tokens += other.reused_tokens
        stats.prefill_seconds += other.prefill_seconds
    stats.preparing_seconds = executable.preparing - prepared
    return stats


def settled(executable: Executable) -> Executable:
    """What decodes: the target alone where the plan's drafts are `untaught`, which neither asks nor
    tells a drafter anything."""
    plan = executable.program.plan
    if not plan.untaught:
        return executable
    # Parts of a step are for drafts that leave between them, or for tokens that do.
    whole = plan.step.in_parts and not plan.depth.stops
    return alone(executable, whole=whole)


def alone(executable: Executable, *, whole: bool = False) -> Executable:
    """The target without drafts, and without what steps do for them. whole: not in parts. What
    decides on tokens that nobody drafted goes on deciding."""
    plan = executable.program.plan
    whole = whole or isinstance(plan.step, Fused)
    step = Whole(function=plan.step.plain) if whole else plan.step
    undrafted = plan.undrafted()
    verify = plan.verify if plan.verify.stays else undrafted.verify
    return Planned(executable, replace(undrafted, step=step, verify=verify))


def _undrafted(executable: Executable) -> Executable:
    """What decodes prompts of rows without drafts that are made of prompts' tokens. Errors:
    `InputError` for a recipe in which other models than the target decide on the text."""
    plan = executable.program.plan
    if not plan.verify.lone:
        raise InputError(
            f"inputs_embeds: the recipe's verify={plan.verify.brief} decides by what other models "
            f"make of the prompts' tokens: give input_ids, or take another recipe"
        )
    if plan.speculates:
        warnings.warn(
            f"inputs_embeds: the target decodes alone: draft={plan.draft.brief} reads prompts as "
            f"tokens",
            GraftworkWarning,
            stacklevel=5,
        )
    return alone(executable)


def _decoded(executable: Executable, request: Request) -> Stats:
    """Carry out a request as it is."""
    return _finished(Decoding(executable, request))


def _finished(decoding: Decoding) -> Stats:
    stats = run(decoding)
    decoding.finish()
    return stats


def run(decoding: Decoding) -> Stats:
    """Carry out a generation; what it cost."""
    decoding.start()
    stats, feeder, texts = decoding.stats, decoding.feeder, decoding.texts
    first = sum(text.generated for text in decoding.own)
    feeders = {feeder, decoding.resting}
    before = sum(each.seconds for each in feeders) - feeder.executable.preparing
    start = decoding.clock()
    rounds = [round_(decoding) for round_ in ROUNDS if round_.fits(decoding)]
    while decoding.live:
        decoding.retire()
        decoding.cache.settle(texts)
        chosen, most = next((r, n) for r in rounds if (n := r.wants()) != 0)
        chosen.run(most)
    stats.decode_seconds = decoding.clock() - start
    after = sum(each.seconds for each in feeders) - feeder.executable.preparing
    stats.executable_seconds = after - before
    stats.new_tokens = sum(text.generated for text in decoding.own)
    stats.decoded_tokens = stats.new_tokens - first
    return stats
