"""An executable under another decode plan."""

from __future__ import annotations

from typing import Any

from ..ir.execution.executable import Executable
from ..ir.plan import DecodePlan


class Planned:
    """Wraps an executable: another plan, the same graphs and buffers."""

    def __init__(self, executable: Executable, plan: DecodePlan) -> None:
        self.program = executable.program.replace(plan=plan)
        self.executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)
