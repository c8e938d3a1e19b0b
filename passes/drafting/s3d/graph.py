"""Draft several tokens at once with the first and the last layers, by trained mask tokens.

Before (a step that `cut_depth` cut after layers 0 and 2)::

    func step.0(tokens: i64[B,T], ...) -> kv.0.key, ..., stream {
      %e: f32[B,T,H] = aten.embedding(@embed, %tokens)

After (masks=3)::

    weight s3d.masks: f32[3,H]
    func step.0(tokens: i64[B,T], ...) -> kv.0.key, ..., stream {
      %p: bool[B,T] = aten.ge.Scalar(%tokens, V)
      %e: f32[B,T,H] = aten.embedding(@embed, aten.clamp(%tokens, 0, V - 1))
      %t: f32[B,T,H] = aten.embedding(@s3d.masks, aten.clamp(%tokens - V, 0))
      %x: f32[B,T,H] = aten.where.self(%p[..., None], %t, %e)
    decode {
      draft = masked_skipping(functions=("step.0", "step.2", "step.head"), ...)

To draft, the last token and the ids V, V + 1, V + 2 behind it run through the first segment, the
last one and the head, in one call: what is said after the k-th mask token is a guess for the token
k + 1 places ahead (Zhong and Bharadwaj, "S3D: A Simple and Cost-Effective Self-Speculative Decoding
Scheme for Low-Memory GPUs", 2024). The segments between are left out; verification runs them all,
on the drafted tokens, and writes their cache rows anew, so the text is the target's. New mask
tokens know nothing: train them with `graftwork train`, at a rate of 1e-2. Runs right after
`cut_depth`. Refuses steps that are not cut in three at least, and what `draft_ppd` refuses.
"""

from __future__ import annotations

from typing import ClassVar

from ....ir import PassError, Program
from ....ir.plan.bounds import Levels
from ...engine.base import Effect, Outcome
from ...engine.plan_edits import with_draft
from ...policies import builds
from ..draft_pass import TrainedPass
from ..prompt_tokens import reading_prompts
from . import MaskedSkippingDraft

WEIGHT = "s3d.masks"


@builds(MaskedSkippingDraft, "prompts")
class DraftS3d(TrainedPass):
    """masks: mask tokens; one token more is drafted. The rest: `TrainedPass` and the record."""

    masks: Levels = 3

    name: ClassVar[str] = "draft_s3d"
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS, Effect.DECODE_PLAN})
    reads: ClassVar[frozenset[Effect]] = frozenset()

    def insert(self, program: Program) -> Outcome:
        plan = program.plan.step
        if len(plan.parts) < 4:
            raise PassError(
                f"{self.name}: expected a step with a segment between the first and the last to "
                f"leave out, got step={plan.brief}: set cut_depth.middle, or two exits"
            )
        first = program.function(plan.parts[0]).copy()
        weight = reading_prompts(first, program, WEIGHT, self.masks, self.name, self.weights)
        draft = self.made(
            functions=(plan.parts[0], *plan.parts[-2:]),
            weight=WEIGHT,
            prompts=self.masks,
        )
        program = program.with_function(first, weights=program.weights.adding(weight))
        return Outcome(with_draft(program, draft), 1)
