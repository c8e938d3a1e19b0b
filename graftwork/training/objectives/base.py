"""Objectives: batches, losses and the registry."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from ...ir import UnsupportedError
from ...ir.plan import DraftRecord, NoDraft, Record
from ...ir.plan.bounds import Aim
from ...ir.support.discovery import OBJECTIVE, import_all, import_methods


@dataclass(frozen=True)
class Batch:
    """Text and the teacher's outputs.

    tokens: i64[N,T]. hidden: f[N,T,H] by the step's output name. logits: f[N,T,V] after each token.
    draft: the plan's drafter, for policies about it. firsts: by window, the index of the last token
    that the target did not generate; default 0. parts: segments of the target's step, if it is cut.
    known: i64[D], rising ids of the tokens that the student knows; logits are theirs, f[N,T,D], and
    so are distributions and `best`, which say nothing where the target's best token is another.
    chosen: the target's best tokens i64[N,T]; default: by `logits`. counted: bool[N,T], after which
    tokens predictions are taught; None: after all. Target distributions are zero after the others.
    """

    tokens: torch.Tensor
    hidden: Mapping[str, torch.Tensor]
    logits: torch.Tensor
    draft: DraftRecord = field(default_factory=NoDraft)
    firsts: Sequence[int] = ()
    parts: tuple[str, ...] = ()
    known: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    counted: torch.Tensor | None = None

    def alone(self) -> Iterator[Batch]:
        """Each window, from its continuation by the target on. For drafts that read one position;
        others need the preceding text."""
        if not any(self.firsts):
            yield self
            return
        for index, first in enumerate(self.firsts):
            part = (slice(index, index + 1), slice(first, None))
            hidden = {name: states[part] for name, states in self.hidden.items()}
            yield self.part(part, self.tokens[part], hidden)

    def part(
        self, place: tuple[slice, slice], tokens: torch.Tensor, hidden: Mapping[str, torch.Tensor]
    ) -> Batch:
        """Some windows and positions, with tokens and states of theirs."""
        chosen, counted = (
            None if given is None else given[place] for given in (self.chosen, self.counted)
        )
        said = replace(self, logits=self.logits[place], chosen=chosen, counted=counted)
        return replace(said, tokens=tokens, hidden=hidden, firsts=())

    def _taught(self, found: torch.Tensor) -> torch.Tensor:
        """Distributions f[N,T,V], of which those that are not taught become zero."""
        return found if self.counted is None else found.mul_(self.counted[..., None])

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where tokens stand in the student's vocabulary; -1: nowhere."""
        if self.known is None:
            return tokens
        found = torch.searchsorted(self.known, tokens).clamp(max=len(self.known) - 1)
        return found.masked_fill(self.known[found] != tokens, -1)

    @cached_property
    def best(self) -> torch.Tensor:
        """The teacher's most likely next tokens, i64[N,T]; -1: the student does not know it."""
        return self.logits.argmax(-1) if self.chosen is None else self._rows(self.chosen)

    @cached_property
    def teacher(self) -> torch.Tensor:
        """The teacher's distribution, f32[N,T,V]; zeros where `best` is -1."""
        found = self._taught(self.logits.float().softmax(-1))
        return found if self.known is None else found.mul_((self.best >= 0)[..., None])

    def target(self, aim: Aim) -> torch.Tensor:
        """Target distributions f32[N,T,V] of the token after each position. After the last one,
        the teacher's token is used for the text's."""
        if aim == "distribution":
            return self.teacher
        return self._both if aim == "both" else self._text

    @cached_property
    def _text(self) -> torch.Tensor:
        # tokens [N,T,P]: paths, whose last tokens follow.
        after = self.tokens[:, 1:] if self.tokens.dim() == 2 else self.tokens[..., -1]
        index = torch.cat([self._rows(after), self.best[:, -1:]], 1)[..., None]
        one = torch.zeros(self.logits.shape, device=self.logits.device)
        return self._taught(one.scatter_(-1, index.clamp(min=0), (index >= 0).float()))

    @cached_property
    def _both(self) -> torch.Tensor:
        index = self.best[..., None]
        both = (self.teacher * 0.5).scatter_add_(-1, index.clamp(min=0), (index >= 0) * 0.5)
        return self._taught(both)


