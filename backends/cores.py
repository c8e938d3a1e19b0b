"""How many threads a process had best compute with."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def default_threads() -> int:
    """Physical cores that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return os.cpu_count() or 1
    cores = {_core(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _core(cpu: int) -> str:
    """What two hardware threads of one core have in common."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(cpu)


def _quota() -> int:
    """CPUs that the control group grants, rounded up; many if it says nothing."""
    path = Path("/sys/fs/cgroup/cpu.max")
    if not path.exists():
        return 1 << 20
    limit, period = path.read_text().split()
    return 1 << 20 if limit == "max" else max(1, -(-int(limit) // int(period)))
