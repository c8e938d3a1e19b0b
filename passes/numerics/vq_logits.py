"""A head of fewer codewords than tokens, and a map from the vocabulary to them.

Before::

    %y: f32[B,T,4096] = aten.linear(%h, @head)

After, with 1024 codewords::

    %c: f32[B,T,1024] = aten.linear(%h, @head.codewords)
    %y: f32[B,T,4096] = aten.index_select(%c, -1, @head.codes)

Tokens of one codeword have the same logit, and greedy decoding takes the first of them. Codewords
are means of clusters of the head's rows: those of the most frequent tokens to begin with, then in
turns the nearest codeword of every row and the mean of each codeword's rows, a row as often as its
token. Rows are as far apart as their logits are on the text: by e H e^T, where H are the second
moments of what the head reads.

Refuses a head that is no plain product of a weight, one with a bias, and codewords that are not
fewer than the vocabulary. A table that look-up and head share stays for the look-up.

Source: Shao et al., "VQ-Logits: Compressing the Output Bottleneck of Large Language Models via
Vector Quantized Logits" (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, ClassVar

import torch
import torch.fx
from pydantic import Field
from torch import Tensor

from ...ir import Function, PassError, Program, WeightStore, site_of, type_of
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import (
    STATES,
    Contract,
    Effect,
    Evidence,
    LearningPass,
    Outcome,
    Windows,
    register,
)
from ..engine.blocks import weight_of
from ..engine.calibrate import Seen, calibrate
from ..engine.functions import TARGET, edit_with_weights
from ..engine.reopening import Reopened, reopened
from ..fusing.products import source_product

A = torch.ops.aten
SUFFIXES = (".codewords", ".codes")
SLICE = 1024
"""Rows whose distances are in memory at once."""

SETTLED = 1000
"""One in so many rows that still change their codeword: the search ends."""


@register
class VqLogits(LearningPass):
    """codewords: how many, or as a share of the vocabulary. rounds: of the search for clusters.
    damp: added to the diagonal of the second moments, as a share of its mean. unseen: how often a
    token counts that the text does not have. windows, length: windows of text, and tokens of each.
    """

    codewords: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = 0.5
    rounds: Annotated[int, Field(ge=0, le=1000)] = 20
    damp: Annotated[float, Field(gt=0, le=1)] = 0.01
    unseen: Annotated[float, Field(gt=0)] = 0.5
    windows: Windows = 64

    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.VOCABULARY})
    reads: ClassVar[frozenset[Effect]] = STATES

    def reopen(self, program: Program, held: frozenset[str]) -> Reopened:
        """A head that the source holds in few bits as floats."""
        step = program.step

        def wants(fn: Function, call: torch.fx.Node, floats: object) -> str:
            head = source_product(fn.outputs["logits"]) if fn.name == step.name else None
            return "floats" if call is head else ""

        return reopened(program, held, wants, what="clustered as floats")

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """Find the codewords, and put them in the head's place."""
        head = head_of(program)
        name, vocabulary = weight_of(head), int(str(type_of(head).dims[-1]))
        count = self.codewords
        count = round(count * vocabulary) if isinstance(count, float) else count
        if not 1 <= count < vocabulary:
            raise PassError(
                f"vq_logits: expected fewer codewords than the vocabulary of {vocabulary}, got "
                f"{count}"
            )
        seen = torch.bincount(
            evidence.sampled(self.sample, program).flatten(), minlength=vocabulary
        )
        solver = _HeadSolver(count, self, seen.float().clamp(min=self.unseen))
        found = calibrate(program, [head], evidence, self.sample, solver, f"vq_logits {self!r}")
        parts = [found[name + suffix] for suffix in SUFFIXES]
        renamed = [part.renamed(fresh_name(program.weights, part.name)) for part in parts]

        def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
            if fn.name != program.step.name:
                return "it is not the step", weights
            node = source_product(fn.outputs["logits"])
            with fn.graph.inserting_before(node):
                words, codes = map(fn.weight, renamed)
                site = site_of(node)
                small = fn.call(A.linear.default, node.args[0], words, site=site)
                new = fn.call(A.index_select.default, small, -1, codes, site=site)
            fn.replace(node, new)
            sweep(fn)
            return 1, weights.adding(*renamed)

        done = edit_with_weights(program, edit, TARGET)
        return Outcome(done.program, done.matches, done.near_miss, (f"{count} codewords",))