class Loss(NamedTuple):
    """total: a scalar to minimise. hits: by level, the share of best candidates that are the
    teacher's token, given correct tokens before."""

    total: torch.Tensor
    hits: list[float]


def mean_loss(losses: Iterable[tuple[Batch, Loss]]) -> Loss:
    """The mean loss over the positions of several batches."""
    kept = list(losses)
    counts = [batch.tokens.numel() for batch, _ in kept]
    shares = [count / sum(counts) for count in counts]
    totals = [loss.total * share for share, (_, loss) in zip(shares, kept, strict=True)]
    levels = zip(*(loss.hits for _, loss in kept), strict=True)
    hits = [math.fsum(map(operator.mul, shares, level)) for level in levels]
    return Loss(torch.stack(totals).sum(), hits)


Functions = str | tuple[str, ...] | None
"""A function of a program, several segments of its step, or the step (None)."""


class Run(Protocol):
    """Runs a function, segments of the step in sequence, or the step, with gradients."""

    def __call__(self, function: Functions, **inputs: torch.Tensor) -> dict[str, torch.Tensor]: ...


Objective = Callable[[Any, Run, Batch], Loss]
OBJECTIVES: dict[type[Record], Objective] = {}


def objective(record: type[Record]) -> Callable[[Objective], Objective]:
    """Decorator: register the objective of a kind of record."""

    def add(function: Objective) -> Objective:
        OBJECTIVES[record] = function
        return function

    return add


def objective_of(record: Record) -> Objective:
    """The objective of a record. Errors: `UnsupportedError` if there is none."""
    import_all(__package__)
    import_methods(OBJECTIVE)
    if type(record) not in OBJECTIVES:
        known = sorted(kind.kind for kind in OBJECTIVES)
        raise UnsupportedError(
            f"{record.slot}={record} has nothing to train; kinds that have: {', '.join(known)}"
        )
    return OBJECTIVES[type(record)]


class _CrossEntropy(torch.autograd.Function):
    """Mean of -sum(target * log softmax(student)), also of targets that are zero. The gradient is
    computed in the forward pass, one sequence at a time, which reads logits once."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, target: torch.Tensor, shift: int) -> torch.Tensor:
        width = student.shape[1]
        most = min(width, target.shape[1] - shift)
        rows = student.shape[0] * most
        gradient = torch.zeros(student.shape, dtype=torch.float32, device=student.device)
        total = torch.zeros((), device=student.device)
        for index in range(len(student)):
            scores, slope = student[index, :most].float(), gradient[index, :most]
            wanted = target[index, shift : shift + most]
            torch.softmax(scores, -1, out=slope)
            mass = wanted.sum(-1)
            # log-sum-exp from the best token, whose probability cannot underflow.
            total += torch.dot(scores.amax(-1) - slope.amax(-1).log(), mass)
            total -= torch.dot(wanted.reshape(-1), scores.reshape(-1))
            slope.mul_(mass[:, None]).sub_(wanted).div_(rows)
        ctx.save_for_backward(gradient)
        return total / rows

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(given[0]), None, None


def distilled(student: torch.Tensor, target: torch.Tensor, shift: int) -> torch.Tensor:
    """Cross entropy of logits [N,T,V] against target probabilities [N,T',V] `shift` places later,
    averaged over positions with a target. Differentiable once, by the student. Source: Hinton et
    al., "Distilling the Knowledge in a Neural Network" (2015)."""
    return _CrossEntropy.apply(student, target, shift)  # type: ignore[no-any-return,no-untyped-call]


def hit_rate(student: torch.Tensor, best: torch.Tensor, shift: int) -> float:
    """Share of argmaxes of logits [N,T,V] equal to `best` i64[N,T'] `shift` positions later, in the
    first sequence."""
    wanted = best[0, shift:]
    return float(
        (student[0, : len(wanted)].argmax(-1) == wanted[: student.shape[1]]).float().mean()
    )
