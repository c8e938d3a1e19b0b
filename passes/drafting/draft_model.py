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
draft of few bits are rounded to int8, whatever its format means: what it says is verified.

A model of another vocabulary (vocabulary="shared", which "auto" is where the tokenizers differ) is
fed the text in its own tokens, and predicts those that the target has, too; its tokenizer is saved
with the program (see `other_vocabulary`)::

      draft = shared_tokens(function="draft", ..., shared=("draft.ours", "draft.theirs"))

With vocabulary="text" it writes as it would, and what it writes is encoded in the target's tokens::

      draft = respelled(function="draft", ..., shared=("draft.ours", "draft.theirs"))

Refuses a model that is not there, tokenizers of which it is not known what their tokens write, a
program with a function ``draft``, a recipe for the drafter whose drafter needs functions of its
own, and a drafter for a model whose text is encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch

from ...ir import ParseError, PassError, Program, Role, type_of
from ...ir.plan import (
    CachedDraft,
    RespelledDraft,
    SharedTokensDraft,
    StagedDraft,
    StagedSharedDraft,
)
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
from .guest_step import any_guest_of, of_vocabulary, tokenizer_remarks, with_step_of
from .other_vocabulary import (
    Predicting,
    Vocabulary,
    best,
    predicting,
    said_of,
    tokens_of_both,
    which,
    with_words,
)

G = torch.ops.graftwork
NAME = "draft"


@builds(CachedDraft, "rollout", "decay", "aim")
class DraftModel(RecordPass):
    """model: the draft, a checkpoint folder or .gguf file. candidates: best tokens that it returns.
    drafter: of the draft itself: a draft record, or a recipe's name or path. vocabulary: whose
    tokens it has: the "same" as the target; others, of which it predicts those that both have
    ("shared"), or all, by the "text" that it writes; "auto": the same or shared. The rest: see the
    record."""

    model: str = ""
    drafter: str = ""
    candidates: Nodes = 10
    vocabulary: Vocabulary = "auto"

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
        guest = any_guest_of(program, self.model, self.name, NAME)
        how = which(program, guest, self.vocabulary, self.name)
        shared = None
        remarks: tuple[str, ...]
        if how == "same":
            remarks = tokenizer_remarks(program, guest)
            made = as_draft(of_vocabulary(guest, program.info.vocab_size), self.candidates)
        else:
            shared = tokens_of_both(program, guest, self.name)
            remarks = (said_of(program, guest, shared),)
            if how == "text":
                made = as_draft(guest, 1, outputs=best)
            else:
                made, outputs = predicting(guest, shared, program.info.vocab_size)
                made = as_draft(made, self.candidates, outputs=outputs)
        merged = with_step_of(program, made, self.model, NAME, Role.DRAFT)
        short = guest.info.context < program.info.context
        filled: dict[str, Any] = {
            "function": NAME,
            "context": guest.info.context if short else None,
            "trained": True,
            "aim": "distribution",
        }
        if shared is not None:
            merged, filled["shared"] = with_words(merged, guest, shared, NAME)
        kind = RespelledDraft if how == "text" else SharedTokensDraft if shared else CachedDraft
        draft = kind(**{n: getattr(self, n) for n in self.taken}, **filled)
        if self.drafter:
            merged, draft = self._staged(merged, guest, draft)
        return Outcome(with_draft(merged, draft), 1, remarks=remarks)

    def _staged(
        self, program: Program, guest: Program, draft: CachedDraft
    ) -> tuple[Program, CachedDraft]:
        """The draft with a drafter of its own, and the program with what that needs."""
        if isinstance(draft, RespelledDraft):
            raise PassError(
                f"draft_model: vocabulary=text and drafter={self.drafter!r}: what the drafter "
                f"copies are the target's tokens, and the model drafts its own; set "
                f"vocabulary=shared, or leave the drafter out"
            )
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
        staged = StagedSharedDraft if isinstance(draft, SharedTokensDraft) else StagedDraft
        return program, staged(**given, drafter=inner)


def as_draft(guest: Program, count: int, *, outputs: Predicting = candidates) -> Program:
    """The guest with the outputs of a draft function, `count` best tokens among them."""
    fn = guest.step.copy()
    logits = fn.outputs["logits"]
    with fn.graph.inserting_before(fn.output_node):
        fn.set_outputs(outputs(fn, logits, min(count, int(str(type_of(logits).dims[-1])))))
    # What it says is verified, so products of few bits may be whole numbers', whatever its
    # format means. Nobody trains it by its weights' names, so it is merged as the target is.
    round_products(guest, fn)
    merger = Merger(fn, guest.weights)
    merger.merge_attention()
    merger.merge_gates()
    sweep(fn)
    markers = fn.calls(G.hidden.default)
    picked = fn.copy()
    if markers and not pick_after(picked, picked.calls(G.hidden.default)[-1], "draft_scores"):
        fn = picked
    return guest.with_function(fn, weights=merger.weights)
