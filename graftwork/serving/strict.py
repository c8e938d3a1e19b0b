"""The base of what requests are made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Refuses unknown fields, and takes no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)
