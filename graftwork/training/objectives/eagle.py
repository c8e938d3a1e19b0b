"""A draft with a cache of its own: the target's next feature and token from the ones before.

Sources: Li et al., "EAGLE" (2024): SmoothL1 on features plus 0.1 times the cross entropy against
the target's distribution, with uniform noise on the features that go in, because those that the
draft makes itself are not exact. Li et al., "EAGLE-3" (2025): cross entropy alone, on the target's
features and then for some levels on the states that the draft makes itself, weighted decay^level. A
second model that drafts is distilled (Zhou et al., "DistillSpec", 2024).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...ir.plan import CachedDraft
from ...passes.drafting.draft_vocabulary import ABSENT
from .base import Batch, Loss, Run, distilled, hit_rate, objective

TOKEN_SHARE = 0.1
"""Weight of the cross entropy beside the features' loss."""

EVEN = 1e-8
"""Added to every probability before they are scaled to a draft's vocabulary."""

NOISE = 0.2
"""Width of the noise at 512 tokens a window; shorter windows get more."""


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
    # The feature after token t goes in beside token t + 1 and gives the one after that.
    given = noisy(features[:, :-1], batch.tokens)
    outputs = run(record.function, tokens=batch.tokens[:, 1:], hidden=given)
    regression = torch.nn.functional.smooth_l1_loss(
        outputs["hidden"].float(), features[:, 1:].float()
    )
    student = outputs["draft_logits"]
    tokens = distilled(student, batch.target(record.aim), 1)
    return Loss(regression + TOKEN_SHARE * tokens, [hit_rate(student, batch.best, 1)])


def rolled_out(record: CachedDraft, run: Run, batch: Batch, features: torch.Tensor) -> Loss:
    """What a draft of every level is worth, from features f[N,T-1,F] at every place at once."""
    if record.entry is not None:
        features = run(record.entry, hidden=features)["hidden"]
    target = None
    total, hits = torch.zeros((), device=features.device), []
    levels = rollout(record.function, run, batch.tokens, features, record.rollout)
    for level, (student, *_) in enumerate(levels):
        target = sayable(batch.target(record.aim), student) if target is None else target
        total = total + record.decay**level * distilled(student, target, 1 + level)
        hits.append(hit_rate(student, batch.best, 1 + level))
    return Loss(total, hits)


def rollout(
    function: str, run: Run, tokens: torch.Tensor, features: torch.Tensor, levels: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Logits [N,T-1-i,V], states [N,T-1-i,H] and what the head reads of them, of level i = 0.. that
    a draft function makes at every place of tokens i64[N,T] at once, from features f[N,T-1,H];
    fewer levels where T is small.

    Place t of level i has fed token t + 1 + i beside the state that place t of the level before
    made. It sees the places up to t of level 0, as a draft sees the text's rows, and itself on the
    levels between.
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
        # The next level: one place less, because the last one has no token to go on with.
        given = torch.cat([given, made[:, :-1]], 1)
        tokens = torch.cat([tokens, text[:, 2 + level :]], 1)
        seen = _deeper(seen, last[:-1])
        places = torch.cat([places, places[last[:-1]]])
        depths = torch.cat([depths, torch.full((count - 1,), level + 1)])


def _deeper(seen: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Ancestors bool[M,M] and a node more below each of the nodes `above`, i64[C]."""
    have, count = len(seen), len(above)
    wider = torch.zeros(have + count, have + count, dtype=torch.bool)
    wider[:have, :have] = seen
    wider[have:, :have] = seen[above]
    wider[have:, have:] = torch.eye(count, dtype=torch.bool)
    return wider


def sayable(target: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Probabilities [N,T,V] among the tokens that the student has logits for; next to even where
    the target means none of those."""
    known = student.detach()[0, 0] > ABSENT / 2
    if bool(known.all()):
        return target
    kept = (target + EVEN) * known
    return kept / kept.sum(-1, keepdim=True)


def noisy(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Features f[N,T,H] with noise that the tokens decide, so that training repeats itself."""
    generator = torch.Generator(features.device).manual_seed(int(tokens.sum()))
    noise = torch.rand(
        features.shape, generator=generator, device=features.device, dtype=torch.float32
    )
    width = NOISE * 512 / tokens.shape[1]
    return features + ((noise - 0.5) * width).to(features.dtype)
