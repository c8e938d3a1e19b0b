"""Let a step be fed mixtures of tokens, so that one row of a batch stands for several texts.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V] {
      %x: f32[B,T,H] = aten.embedding(@embed, %tokens)
      ...

After (drafts=3)::

    func step(tokens: i64[B,T], positions: i64[B,T], mixed: i64[B,T,2], shares: f32[B,T,2])
        -> logits f32[B,T,V] {
      %x: f32[B,T,H] = aten.embedding(@embed, %tokens)
      %e: f32[B,T,2,H] = aten.embedding(@embed, %mixed)
      %y: f32[B,T,H] = x + sum of shares (e - x)
      ...

    decode {
      step = superposed(function="step", weight=None, drafts=3, ...)

A token's embedding becomes (1 - s) x + s_1 e_1 + s_2 e_2 with s = s_1 + s_2; where the shares are 0
it is x, bit for bit, so all that does not ask for several texts at once runs as before. What the
model does to embeddings in the module that looks them up, such as a scale, is done to all. With a
`path` the program takes that text along as a weight, in which n-grams are counted. How texts are
drafted: `graftwork.ir.plan.SuperposedStep`. Refuses a step that is cut, or makes more of its tokens
than one look-up, models that write from a source, drafters, depth policies, and a file of no tokens
of the model.

Source: Shen et al., "Superposed Decoding: Multiple Generations from a Single Autoregressive
Inference Pass" (2024).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.fx
from torch.fx.node import map_arg

from ...ir import Function, PassError, Program, site_of, type_of
from ...ir.ops.quantized import LOOK_UPS
from ...ir.plan import SuperposedStep
from ...ir.plan.inputs import MIXED, SHARES
from ...ir.types import Sym, TensorType
from ...ir.weights import Weight
from ..engine.base import STATES, Effect, Outcome
from ..engine.corpus_files import corpus_tokens
from ..engine.functions import TARGET, edit_each
from ..engine.plan_edits import with_record
from ..policies import RecordPass, builds

A = torch.ops.aten
WEIGHT = "ngrams"
SCALES = (A.mul.Tensor, A._to_copy.default)
"""What a module may do to embeddings behind its look-up."""
ALONE = (
    "there is no text to count n-grams in (option path): drafts are told apart by the model alone, "
    "and words of one may follow words of another"
)


@builds(SuperposedStep, drafts=3)
class Superpose(RecordPass):
    """path: the text that n-grams are counted in, a text file, a .jsonl file or a .json file of
    token ids (see `draft_corpus`), of the kind that is to be written; "": none, and drafts are told
    apart by the model alone. The rest: see the record."""

    path: str = ""

    name: ClassVar[str] = "superpose"
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.FUNCTIONS, Effect.DECODE_PLAN})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS, Effect.SEGMENTS}

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,) if self.path else ()

    @property
    def moot(self) -> frozenset[str]:
        return frozenset() if self.path else frozenset({"alpha", "orders", "penalty"})

    def run(self, program: Program) -> Outcome:
        weight: str | None = None
        remarks: tuple[str, ...] = (ALONE,)
        if self.path:
            if WEIGHT in program.weights:
                raise PassError(f"{self.name}: the program has a weight {WEIGHT!r} already")
            tokens = corpus_tokens(self.name, Path(self.path), program)
            made = Weight.of(WEIGHT, torch.tensor(tokens, dtype=torch.int64))
            program = program.replace(weights=program.weights.adding(made))
            weight, remarks = WEIGHT, ()
        record = self.made(function=program.step.name, weight=weight)
        planned = with_record(program, self.name, record)
        outcome = edit_each(planned, partial(self._mix, record.drafts - 1), TARGET)
        return replace(outcome, remarks=remarks)

    def _mix(self, count: int, fn: Function) -> int:
        """Let a function mix `count` others into what each token is looked up as, in place.

        Errors: `PassError` for tokens that are used otherwise."""
        users = list(fn.input("tokens").users) if fn.has_input("tokens") else []
        if len(users) != 1 or users[0].target not in LOOK_UPS:
            used = ", ".join(str(user.target) for user in users) or "no use"
            raise PassError(
                f"{self.name}: expected {fn.name} to use its tokens for one look-up in an "
                f"embedding table, got {used}: what else it makes of them cannot be mixed"
            )
        shape = Sym("B"), Sym("T"), count
        mixed = fn.add_input(MIXED, TensorType(torch.int64, shape))
        shares = fn.add_input(SHARES, TensorType(torch.float32, shape))
        chain = _module(users[0])
        own = chain[-1]
        old = list(own.users)
        with fn.graph.inserting_before(own.next):
            made = _mixture(fn, own, _again(fn, chain, mixed), shares)
        for user in old:
            user.replace_input_with(own, made)
        return 1


def _module(node: torch.fx.Node) -> list[torch.fx.Node]:
    """A look-up and what its module does to the rows, in order."""
    chain = [node]
    while len(node.users) == 1 and (user := next(iter(node.users))).target in SCALES:
        if site_of(user).module != site_of(node).module:
            break
        chain.append(node := user)
    return chain


def _again(fn: Function, chain: list[torch.fx.Node], ids: torch.fx.Node) -> torch.fx.Node:
    """What the calls of a chain make of other tokens."""
    made = {fn.input("tokens"): ids}
    for node in chain:
        target: Any = node.target
        args: Any = map_arg(node.args, lambda arg: made.get(arg, arg))
        given: Any = map_arg(node.kwargs, lambda arg: made.get(arg, arg))
        made[node] = fn.call(target, *args, site=site_of(node), **given)
    return made[chain[-1]]


def _mixture(
    fn: Function, own: torch.fx.Node, others: torch.fx.Node, shares: torch.fx.Node
) -> torch.fx.Node:
    """x [B,T,H] and e [B,T,K,H] by shares [B,T,K]: x + sum of shares (e - x), in float32."""
    dtype, site = type_of(own).dtype, site_of(own)
    wide = dtype != torch.float32
    if wide:
        own = fn.call(A._to_copy.default, own, dtype=torch.float32, site=site)
        others = fn.call(A._to_copy.default, others, dtype=torch.float32, site=site)
    away = fn.call(A.sub.Tensor, others, fn.call(A.unsqueeze.default, own, 2, site=site), site=site)
    parts = fn.call(
        A.mul.Tensor, away, fn.call(A.unsqueeze.default, shares, 3, site=site), site=site
    )
    moved = fn.call(A.sum.dim_IntList, parts, [2], False, site=site)
    made = fn.call(A.add.Tensor, own, moved, site=site)
    return fn.call(A._to_copy.default, made, dtype=dtype, site=site) if wide else made
