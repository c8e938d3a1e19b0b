"""Let tokens run through no more MLPs once one has left them as they were (FFN-SkipLLM).

Before (a step that `cut_depth` cut behind every layer and every attention)::

    func step.5(positions, past, stream) -> stream {
      %r: f32[B,T,H] = graftwork.cache_read(%stream, %past, 0 .. T-1)
      ... layer 2's MLP on %r -> %h2 = graftwork.hidden(%x2, layer=2, point="block") ...

After::

    func step.5(positions, past, stream) -> stream, sure f32[B,T] {
      ... %sure: f32[B,T] = cosine(%r, %h2)
    decode {
      depth = mlp(similarity=0.98, first=2, last=2, warm=8, score="sure")

The first and the last layers' MLPs always run, and so do all of them for the first tokens behind
the prompt. Of the others, those that follow one whose states before and behind it are alike by
more than `similarity` (their cosine) are left out, for that token. Attention runs in every layer,
so no row of a cache is lacking (Jaiswal et al., "FFN-SkipLLM: A Hidden Gem for Autoregressive
Decoding with Adaptive Feed Forward Skipping", 2024). Refuses steps that are not cut so (set
``cut_depth.sublayers``), and models with fewer than two MLPs between the first and the last ones.
"""

from __future__ import annotations

from typing import ClassVar

from ....ir import InputError, PassError, Program
from ...engine.base import Effect, Outcome
from ...engine.plan_edits import with_record
from ...policies import RecordPass, builds
from ..confident.graph import SCORE, saturating
from . import MlpDepth


@builds(MlpDepth)
class DepthMlp(RecordPass):
    """See the record."""

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS, Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        plan, functions = program.plan, dict(program.functions)
        if not plan.step.halves:
            raise PassError(
                f"{self.name}: expected a step that is cut behind each layer and its attention, "
                f"got step={plan.step.brief}: set cut_depth.every=1 and cut_depth.sublayers"
            )
        record: MlpDepth = self.made(score=SCORE)
        try:
            names = [name for name, _ in record.calls(plan)]
        except InputError as error:
            raise PassError(f"{self.name}: {error}") from error
        for name in names:
            functions[name] = saturating(program.function(name), self.name)
        made = program.replace(functions=functions)
        return Outcome(with_record(made, self.name, record), len(names))