def head_of(program: Program) -> torch.fx.Node:
    """The product that gives the step's logits. Errors: `PassError` if it is no plain one."""
    node = source_product(program.step.outputs.get("logits"))
    plain = isinstance(node, torch.fx.Node) and node.target is A.linear.default
    if not plain or len(node.args) > 2 or node.args[1].op != "get_attr":
        raise PassError(
            f"vq_logits: expected logits of {program.step.name} that are a product of a float "
            f"weight without bias, got {node}"
        )
    found: torch.fx.Node = node
    return found


class _HeadSolver:
    """Finds the codewords when the head's block comes."""

    def __init__(self, count: int, options: VqLogits, often: Tensor) -> None:
        self.count, self.options, self.often = count, options, often

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        """Codewords [count,D] and codes i64[V], by name."""
        ((tap, (node,)),) = seen.products.items()
        name = weight_of(node)
        hessian = seen.moments.pop(tap).hessian
        diagonal = hessian.diagonal()
        diagonal += self.options.damp * diagonal.mean()
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if failed:
            raise PassError(
                "vq_logits: what the head reads on this text is too much alike: give more"
            )
        weight = seen.weights[name]
        given = weight.float() @ lower, self.often, self.count, self.options.rounds
        codes = clustered(*given, seen.progress)
        words = means(weight.float(), self.often, codes, self.count)
        return {name + SUFFIXES[0]: words.to(weight.dtype), name + SUFFIXES[1]: codes}

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Nothing comes after the head."""
        return iter(())


def clustered(
    rows: Tensor,
    often: Tensor,
    count: int,
    rounds: int,
    progress: Callable[[float], None] = lambda share: None,
) -> Tensor:
    """The cluster i64[V] of each row f32[V,D], where a row counts as often f32[V].

    After the first round only what may have changed is looked at: words that did not move are no
    nearer than they were, and the nearest was nearest. The end is where fewer rows than one in
    `SETTLED` change their word.
    """
    words = rows[often.argsort(descending=True, stable=True)[:count]]
    codes, far = _nearest(rows, words, lambda share: progress(share / (rounds + 1)))
    for done in range(rounds):
        progress((done + 1) / (rounds + 1))
        before, words = words, means(rows, often, codes, count, words)
        moved = (words != before).any(-1)
        if not moved.any():
            break
        some = moved.nonzero().flatten()
        near, least = _nearest(rows, words[some])
        near, own = some[near], moved[codes]
        # Of words that stay none is nearer than `far`: a row whose own has moved asks them all
        # only where those that moved are farther.
        asks = (own & (least > far)).nonzero().flatten()
        stays = ~own & (least >= far)
        now, far = torch.where(stays, codes, near), torch.where(stays, far, least)
        if len(asks):
            now[asks], far[asks] = _nearest(rows[asks], words)
        changed = int((now != codes).sum())
        codes = now
        if changed * SETTLED < len(rows):
            break
    return codes


def means(
    rows: Tensor, often: Tensor, codes: Tensor, count: int, empty: Tensor | None = None
) -> Tensor:
    """Means f32[count,D] of the rows of each cluster; of none what it was, or zeros."""
    mass = torch.zeros(count).index_add_(0, codes, often)[:, None]
    sums = torch.zeros(count, rows.shape[1]).index_add_(0, codes, rows * often[:, None])
    before = torch.zeros_like(sums) if empty is None else empty
    return torch.where(mass > 0, sums / mass.clamp(min=1e-30), before)


def _nearest(
    rows: Tensor, words: Tensor, progress: Callable[[float], None] = lambda share: None
) -> tuple[Tensor, Tensor]:
    """The word i64[V] at the least distance from each row, of several the first, and its distance
    f32[V], less what the row itself adds to it."""
    size, codes, least = words.square().sum(-1), list[Tensor](), list[Tensor]()
    for part in rows.split(SLICE):
        found = torch.addmm(size, part, words.T, alpha=-2).min(-1)
        codes.append(found.indices)
        least.append(found.values)
        progress(min(len(codes) * SLICE / len(rows), 1.0))
    return torch.cat(codes), torch.cat(least)
