"""Let an edited prompt go on from the rows of the text that it was made of.

Before::

    func step(..., past: i64[B], kv.0.key: f32[B,G,C,64], kv.0.value: f32[B,G,C,64], ...) { ... }

After::

    func step(..., past: i64[B], kv.0.key: f32[B,G,C,64], kv.0.value: f32[B,G,C,64], ...) { ... }

    upkeep func shift(past: i64[B], shift: i64[B], kv.0.key: f32[B,G,C,64], ...) -> kv.0.key, ... {
      %y: f32[B,G,C,64] = graftwork.shift_rows(%kv.0.key, %past, %shift, @cos, @sin)
      ...
    decode {
      cache = edited(function="shift", least=32)

A prompt that is a text of an earlier call with tokens put in, taken out or replaced feeds what was
edited, and what follows the text. The rows behind an edit are kept: their values as they are, their
keys turned by as many positions as the edit moved them. What those rows hold was computed from the
old text before them, so what the model says is not what it would say of the new one: only recipes
that ask for it do so.

Source: He et al., "Let the Code LLM Edit Itself When You Edit the Code" (2024), positional
integrity encoding.

Layers that look back over a sliding window keep all rows here, and look back over them from where
they come to stand.

Refuses caches that lose rows, those of windows included (`hold_windows`): what is fed with the new
text before it would miss them. And caches that store rows in few bits or are not keys and values
alone; keys that are not what a rotation by the tokens' own positions makes them; attention over
chunks, or that weighs rows by their distance; drafts with a cache of their own; recurrences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from ...ir import Program
from ...ir.plan import KeepEdited
from ...ir.plan.inputs import INPUTS
from ..engine.base import Outcome
from ..policies import builds
from .cached_rows import Written, written
from .contents import RecordedContents, upkeep
from .rotation import Rotation

G = torch.ops.graftwork


@builds(KeepEdited)
class ReuseEdited(RecordedContents):
    """See the record."""

    name: ClassVar[str] = "reuse_edited"

    def run(self, program: Program) -> Outcome:
        writes = list(written(program.step, program))
        if not writes:
            return Outcome(program, 0, "the step writes no keys and values into caches")
        self._check(program, writes)
        fn = upkeep(program, "shift")
        past, shift = fn.input("past"), fn.add_input("shift", INPUTS["shift"].type)
        moved = {}
        for write in writes:
            (state,) = write.keys.names
            rotation = Rotation.of(write.keys.new)
            assert rotation is not None
            keys = fn.add_input(state, program.states[state].type)
            given = keys, past, shift, *rotation.tables(fn, program)
            inner = rotation.interleaved
            moved[state] = fn.call(G.shift_rows.default, *given, interleaved=inner)
        fn.set_outputs(moved)
        plan = replace(program.plan, cache=self.made(function=fn.name))
        made = program.replace(functions={**program.functions, fn.name: fn}, plan=plan)
        return Outcome(made, len(writes))

    def _check(self, program: Program, writes: list[Written]) -> None:
        """Errors: `PassError` for rows that cannot be kept behind an edit."""
        self.refuse_other(program, "and what it drops or moves is not there behind an edit")
        self.refuse(
            program.recurrent,
            f"{program.name} has recurrences, which hold what all rows before an edit add up to",
        )
        self.refuse_places(program)
        for write in writes:
            self.refuse(
                bool(write.how), f"rows of {write.what} are stored in few bits and cannot be turned"
            )
            self.refuse(
                Rotation.of(write.keys.new, program.step.input("positions")) is None,
                f"keys of {write.what} are not what a rotation by the tokens' own positions gives, "
                f"from tables (tabulate_positions makes them)",
            )
        own = {name for write in writes for name in write.names}
        for name, state in program.states.items():
            self.refuse(
                state.grows and name not in own,
                f"{name} holds something else of a text than the keys and values that the step "
                f"attends to, such as a draft's own cache: draft without one",
            )
