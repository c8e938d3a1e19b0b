"""What the drafting parts of a plan are made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...ir.execution.executable import Executable
from ..asking.options import GenerationOptions
from ..asking.text import Text
from ..feeding.feed import Feeder
from .lengths.base import LengthPolicy


class Setting(NamedTuple):
    """One generation. length: bounds growing drafts. feeder, texts: of the target."""

    executable: Executable
    options: GenerationOptions
    length: LengthPolicy
    feeder: Feeder | None = None
    texts: Sequence[Text] = ()
