"""What the drafting parts of a plan are made for."""

from __future__ import annotations

from typing import NamedTuple

from ...ir.executable import Executable
from ..asking.options import GenerationOptions
from .lengths.base import LengthPolicy


class Setting(NamedTuple):
    """One generation. length: asked while a draft grows how deep it should."""

    executable: Executable
    options: GenerationOptions
    length: LengthPolicy
