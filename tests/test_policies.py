"""A policy is declared once: its record is found, and so is the class that carries it out."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from tiny import cached_llama

import graftwork.ir.plan as plan_package
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError
from graftwork.ir.plan import RECORDS, FullDepth, KeepAll
from graftwork.ir.plan.base import record
from graftwork.ir.plan.length import LengthRecord
from graftwork.runtime.cache import CACHES
from graftwork.runtime.depth import DEPTHS

PLAN = Path(__file__).parents[1] / "ir" / "plan"


def test_every_record_can_be_imported_from_the_package() -> None:
    """For type checkers too, which see the lines of the package and not what is registered."""
    lines = ast.parse((PLAN / "__init__.py").read_text()).body
    listed = {n.module for n in lines if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"}
    defining = {cls.__module__.rpartition(".")[2] for cls in RECORDS.values()}
    assert defining <= listed, "add a line to ir/plan/__init__.py"
    for cls in RECORDS.values():
        assert getattr(plan_package, cls.__name__) is cls


def test_two_records_of_one_kind_are_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Other(LengthRecord):
        kind: ClassVar[str] = "svip"

    with pytest.raises(InputError, match=r"Other cannot be length=svip: .*length\.SvipLength is"):
        record(Other)
    assert RECORDS["length", "svip"] is plan_package.SvipLength


def test_the_defaults_of_depth_and_cache_are_policies() -> None:
    executable = compile(cached_llama(), Target.parse("eager"))
    for registry, kept in ((DEPTHS, FullDepth()), (CACHES, KeepAll())):
        policy = registry.find(kept)(kept, executable)
        policy.begin(2)
        assert policy.record == kept
    assert CACHES.find(KeepAll())(KeepAll(), executable).room([3, 5]) is None
