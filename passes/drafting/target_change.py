"""By how much training changed a target: what the file beside its adapters says of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...ir import PassError
from ...ir.support.files import read_json

MEASURED = "tuned.json"
"""Name of the file beside the weights that says by how much training changed the target."""

Change = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Changed(BaseModel):
    """By how much a tuned target differs from the original on held-out text. tokens: that were
    predicted. divergence: mean KL(original || tuned), nats a token. ratio: perplexity over the
    original's; error: its standard error. agreement: share of tokens whose likeliest is the
    original's. sha256: of the file of weights that was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: Annotated[int, Field(ge=1)]
    divergence: Annotated[float, Field(allow_inf_nan=False)]
    ratio: Change
    error: Change
    agreement: Annotated[float, Field(ge=0, le=1)]
    sha256: str = ""

    def __str__(self) -> str:
        return (
            f"on {self.tokens} held-out tokens KL {max(self.divergence, 0.0):.4f} nats a token, "
            f"perplexity {self.ratio:.3f} +- {self.error:.3f} of the original's, "
            f"{self.agreement:.1%} of the likeliest tokens the same"
        )


def told_of(change: Changed | None) -> str:
    """What reports say of a tuned target."""
    by = "by how much is unknown here (optimize with cost=True measures it)"
    return f"the target's weights were tuned: {by if change is None else change}"


def measured(path: Path) -> Changed | None:
    """What training measured of a file of weights; None if it measured no such file. Errors:
    `PassError` for a damaged file."""
    beside = path.with_name(MEASURED)
    if not beside.exists():
        return None
    try:
        change = Changed.model_validate(read_json(beside))
    except (OSError, ValueError, ValidationError) as error:
        what = " ".join(str(error).split())[:200]
        raise PassError(
            f"tune_target: {beside} is damaged ({what}): delete it, and the report says that the "
            f"change is unknown"
        ) from error
    return change if change.sha256 == digest_of(path) else None


def digest_of(path: Path) -> str:
    """A file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
