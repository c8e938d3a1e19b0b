"""What passes have in common that change which rows caches hold, how, or which of them are read."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...ir import Function, PassError, Program, Role, arguments
from ...ir.plan import KeepAll
from ...ir.plan.contract import Contract
from ...ir.plan.inputs import INPUTS
from ..engine.base import Effect, LearningPass, Pass
from ..policies import CheckedPass
from .cached_rows import reach_of

G = torch.ops.graftwork

MOVED = "whose functions move rows as they are"
"""Why rows cannot be stored otherwise when another pass decides what becomes of them."""


class CacheContents(Pass):
    """Base of passes over the rows of caches: the program has them, with every function and layer
    that reads them."""

    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.CACHE_CONTENTS})
    reads: ClassVar[frozenset[Effect]] = frozenset(
        {Effect.CACHE_LAYOUT, Effect.FUNCTIONS, Effect.LAYER_SET}
    )

    def refuse(self, wrong: bool, why: str) -> None:
        """Errors: `PassError` with why, if something is wrong."""
        if wrong:
            raise PassError(f"{self.name}: {why}")

    def refuse_other(self, program: Program, why: str = "") -> None:
        """Errors: `PassError`, and why, if another pass decides what becomes of the rows."""
        taken = not isinstance(program.plan.cache, KeepAll)
        rest = f", {why}" if why else ""
        self.refuse(taken, f"the plan has cache={program.plan.cache.brief} already{rest}")

    def refuse_shared(self, program: Program) -> None:
        """Errors: `PassError` if a function that drafts reads rows of the target's as its steps
        leave them."""
        for name in program.functions:
            for state in program.shared_with(name):
                self.refuse(
                    True,
                    f"{name} drafts and reads a row of {state} for every token of the text, and "
                    f"not all would stay where they are: leave one of the two out, or draft by a "
                    f"layer of its own, such as eagle2",
                )

    def refuse_places(self, program: Program, why: str = "") -> None:
        """Errors: `PassError`, and why, if attention over caches asks where rows stand, otherwise
        than by how far before a token (a sliding window)."""
        rest = f", {why}" if why else ""
        for fn in program.functions.values():
            masks = fn.calls(G.step_mask.default)
            far = [mask for mask in masks if arguments(mask)["window"] is None]
            for near in filter(None, map(reach_of, far)):
                self.refuse(True, f"{fn.name} looks back over {near}{rest}")
            by_distance = bool(masks and fn.calls(G.alibi.default, G.distance_bias.default))
            weighs = "weighs rows by their distance (ALiBi, or a table)"
            self.refuse(by_distance, f"{fn.name} {weighs}{rest}")

    def refuse_small(self, program: Program, block: int) -> None:
        """Errors: `PassError` if a step with a draft is wider than a block, whose end it may not go
        beyond."""
        wide = program.plan.columns + 1
        self.refuse(
            block < wide,
            f"block={block} is smaller than a step with a draft, {wide} tokens, which may not go "
            f"beyond the end of a block",
        )


class RecordedContents(CacheContents, CheckedPass):
    """Base of those that put a record of what they do into the plan."""

    reads: ClassVar[frozenset[Effect]] = CacheContents.reads | {Effect.DECODE_PLAN}


class LearnedContents(LearningPass, CacheContents):
    """Base of those that learn what they do on text."""


def upkeep(program: Program, name: str) -> Function:
    """An empty function between steps, with `past`, of this name or one like it that is free."""
    while name in program.functions:
        name += "_"
    fn = Function(name, role=Role.UPKEEP)
    fn.add_input("past", INPUTS["past"].type)
    return fn
