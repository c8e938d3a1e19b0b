"""Two models that take turns: the smaller one writes where the text is easy.

Source: Simonds, "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference"
(2025). The model that does not write lacks rows of the other's tokens, and the smaller one those
of the prompt: each makes them when its turn comes, so one whose turn never comes costs nothing.
"""

from __future__ import annotations

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
from ....runtime.feeding.feed import Feeder
from ....runtime.feeding.gather import gathered
from ....runtime.feeding.outputs import Outputs
from ....runtime.memo import Memo

ENTROPY = "entropy"


@record
@dataclass(frozen=True)
class EntropyDepth(DepthRecord):
    """A smaller model writes where it is sure, the target where it is not (Entropy Adaptive
    Decoding).

    function: the smaller model's step, with a cache of its own. It and the target's step return
    ``entropy`` f32[B,S], in bits, of the distribution behind each chosen token. threshold: the
    target writes where the mean entropy of the distributions that the latest `window` tokens were
    chosen from, by whichever model, exceeds it, in bits. least: tokens that a model writes before
    the other may. pending: tokens that it lacks then which it may read in the same call as the
    next; more are read before, as prompts are. context: the smaller model's positions, where those
    are fewer. A batch changes together: one unsure text suffices. Source: Simonds, "Entropy
    Adaptive Decoding" (2025).
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
        for function in dict.fromkeys((*plan.step.variants, self.function)):
            yield function, {"logits": ("", "", "V"), ENTROPY: ("", "")}


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

    def catch_up(self, spare: int = 0) -> None:
        """Make the rows that are lacking, as prompts' are, but for up to `spare` that are left for
        the next call."""
        while (lacking := self.lacking()) > spare:
            width = self.feeder.chunk(lacking)
            past, starts, rows = self._missing(0)
            rows = [row[:width] for row in rows]
            column = [max(len(row) - 1, 0) for row in rows]
            self.feeder.run_picking(StepFeed(rows, past, starts, (), width), column)
            self._made(past, rows)

    def write(self, fetch: tuple[str, ...]) -> Outputs:
        """What is said after each text's last token, in column 0; the rows up to it are made."""
        past, starts, rows = self._missing(1)
        outputs = self.feeder.run(StepFeed(rows, past, starts, fetch))
        self._made(past, rows)
        column = np.array([[max(len(row) - 1, 0)] for row in rows])
        if not column.any():
            return outputs
        return Outputs({name: gathered(value, column) for name, value in outputs.items()})

    def _missing(self, more: int) -> tuple[list[int], list[int], list[list[int]]]:
        """Rows that are there of each sequence, the next one's position, and the tokens to feed
        behind them: what is lacking, and `more` behind that."""
        past = [0 if text.done else n for text, n in zip(self.texts, self.known, strict=True)]
        starts, rows = [], list[list[int]]()
        for text, known in zip(self.texts, self.known, strict=True):
            lag, first = text.rows - known, len(text.tokens) - 1 - (text.rows - known)
            starts.append(0 if text.done else text.position - lag)
            rows.append([] if text.done else text.tokens[first : first + lag + more])
        return past, starts, rows

    def _made(self, past: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        self.known = [n + len(row) for n, row in zip(past, rows, strict=True)]


@DEPTHS.register(EntropyDepth)
class EntropyPolicy(DepthPolicy):
    """Asks, before each token, how uncertain the latest ones were.

    small: whether the smaller model writes now; since: tokens that it, or the other, wrote in a
    row. recent: by sequence, the entropies of the latest tokens' distributions.
    """

    record: EntropyDepth
    reads = True  # the prompts' tokens, though later

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

    def keep(self, index: int, fed: int) -> Memo:
        """small.rows: i64, how many the smaller model's caches hold."""
        return {"small.rows": torch.tensor(self.other.known[index])}

    def resume(self, index: int, memo: Memo, count: int) -> None:
        if "small.rows" in memo:
            self.other.known[index] = min(int(memo["small.rows"]), self.texts[index].rows)

    def feed(self, step: StepFeed) -> Outputs:
        if not self.started:  # of the prompts' rows the target has made all
            self.target.known, self.started = [text.rows for text in self.texts], True
        for model in (self.target, self.other):
            model.note()
        self.ran = self.total
        fetch = tuple(dict.fromkeys((ENTROPY, *step.fetch)))
        if any(len(row) > 1 for row in step.rows):  # drafts are verified by the target
            self.target.catch_up()
            self.target.known = [n + len(r) for n, r in zip(step.past, step.rows, strict=True)]
            outputs = super().feed(step._replace(fetch=fetch))
        else:
            self._take_turns(step)
            writer = self.other if self.small else self.target
            writer.catch_up(self.record.pending)
            outputs = writer.write(fetch)
            self.ran = 0 if self.small else self.total
        entropies = outputs[ENTROPY][:, 0].tolist()
        for recent, entropy in zip(self.recent, entropies, strict=True):
            recent.append(entropy)
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
