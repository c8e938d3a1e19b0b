"""A short run of the mutated artifacts (`python tests/fuzz/artifacts.py` makes more)."""

from __future__ import annotations

import pytest
from artifacts import summary


@pytest.mark.long
def test_mutated_artifacts_are_refused_or_what_their_text_says() -> None:
    counts, faults = summary(seed=1, mutations=60, processes=1)
    assert not faults, "\n".join(faults)
    assert counts["mutations"] == 60 and counts["refused"] > 20 and counts["accepted"] > 2
