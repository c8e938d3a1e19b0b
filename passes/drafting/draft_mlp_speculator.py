"""Draft with a chain of small multi-layer perceptrons, one a level.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V]

After (levels=3)::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden f32[B,T,H]
    func speculator_0(tokens: i64[B,T], state: f32[B,T,H]) -> state f32[B,T,I], draft_logits ...
    func speculator_1(tokens: i64[B,T], state: f32[B,T,I]) -> state f32[B,T,I], draft_logits ...
    ...
    decode {
      draft = recurrent(functions=("speculator_0", "speculator_1", ...), levels=3, ...)

z_i = GELU(norm_i(P_i z_{i-1} + c E_i x_i)), logits = head_i z_i: each level has its own projection,
token embedding, norm and head; z_0 is the normed hidden state. The norm divides by the root mean
square, subtracts no mean, and has gains and a shift. c weighs token against state: with n levels
and states of I channels c^2 = (2^(1/n) - 1) I / 2, so that half of the last level's variance is
still the first state's (Wertheimer et al., "Accelerating Production LLMs with Combined
Token/Embedding Speculators", 2024). New weights know nothing: train them with `graftwork train`.
`weights` may also be published ones (``emb.*``, ``proj.*``, ``ln.*``, ``head.*``, with or without
``speculator.`` before), as safetensors, if no levels share weights and the state goes in unscaled
(``tie_weights``, ``scale_input``). Refuses what `draft_medusa` refuses, and published tensors that
do not fit, by name.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ...ir import Program
from ...ir.plan import RecurrentDraft
from ..engine.base import Outcome
from ..engine.plan_edits import with_draft
from ..policies import builds
from .draft_pass import DraftHeadPass
from .trained import as_published

A = torch.ops.aten

THEIRS = {"embedding": "emb", "project": "proj", "norm": "ln", "head": "head"}
"""What published weights call the parts of a level."""


@builds(RecurrentDraft, levels=3, decay=1.0)
class DraftMlpSpeculator(DraftHeadPass):
    """inner: width of the state; None: the model's. The rest: `DraftHeadPass` and the record."""

    inner: int | None = Field(default=None, ge=1)

    name: ClassVar[str] = "draft_mlp_speculator"

    def insert(self, program: Program) -> Outcome:
        levels: int = self.made().levels
        for level in range(levels):
            program = self._level(program, level, levels)
        functions = tuple(f"speculator_{level}" for level in range(levels))
        draft = self.made(functions=functions)
        return Outcome(with_draft(program, draft), levels)

    def published(self, name: str) -> tuple[str, ...]:
        """Modules are listed by kind, and then by level."""
        level, _, rest = name.removeprefix("speculator_").partition(".")
        kind, _, leaf = rest.partition(".")
        if kind not in THEIRS:
            return as_published(name)
        theirs = f"{THEIRS[kind]}.{level}.{leaf or 'weight'}"
        return theirs, f"speculator.{theirs}"

    def _level(self, program: Program, level: int, levels: int) -> Program:
        name = f"speculator_{level}"
        graft = self.graft(program, name)
        inner = self.inner or graft.hidden
        graft.trained.check_config(
            n_predict=levels,
            emb_dim=graft.hidden,
            vocab_size=graft.vocab,
            tie_weights=False,
            scale_input=False,
        )
        graft.tap()
        tokens = graft.input("tokens", dtype=torch.int64)
        before = graft.input("state", graft.hidden if level == 0 else inner)
        state = graft.norm(before) if level == 0 else before
        table = graft.parameter(f"{name}.embedding", graft.vocab, inner)
        heard = graft.call(A.embedding.default, table, tokens)
        # a P z + b E x with a^2 = 0.5^(1/n), b^2 = (1 - a^2) I / 2; the norm takes a out again.
        weight = ((2 ** (1 / levels) - 1) * inner / 2) ** 0.5
        told = graft.call(A.mul.Tensor, heard, weight)
        kept = graft.linear(state, f"{name}.project", inner, bias=False)
        total = graft.call(A.add.Tensor, kept, told)
        normed = graft.rms_norm(total, f"{name}.norm", eps=1e-6)
        shift = graft.parameter(f"{name}.norm.bias", inner, init="zeros")
        after = graft.call(A.gelu.default, graft.call(A.add.Tensor, normed, shift))
        logits = graft.linear(after, f"{name}.head", graft.words, bias=False)
        return graft.done({"state": after, **graft.candidates(logits, self.candidates)})
