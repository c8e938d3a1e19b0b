"""Two models that take turns: the smaller one writes where the text is easy.

Source: Simonds, "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference"
(2025). The model that does not write lacks rows of the other's tokens; it makes them in one call
when its turn comes, or when they are many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ....ir.execution.executable import Executable
from ....ir.plan import DecodePlan, DepthRecord, Returned, record
from ....ir.plan.bounds import Amount, Context, Filled, Nodes
from ....runtime.asking.text import Text
from ....runtime.depth.base import DEPTHS, DepthPolicy, StepFeed
from ....runtime.feeding.draft import UnverifiedStep
from ....runtime.feeding.feed import Feeder
from ....runtime.feeding.gather import gathered
from ....runtime.feeding.outputs import Outputs


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

    def ending(self, plan: DecodePlan) -> str:
        return self.function

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {"logits": ("", "", "V")}


class Writer:
    """One of the models. known: by sequence, the rows that its cache has of the text."""

    def __init__(self, feeder: Feeder, texts: Sequence[Text]) -> None:
        self.feeder, self.texts = feeder, texts
        self.known = [0] * len(texts)

    def note(self) -> None:
        """A step begins: rows of drafts that were not kept are none of the text's."""
        rows = zip(self.known, self.texts, strict=True)
        self.known = [min(known, text.rows) for known, text in rows]

    def lacking(self) -> int:
        """Rows that it has to make before its next token, of the sequence with the most."""
        rows = zip(self.known, self.texts, strict=True)
        return max((text.rows - known for known, text in rows if not text.done), default=0)

    def catch_up(self) -> None:
        """Make the rows that are lacking."""
        if self.lacking():
            self._run([0] * len(self.texts), ())

    def write(self, fetch: tuple[str, ...]) -> Outputs:
        """What is said after each text's last token, in column 0; the rows up to it are made."""
        places = [text.rows - known for known, text in zip(self.known, self.texts, strict=True)]
        outputs = self._run([1] * len(self.texts), fetch)
        if not any(places):
            return outputs
        column = np.array([[0 if t.done else p] for t, p in zip(self.texts, places, strict=True)])
        return Outputs({name: gathered(value, column) for name, value in outputs.items()})

    def _run(self, more: Sequence[int], fetch: tuple[str, ...]) -> Outputs:
        """Feed what is lacking, and `more[b]` tokens behind it."""
        texts = self.texts
        past = [0 if text.done else n for text, n in zip(texts, self.known, strict=True)]
        lag = [text.rows - n for text, n in zip(texts, self.known, strict=True)]
        rows = [
            [] if text.done else text.tokens[len(text.tokens) - 1 - n :][: n + extra]
            for text, n, extra in zip(texts, lag, more, strict=True)
        ]
        starts = [0 if text.done else text.position - n for text, n in zip(texts, lag, strict=True)]
        outputs = self.feeder.run(StepFeed(rows, past, starts, fetch))
        self.known = [n + len(row) for n, row in zip(past, rows, strict=True)]
        return outputs


@DEPTHS.register(EntropyDepth)
class EntropyPolicy(DepthPolicy):
    """Asks, before each token, how uncertain the latest ones were.

    small: whether the smaller model writes now; since: tokens that it, or the other, wrote in a
    row. recent: by sequence, the entropies of the latest tokens' distributions.
    """

    record: EntropyDepth
    reads = True

    def __init__(self, record: EntropyDepth, executable: Executable) -> None:
        super().__init__(record, executable)
        self.context = record.context or executable.program.info.context

    def begin(self, feeder: Feeder, texts: Sequence[Text]) -> None:
        super().begin(feeder, texts)
        other = Feeder(self.executable, len(texts), self.record.function)
        other.rows = feeder.rows
        self.target, self.other = Writer(feeder, texts), Writer(other, texts)
        self.small, self.since, self.started = False, 0, False
        self.recent = [deque[float](maxlen=self.record.window) for _ in texts]

    def read(self, fed: UnverifiedStep) -> None:
        if self.started:
            return
        feeder, longest = self.other.feeder, max(map(len, fed.rows))
        width = feeder.chunk(longest)
        for first in range(0, longest, width):
            rows = [row[first : first + width] for row in fed.rows]
            starts = [n + min(first, len(r)) for n, r in zip(fed.starts, fed.rows, strict=True)]
            column = [max(len(row) - 1, 0) for row in rows]
            feeder.run_picking(StepFeed(rows, starts, starts, (), width), column)

    def feed(self, step: StepFeed) -> Outputs:
        models = (self.target, self.other)
        for model in models:
            if not self.started:
                model.known = [text.rows for text in self.texts]
            model.note()
        self.started, self.ran = True, self.total
        fetch = tuple(dict.fromkeys(("logits", *step.fetch)))
        if any(len(row) > 1 for row in step.rows):  # drafts are verified by the target
            self.target.catch_up()
            self.target.known = [n + len(r) for n, r in zip(step.past, step.rows, strict=True)]
            outputs = super().feed(step._replace(fetch=fetch))
            self._note(outputs["logits"])
            return outputs
        self._take_turns(step)
        writer = self.other if self.small else self.target
        outputs = writer.write(fetch)
        self._note(outputs["logits"])
        for model in models:
            if model.lacking() >= self.record.pending:
                model.catch_up()
        self.ran = 0 if self.small else self.total
        return outputs

    def _take_turns(self, step: StepFeed) -> None:
        """Decide who writes."""
        live = [index for index, text in enumerate(self.texts) if not text.done]
        unsure = any(self._mean(index) > self.record.threshold for index in live)
        # Where the smaller model's positions end, the target alone goes on.
        ended = max(step.starts) + self.record.pending + 1 >= self.context
        if ended or (self.since >= self.record.least and self.small is unsure):
            self.small, self.since = not (unsure or ended), 0
        self.since += 1

    def _mean(self, index: int) -> float:
        recent = self.recent[index]
        return sum(recent) / len(recent) if recent else 0.0

    def _note(self, logits: torch.Tensor) -> None:
        """Take in the entropies of a step's distributions, in bits."""
        logs = logits[:, 0].float().log_softmax(-1).cpu()
        entropies = -(logs.exp() * logs).nan_to_num(0.0).sum(-1) / math.log(2)
        for recent, entropy in zip(self.recent, entropies.tolist(), strict=True):
            recent.append(entropy)
