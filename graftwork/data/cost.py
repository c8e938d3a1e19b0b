"""What a recipe costs a text: its predictions beside those of the model that it was made from.

Both run on the same target by the path that generates, whole texts at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ..ir import InputError, Program
from ..passes.engine.base import Effect, all_passes
from ..passes.engine.evidence import TextSample, sampled
from ..report import Cost, Report, megabytes
from .corpus import SAMPLE, read_corpus
from .prompts import Prompts

LENGTH, MOST = 256, 48
"""Tokens of a window, and windows at most."""
LONG = 2048
"""Tokens of a window where caches hold or read other rows than the model's: those that keep 1,024
rows have dropped some by then."""
AT_ONCE = 64
"""Tokens that are compared at once, and of one part of which differences have a standard error."""


LARGEST = 1e6
"""Perplexity, its ratio, or an error of that, that stands for larger ones: a text with tokens that
a recipe rules out, as `dola` does, has none."""


def perplexed(nats: float) -> float:
    """The perplexity of so many nats a token, `LARGEST` at most.

    >>> round(perplexed(0.5), 3), perplexed(2000.0)
    (1.649, 1000000.0)
    """
    return min(math.exp(min(nats, 700.0)), LARGEST)


class Predicting(Protocol):
    """What is measured: logits f32[B,S,V] of token ids i64[B,S]; the first `prompt` of them are run
    as one."""

    @property
    def program(self) -> Program: ...
    @property
    def report(self) -> Report | None: ...
    def __call__(self, input_ids: torch.Tensor, /, *, prompt: int = 1) -> torch.Tensor: ...


class Remembered:
    """A model that several are set beside, whose logits of a text are computed once: those of the
    first texts, up to a third of the memory that is free."""

    def __init__(self, model: Predicting) -> None:
        self.program, self.report, self._model = model.program, model.report, model
        self._known: dict[tuple[bytes, int], torch.Tensor] = {}
        self._left = (available() or 0) // 3

    def __call__(self, input_ids: torch.Tensor, /, *, prompt: int = 1) -> torch.Tensor:
        key = input_ids.numpy().tobytes(), prompt
        known = self._known.get(key)
        if known is None:
            known = self._model(input_ids, prompt=prompt)
            if known.nbytes <= self._left:
                self._left -= known.nbytes
                self._known[key] = known
        return known


def why_not(made: Predicting) -> str:
    """Why a cost is not measured where nobody asked for it; "" if it can be."""
    program, report = made.program, made.report
    if program.plan.source.encoder is not None or "tokenizer.json" not in program.assets:
        return "it takes a model that continues texts, with its tokenizer"
    free = available()
    needed = 0 if report is None else 2 * report.weight_bytes_before
    needed += 3 * 4 * program.info.vocab_size * _width(made)
    if free is not None and needed > free:
        return f"the model itself would take {megabytes(needed)}, and {megabytes(free)} are free"
    return ""


def tokens_of(text: Prompts | None, made: Predicting) -> torch.Tensor:
    """The tokens i64[N] of a text; None: `SAMPLE`. Errors: `InputError` for fewer than are read
    before the first that is predicted."""
    documents = read_corpus(SAMPLE if text is None else text, made.program)
    tokens = torch.tensor([token for document in documents for token in document])
    least = 4 if made.program.plan.step.ahead else 2
    if min(len(tokens), made.program.info.context) < least:
        raise InputError(f"cost: a text of {len(tokens)} tokens has nothing to predict")
    return tokens


def _width(made: Predicting) -> int:
    """Tokens of a window."""
    passes = () if made.report is None else made.report.passes
    known = all_passes()
    rows = any(Effect.CACHE_CONTENTS in known[line.name].effects for line in passes)
    return min(LONG if rows else LENGTH, made.program.info.context)


def available() -> int | None:
    """Bytes of memory that can be had; None where the system does not tell (but on Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def cost_of(
    made: Predicting,
    plain: Predicting,
    text: Prompts | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    sample: TextSample | None = None,
) -> Cost:
    """What `made` costs on a text; None: `SAMPLE`. plain: the model that it was made from, on the
    same target. sample: windows that are read; None: all. Errors: `InputError` for texts that do
    not make a window of two tokens."""
    tokens = tokens_of(text, made)
    most, wanted = (MOST, _width(made)) if sample is None else (sample.windows, sample.length)
    width = min(wanted, made.program.info.context, len(tokens))
    half = bool(made.program.plan.step.ahead)
    count = min(most, len(tokens) // width)
    windows = sampled(tokens, TextSample(count, width), made.program)
    # Where prompts run otherwise than what follows them, so does the first half of each window.
    first = width // 2 - 1 if half else 0
    divergence, apart, alike, nats = 0.0, 0.0, 0, 0.0
    parts: list[float] = []
    for number, window in enumerate(windows):
        progress(f"measure what it costs, {100 * number // count}%")
        ids = window[None]
        own, other = made(ids, prompt=first + 1)[0, :-1], plain(ids)[0, :-1]
        for start in range(first, width - 1, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            ours, theirs = (logits[part].log_softmax(-1) for logits in (own, other))
            divergence += float((theirs.exp() * (theirs - ours)).sum())
            alike += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            said = window[1:][part, None]
            own_said = ours.gather(1, said).double()
            worse = theirs.gather(1, said).double() - own_said
            apart += float(worse.sum())
            nats -= float(own_said.sum())
            parts.append(float(worse.mean()))
    predicted = count * (width - 1 - first)
    ratio = perplexed(apart / predicted)
    error = statistics.stdev(parts) / math.sqrt(len(parts)) * ratio if len(parts) > 1 else 0.0
    error = min(error, LARGEST)
    return Cost(
        text="a bundled text" if text is None else "the given text",
        tokens=predicted,
        divergence=divergence / predicted,
        ratio=ratio,
        error=error,
        agreement=alike / predicted,
        perplexity=perplexed(nats / predicted),
        prompts=half,
    )
