"""A short run of the mutated checkpoint folders (`python tests/fuzz/folders.py` makes more)."""

from __future__ import annotations

from folders import summary


def test_mutated_folders_are_refused_or_as_transformers_reads_them() -> None:
    counts, faults = summary(seed=1, mutations=12, processes=1)
    assert not faults, "\n".join(faults)
    assert counts["mutations"] == 12 and counts["refused"] and counts["accepted"]
