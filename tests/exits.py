"""Programs whose exits and routers act though nobody trained them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graftwork.ir import Program
from graftwork.ir.plan import untrained


def acting(program: Program) -> Program:
    """The program, its depth policy taken for a trained one: the layers that it leaves out are
    tested, not whether that is wise."""
    depth: Any = program.plan.depth
    if not untrained([depth]):
        return program
    return program.replace(plan=replace(program.plan, depth=replace(depth, trained=True)))
