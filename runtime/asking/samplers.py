"""Samplers that follow a text: what the next token may be depends on what was likely before.

They are given as ``logits_processor``. Unlike other processors they remember: of each prefix of a
text what they need of it, drafts' prefixes included, so that drafts change no text here, either.
They compose with all other options; each call of `generate` begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ...ir import InputError

S = TypeVar("S")

Apply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

FORGET = 512
"""Places behind a text's end at which drafts that were not kept are forgotten."""

FAR = 1e4
"""What tokens lose that are not to come up: they stay in order, for grammars that allow no other,
and their probability is 0."""


class Prefix(Generic[S]):
    """A prefix of a text. state: what a sampler knows of it; None: it was not asked there."""

    __slots__ = ("children", "parent", "state")

    def __init__(self, parent: Prefix[S] | None = None) -> None:
        self.parent = parent
        self.children: dict[int, Prefix[S]] = {}
        self.state: S | None = None


class Trail(Generic[S]):
    """The prefixes of one text from its prompt on, those of drafts as branches."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.root = prompt, Prefix[S]()

    def at(self, tokens: Sequence[int]) -> Prefix[S]:
        """The prefix that ends with these tokens behind the prompt."""
        here, old = self.root, len(tokens) - FORGET
        for place, token in enumerate(tokens):
            child = here.children.get(token)
            if child is None:
                child = here.children[token] = Prefix(here)
            if place < old and len(here.children) > 1:
                here.children = {token: child}
            here = child
        return here


class Sampler:
    """Base of processors that follow a text. Frozen dataclasses; a field is an option."""

    def of(self, prompt: int) -> Apply:
        """What does the work for one text, whose prompt has so many tokens."""
        raise NotImplementedError

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Errors: `InputError`: it is no function of one prefix alone."""
        raise InputError(f"{type(self).__name__} follows a text: give it as logits_processor")


