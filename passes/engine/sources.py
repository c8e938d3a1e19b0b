"""What code is: results of other code are not used again."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import torch

from ...ir.support.discovery import sources_of

PASSES = Path(__file__).parents[1]


def code_of(*kinds: type) -> str:
    """A digest of torch's version, every pass and what these classes' modules say: whatever may
    change the bits of what they work out."""
    digest = hashlib.sha256(f"{torch.__version__} {sources_of(PASSES)}".encode())
    for path in filter(None, map(_source, kinds)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _source(kind: type) -> Path | None:
    """Where a class is written; none for one that was typed at a prompt."""
    try:
        path = inspect.getsourcefile(kind)
    except TypeError:
        return None
    return Path(path) if path else None
