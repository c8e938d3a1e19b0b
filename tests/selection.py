"""Which cases of a test the everyday run leaves out (see `long` in CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
import torch

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


Check = Callable[..., None]


def in_turn(cases: Callable[[], Iterable[Any]]) -> Callable[[Check], Check]:
    """One test that runs a check of all cases, each from the same random state, and names those
    that fail; called with a case, it is the check. cases: gives arguments of the check, or
    `pytest.param`s of them."""

    def test_of(check: Check) -> Check:
        def test(*one: Any) -> None:
            if one:
                return check(*one)
            wrong: dict[str, Exception] = {}
            given = [c if hasattr(c, "values") else pytest.param(c, id=str(c)) for c in cases()]
            assert given, "no cases"
            for case in given:
                torch.manual_seed(0)
                try:
                    check(*case.values)
                except Exception as error:
                    wrong[str(case.id)] = error
            if wrong:
                told = "\n".join(f"{name}: {error!r}" for name, error in wrong.items())
                raise AssertionError(f"{len(wrong)} of {len(given)} cases:\n{told}") from next(
                    iter(wrong.values())
                )

        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        return test

    return test_of


def _check(chosen: Collection[str], names: Collection[str]) -> None:
    strange = set(chosen) - set(names)
    assert not strange, f"no such cases: {', '.join(sorted(strange))}"
