"""Draft with guesses and noise that the target itself replaces by better guesses.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] { ... }

After::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], draft_tokens i64[B,T,10], ... { ... }
    decode {
      draft = noise(prompts=5, after=4, ...)

Behind the nodes of a draft where verification will likeliest end, the step is also fed what the
target guessed for the places ahead, and noise where it has not guessed yet: tokens of the text at
random. What it says after them are its next guesses (Wang et al., "Make Some Noise: Unlocking
Language Model Parallel Inference Capability through Noisy Training", 2024). A target that was not
trained on such noise guesses badly: tune it with `tune_target` (`graftwork train --tune`). Needs
`accept_trees`, a chain of drafted tokens too. Refuses a step that has drafts of its own already.
"""

from __future__ import annotations

from typing import ClassVar

from ....ir import PassError, Program
from ....ir.plan.bounds import Nodes
from ...engine.base import STATES, Effect, Outcome
from ...engine.plan_edits import with_draft
from ...policies import RecordPass, builds
from ..grafts import candidates
from ..tune_target import is_tuned
from . import NoiseDraft


@builds(NoiseDraft, prompts=5, after=4, decay=1.0)
class DraftNoise(RecordPass):
    """candidates: best tokens that the step returns after each token. The rest: see the record."""

    candidates: Nodes = 10

    name: ClassVar[str] = "draft_noise"
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})
    reads: ClassVar[frozenset[Effect]] = STATES

    def run(self, program: Program) -> Outcome:
        fn = program.step.copy()
        if "draft_tokens" in fn.outputs:
            raise PassError(f"{self.name}: the step drafts already")
        with fn.graph.inserting_before(fn.output_node):
            best = candidates(
                fn, fn.outputs["logits"], min(self.candidates, program.info.vocab_size)
            )
        del best["draft_logits"]
        fn.set_outputs({**fn.outputs, **best})
        draft: NoiseDraft = self.made(trained=is_tuned(program))
        return Outcome(with_draft(program.with_function(fn), draft), 1)
