"""The memory of this machine."""

from __future__ import annotations

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
