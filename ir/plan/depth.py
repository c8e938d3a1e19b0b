"""Depth records: how many layers a token runs through."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from ..support.errors import InputError
from .base import Record, Returned, policy, record
from .bounds import Amount, Context, Filled, Levels, Nodes, Part, Place, Rollout, Share
from .contract import Contract

if TYPE_CHECKING:
    from .decode import DecodePlan
    from .step import StepRecord


@dataclass(frozen=True)
class DepthRecord(Record):
    """Base of depth records.

    stops: not every token runs through every layer; parted: so the step must be cut. gaps: what a
    token leaves out is never made up for, so every later one leaves it out, too. halves: it runs
    attention without MLPs, so the step must be cut between them.
    """

    slot: ClassVar[str] = "depth"
    noun: ClassVar[str] = "depth policy"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"segments"})
    stops: ClassVar[bool] = True
    parted: ClassVar[bool] = True
    gaps: ClassVar[bool] = False
    halves: ClassVar[bool] = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that calls of deeper layers often have, besides those of steps."""
        return ()

    def ending(self, plan: DecodePlan) -> str:
        """The function that ends any step, however few layers it runs through."""
        return plan.step.parts[-1]


@record
@dataclass(frozen=True)
class FullDepth(DepthRecord):
    """Every token runs through every layer."""

    kind: ClassVar[str] = "full"
    requires: ClassVar[frozenset[str]] = frozenset()
    stops: ClassVar[bool] = False


@policy
@dataclass(frozen=True)
class LinearBudget(DepthRecord):
    """Layers fall linearly with a token's place behind the prompt (SkipDecode, Del Corro 2023).

    The first segment runs for every token, and of the others the last ones, as many as the budget
    allows: the middle is left out. A batch shares one budget, that of its shallowest place. Prompts
    run through all layers. most, least: layers of the first token and of those from `tokens` on;
    most=0: all there are.
    """

    most: Rollout = 0
    least: Levels = 2
    tokens: Nodes = 256
    kind: ClassVar[str] = "linear"
    gaps: ClassVar[bool] = True

    def check(self) -> None:
        """See `Record.check`."""
        if self.most and self.most < self.least:
            raise InputError(f"least={self.least} is more than most={self.most}")

    def layers(self, place: int, total: int) -> int:
        """Layers of the token at a place, of `total`."""
        most, along = self.most or total, min(place / self.tokens, 1.0)
        return int(most - (most - self.least) * along)


@policy
@dataclass(frozen=True)
class DecayBudget(DepthRecord):
    """Of L layers floor(L alpha^i) for the i-th token behind the prompt (D3, Fan et al. 2025).

    alpha: at most 1. least: layers that always run. Which ones, and what batches and prompts do: as
    in `LinearBudget`.
    """

    alpha: Part = 0.998
    least: Levels = 2
    kind: ClassVar[str] = "decay"
    gaps: ClassVar[bool] = True

    def layers(self, place: int, total: int) -> int:
        """Layers of the token at a place, of `total`."""
        return max(int(total * self.alpha**place), self.least)


@dataclass(frozen=True)
class ThresholdDepth(DepthRecord):
    """Base of records that let tokens leave where the first layers are sure.

    threshold: of their confidence, at the first place; at place t of N it is 0.9 threshold + 0.1
    threshold exp(-decay t / N), so with decay=0 the same everywhere (as in FREE's code; in CALM,
    Schuster et al. 2022, the second term is 0.1 exp(-decay t / N), whatever the threshold).
    tokens: the first so many new tokens of a text may be written early, those behind them run
    through all layers, and N is that number: what a threshold promises, it promises of texts of one
    length. 0: all may, and N is what a call asks for.
    """

    threshold: Share = 0.9
    decay: Amount = 0.0
    tokens: Place = 0

    def bound(self, along: float) -> float:
        """The threshold where so large a share of the text is written, 0..1.

        >>> round(DeferredDepth(threshold=0.8, decay=4.0).bound(0.5), 4)
        0.7308
        """
        return self.threshold * (0.9 + 0.1 * math.exp(-self.decay * along))

    def fixed(self, threshold: float, tokens: int) -> Self:
        """The record with a threshold that stays, for so many new tokens."""
        return replace(self, threshold=threshold, tokens=tokens)


