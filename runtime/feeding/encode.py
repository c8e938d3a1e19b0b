"""Reading the sources of a call, its pictures or its rows, once, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ir import SOURCE
from ...ir.execution.executable import Executable
from ...ir.plan import Pictures
from ...ir.plan.source import EMBEDS
from ..asking.image_embeds import PlacedRows
from ..asking.sources import Sources

LEAST = 16
"""Columns that a source is fed in at least where each width is compiled by itself."""


def encode(executable: Executable, sources: Sources) -> None:
    """Have the states hold what is made of the sources. The executable has begun."""
    plan = executable.program.plan.source
    assert plan.encoder is not None
    executable.reserve(sources.rows, SOURCE)
    inputs = dict(sources.inputs)
    if "tokens" in inputs:
        width, widths = inputs["tokens"].shape[1], executable.widths(plan.encoder)
        doubled = 1 << max(width - 1, LEAST - 1).bit_length()
        width = max(width, min(widths.holding(width) if widths.more else doubled, plan.rows))
        short = width - inputs["tokens"].shape[1]
        inputs["tokens"] = torch.nn.functional.pad(inputs["tokens"], (0, short))
        executable.reserve(width, SOURCE)
        inputs["positions"] = torch.arange(width).repeat(len(inputs["tokens"]), 1)
    taken = executable.program.function(plan.encoder)
    executable.run(plan.encoder, {n: t for n, t in inputs.items() if taken.has_input(n)}, ())


def place(executable: Executable, pictures: Sequence[PlacedRows]) -> None:
    """Have the states hold the rows of each text's pictures. The executable has begun."""
    executable.reserve(max(1, *(len(found.rows) for found in pictures)), SOURCE)
    states = executable.program.states
    for index, found in enumerate(pictures):
        if not len(found.rows):
            continue
        held = {Pictures.state: found.rows.to(states[Pictures.state].type.dtype)}
        held |= {Pictures.blocks: found.blocks, Pictures.places: found.places}
        executable.write_rows(index, 0, {name: held[name] for name in held if name in states})


def place_rows(executable: Executable, prompts: Sequence[torch.Tensor]) -> None:
    """Have the states hold the rows f[R,H] that stand for each text's prompt. The executable has
    begun."""
    executable.reserve(max(map(len, prompts)), SOURCE)
    dtype = executable.program.states[EMBEDS].type.dtype
    for index, rows in enumerate(prompts):
        executable.write_rows(index, 0, {EMBEDS: rows.to(dtype)})
