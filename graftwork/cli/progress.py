"""Training progress: a bar on a terminal, lines in a log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from ..data.calibration import TimeLeft
from ..training import FitState
from .console import BRIEF, EVERY, lines


def shown(state: FitState) -> str:
    """Format a state.

    >>> shown(FitState("training", 0.25, 120, 2.5)), shown(FitState("measuring", 1.0, 400))
    ('training step 120 loss 2.500', 'measuring')
    """
    if not state.step or math.isnan(state.loss):
        return state.phase
    text = f"{state.phase} step {state.step} loss {state.loss:.3f}"
    if not math.isnan(state.rate):
        text += f", {state.rate:.2f} steps/s"
    if not math.isnan(state.accepted):
        text += f", {state.accepted:.2f} tokens a step on held-out text"
    return text


@contextmanager
def training_progress(
    console: Console, every: float = EVERY, brief: float = BRIEF
) -> Iterator[Callable[[FitState], None]]:
    """Yield a function that displays states. every, brief: see `console.lines`."""
    if console.is_terminal:
        with _bar(console) as update:
            yield update
    else:
        left = TimeLeft()
        with lines(console, every, brief) as say:
            yield lambda state: say(state.phase, f"{shown(state)}, {left.brief(state.share)}")


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[FitState], None]]:
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    columns = TextColumn("{task.description}"), BarColumn(), *times
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("start", total=1.0)

        def update(state: FitState) -> None:
            bar.update(task, completed=state.share, description=shown(state))

        yield update
