"""Prompts that are earlier texts edited: only what was edited is fed.

The rows of a run of tokens that both texts have are put behind the new text before it, with keys
turned by as many positions as it moved (see the pass `reuse_edited`). The prompt then goes on from
the result as from any earlier text (`cache/conversations.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from ..ir.execution.executable import Executable
from ..ir.plan import KeepEdited
from .asking.request import Request
from .cache.conversations import Conversations, common
from .rounds.base import Decoding
from .shared import asking
from .stats import Stats


class Run(NamedTuple):
    """`length` tokens that two texts share, from `old` on in one and from `new` on in the other."""

    old: int
    new: int
    length: int

    @property
    def shift(self) -> int:
        """Positions by which the other text has it later."""
        return self.new - self.old


def runs(old: Sequence[int], new: Sequence[int], least: int) -> list[Run]:
    """What of a text is found again in one that it was edited to, in the order of both, behind what
    both begin with: runs of at least `least` tokens, each the first that there is."""
    at = place = max(common(old, new, len(new)), 1)  # a text begins with what was fed
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for start in range(at, len(old) - least + 1):
        places[tuple(old[start : start + least])].append(start)
    found = []
    while place + least <= len(new):
        starts = places.get(tuple(new[place : place + least]), ())
        first = bisect_left(starts, at)
        if first == len(starts):
            place += 1
            continue
        start = starts[first]
        most = min(len(old) - start, len(new) - place)
        count = common(old[start:], new[place:], most)
        found.append(Run(start, place, count))
        at, place = start + count, place + count
    return found


class Edit(NamedTuple):
    """A prompt, the runs that it shares with the text of an earlier call, and their rows."""

    tokens: list[int]
    runs: list[Run]
    rows: Sequence[Mapping[str, torch.Tensor]]


def edits(decoding: Decoding) -> list[Edit]:
    """Prompts of a call that has not begun for which edits of earlier texts save tokens."""
    kept, least = decoding.kept, decoding.cache.least
    if kept is None or least is None or decoding.drafter.reads:
        return []
    executable = decoding.feeder.executable
    known = kept.known(executable, decoding.program)
    made: dict[tuple[int, ...], Edit] = {}
    for start, text in zip(kept.find(executable, decoding), decoding.texts, strict=True):
        tokens = text.tokens[:-1]  # something must be fed: only a step says what follows
        best, most = None, (0 if start is None else start.count) + least - 1
        for one in known:
            found = runs(one.tokens, tokens, least)
            gained = common(one.tokens, tokens, len(tokens)) + sum(run.length for run in found)
            if found and gained > most:
                best, most = (one, found), gained
        if best is not None and tuple(tokens) not in made:
            one, found = best
            rows = [kept.rows(executable, one, run.old, run.length) for run in found]
            made[tuple(tokens)] = Edit(tokens, found, rows)
    return list(made.values())


def put_together(executable: Executable, edit: Edit, feed: Callable[[Request], Stats]) -> Stats:
    """Leave a conversation that ends with the edit's last run; its cost. feed: runs a request."""
    program, stats = executable.program, Stats()
    record = program.plan.cache
    assert isinstance(record, KeepEdited)
    for run, rows in zip(edit.runs, edit.rows, strict=True):
        ahead = feed(asking([edit.tokens[: run.new]], program))
        begun = perf_counter() - executable.preparing
        conversation = Conversations.of(executable).lying[0]
        assert conversation is not None
        executable.reserve(run.new + run.length)
        executable.write_rows(0, run.new, rows)
        moved = {"past": torch.tensor([run.new]), "shift": torch.tensor([run.shift])}
        executable.run(record.function, moved, ())
        conversation.extend(edit.tokens[run.new : run.new + run.length])
        stats.turned_tokens += run.length
        stats.reused_tokens -= run.new - ahead.reused_tokens  # they were fed, by this very call
        taken = perf_counter() - executable.preparing - begun
        stats.prefill_seconds += ahead.prefill_seconds + taken
    return stats
