"""A layer that reads the target's rows learns to do without those that a draft would not have.

Source: Du et al., "GliDe with a CaPE" (2024): cross entropy to the text's next token at all places
at once. A text is cut into blocks; a block's tokens see, of the target, the rows before the block,
as all tokens of one draft do: the first of them is the text's last token, the others are drafted.
Of the draft's own rows they see all before them.
"""

from __future__ import annotations

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from . import GlideDraft, rows_seen


@objective(GlideDraft)
def glide_loss(record: GlideDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring. A text's first token has nothing of the target's before it, and no
    draft begins there: what is said of it does not count. hits: by place in a block."""
    seen = rows_seen(batch.tokens.shape[1], record.block).to(batch.tokens.device)
    given = seen.expand(batch.tokens.shape)
    student = run(record.function, tokens=batch.tokens, seen=given)["draft_logits"][:, 1:]
    wanted, best = batch.target(record.aim)[:, 1:], batch.best[:, 1:]
    levels = [slice(level, None, record.block) for level in range(record.block)]
    hits = [hit_rate(student[:, some], best[:, some], 0) for some in levels]
    return Loss(distilled(student, wanted, 0), hits)
