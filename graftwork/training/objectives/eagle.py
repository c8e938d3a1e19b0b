"""A draft with a cache of its own: the target's next feature and token from the ones before.

Sources: Li et al., "EAGLE" (2024): SmoothL1 on features plus 0.1 times the cross entropy against
the target's distribution, with uniform noise on the features that go in, because those that the
draft makes itself are not exact. A second model that drafts is distilled (Zhou et al.,
"DistillSpec", 2024).
"""

from __future__ import annotations

import torch

from ...ir.plan import CachedDraft
from .base import Batch, Loss, Run, distilled, hit_rate, objective

TOKEN_SHARE = 0.1
"""Weight of the cross entropy beside the features' loss."""

NOISE = 0.2
"""Width of the noise at 512 tokens a window; shorter windows get more."""


@objective(CachedDraft)
def cached_loss(record: CachedDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    if record.output is None:
        student = run(record.function, tokens=batch.tokens)["draft_logits"]
        return Loss(distilled(student, batch.target, 0), [hit_rate(student, batch.best, 0)])
    features = batch.hidden[record.output]
    # The feature after token t goes in beside token t + 1 and gives the one after that.
    given = noisy(features[:, :-1], batch.tokens)
    outputs = run(record.function, tokens=batch.tokens[:, 1:], hidden=given)
    regression = torch.nn.functional.smooth_l1_loss(
        outputs["hidden"].float(), features[:, 1:].float()
    )
    student = outputs["draft_logits"]
    tokens = distilled(student, batch.target, 1)
    return Loss(regression + TOKEN_SHARE * tokens, [hit_rate(student, batch.best, 1)])


def noisy(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Features f[N,T,H] with noise that the tokens decide, so that training repeats itself."""
    generator = torch.Generator(features.device).manual_seed(int(tokens.sum()))
    noise = torch.rand(
        features.shape, generator=generator, device=features.device, dtype=torch.float32
    )
    width = NOISE * 512 / tokens.shape[1]
    return features + ((noise - 0.5) * width).to(features.dtype)
