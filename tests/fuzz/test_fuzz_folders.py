"""A short run of the mutated checkpoint folders (`python tests/fuzz/folders.py` makes more)."""

from __future__ import annotations

import pytest
from folders import summary


@pytest.mark.parametrize("count", [3, pytest.param(24, marks=pytest.mark.long)])
def test_mutated_folders_are_refused_or_as_transformers_reads_them(count: int) -> None:
    counts, faults = summary(seed=1, mutations=count, processes=1)
    assert not faults, "\n".join(faults)
    assert counts["mutations"] == count and counts["refused"] and counts["accepted"]
