"""Draft with another, smaller model.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path")::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func draft(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S])
        -> draft_logits f32[B,S,V], draft_tokens i64[B,S,10], draft_scores f32[B,S,10]
    decode {
      draft = cached(function="draft", output=None, levels=5, ...)

With a drafter of its own (drafter="suffix(tokens=4)" or the name of a recipe that drafts) the model
checks several guesses of its next tokens in one step, and the draft is the same::

      draft = staged(function="draft", ..., drafter=suffix(tokens=4, longest=16, shortest=2))

The model's own step becomes a function of this program, its weights are called ``draft.*``, and
`insert_kv_cache` gives it its own cache (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023; Chen et al., 2023). The path is resolved, traced and made canonical by
whoever starts the passes (`Program.guests`), because passes know nothing of where models come from.
Where one of the two has no tokenizer to compare, the report says so. Models of one family pad their
vocabulary to different sizes: the draft's logits are those of the target's tokens. Activations of a
draft of few bits are rounded to int8, whatever its format means: what it says is verified. Refuses
a model that is not there, other tokens, a program with a function ``draft``, and a recipe for the
drafter whose drafter needs functions of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch

from ...ir import ParseError, PassError, Program, Role
from ...ir.plan import CachedDraft, StagedDraft
from ...ir.plan.bounds import Nodes
from ...ir.rewrite.cleanup import sweep
from ...ir.text.parser import parse_record
from ..engine.base import Effect, Outcome
from ..engine.plan_edits import with_draft
from ..fusing.products import Merger
from ..numerics.round_activations import round_products
from ..policies import RecordPass, builds
from ..stepping.pick_logits import pick_after
from .grafts import candidates
from .guest_step import guest_of, tokenizer_remarks, with_step_of

G = torch.ops.graftwork
NAME = "draft"


@builds(CachedDraft, "rollout", "decay", "aim")
class DraftModel(RecordPass):
    """model: the draft, a checkpoint folder or .gguf file. candidates: best tokens that it returns.
    drafter: of the draft itself: a draft record, or a recipe's name or path. The rest: see the
    record."""

    model: str = ""
    drafter: str = ""
    candidates: Nodes = 10

    name: ClassVar[str] = "draft_model"
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    @property
    def model_recipes(self) -> Mapping[str, str]:
        """The recipe that the draft drafts by, if one is named."""
        return {self.model: self.drafter} if self.drafter and not self._record else {}

    @property
    def _record(self) -> bool:
        """Whether `drafter` is a record and not a recipe's name."""
        return self.drafter.endswith(")")

    def run(self, program: Program) -> Outcome:
        guest = as_draft(guest_of(program, self.model, self.name, NAME), self.candidates)
        merged = with_step_of(program, guest, self.model, NAME, Role.DRAFT)
        short = guest.info.context < program.info.context
        context = guest.info.context if short else None
        draft = self.made(function=NAME, context=context, trained=True, aim="distribution")
        if self.drafter:
            merged, draft = self._staged(merged, guest, draft)
        return Outcome(with_draft(merged, draft), 1, remarks=tokenizer_remarks(program, guest))

    def _staged(
        self, program: Program, guest: Program, draft: CachedDraft
    ) -> tuple[Program, CachedDraft]:
        """The draft with a drafter of its own, and the program with what that needs."""
        inner: Any = guest.plan.draft
        if self._record:
            try:
                inner = parse_record(self.drafter, "draft")
            except ParseError as error:
                raise PassError(f"draft_model: drafter={self.drafter!r}: {error}") from error
        if not inner.foresees:
            raise PassError(
                f"draft_model: drafter={self.drafter!r} drafts by {inner.brief}: expected a "
                f"drafter that copies, such as suffix(tokens=4) or the recipe copyspec"
            )
        weights = [guest.weights[name] for name in sorted(inner.weights - set(program.weights))]
        program = program.replace(weights=program.weights.adding(*weights))
        given = {f.name: getattr(draft, f.name) for f in fields(draft)}
        return program, StagedDraft(**given, drafter=inner)


def as_draft(guest: Program, count: int) -> Program:
    """The guest with the outputs of a draft function, `count` best tokens among them."""
    fn = guest.step.copy()
    with fn.graph.inserting_before(fn.output_node):
        count = min(count, guest.info.vocab_size)
        outputs = candidates(fn, fn.outputs["logits"], count)
    fn.set_outputs(outputs)
    # What it says is verified, so products of few bits may be whole numbers', whatever its
    # format means. Nobody trains it by its weights' names, so it is merged as the target is.
    round_products(guest, fn)
    merger = Merger(fn, guest.weights)
    merger.merge_attention()
    merger.merge_gates()
    sweep(fn)
    markers = fn.calls(G.hidden.default)
    picked = fn.copy()
    if markers and not pick_after(picked, picked.calls(G.hidden.default)[-1], "draft_logits"):
        fn = picked
    return guest.with_function(fn, weights=merger.weights)
