"""Draft with trained prompt tokens that ride along with every step.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %e: f32[B,T,H] = aten.embedding(@embed, %tokens)

After (prompts=3)::

    weight ppd.prompts: f32[3,H]
    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], draft_tokens i64[B,T,10], ... {
      %p: bool[B,T] = aten.ge.Scalar(%tokens, V)
      %e: f32[B,T,H] = aten.embedding(@embed, aten.clamp(%tokens, 0, V - 1))
      %t: f32[B,T,H] = aten.embedding(@ppd.prompts, aten.clamp(%tokens - V, 0))
      %x: f32[B,T,H] = aten.where.self(%p[..., None], %t, %e)
    decode {
      draft = prompts(weight="ppd.prompts", prompts=3, after=8, ...)

Behind the nodes of a draft where verification will likeliest end, the step is also fed the ids
V, V + 1, V + 2. They look up trained embeddings and attend to what the node attends to, so that
what the target says after the k-th of them is its guess for the token k + 1 places after the node:
the next draft, at no forward pass of its own (Chen et al., "Hardware-Aware Parallel Prompt Decoding
for Memory-Efficient Acceleration of LLM Inference", 2024). Their cache rows are forgotten, and no
other token sees them. New prompt tokens know nothing: train them with `graftwork train`, at a rate
of 1e-2. Needs `accept_trees`, a chain of drafted tokens too. Refuses a step that uses its tokens
for anything but looking them up in one embedding table, and one that has drafts of its own already.
"""

from __future__ import annotations

from typing import ClassVar

from ....ir import PassError, Program
from ...engine.base import Outcome
from ...engine.plan_edits import with_draft
from ...policies import builds
from ..draft_pass import DraftPass
from ..grafts import candidates
from ..prompt_tokens import reading_prompts
from . import PromptDraft

WEIGHT = "ppd.prompts"


@builds(PromptDraft, aim="distribution")
class DraftPpd(DraftPass):
    """See `DraftPass` and the record."""

    name: ClassVar[str] = "draft_ppd"

    def insert(self, program: Program) -> Outcome:
        draft: PromptDraft = self.made(weight=WEIGHT)
        program = riding(program, self, WEIGHT, draft.prompts)
        return Outcome(with_draft(program, draft), 1)


def riding(program: Program, owner: DraftPass, weight: str, count: int) -> Program:
    """The program whose step looks up the ids V, V + 1, ... in a table `weight` of `count` rows of
    its own, and returns the best tokens after each. Errors: `PassError` naming the `owner`."""
    fn = program.step.copy()
    if "draft_tokens" in fn.outputs:
        raise PassError(f"{owner.name}: the step drafts already")
    table = reading_prompts(fn, program, weight, count, owner.name, owner.weights)
    with fn.graph.inserting_before(fn.output_node):
        best = candidates(fn, fn.outputs["logits"], min(owner.candidates, program.info.vocab_size))
    del best["draft_logits"]
    fn.set_outputs({**fn.outputs, **best})
    return program.with_function(fn, weights=program.weights.adding(table))
