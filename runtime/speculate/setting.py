"""What the drafting parts of a plan are made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...ir.execution.executable import Executable
from ..asking.options import GenerationOptions
from ..asking.text import Text
from ..feeding.feed import Feeder
from .lengths.base import LengthPolicy
from .noise import Noise


class Setting(NamedTuple):
    """One generation. length: bounds growing drafts. feeder, texts: of the target. noise: by which
    the target's tokens are drawn, where drafts are drawn by it, too; None: they are not."""

    executable: Executable
    options: GenerationOptions
    length: LengthPolicy
    feeder: Feeder | None = None
    texts: Sequence[Text] = ()
    noise: Noise | None = None
