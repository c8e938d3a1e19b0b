"""Whether the layers so far are sure enough of what comes next.

Source: Schuster et al., "Confident Adaptive Language Modeling" (CALM, 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...ir.plan.depth import ThresholdDepth
from ..asking.text import Text
from ..feeding.outputs import Outputs


def margins(outputs: Outputs, live: Sequence[int]) -> list[float]:
    """p(best) - p(second) by the first column of ``logits`` f[B,S,V], of some sequences."""
    # By numpy: torch takes 0.3 ms for so little right after a model has run.
    rows = outputs.floats("logits")
    return [_margin(rows[index, 0]) for index in live]


def _margin(logits: npt.NDArray[np.float32]) -> float:
    """Of logits f32[V]. NaN where there is one."""
    best = int(logits.argmax())
    chances = np.exp(logits - logits[best])
    total = float(chances.sum())
    chances[best] = 0.0
    return (1.0 - float(chances.max())) / total


def may_leave(record: ThresholdDepth, texts: Sequence[Text], live: Sequence[int]) -> bool:
    """Whether what some sequences are about to write is among what may be written early."""
    return not record.tokens or all(texts[index].generated < record.tokens for index in live)


def all_sure(
    record: ThresholdDepth, texts: Sequence[Text], live: Sequence[int], confidence: Sequence[float]
) -> bool:
    """Whether every one of some sequences may leave with its confidence."""
    return all(
        sure > record.bound(_along(record, texts[index]))
        for sure, index in zip(confidence, live, strict=True)
    )


def _along(record: ThresholdDepth, text: Text) -> float:
    return text.generated / (record.tokens or max(text.limit - text.prompt, 1))
