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
Where one of the two has no tokenizer to compare, the report says so. Refuses a model that is not
there, another vocabulary or tokenizer, a program with a function ``draft``, and a recipe for the
drafter whose drafter needs functions of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...ir import Function, InputError, ParseError, PassError, Program, Role
from ...ir.files import LARGE, read_json
from ...ir.plan import CachedDraft, StagedDraft
from ...ir.plan.bounds import Levels, Nodes
from ...ir.record_text import parse_record
from ..engine.base import Contract, Effect, Outcome, Pass, register
from ..stepping.pick_logits import pick_after
from .decoder_layer import free_layer
from .grafts import candidates
from .plan_edits import with_draft

G = torch.ops.graftwork
NAME = "draft"
TOKENIZER = "tokenizer.json"


@register
class DraftModel(Pass):
    """model: folder of the draft's checkpoint. levels: tokens drafted ahead at most. candidates:
    best tokens that the draft returns. drafter: who drafts for the draft: a draft record, or a
    recipe's name or path."""

    model: str = ""
    drafter: str = ""
    levels: Levels = 5
    candidates: Nodes = 10

    name: ClassVar[str] = "draft_model"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})

    @property
    def models(self) -> tuple[str, ...]:
        """The draft's folder."""
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
        """Take the model in. See the module docstring."""
        guest = program.guests.get(self.model)
        if guest is None:
            given = ", ".join(map(repr, program.guests)) or "none"
            raise PassError(
                f"draft_model: expected the model {self.model!r} beside the program, got {given}; "
                f"set the option model to a checkpoint folder and start from graftwork.optimize"
            )
        _check(program, guest)
        guest = self._drafting(guest)
        layer, prefix = free_layer(program.functions.values()), f"{NAME}."
        fn = _renamed(guest.step, layer)
        weights = [guest.weights[n].renamed(prefix + n) for n in guest.step.weights]
        merged = program.with_function(fn, weights=program.weights.adding(*weights))
        rest = {path: model for path, model in program.guests.items() if path != self.model}
        short = guest.info.context < program.info.context
        draft = CachedDraft(
            NAME, None, self.levels, guest.info.context if short else None, trained=True
        )
        if self.drafter:
            merged, draft = self._staged(merged, guest, draft)
        made = with_draft(merged.replace(guests=rest), draft)
        return Outcome(made, 1, remarks=_untold(program, guest))

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

    def _drafting(self, guest: Program) -> Program:
        """The guest with the outputs of a draft function."""
        fn = guest.step.copy()
        with fn.graph.inserting_before(fn.output_node):
            count = min(self.candidates, guest.info.vocab_size)
            outputs = candidates(fn, fn.outputs["logits"], count)
        fn.set_outputs(outputs)
        markers = fn.calls(G.hidden.default)
        picked = fn.copy()
        if markers and not pick_after(picked, picked.calls(G.hidden.default)[-1], "draft_logits"):
            fn = picked
        return guest.with_function(fn)


def _renamed(step: Function, first_layer: int) -> Function:
    """The function under its new name, with caches and weights that are its own."""
    fn = Function(NAME, step.copy().graph, Role.DRAFT)
    for node in fn:
        if node.op == "get_attr":
            node.target = f"{NAME}.{node.target}"
    for node in fn.calls(G.attention.default):
        layer = int(node.kwargs["layer"])  # type: ignore[arg-type]
        node.kwargs = {**node.kwargs, "layer": first_layer + layer}
    return fn


def _check(program: Program, guest: Program) -> None:
    if NAME in program.functions:
        raise PassError(f"draft_model: the program has a function {NAME!r} already")
    if guest.stage != "canonical" or guest.states:
        raise PassError(
            f"draft_model: expected {guest.name} at the stage canonical, got {guest.stage}"
        )
    ours, theirs = program.info.vocab_size, guest.info.vocab_size
    if ours != theirs:
        raise PassError(
            f"draft_model: {guest.name} has a vocabulary of {theirs} tokens and {program.name} one "
            f"of {ours}: a draft's tokens must be the target's; choose a model of the same family"
        )
    files = [p.assets.get(TOKENIZER) for p in (program, guest)]
    if None not in files and _tokens(files[0]) != _tokens(files[1]):
        raise PassError(
            f"draft_model: the tokenizers of {program.name} and {guest.name} differ ({files[0]}, "
            f"{files[1]}): a draft's tokens must be the target's; choose a model of the same family"
        )


def _untold(program: Program, guest: Program) -> tuple[str, ...]:
    """What nobody could compare: the tokenizers, unless both models came with theirs."""
    without = [p.name for p in (program, guest) if TOKENIZER not in p.assets]
    if not without:
        return ()
    return (
        f"{' and '.join(dict.fromkeys(without))} came without a {TOKENIZER}, so nothing shows that "
        f"the draft's tokens are the target's: of another vocabulary few drafts are kept",
    )


def _tokens(path: Path | None) -> dict[str, Any]:
    """What a tokenizer file says of which text becomes which token."""
    assert path is not None
    try:
        content = read_json(path, LARGE)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the tokenizer {path}: {error}") from error
    # How a batch is cut and padded changes no token.
    return {k: v for k, v in content.items() if k not in ("truncation", "padding")}
