"""A short run of the random kernel calls (`python tests/fuzz/kernels.py` makes more)."""

from __future__ import annotations

from kernels import MAKERS, Maker, summary

from graftwork.backends.torch import native


def test_random_calls_give_what_the_meaning_gives_or_are_refused():
    counts, faults = summary(seed=1, calls=400)
    assert not faults, "\n".join(faults)
    assert counts["calls"] == 400 and counts["equal"] > 200 and counts["refused"] > 80


def test_every_native_op_is_called():
    assert {make(Maker(0)).op for make in MAKERS} >= set(native.OPS)
