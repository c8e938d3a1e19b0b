"""A draft model with a drafter of its own is distilled like one without."""

from __future__ import annotations

from ...ir.plan import StagedDraft
from .base import objective
from .eagle import cached_loss

objective(StagedDraft)(cached_loss)
