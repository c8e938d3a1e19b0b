"""Draft the rest of a lexical unit with [PAD] tokens that ride along with every step.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %e: f32[B,T,H] = aten.embedding(@embed, %tokens)

After (prompts=4)::

    weight lexical.pad: f32[1,H]
    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], draft_tokens i64[B,T,10], ... {
      ... the id V is looked up in lexical.pad, and others as before ...
    decode {
      draft = lexical(weight="lexical.pad", prompts=4, sure=0.9, ...)

Behind a draft the step is also fed the id V, four times. What the target says after the k-th of
them is its guess for the token k + 1 places on. Guesses are drafted as far as all of them, and the
text's last token, had a probability of `sure` at least: such a row is a lexical unit (Sun et al.,
"Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs", 2024).
With `verify_vouched` units are taken as they are; without it, the target verifies them. A target
that was not trained for it is never sure: tune it with `tune_target` (`graftwork train --tune`).
Needs `accept_trees`. Refuses what `draft_ppd` refuses.
"""

from __future__ import annotations

from typing import ClassVar

from ....ir import Program
from ...engine.base import Outcome
from ...engine.plan_edits import with_draft
from ...policies import builds
from ..draft_pass import DraftPass
from ..ppd.graph import riding
from . import LexicalDraft

PAD = "lexical.pad"


@builds(LexicalDraft, prompts=4, after=1, decay=1.0, aim="text")
class DraftLexical(DraftPass):
    """See `DraftPass` and the record."""

    name: ClassVar[str] = "draft_lexical"

    def insert(self, program: Program) -> Outcome:
        draft: LexicalDraft = self.made(weight=PAD)
        program = riding(program, self, PAD, 1)
        return Outcome(with_draft(program, draft), 1)
