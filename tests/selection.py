"""Which cases of a test the everyday run leaves out (see `long` in CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

DEAREST = (
    *("test_torch_backend.py", "test_cuda_provider.py", "test_source_drafts.py"),
    *("test_pictures.py", "test_pairs.py", "test_onnxruntime_executable.py"),
    *("test_frontends_modules.py", "test_gpu_products.py", "test_ops_wrong.py"),
    *("test_cut_depth.py", "test_few_bits.py", "test_runtime_plain.py", "test_eviction.py"),
    *("test_scoring.py", "test_torch_replay.py", "test_fuzz_folders.py", "test_commands.py"),
)
"""Files with few tests that take long: by their number of tests they would be the last."""


def mostly_long(cases: Iterable[str], keep: Collection[str]) -> list[Any]:
    """All cases as parameters, those that are not to be kept with the mark `long`."""
    names = list(cases)
    _check(keep, names)
    return [n if n in keep else pytest.param(n, marks=pytest.mark.long) for n in names]


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """All cases as parameters: the first of each `every`, and the others with the mark `long`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        if place % every
        else case
        for place, case in enumerate(cases)
    ]


def rarely(cases: Iterable[str], every: int, keep: Collection[str] = ()) -> list[Any]:
    """All cases as parameters: those that are to be kept, of the others one in `every` with the
    mark `long`, and the rest with the mark `sweep`."""
    names = list(cases)
    _check(keep, names)
    others = [n for n in names if n not in keep]
    marks = {
        n: pytest.mark.sweep if place % every else pytest.mark.long
        for place, n in enumerate(others)
    }
    return [n if n in keep else pytest.param(n, marks=marks[n]) for n in names]


def on_backends(
    cases: Iterable[str],
    everywhere: Collection[str],
    backends: Sequence[str] = ("eager", "onnxruntime"),
    rare: Collection[str] = (),
) -> list[Any]:
    """(case, backend) as parameters: all cases but the `rare` on the first backend, and on the
    others those of `everywhere`; the rest with the mark `long`."""
    names = list(cases)
    _check({*everywhere, *rare}, names)
    first = set(names) - set(rare)
    return [
        (name, backend)
        if name in everywhere or (name in first and backend == backends[0])
        else pytest.param(name, backend, marks=pytest.mark.long)
        for name in names
        for backend in backends
    ]


def _check(chosen: Collection[str], names: Collection[str]) -> None:
    strange = set(chosen) - set(names)
    assert not strange, f"no such cases: {', '.join(sorted(strange))}"
