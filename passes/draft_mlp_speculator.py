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

z_i = GELU(LayerNorm_i(P_i z_{i-1} + c E_i x_i)), logits = head_i z_i: each level has its own
projection, token embedding and head; z_0 is the normed hidden state, c weighs tokens against state
so that a deep level still hears the first one (Wertheimer et al., "Accelerating Production LLMs
with Combined Token/Embedding Speculators", 2024). New weights know nothing: train them with
`graftwork train`. Refuses what `draft_medusa` refuses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ..ir import Program
from ..ir.plan import RecurrentDraft
from .base import Outcome, register
from .draft_pass import DraftPass
from .grafts import Graft
from .plan_edits import with_draft

A, G = torch.ops.aten, torch.ops.graftwork


@register
class DraftMlpSpeculator(DraftPass):
    """levels: tokens drafted. inner: width of the state; None: the model's own. The rest: see
    `DraftPass`."""

    levels: int = Field(default=3, ge=1)
    inner: int | None = Field(default=None, ge=1)
    decay: float = Field(default=0.9, gt=0)

    name: ClassVar[str] = "draft_mlp_speculator"

    def insert(self, program: Program) -> Outcome:
        """Graft the levels on. See the module docstring."""
        for level in range(self.levels):
            program = self._level(program, level)
        functions = tuple(f"speculator_{level}" for level in range(self.levels))
        draft = RecurrentDraft(functions, self.levels, self.decay, bool(self.weights))
        return Outcome(with_draft(program, draft), self.levels)

    def _level(self, program: Program, level: int) -> Program:
        name = f"speculator_{level}"
        graft = Graft(program, self.name, name, self.weights)
        graft.tap()
        inner = self.inner or graft.hidden
        tokens = graft.input("tokens", dtype=torch.int64)
        before = graft.input("state", graft.hidden if level == 0 else inner)
        state = graft.norm(before) if level == 0 else before
        table = graft.parameter(f"{name}.embedding", graft.vocab, inner)
        heard = graft.call(A.embedding.default, table, tokens)
        # Variances of state and token stay at the ratio that the paper keeps through the levels.
        weight = (1 - 0.5 ** (2 / self.levels)) ** 0.5 * (inner / 2) ** 0.5
        told = graft.call(A.mul.Tensor, heard, weight)
        kept = graft.linear(state, f"{name}.project", inner, bias=False)
        total = graft.call(A.add.Tensor, kept, told)
        gains = graft.parameter(f"{name}.norm.weight", inner, init="ones")
        shift = graft.parameter(f"{name}.norm.bias", inner, init="zeros")
        normed = graft.call(G.layer_norm.default, total, gains, shift, eps=1e-6)
        after = graft.call(A.gelu.default, normed)
        logits = graft.linear(after, f"{name}.head", graft.vocab, bias=False)
        return graft.done({"state": after, **graft.candidates(logits, self.candidates)})
