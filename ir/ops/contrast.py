"""Logits that contrast a model's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, op
from .eviction import rounded

FAR = 1e4
"""What tokens lose that are not plausible: they stay in order, and their probability is 0."""


def _samples() -> Iterator[Sample]:
    last, early = torch.randn(2, 3, 11) * 3, torch.randn(2, 2, 3, 11)
    yield (last, early), {"plausible": 0.1}
    yield (last, early[:1]), {"plausible": 0.0}


@op("last: BSV, early: JBSV, J >= 1 -> f32 BSV", samples=_samples)
def contrast_layers(last: Tensor, early: Tensor, *, plausible: float) -> Tensor:
    """What the last layer says more than the early one that differs most from it.

    ``%y: f32[B,S,V] = graftwork.contrast_layers(%last, %early, plausible=0.1)``

    last [B,S,V]: logits; early [J,B,S,V]: those of other layers -> log p - log q, where q is of the
    layer with the largest Jensen-Shannon divergence from p, chosen for each row (in 1/1024 nats; of
    equal ones the first). Tokens with less than `plausible` times the probability of the likeliest
    lose 10,000. Source: Chuang et al., "DoLa: Decoding by Contrasting Layers Improves Factuality in
    Large Language Models" (2023).
    """
    own, others = last.float().log_softmax(-1), early.float().log_softmax(-1)
    p, q = own.exp(), others.exp()
    middle = (0.5 * (p + q)).clamp(min=1e-30).log()
    divergence = (p * (own - middle)).sum(-1) + (q * (others - middle)).sum(-1)
    chosen = rounded(0.5 * divergence).argmax(0)
    index = chosen[None, :, :, None].expand(1, *own.shape)
    contrast = own - others.gather(0, index)[0]
    if plausible <= 0:
        return contrast
    least = own.amax(-1, keepdim=True) + math.log(plausible)
    return torch.where(own >= least, contrast, own - FAR)