def _numbers(of: object, **bounds: tuple[float, float]) -> None:
    """Errors: `InputError` for an option outside its bounds."""
    for name, (low, high) in bounds.items():
        value = getattr(of, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            upper = f" to {high:g}" if math.isfinite(high) else " on"
            raise InputError(
                f"{type(of).__name__}: {name}: expected a number from {low:g}{upper}, got {value!r}"
            )


# -- Mirostat


@dataclass(frozen=True)
class Mirostat(Sampler):
    """Holds a sampled text's surprise at a target: tokens whose surprise is above a bound are left
    out, and the bound follows what is drawn.

    tau: the target, in bits a token (5: as varied as prose; 3: closer). eta: how fast the bound,
    which begins at twice the target, follows. Give ``do_sample=True, top_k=0``; a temperature
    counts behind it. Where no token is within the bound the likeliest stays.

    Source: Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls
    Perplexity" (2021, arXiv 2007.14966), in its second form, which cuts by surprise itself and not
    by the k of an estimated Zipf's law (as llama.cpp's ``--mirostat 2``).
    """

    tau: float = 5.0
    eta: float = 0.1

    def __post_init__(self) -> None:
        _numbers(self, tau=(0.01, 100.0), eta=(0.0, 1.0))

    def of(self, prompt: int) -> Apply:
        return _Follow(self, prompt)


@dataclass
class _Bound:
    """mu: the bound behind a prefix, in bits. kept, bits: the tokens within it, i64[K], sorted, and
    their surprise among themselves, f32[K]."""

    mu: float
    kept: torch.Tensor | None = None
    bits: torch.Tensor | None = None

    def after(self, token: int, tau: float, eta: float) -> float:
        """The bound once a token is drawn."""
        if self.kept is None or self.bits is None:
            return self.mu
        place = int(torch.searchsorted(self.kept, token))
        if place == len(self.kept) or int(self.kept[place]) != token:
            return self.mu  # another option put it there
        return self.mu - eta * (float(self.bits[place]) - tau)


class _Follow:
    """A text's bounds."""

    def __init__(self, options: Mirostat, prompt: int) -> None:
        self.options, self.trail = options, Trail[_Bound](prompt)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, text in enumerate(ids.tolist()):
            new = text[self.trail.prompt :]
            here = self.trail.at(new)
            if here.state is None:
                before = None if here.parent is None else here.parent.state
                tau, eta = self.options.tau, self.options.eta
                here.state = _Bound(2 * tau if before is None else before.after(new[-1], tau, eta))
            self._cut(here.state, scores[row])
        return scores

    def _cut(self, bound: _Bound, row: torch.Tensor) -> None:
        """Take out of a row what surprises too much, and remember what stays."""
        bits = row.log_softmax(-1) / -math.log(2)
        inside = (bits <= bound.mu) & torch.isfinite(bits)
        inside[bits.argmin()] = True
        row[~inside] -= FAR
        bound.kept = inside.nonzero()[:, 0]
        bound.bits = row[bound.kept].log_softmax(-1) / -math.log(2)


# -- Momentum


@dataclass(frozen=True)
class Momentum(Sampler):
    """Greedy decoding that a loop slows down: tokens that would go on with something that the text
    has already said lose probability, the more the longer that is.

    The text is a walk through a graph of its tokens. A token that is not in the graph is taken as
    it is, if it is the likeliest. Otherwise each of the `k` likeliest tokens loses `alpha` times
    the resistance of its depth: of the longest n-gram that ends with it and was said before, n. The
    prompt counts. Greedy decoding takes the best; the rest cannot come up.

    resistance: at depth 1, 2, ...; the last one counts for all deeper ones.

    Source: Lan et al., "Momentum Decoding: Open-ended Text Generation As Graph Exploration" (2022,
    arXiv 2212.02175), for which the form of the resistance depends on the model.
    """

    alpha: float = 0.2
    k: int = 5
    resistance: tuple[float, ...] = (1.0, 3.0, 4.0, 5.0)

    def __post_init__(self) -> None:
        _numbers(self, alpha=(0.0, 10.0), k=(1, 1000))
        steps: Any = self.resistance
        if (
            not isinstance(steps, tuple | list)
            or not steps
            or any(
                isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < math.inf
                for one in steps
            )
        ):
            raise InputError(
                f"Momentum: resistance: expected numbers of at least 0, one a depth, got {steps!r}"
            )

    def of(self, prompt: int) -> Apply:
        return self._weigh

    def _weigh(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, text in enumerate(ids.tolist()):
            best = scores[row].topk(min(self.k, scores.shape[1]))
            seen = set(text)
            if best.indices[0].item() not in seen:
                continue
            chances = scores[row].softmax(-1)[best.indices]
            depths = [depth(text, token, len(self.resistance)) for token in best.indices.tolist()]
            against = torch.tensor([0.0, *map(float, self.resistance)])[depths]
            scores[row] = scores[row].log_softmax(-1) - FAR
            scores[row, best.indices] = (chances - self.alpha * against).to(scores.dtype)
        return scores


def depth(text: Sequence[int], token: int, most: int) -> int:
    """The longest n-gram that would end with a token and is in the text already; at most `most`.

    >>> depth([1, 2, 3, 7, 1, 2], 3, 4), depth([1, 2, 3], 1, 4), depth([1, 2], 5, 4)
    (3, 1, 0)
    """
    found = 0
    for end in range(len(text) - 1, -1, -1):
        if text[end] != token:
            continue
        length = 1
        while length < most and length <= end and text[end - length] == text[-length]:
            length += 1
        found = max(found, length)
        if found == most:
            break
    return found


# -- Look-back


@dataclass(frozen=True)
class LookBack(Sampler):
    """Greedy decoding that samples where it is about to repeat itself: where the distribution of
    the next token is as close to an earlier one's as it is when texts repeat.

    Where the smallest divergence KL(now | earlier) of the last `window` places is at most `alpha`
    nats, one of the `k` likeliest tokens is drawn; elsewhere the likeliest is taken. Give
    ``do_sample=True, top_k=0``. It holds `window` + 512 rows of the vocabulary's size for a text.

    Source: Xu et al., "Look-back Decoding for Open-Ended Text Generation" (2023, arXiv 2305.13477).
    There the `k` tokens are drawn by how close the step after each of them would be to the prompt,
    which takes `k` more steps a token; here by their own probabilities.
    """

    alpha: float = 0.5
    k: int = 8
    window: int = 128

    def __post_init__(self) -> None:
        _numbers(self, alpha=(0.0, math.inf), k=(1, 1000), window=(1, 4096))

    def of(self, prompt: int) -> Apply:
        return _Look(self, prompt)


class _Look:
    """A text's distributions."""

    def __init__(self, options: LookBack, prompt: int) -> None:
        self.options, self.trail = options, Trail[torch.Tensor](prompt)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, text in enumerate(ids.tolist()):
            here = self.trail.at(text[self.trail.prompt :])
            if here.state is None:
                here.state = scores[row].log_softmax(-1).clamp_min(-1e4)
            near = self._distance(here) <= self.options.alpha
            best = scores[row].topk(min(self.options.k if near else 1, scores.shape[1]))
            scores[row] -= FAR
            scores[row, best.indices] = best.values
        return scores

    def _distance(self, here: Prefix[torch.Tensor]) -> float:
        """The smallest divergence of a prefix's distribution from those before it, in nats."""
        assert here.state is not None
        earlier: list[torch.Tensor] = []
        place = here.parent
        while place is not None and len(earlier) < self.options.window:
            if place.state is not None:
                earlier.append(place.state)
            place = place.parent
        for _ in range(FORGET):  # drafts are not as long
            place = None if place is None else place.parent
        if place is not None:
            place.state = None  # none looks so far back any more
        if not earlier:
            return math.inf
        now = here.state.exp()
        return float((now @ here.state) - (torch.stack(earlier) @ now).max())
