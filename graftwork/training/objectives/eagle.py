"""Drafts with a cache: predict the target's next feature and token from earlier ones.

Sources: Li et al., "EAGLE" (2024): SmoothL1 on features plus 0.1 times cross entropy against the
target's distribution, with uniform noise on input features, because the draft's own are inexact.
Li et al., "EAGLE-3" (2025): cross entropy alone, on the target's features and for some levels on
the draft's own states, weighted decay^level. Draft models are distilled (Zhou et al.,
"DistillSpec", 2024).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...ir.plan import CachedDraft
from .base import Batch, Loss, Run, distilled, hit_rate, objective

TOKEN_SHARE = 0.1
"""Weight of the cross entropy; the features' loss has 1."""

NOISE = 0.2
"""Width of the noise for windows of 512 tokens; inversely proportional to the length."""


@objective(CachedDraft)
def cached_loss(record: CachedDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    if record.output is None:
        student = run(record.function, tokens=batch.tokens)["draft_logits"]
        return Loss(
            distilled(student, batch.target(record.aim), 0), [hit_rate(student, batch.best, 0)]
        )
    features = batch.hidden[record.output]
    if record.rollout:
        return rolled_out(record, run, batch, features[:, :-1])
    # The feature after token t and token t + 1 predict the next feature.
    given = noisy(features[:, :-1], batch.tokens)
    outputs = run(record.function, tokens=batch.tokens[:, 1:], hidden=given)
    regression = torch.nn.functional.smooth_l1_loss(
        outputs["hidden"].float(), features[:, 1:].float()
    )
    student = outputs["draft_logits"]
    tokens = distilled(student, batch.target(record.aim), 1)
    return Loss(regression + TOKEN_SHARE * tokens, [hit_rate(student, batch.best, 1)])


def rolled_out(record: CachedDraft, run: Run, batch: Batch, features: torch.Tensor) -> Loss:
    """The loss of all levels, from features f[N,T-1,F] at all positions."""
    if record.entry is not None:
        features = run(record.entry, hidden=features)["hidden"]
    target = batch.target(record.aim)
    total, hits = torch.zeros((), device=features.device), []
    levels = rollout(record.function, run, batch.tokens, features, record.rollout)
    for level, (student, *_) in enumerate(levels):
        total = total + record.decay**level * distilled(student, target, 1 + level)
        hits.append(hit_rate(student, batch.best, 1 + level))
    return Loss(total, hits)


def rollout(
    function: str, run: Run, tokens: torch.Tensor, features: torch.Tensor, levels: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run a draft function for several levels at all positions of tokens i64[N,T] at once, from
    features f[N,T-1,H]. Yields, for level i, logits [N,T-1-i,V], states [N,T-1-i,H] and the inputs
    of the head; fewer levels if T is small.

    Position t of level i reads token t + 1 + i and the state of position t at level i - 1. It
    attends to the positions up to t of level 0, and to position t of the levels between.
    """
    batches, width = features.shape[:2]
    text, tokens = tokens, tokens[:, 1:]
    given, places = features, torch.arange(width)
    seen = torch.ones(width, width, dtype=torch.bool).tril()
    depths = torch.zeros(width, dtype=torch.int64)
    for level in range(levels):
        count = min(width - level, len(places))
        last = torch.arange(len(places) - count, len(places))
        inputs = {"positions": places + depths, "select": last}
        inputs = {n: v.to(tokens.device).expand(batches, -1) for n, v in inputs.items()}
        if level:
            inputs["ancestors"] = seen.to(tokens.device).expand(batches, -1, -1)
        outputs = run(function, tokens=tokens, hidden=given, **inputs)
        made = outputs["hidden"][:, -count:]
        read = outputs.get("feature", outputs["hidden"])[:, -count:]
        yield outputs["draft_logits"][:, -count:], made, read
        if count <= 1:
            return
        # The next level has one position less: the last one has no next token.
        given = torch.cat([given, made[:, :-1]], 1)
        tokens = torch.cat([tokens, text[:, 2 + level :]], 1)
        seen = _deeper(seen, last[:-1])
        places = torch.cat([places, places[last[:-1]]])
        depths = torch.cat([depths, torch.full((count - 1,), level + 1)])


def _deeper(seen: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Ancestors bool[M+C,M+C]: of bool[M,M] and a child of each node in `above`, i64[C]."""
    have, count = len(seen), len(above)
    wider = torch.zeros(have + count, have + count, dtype=torch.bool)
    wider[:have, :have] = seen
    wider[have:, :have] = seen[above]
    wider[have:, have:] = torch.eye(count, dtype=torch.bool)
    return wider


def noisy(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Features f[N,T,H] with noise seeded by the tokens, so that training is reproducible."""
    generator = torch.Generator(features.device).manual_seed(int(tokens.sum()))
    noise = torch.rand(
        features.shape, generator=generator, device=features.device, dtype=torch.float32
    )
    width = NOISE * 512 / tokens.shape[1]
    return features + ((noise - 0.5) * width).to(features.dtype)
