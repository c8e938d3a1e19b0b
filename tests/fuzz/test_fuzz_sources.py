"""A short run of the mutated sources (`python tests/fuzz/sources.py` makes more)."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")
pytest.importorskip("transformers")

from sources import summary


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (["gguf", "onnx", "tokenizer", "gguf-tokenizer", "prompts"], 8),
        pytest.param(["gguf", "onnx"], 40, marks=pytest.mark.long),
        pytest.param(["tokenizer", "gguf-tokenizer", "prompts"], 60, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_mutated_sources_are_refused_or_what_others_read(kinds: list[str], count: int) -> None:
    counts, faults = summary(seed=1, mutations=count, kinds=kinds, processes=1)
    assert not faults, "\n".join(faults)
    assert counts["mutations"] == count and counts["refused"] > count // 4 and counts["accepted"]
