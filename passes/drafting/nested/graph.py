"""Cut a draft model into nested depths, each of which may say what the next token is.

Before (a draft model of 12 layers, with its cache)::

    func draft(tokens, positions, past, select, draft.kv.0.key, ...)
        -> draft_logits, draft_tokens, draft_scores, draft.kv.0.key, ...
    decode {
      draft = cached(function="draft", output=None, levels=5, ...)

After (exits=[6, 9])::

    state draft.stream: f32[B,1,C,H]
    func draft.0(tokens, positions, past, draft.kv.0.key, ..., draft.stream)
        -> draft.kv.0.key, ..., draft.stream
    func draft.1(positions, past, draft.kv.6.key, ..., draft.stream) -> ...
    func draft.2(positions, past, draft.kv.9.key, ..., draft.stream) -> ...
    func draft.head(past, select, draft.stream) -> draft_logits, draft_tokens, draft_scores
    decode {
      draft = nested(functions=("draft.0", "draft.1", "draft.2"), head="draft.head", exits=(6, 9),
                     threshold=0.8, levels=5, ...)

Every depth is a model of its own by the one norm and the one head that they share; a token is
drafted by the first depth that is sure of it (Kavehzadeh et al., "S2D: Sorted Speculative Decoding
For More Efficient Deployment of Nested Large Language Models", 2024, whose drafts of 12 layers have
exits behind 6 and 9). Cache rows that a token lacks behind its exit are made with those of the
next token that goes as deep. The functions are cut as `cut_depth` cuts the step.

Takes any draft that is a model of its own, of the target's tokens: another one (`draft_model`), or
a copy of some of the target's layers (`draft_layers`). No exits: one behind half of its layers, and
one behind three quarters. Runs when everything else is done to the draft, but before
`fuse_residual_norm`. Refuses other drafters, and exits where there is no layer or none behind.
"""

from __future__ import annotations

from typing import ClassVar

from ....ir import PassError, Program
from ....ir.plan import CachedDraft, DraftRecord
from ...depth.cut_depth import Cutter, Exits
from ...engine.base import Effect, Outcome
from ...engine.plan_edits import fitting, with_plan
from ...policies import RecordPass, builds
from . import NestedDraft


@builds(NestedDraft, "levels", "aim")
class CutDraft(RecordPass):
    """exits: numbers of layers of the draft, counted from its first, that draft by themselves. The
    rest: see the record."""

    exits: Exits = ()

    name: ClassVar[str] = "cut_draft"
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS, Effect.DECODE_PLAN})
    reads: ClassVar[frozenset[Effect]] = frozenset(Effect) - {
        Effect.SEGMENTS,
        Effect.DECODE_PLAN,
    }

    def run(self, program: Program) -> Outcome:
        whole = next((d for d in program.plan.draft.leaves if type(d) is CachedDraft), None)
        if whole is None or not whole.is_model:
            raise PassError(
                f"{self.name}: expected a drafter that is a model of its own, of the target's "
                f"tokens, got draft={program.plan.draft.brief}: run draft_model or draft_layers "
                f"before, without a drafter of the model's own"
            )
        draft = program.function(whole.function)
        rows = program.whole_rows(draft.name) or "C"
        cutter = Cutter(draft.copy(), self.name, f"{draft.name}.stream", rows)
        layers = sorted(cutter.blocks)
        exits = self.exits or usual_exits(len(layers))
        if any(not 0 < exit < len(layers) for exit in exits) or len(set(exits)) < len(exits):
            raise PassError(
                f"{self.name}: exits={list(exits)}: expected different numbers of layers from 1 to "
                f"{len(layers) - 1}, as {draft.name} has {len(layers)}"
            )
        exits = tuple(sorted(exits))
        # The layers of a draft are counted on behind the target's.
        *parts, head = cutter.parts([layers[exit - 1] + 1 for exit in exits], ())
        nested = self.made(
            functions=tuple(part.name for part in parts),
            head=head.name,
            state=cutter.state.name,
            exits=exits,
            levels=whole.levels,
            context=whole.context,
            trained=whole.trained,
            aim=whole.aim,
        )

        def cut(leaf: DraftRecord) -> DraftRecord:
            return nested if leaf is whole else leaf

        functions = {n: f for n, f in program.functions.items() if n != draft.name}
        functions |= {part.name: part for part in (*parts, head)}
        states = {**program.states, cutter.state.name: cutter.state}
        program = program.replace(functions=functions, states=states)
        program = with_plan(program, draft=program.plan.draft.with_leaves(cut))
        return Outcome(fitting(program, self.name), len(exits))


def usual_exits(layers: int) -> tuple[int, ...]:
    """Behind half of the layers, and behind three quarters.

    >>> usual_exits(12), usual_exits(3), usual_exits(2)
    ((6, 9), (1, 2), (1,))
    """
    found = {layers // 2, 3 * layers // 4}
    return tuple(sorted(exit for exit in found if 0 < exit < layers))
