"""Exit heads: what comes after a token, from the state of the target's first layers.

Sources: Elhoushi et al., "LayerSkip" (2024), cross entropy on the text, with the target as it is;
Liu et al., "EESD" (2024), the same on text that the target wrote, through a layer that sees the
text before a token; Liu et al., "Kangaroo" (2024), whose adapter learns the target's distribution.
"""

from __future__ import annotations

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, mean_loss, objective
from . import ExitDraft


@objective(ExitDraft)
def exit_loss(record: ExitDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    return mean_loss((one, window_loss(record, run, one)) for one in batch.alone())


def window_loss(record: ExitDraft, run: Run, batch: Batch) -> Loss:
    """The loss of windows that the function is run on whole."""
    student = run(record.function, hidden=batch.hidden[record.output])["draft_logits"]
    total = distilled(student, batch.target(record.aim), 0)
    return Loss(total, [hit_rate(student, batch.best, 0)])
