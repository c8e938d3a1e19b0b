"""Superposed decoding: several texts of a prompt out of the steps of one row.

Source: Shen et al., "Superposed Decoding: Multiple Generations from a Single Autoregressive
Inference Pass" (NeurIPS 2024). See `SuperposedStep` for what a step is fed, and how a draft's
probability grows. The best drafts that go on are kept, as many as are asked for, and beside them
the best of those that have ended; in the end the likeliest of both, by the mean log probability of
a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...ir import InputError
from ...ir.execution.executable import Executable
from ...ir.plan import SuperposedStep
from .beams import Found
from .checks import bad_logits
from .grammar import grammar_asked
from .ngrams import Ngrams
from .options import GenerationOptions
from .samplers import Sampler
from .stopping import Stopping
from .text import Mixture, Text

UNKNOWN = -1e6
"""In place of the logarithm of 0: taken where nothing else is left, and still in order."""


class Draft(NamedTuple):
    """tokens: behind the prompt. score: the sum of their log probabilities."""

    tokens: list[int]
    score: float

    @property
    def mean(self) -> float:
        """The same, a token."""
        return self.score / max(len(self.tokens), 1)


@dataclass
class Superposition:
    """The drafts of some prompts, of which each is one row. texts: theirs, which hold the likeliest
    draft. width: drafts of each. ngrams: what smooths them, if something does.

    going: of each prompt, the drafts that go on, best first; ended: those that have.
    """

    texts: Sequence[Text]
    width: int
    plan: SuperposedStep
    stopping: Stopping
    ngrams: Ngrams | None = None
    going: list[list[Draft]] = field(default_factory=list)
    ended: list[list[Draft]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.going = [[Draft(text.tokens[text.prompt :], 0.0)] for text in self.texts]
        self.ended = [[] for _ in self.texts]

    @property
    def best(self) -> list[Found]:
        """What is returned: of each prompt its drafts, best first, with their scores."""
        found = []
        for going, ended in zip(self.going, self.ended, strict=True):
            both = sorted([*ended, *going], key=lambda draft: -draft.mean)[: self.width]
            if len(both) < self.width:
                raise InputError(
                    f"num_return_sequences={self.width}: no more than {len(both)} texts may follow "
                    f"a prompt: ask for fewer, or allow more tokens"
                )
            found += [Found(draft.tokens, [], draft.mean) for draft in both]
        return found

    def scores(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """What the drafts of a prompt may go on with, by the row's logits f32[V]: f32[D,V] behind
        each draft's own processors, or f32[1,V], which is all the same to them."""
        text, rows = self.texts[index], logits[None]
        if not text.processors:
            return rows
        prompt = text.tokens[text.unknown : text.prompt]
        ids = [[*prompt, *draft.tokens] for draft in self.going[index]]
        rows = rows.repeat(len(ids), 1)
        for processor in text.processors:
            rows = processor(torch.tensor(ids, dtype=torch.int64), rows)
        return rows

    def advance(self, index: int, scores: torch.Tensor) -> bool:
        """Let the drafts of a prompt grow by a token. scores: see `scores`. Whether they go on.

        The text then holds the likeliest draft but for its last token, which is the next to be fed,
        and with it the mixture. Errors: `InputError` for scores that are NaN."""
        text, going, ended = self.texts[index], self.going[index], self.ended[index]
        last: list[Draft] = []
        for draft in self._grown(text, going, scores):
            (ended if self._ends(text, draft) else last).append(draft)
            if len(last) == self.width:
                break
        ended.sort(key=lambda draft: -draft.mean)
        del ended[self.width :]
        self.going[index] = last
        return self._goes_on(index)

    def _grown(self, text: Text, going: list[Draft], scores: torch.Tensor) -> list[Draft]:
        """The drafts and a token more, the likeliest first."""
        count = min(self.width * self.plan.spread, scores.shape[-1])
        values, places = scores.topk(count)
        if bool(values.isnan().any()) or not bool(values[:, 0].isfinite().all()):
            raise bad_logits()
        logs = (values.double() / self.plan.temperature).log_softmax(-1).numpy()
        grown: list[Draft] = []
        for place, draft in enumerate(going):
            row = min(place, len(logs) - 1)
            own = logs[row][np.isfinite(logs[row])]  # what processors forbid is not
            tokens: list[int] = places[row].tolist()[: len(own)]
            gains = own if self.ngrams is None else self._smoothed(text, draft, tokens, own)
            for token, gain in zip(tokens, gains.tolist(), strict=True):
                grown.append(Draft([*draft.tokens, token], draft.score + gain))
        return sorted(grown, key=lambda draft: -draft.score)

    def _goes_on(self, index: int) -> bool:
        """Whether a draft may still become one of the best; if not, none of them is."""
        going, ended = self.going[index], self.ended[index]
        if not going or (len(ended) == self.width and going[0].mean <= ended[-1].mean):
            self.going[index] = []
            return False
        text = self.texts[index]
        text.tokens[text.prompt :] = going[0].tokens[:-1]
        text.mixture = mixed([draft.tokens[-1] for draft in going], [one.score for one in going])
        return True

    def _ends(self, text: Text, draft: Draft) -> bool:
        return self.stopping.ends(
            replace(text, tokens=[*text.tokens[: text.prompt], *draft.tokens])
        )

    def _smoothed(
        self, text: Text, draft: Draft, tokens: list[int], own: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """What the n-gram models make of log probabilities of the tokens that may follow."""
        assert self.ngrams is not None
        plan, prompt = self.plan, text.tokens[text.unknown : text.prompt]
        told = self.ngrams.mixture([*prompt, *draft.tokens], plan.orders, tokens)
        if not told.any():
            return (1 - plan.alpha) * own - plan.penalty
        logs = np.log(told, where=told > 0, out=np.full(len(told), UNKNOWN))
        return (1 - plan.alpha) * own + plan.alpha * logs


def mixed(tokens: Sequence[int], scores: Sequence[float]) -> Mixture:
    """What is mixed into the first of some tokens: the others, each by its share of all
    probability.

    >>> mixed([3, 5], [0.0, 0.0])
    [(5, 0.5)]
    """
    shares = np.exp(np.array(scores) - max(scores))
    shares /= shares.sum()
    pairs = zip(tokens, shares.tolist(), strict=True)
    return [(token, share) for token, share in list(pairs)[1:] if share > 0 and token != tokens[0]]


def superposed(options: GenerationOptions, plan: SuperposedStep) -> tuple[int, GenerationOptions]:
    """How many drafts one row stands for, 0: a text of its own; and the options of that row.

    Errors: `InputError` for more drafts than the recipe has, and options that follow one text."""
    count = options.num_return_sequences
    if count == 1 or options.do_sample or options.beams:
        return 0, options
    asked = f"num_return_sequences={count}"
    if count > plan.drafts:
        raise InputError(
            f"{asked}: the recipe keeps at most {plan.drafts} texts in a row "
            f"(superpose.drafts); give fewer, set that option, or sample (do_sample=True)"
        )
    why = f"{asked} without sampling keeps several texts in one row"
    if (grammar := grammar_asked(options)) is not None:
        raise InputError(f"{grammar}: {why}, and a grammar follows one: sample (do_sample=True)")
    if options.guided:
        raise InputError(f"guidance_scale: {why}, and guides follow one: sample (do_sample=True)")
    for hook in options.logits_processor:  # type: ignore[union-attr]
        if isinstance(hook, Sampler):
            name = type(hook).__name__
            raise InputError(f"{name}: {why}, and it follows one: take one of the two")
    if options.forced_eos_token_id is not None:
        raise InputError(f"forced_eos_token_id: {why}, which it would make alike: leave it out")
    if options.streamer is not None:
        raise InputError(f"streamer: {why}, which change until they end: leave it out")
    if options.image_embeds is not None:
        raise InputError(f"image_embeds: {why}, of prompts without pictures: sample, or take beams")
    for name in ("output_scores", "output_logits"):
        if options.records and getattr(options, name):
            raise InputError(
                f"{name}: {why}, none of which has scores of its own: leave it out; "
                f".sequences_scores comes without it"
            )
    return count, replace(options, num_return_sequences=1)


def ngrams_of(executable: Executable, plan: SuperposedStep) -> Ngrams | None:
    """The n-gram models of a plan's text, counted at first use and kept with the executable."""
    if plan.weight is None or not plan.alpha:
        return None
    kept: dict[tuple[str, int], Ngrams] = executable.scratch(Ngrams, shared=True)
    key = plan.weight, len(plan.orders) - 1
    if key not in kept:
        kept[key] = Ngrams(executable.program.weights[plan.weight].load().numpy(), key[1])
    return kept[key]
