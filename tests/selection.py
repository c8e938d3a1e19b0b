"""Which cases of a test the everyday run leaves out (see `long` in CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_long(cases: Iterable[str], keep: Collection[str]) -> list[Any]:
    """All cases as parameters, those that are not to be kept with the mark `long`."""
    names = list(cases)
    strange = set(keep) - set(names)
    assert not strange, f"no such cases: {', '.join(sorted(strange))}"
    return [n if n in keep else pytest.param(n, marks=pytest.mark.long) for n in names]
