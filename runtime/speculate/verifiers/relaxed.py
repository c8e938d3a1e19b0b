"""What approximate verifiers share: some tokens pass that the target would not have chosen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log

import numpy as np
import torch

from ....ir.plan import Tolerant, TopKAccept, Typical, Vouched
from ...asking.checks import bad_logits
from ...feeding.draft import Draft
from ..sampling import Array, Chances, StepToVerify, best
from .base import GREEDY, NOTHING_GAINED, SAMPLING, VERIFIERS, Verdict, Verifier


class RelaxedVerifier(Verifier):
    """The longest path of tokens that pass, the likeliest of several; then one token of the target.

    That token is the best one, or under sampling one drawn under the user's options, so a step
    without a draft is plain decoding. Whether a token passes is decided on the target's
    probabilities p: after the user's options when sampling, as they are when greedy. The best token
    always passes, so a relaxed verifier keeps no fewer tokens than greedy verification of the same
    draft. Register subclasses for both `GREEDY` and `SAMPLING`.
    """

    @abstractmethod
    def bounds(self, probs: Array) -> Array:
        """How likely a token must be to pass, f32[R], after p f32[R,K] whose rows add up to 1."""

    def verify(self, step: StepToVerify) -> list[Verdict]:
        drafts = step.drafts
        scores, owners = self.scorer.rows(step)
        first = {index: row for row, (index, node) in enumerate(owners) if node < 0}
        paths = self._paths(scores, first, drafts)
        ends = [first[i] + (path[-1] + 1 if path else 0) for i, path in paths.items()]
        verdicts = [NOTHING_GAINED] * len(drafts)
        for (index, path), token in zip(paths.items(), self._choose(scores[ends]), strict=True):
            accepted = [drafts[index].tokens[node] for node in path]
            verdicts[index] = Verdict(path, [*accepted, token])
        return verdicts

    def _choose(self, scores: torch.Tensor) -> list[int]:
        if not self.options.do_sample:
            return best(scores)
        return self.scorer.warp(scores).draw(self.options.random())

    def _paths(
        self, scores: torch.Tensor, first: Mapping[int, int], drafts: Sequence[Draft]
    ) -> dict[int, list[int]]:
        """For each sequence the path that is kept."""
        families = [(index, drafts[index].children()) for index in first]
        # Only rows that a draft token follows are looked at: leaves need no probabilities.
        rows = [first[i] + parent + 1 for i, family in families for parent in family]
        if not rows:
            return {index: [] for index in first}
        chances = self._chances(scores[rows])
        bounds = self.bounds(chances.probs).tolist()
        places = iter(range(len(rows)))
        return {
            index: self._longest(drafts[index], family, chances, bounds, places)
            for index, family in families
        }

    def _longest(
        self,
        draft: Draft,
        family: Mapping[int, Sequence[int]],
        chances: Chances,
        bounds: Sequence[float],
        places: Iterator[int],
    ) -> list[int]:
        """The best path of one draft; `places` yields the row of each parent in turn."""
        # Length and log probability of each path that passes; parents come before their children.
        reached = {-1: (0, 0.0)}
        for parent, siblings in family.items():
            place = next(places)
            if parent not in reached:
                continue
            depth, worth = reached[parent]
            tokens = [draft.tokens[node] for node in siblings]
            likely = chances.of([place] * len(tokens), tokens)
            for node, chance in zip(siblings, likely, strict=True):
                if chance > 0 and chance >= bounds[place]:
                    reached[node] = (depth + 1, worth + log(chance))
        return draft.path(max(reached, key=reached.__getitem__))

    def _chances(self, scores: torch.Tensor) -> Chances:
        if self.options.do_sample:
            return self.scorer.warp(scores)
        probs = scores.softmax(-1).numpy()
        if np.isnan(probs[:, 0]).any():
            raise bad_logits()
        return Chances(probs, None)


@VERIFIERS.register(TopKAccept, GREEDY)
@VERIFIERS.register(TopKAccept, SAMPLING)
class TopKVerifier(RelaxedVerifier):
    """A token passes if it is among the `count` likeliest, or as likely as the last of them.

    Source: Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models" (2018),
    section 5.1.
    """

    record: TopKAccept

    def bounds(self, probs: Array) -> Array:
        count = min(self.record.count, probs.shape[-1])
        found: Array = torch.from_numpy(probs).topk(count).values[:, -1].numpy()
        return found


@VERIFIERS.register(Tolerant, GREEDY)
@VERIFIERS.register(Tolerant, SAMPLING)
class TolerantVerifier(RelaxedVerifier):
    """A token passes if it is among the `count` likeliest and log p is at most `gap` below the
    best token's.

    Source: Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating
    Seq2seq Generation" (2023), section 3.2.
    """

    record: Tolerant

    def bounds(self, probs: Array) -> Array:
        count = min(self.record.count, probs.shape[-1])
        likeliest = torch.from_numpy(probs).topk(count).values.numpy()
        near = np.minimum(likeliest[:, 0] * exp(-self.record.gap), likeliest[:, 0])
        found: Array = np.maximum(likeliest[:, -1], near)
        return found


@VERIFIERS.register(Typical, GREEDY)
@VERIFIERS.register(Typical, SAMPLING)
class TypicalVerifier(RelaxedVerifier):
    """A token passes if p reaches min(floor, share * exp(-entropy of p)).

    exp(-entropy) is at most the best token's p. Source: Cai et al., "Medusa: Simple LLM Inference
    Acceleration Framework with Multiple Decoding Heads" (2024), section 2.3.1.
    """

    record: Typical

    def bounds(self, probs: Array) -> Array:
        tiny = np.finfo(probs.dtype).tiny
        entropy = -(probs * np.log(np.maximum(probs, tiny))).sum(-1)
        bounds = np.minimum(self.record.floor, self.record.share * np.exp(-entropy))
        # Rounding must not stop the best token of a flat distribution.
        found: Array = np.minimum(bounds, probs.max(-1))
        return found


@VERIFIERS.register(Vouched, GREEDY)
@VERIFIERS.register(Vouched, SAMPLING)
class VouchedVerifier(RelaxedVerifier):
    """A token passes unless the call's options rule it out.

    Source: Sun et al., "Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical
    Units for LLMs" (2024).
    """

    record: Vouched

    def bounds(self, probs: Array) -> Array:
        found: Array = np.zeros(len(probs), dtype=probs.dtype)
        return found
