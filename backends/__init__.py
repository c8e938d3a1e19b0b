"""Backends: Program -> Executable. Names: see `api`, loaded on first use."""

from typing import TYPE_CHECKING

from ..ir.support.lazy import names_of

if TYPE_CHECKING:
    from .api import *  # noqa: F403
else:
    __getattr__ = names_of(f"{__name__}.api")
