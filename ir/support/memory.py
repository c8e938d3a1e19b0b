"""The memory of this machine and of this process."""

from __future__ import annotations

import ctypes
from pathlib import Path


def free_memory() -> int:
    """Bytes that can be had without swapping."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return 1 << 62
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def give_back() -> None:
    """Give memory that was freed back to the system, which the C library would keep for itself.

    GNU's alone has a call for it. Takes milliseconds: for after what made much garbage.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
