"""What a depth policy is."""

from __future__ import annotations

from typing import Any

from ...ir.executable import Executable
from ..memo import Resumes
from ..registry import Registry


class DepthPolicy(Resumes):
    """Says how deep the steps of a generation go.

    Register a subclass with ``@DEPTHS.register(ItsRecord)`` in its own file of this folder.
    """

    def __init__(self, record: Any, executable: Executable) -> None:
        self.record, self.executable = record, executable

    def begin(self, batch: int) -> None:
        """A generation of so many new sequences starts."""


DEPTHS: Registry[DepthPolicy] = Registry(__package__)
