"""From logits to the scores and probabilities that a token is chosen by.

Each function works on rows [R,V] at once; their order and meaning are transformers': repetition
penalty, no end before `min_new_tokens`, then (when sampling) temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..ir import InputError, ModelInfo
from .drafters.base import Draft
from .options import GenerationOptions
from .text import Text

NOTHING = float("-inf")


def penalize_repetition(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Seen tokens' scores divided by `penalty` where positive, multiplied where negative.

    scores f32[R,V]; seen bool[R,V]. Source: Keskar et al., "CTRL" (2019).
    """
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, penalized, scores)


def keep_top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Scores [R,V] with all below the row's `count`-th largest at -inf; ties with it stay.

    Source: Fan et al., "Hierarchical Neural Story Generation" (2018).
    """
    if count >= scores.shape[-1]:
        return scores
    bound = scores.topk(count).values[:, -1:]
    return scores.masked_fill(scores < bound, NOTHING)


def keep_top_p(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Scores [R,V] with the least likely tokens, together at most 1 - mass, at -inf.

    The most likely token always stays. Source: Holtzman et al., "The Curious Case of Neural Text
    Degeneration" (2020).
    """
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1)
    dropped = below <= 1 - mass
    dropped[:, -1] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), NOTHING)


def keep_min_p(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Scores [R,V] with tokens less likely than `share` of the row's likeliest at -inf.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024).
    """
    chances = scores.softmax(-1)
    return scores.masked_fill(chances < share * chances.amax(-1, keepdim=True), NOTHING)


class Scorer:
    """Turns the logits of a step's verified tokens into scores, under the user's options.

    A row belongs to a sequence and a number of draft tokens before it; what the repetition penalty
    counts as seen grows along the draft.
    """

    def __init__(self, options: GenerationOptions, info: ModelInfo, batch: int) -> None:
        self.options = options
        self.eos = list(options.eos(info))
        self.seen = torch.zeros(batch, info.vocab_size, dtype=torch.bool)
        self.counted = [0] * batch

    def rows(
        self, outputs: Mapping[str, torch.Tensor], texts: Sequence[Text], drafts: Sequence[Draft]
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Scores f32[R,V] and each row's (sequence, draft tokens before it).

        outputs["logits"] [B,S,V] with S > the longest draft; finished sequences give no rows.
        Errors: `InputError` if the model returned NaN.
        """
        owners = [
            (index, depth)
            for index, text in enumerate(texts)
            if not text.done
            for depth in range(len(drafts[index].tokens) + 1)
        ]
        sequence, column = (torch.tensor(axis) for axis in zip(*owners, strict=True))
        scores = outputs["logits"][sequence, column].float()
        if self.options.repetition_penalty != 1.0:
            seen = self._seen(texts, drafts, owners)
            scores = penalize_repetition(scores, seen, self.options.repetition_penalty)
        if self.options.min_new_tokens and self.eos:
            self._forbid_end(scores, texts, owners)
        return scores, owners

    def warp(self, scores: torch.Tensor) -> torch.Tensor:
        """Probabilities f32[R,V] to sample from. Errors: `InputError` for NaN scores."""
        options = self.options
        if options.temperature != 1.0:
            scores = scores / options.temperature
        if options.top_k:
            scores = keep_top_k(scores, options.top_k)
        if options.top_p < 1.0:
            scores = keep_top_p(scores, options.top_p)
        if options.min_p > 0.0:
            scores = keep_min_p(scores, options.min_p)
        chances = scores.softmax(-1)
        # One NaN or +inf score makes a whole row NaN, so one column tells.
        if bool(chances[:, 0].isnan().any()):
            raise bad_logits()
        return chances

    def _seen(
        self, texts: Sequence[Text], drafts: Sequence[Draft], owners: list[tuple[int, int]]
    ) -> torch.Tensor:
        for index, text in enumerate(texts):
            self.seen[index, text.tokens[self.counted[index] :]] = True
            self.counted[index] = len(text.tokens)
        seen = self.seen[[index for index, _ in owners]]
        for row, (index, depth) in enumerate(owners):
            seen[row, list(drafts[index].tokens[:depth])] = True
        return seen

    def _forbid_end(
        self, scores: torch.Tensor, texts: Sequence[Text], owners: list[tuple[int, int]]
    ) -> None:
        least = self.options.min_new_tokens
        early = [r for r, (i, depth) in enumerate(owners) if texts[i].generated + depth < least]
        for token in self.eos:
            scores[early, token] = NOTHING


def bad_logits() -> InputError:
    """The error for logits that no token can be chosen by."""
    return InputError(
        "the model's logits hold NaN or are all -inf: expected finite numbers; check the weights, "
        "or use a wider dtype (float16 overflows in some models: try bfloat16 or float32)"
    )


def best(scores: torch.Tensor) -> list[int]:
    """The best token of each row [R,V]; the first at a tie. Errors: `InputError` for NaN rows."""
    tokens = scores.argmax(-1)
    values = scores.gather(1, tokens[:, None])
    if bool((values.isnan() | values.isneginf()).any()):
        raise bad_logits()
    return tokens.tolist()