@policy
@dataclass(frozen=True)
class DeferredDepth(ThresholdDepth):
    """Leave after the first layers where they are sure, and make up for it later (FREE).

    A token whose likeliest successor, by the target's own head on the state after `exit` layers, is
    more probable than the second by more than the threshold is continued from there. The rows that
    it lacks in the deeper layers' caches are made with the next token that goes deep, in one call
    (synchronised parallel decoding; Bae et al. 2023). A batch leaves together, or goes on together.
    threshold: of that difference, at the first place; at place t of N it is 0.9 threshold + 0.1
    threshold exp(-decay t / N), so with decay=0 the same everywhere.
    tokens: N, and so many new tokens may leave; 0: all may, and N is what a call asks for. pending:
    tokens that may lack rows before all go deep. posterior: where it is not 0, the threshold is
    learnt: of the first `compared` predictions of the first layers it is seen whether the whole
    model's are the same, and before each text the threshold becomes the least of ten confidences
    from 0.3 to 0.9 that makes that so probable, by a Beta distribution for each of the two kinds.
    What was learnt is kept as long as the model is.
    """

    exit: Levels = 3
    pending: Nodes = 7
    posterior: Share = 0.0
    compared: Context = 1024
    kind: ClassVar[str] = "deferred"

    def fixed(self, threshold: float, tokens: int) -> Self:
        """See `ThresholdDepth.fixed`: nothing is learnt."""
        return replace(super().fixed(threshold, tokens), posterior=0.0)

    @property
    def widths(self) -> tuple[int, ...]:
        """All pending tokens and one more."""
        return (self.pending + 1,)


