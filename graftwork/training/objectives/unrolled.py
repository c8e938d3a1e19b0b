"""Levels that one call makes: trained one at a time, because the chain has the same weights."""

from __future__ import annotations

from ...ir.plan import FusedDraft, UnrolledDraft
from .base import objective
from .eagle import cached_loss

objective(UnrolledDraft)(cached_loss)
objective(FusedDraft)(cached_loss)
