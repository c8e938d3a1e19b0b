"""A model that drafts with a drafter of its own: distilled as it is without one."""

from __future__ import annotations

from ...ir.plan import StagedDraft
from .base import objective
from .eagle import cached_loss

objective(StagedDraft)(cached_loss)