@record
@dataclass(frozen=True)
class ConfidentDepth(ThresholdDepth):
    """Leave at the first exit that is sure; deeper layers' rows are made of its state (CALM).

    functions: for each segment but the first one that makes its cache rows of the state that a
    token left with, as if its layers had not changed that. score: what each segment but the last
    returns of how sure it is, [B,T]; "": by how much the likeliest successor is more probable than
    the second, by the target's own head. A batch leaves together, or goes on together.
    """

    functions: Filled[tuple[str, ...]] = ("step.1.fill",)
    score: Filled[str] = ""
    kind: ClassVar[str] = "confident"

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` unless there is a function for each segment."""
        *segments, _ = plan.step.parts or ("", "")
        if len(self.functions) != len(segments) - 1:
            raise InputError(
                f"{self.brief} fills {len(self.functions)} segments, and step={plan.step.brief} "
                f"has {len(segments) - 1} behind the first"
            )
        yield from ((function, {}) for function in self.functions)
        if self.score:
            yield from ((segment, {self.score: ("", "")}) for segment in segments[:-1])


@record
@dataclass(frozen=True)
class HeadsDepth(ConfidentDepth):
    """Leave at the first exit whose own trained head is sure (self-supervised early exits).

    heads: for each segment but the last, what makes logits of the state there, in the place of the
    target's own head. outputs: of the step, the states that they are trained on. trained: whether
    they know more than the target's own head does. Source: Valade, "Accelerating Large Language
    Model Inference with Self-Supervised Early Exits" (2024).
    """

    heads: Filled[tuple[str, ...]] = ("step.0.exit",)
    outputs: Filled[tuple[str, ...]] = ("hidden.0",)
    trained: Filled[bool] = False
    kind: ClassVar[str] = "heads"

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` unless there is a head at each exit."""
        yield from super().calls(plan)
        if not len(self.heads) == len(self.outputs) == len(plan.step.cuts):
            raise InputError(
                f"{self.brief} has {len(self.heads)} heads, learning of {len(self.outputs)} "
                f"outputs, and step={plan.step.brief} has {len(plan.step.cuts)} exits"
            )
        yield from ((head, {"logits": ("", "", "V")}) for head in self.heads)


@record
@dataclass(frozen=True)
class EntropyDepth(DepthRecord):
    """A smaller model writes where it is sure, the target where it is not (Entropy Adaptive
    Decoding).

    function: the smaller model's step, with a cache of its own. threshold: the target writes where
    the mean entropy of the distributions that the latest `window` tokens were chosen from, by
    whichever model, exceeds it, in bits. least: tokens that a model writes before the other may.
    pending: tokens that one of them may lack before it reads them. context: the smaller model's
    positions, where those are fewer. A batch changes together: one unsure text suffices. Source:
    Simonds, "Entropy Adaptive Decoding" (2025).
    """

    function: Filled[str] = "small"
    threshold: Amount = 1.0
    window: Nodes = 8
    least: Nodes = 4
    pending: Nodes = 31
    context: Filled[Context | None] = None
    kind: ClassVar[str] = "entropy"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    parted: ClassVar[bool] = False

    @property
    def widths(self) -> tuple[int, ...]:
        """All pending tokens and one more."""
        return (self.pending + 1,)

    def ending(self, plan: DecodePlan) -> str:
        """`function`."""
        return self.function

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield self.function, {"logits": ("", "", "V")}


@record
@dataclass(frozen=True)
class MixtureDepth(DepthRecord):
    """A trained router before some layers says whether a token runs through them (mixture of
    depths).

    functions: for each routed layer what makes its cache rows alone, of the state that a token
    passes by with. routers: for each the segment before it. routed: places of those layers among
    the step's segments, which are a layer each. shares: of the tokens of a window that run through
    each, in training. threshold: of the score, above which a token does. score: what routers
    return, the probability that the token is among those, [B,T]. trained: whether they know more.
    Prompts run through all layers, and a batch runs through a layer if one of its tokens does.
    Sources: Raposo et al., "Mixture-of-Depths" (2024); Zhang et al., "p-MoD" (2024).
    """

    functions: Filled[tuple[str, ...]] = ("step.1.fill",)
    routers: Filled[tuple[str, ...]] = ("step.0",)
    routed: Filled[tuple[Place, ...]] = (1,)
    shares: Filled[tuple[Share, ...]] = (0.5,)
    threshold: Share = 0.5
    score: Filled[str] = "route"
    trained: Filled[bool] = False
    kind: ClassVar[str] = "mixture"

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` unless each routed layer has a segment before
        and behind it, and what fills it."""
        *segments, _ = plan.step.parts or ("", "")
        within = all(0 < place < len(segments) - 1 for place in self.routed)
        if not within or not len(self.functions) == len(self.routed) == len(self.shares):
            raise InputError(
                f"{self.brief} routes places {self.routed} of {len(segments)} segments, with "
                f"{len(self.functions)} functions and {len(self.shares)} shares: expected one each "
                f"for places between the first and the last"
            )
        yield from ((function, {}) for function in self.functions)
        yield from ((router, {self.score: ("", "")}) for router in self.routers)


@record
@dataclass(frozen=True)
class MlpDepth(DepthRecord):
    """Once an MLP leaves a token as it was, it runs through no more of them (FFN-SkipLLM).

    similarity: of the states before and behind an MLP, by cosine, from which on the following ones
    are left out. first, last: layers whose MLPs run in any case. warm: tokens behind the prompt
    that run through all. score: what the segments of the other MLPs return of their similarity,
    [B,T]. Attention runs everywhere, so no cache row is lacking. A batch leaves them out together,
    or not at all. Source: Jaiswal et al., "FFN-SkipLLM" (2024).
    """

    similarity: Share = 0.98
    first: Rollout = 2
    last: Rollout = 2
    warm: Rollout = 8
    score: Filled[str] = "sure"
    kind: ClassVar[str] = "mlp"
    halves: ClassVar[bool] = True

    def places(self, step: StepRecord) -> tuple[int, ...]:
        """Of a step's parts those MLPs that may be left out."""
        layers = sorted(step.mlps)
        return tuple(step.mlps[n] for n in layers[self.first : len(layers) - self.last])

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` where fewer than two MLPs are between those that
        run in any case: the first of them decides."""
        places = self.places(plan.step)
        if plan.step.halves and len(places) < 2:
            raise InputError(
                f"{self.brief} lets the first {self.first} and the last {self.last} MLPs run, and "
                f"of the step's {len(plan.step.mlps)} that leaves {len(places)} to decide and to "
                f"be left out: expected two or more"
            )
        yield from ((plan.step.parts[place], {self.score: ("", "")}) for place in places)
