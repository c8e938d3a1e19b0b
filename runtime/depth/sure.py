"""Whether the layers so far are sure enough of what comes next.

Source: Schuster et al., "Confident Adaptive Language Modeling" (CALM, 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ir.plan.depth import ThresholdDepth
from ..asking.text import Text


def margins(logits: torch.Tensor, live: Sequence[int]) -> list[float]:
    """By how much the likeliest token is more probable than the second, by the first column of
    f[B,S,V], of some sequences."""
    best = logits[list(live), 0].float().softmax(-1).topk(2).values.cpu()
    found: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return found


def all_sure(
    record: ThresholdDepth, texts: Sequence[Text], live: Sequence[int], confidence: Sequence[float]
) -> bool:
    """Whether every one of some sequences may leave with its confidence."""
    return all(
        sure > record.bound(_along(texts[index]))
        for sure, index in zip(confidence, live, strict=True)
    )


def _along(text: Text) -> float:
    return text.generated / max(text.limit - text.prompt, 1)
