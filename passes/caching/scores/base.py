"""What a rule is that scores the rows of a cache, of which `evict_cache` keeps the best.

A rule is a function of tensors in a file of this folder, or of an installed package, registered by
its decorator; `evict_cache` finds it by its name. Its ops become part of the program. What it
needs, its parameters say. By place, tensors:

    keys      f[B,G,C,D]    of all rows, as attention reads them
    values    f[B,G,C,E]    of all rows
    past      i64[B]        rows that are valid; those behind them may hold anything
    queries   f[B,H,W,D]    of the last `block` rows, W >= block; steps then write them to a state
    sums      f32[B,G,C,1]  a number for each row from block to block, in a state: the rule returns
                            it anew, beside its scores
    opening   f[B,H,P,D]    queries of the text's first P tokens, turned to the text's end
    cos, sin  f[P,R]        tables by which queries are rotated, to `ahead` + `block` rows; or None

By keyword: `block`, `sinks`, `recent` and `ahead` of the pass, whether tables are `interleaved`,
and `attention`, the layer's `scale` and, if it has one, `softcap`, as `row_attention` takes them. A
rule that asks for `scale` alone is refused with a softcap. Any other keyword parameter is an option
of its own, with a default, and bounds in its annotation; recipes set it in `tuning`.

It returns scores f32[B,G,C], whole numbers below 2^23: the higher, the more a row counts; see
`rounded`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, create_model

from ....ir import InputError
from ....ir.ops.eviction import rounded, rounded_log
from ....ir.support.discovery import Named
from ....ir.support.fields import tuned

__all__ = ["SCORES", "G", "RowScore", "rounded", "rounded_log", "row_score"]

G = torch.ops.graftwork
TENSORS = ("keys", "values", "past", "queries", "sums", "opening", "cos", "sin")
NUMBERS = ("block", "sinks", "recent", "ahead", "interleaved", "attention", "scale")


@dataclass(frozen=True)
class RowScore:
    """A rule. sinks, recent: rows at the start and the end that are kept in any case, unless the
    recipe says otherwise; recent below 1 is a share of the budget. tensors, numbers: what
    `function` needs. options: its own."""

    function: Callable[..., Any]
    sinks: int
    recent: float
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    options: type[BaseModel]

    @property
    def name(self) -> str:
        """How recipes call it."""
        return self.function.__name__

    def needs(self, *names: str) -> bool:
        """Whether it needs a tensor or a number of one of these names."""
        return not set(names).isdisjoint(self.tensors + self.numbers)

    def tuned(self, tuning: Mapping[str, Any]) -> dict[str, Any]:
        """Its own options, checked. Errors: `InputError` naming those there are."""
        return tuned(self.options, self.name, tuning).model_dump()


SCORES: Named[RowScore] = Named("rule for rows of a cache")


def row_score(sinks: int = 0, recent: float = 0) -> Callable[[Callable[..., Any]], RowScore]:
    """Decorator: the function is the rule of its name; see the module docstring and `RowScore`.
    Errors: `InputError` for parameters that no rule can have."""

    def enter(function: Callable[..., Any]) -> RowScore:
        given = inspect.signature(function).parameters.values()
        hints = get_type_hints(function, include_extras=True)
        named = [p for p in given if p.kind is p.KEYWORD_ONLY]
        tensors = tuple(p.name for p in given if p not in named)
        numbers = tuple(p.name for p in named if p.name in NUMBERS)
        own = {p.name: (hints[p.name], p.default) for p in named if p.name not in NUMBERS}
        wrong = [n for n in tensors if n not in TENSORS]
        wrong += [n for n, (_, default) in own.items() if default is inspect.Parameter.empty]
        if wrong:
            raise InputError(
                f"{function.__module__}.{function.__name__}: parameter {wrong[0]!r}; expected by "
                f"place {', '.join(TENSORS)}, by keyword {', '.join(NUMBERS)}, or an option with a "
                f"default"
            )
        config = ConfigDict(extra="forbid", strict=True)
        options = create_model(function.__name__, __config__=config, **own)  # type: ignore[call-overload]
        score = RowScore(function, sinks, recent, tensors, numbers, options)
        return SCORES.add(score.name, score, function.__module__)

    return enter
