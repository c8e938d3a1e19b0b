"""What a rule is that gives the caches of layers, or of heads, budgets of their own.

A rule is a function in a file of this folder, or of an installed package, registered by its
decorator; `evict_cache` finds it by its name (`layers`). What it needs, its parameters say:

    program, caches              the program, and the caches of its step
    windows                      i64[N,T], text of T tokens each; the pass then asks for text
    layers                       of each cache, the number of its layer
    budget, block, sinks, recent the pass's; the budget is what caches keep on average
    context                      the longest text

It returns the rows that each cache keeps, whole blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....ir.support.discovery import Named
from ..scores.base import RowScore


@dataclass(frozen=True)
class BudgetRule:
    """A rule. score: what must choose the rows, of those that the rule counts; None: any."""

    function: Callable[..., list[int]]
    score: RowScore | None
    parameters: tuple[str, ...]

    @property
    def reads_text(self) -> bool:
        """Whether it must see text."""
        return "windows" in self.parameters

    def __call__(self, given: dict[str, Any]) -> list[int]:
        return self.function(**{name: given[name] for name in self.parameters})


BUDGETS: Named[BudgetRule] = Named("rule for budgets of layers")
Rule = Callable[..., list[int]]


def budget_rule(score: RowScore | None = None) -> Callable[[Rule], Rule]:
    """Decorator: the function is the rule of its name; see the module docstring."""

    def enter(function: Rule) -> Rule:
        rule = BudgetRule(function, score, tuple(inspect.signature(function).parameters))
        BUDGETS.add(function.__name__, rule, function.__module__)
        return function

    return enter


@budget_rule()
def alike() -> list[int]:
    """All caches keep the budget."""
    return []
