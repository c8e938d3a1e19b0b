"""Heads on a layer that asks the target's states learn each the token of its level.

Source: Zeng et al., "Chimera" (2024): cross entropy to the text's token and distillation of the
target's distribution, all heads alike. Levels below the first run on the states that the layer made
of those above, which stand in for the target's, and on the text's own tokens.
"""

from __future__ import annotations

from itertools import count

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from ....training.objectives.eagle import rollout
from . import ChimeraDraft


@objective(ChimeraDraft)
def chimera_loss(record: ChimeraDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    assert record.output is not None
    text, features = batch.tokens, batch.hidden[record.output][:, :-1]
    levels = count()

    def told(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a level's head says of the places that are its own."""
        places = inputs["positions"]
        pair = [text.gather(1, (places - back).clamp(min=0)) for back in (1, 0)]
        made = run(function, **inputs, before=torch.stack(pair, -1))["hidden"]
        own = inputs["select"].shape[1]
        both = torch.cat([features[:, :own], made[:, -own:]], -1)
        head = record.heads[next(levels)]
        return {"hidden": made, "draft_logits": run(head, hidden=both)["draft_logits"]}

    soft, hard = batch.target(record.aim), batch.target("text")
    total, hits = torch.zeros((), device=features.device), []
    for level, (student, *_) in enumerate(
        rollout(record.function, told, text, features, record.levels)  # type: ignore[arg-type]
    ):
        parts = [distilled(student, wanted, 1 + level) for wanted in (soft, hard)]
        loss = (1 - record.hard) * parts[0] + record.hard * parts[1]
        total = total + record.decay**level * loss
        hits.append(hit_rate(student, batch.best, 1 + level))
    return Loss(total, hits)
