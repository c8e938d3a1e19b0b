"""Rewrite rules: a pattern in plain torch code, a guard, and a replacement.

    RMS_NORM = Rule(
        "rms_norm",
        inputs={"x": "F[...,H]", "weight": "@F[H]", "eps": "float"},
        pattern=lambda x, weight, eps: weight * (
            x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        ).to(x.dtype),
        replace=lambda build, m: build.call(
            G.rms_norm.default, m["x"], m["weight"], eps=m.number("eps")
        ),
    )
    result = apply_rules(function, [RMS_NORM], program.weights)
    program.with_function(function, weights=result.weights)

The driver is greedy, visits the last nodes first, and tries rules in order. Candidates are indexed
by root op, so time is linear in the graph. A match whose inner values are used elsewhere is
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.fx

from ..function import Function, Site, type_of
from ..support.errors import PassError, VerifyError
from ..types import TensorType
from ..weights import Weight, WeightStore
from .match import Match, Matcher, Miss
from .normal import kind_of
from .pattern import InputSpec, Pattern, parse_spec, trace_pattern

Replacement = Callable[["Builder", Match], torch.fx.Node]
Guard = Callable[[Match], "str | None"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Rule:
    """One rewrite. Define it at module level: patterns are traced once per rule and dtype.

    inputs: specifications of the pattern's parameters, see `ir.rewrite.pattern`. replace: builds
    the new node, with the type of the old one. guard: None, or why the match is not rewritten.
    optional_casts: the program may have fewer or more casts, and inputs any dtype.
    needs: an op of the pattern; functions without it are skipped before tracing.
    """

    name: str
    inputs: Mapping[str, str]
    pattern: Callable[..., Any]
    replace: Replacement
    guard: Guard | None = None
    optional_casts: bool = False
    needs: Any = None

    def traced(self, dtype: torch.dtype) -> Pattern:
        """The pattern for F = dtype."""
        return _traced(self, dtype)

    @property
    def generic(self) -> bool:
        """Whether an input has the dtype F, so that there is a pattern for each dtype."""
        specs = [parse_spec(text) for text in self.inputs.values()]
        return any(isinstance(s, InputSpec) and s.dtype is None for s in specs)


@lru_cache(maxsize=1024)
def _traced(rule: Rule, dtype: torch.dtype) -> Pattern:
    return trace_pattern(rule.pattern, rule.inputs, dtype)


class Builder:
    """Builds the nodes of a replacement: typed calls with the match's site, and new weights."""

    def __init__(self, function: Function, weights: WeightStore) -> None:
        self.function = function
        self.weights = weights
        self.site = Site()
        self.made: list[torch.fx.Node] = []

    def call(
        self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> torch.fx.Node:
        """A typed call with the match's site. Errors: `VerifyError` on wrong types."""
        return self._keep(self.function.call(target, *args, site=self.site, name=name, **kwargs))

    def add(self, weight: Weight) -> torch.fx.Node:
        """A reference to a weight, new or not. Errors: `InputError` if another has its name."""
        self.weights = self.weights.adding(weight)
        return self._keep(self.function.weight(weight))

    def _keep(self, node: torch.fx.Node) -> torch.fx.Node:
        self.made.append(node)
        return node


@dataclass(frozen=True)
class Rewritten:
    """Result of `apply_rules`. count: rewritten matches, also by_rule. weights: with those that
    replacements added. near_miss: the nearest miss, if nothing matched."""

    count: int
    by_rule: Mapping[str, int]
    weights: WeightStore
    near_miss: str


def apply_rules(
    function: Function,
    rules: Sequence[Rule],
    weights: WeightStore | None = None,
) -> Rewritten:
    """Rewrite a function in place (hand in a copy) until no rule matches.

    Errors: `PassError` after more rewrites than nodes and 64, naming the rules; `VerifyError` if a
    replacement's type differs.
    """
    return _Driver(function, rules, weights or WeightStore()).run()


@dataclass
class _Driver:
    function: Function
    rules: Sequence[Rule]
    weights: WeightStore
    erased: set[torch.fx.Node] = field(default_factory=set)
    fired: dict[str, int] = field(default_factory=dict)

    def run(self) -> Rewritten:
        self.builder = Builder(self.function, self.weights)
        self.matchers = self.prepare()
        bound = len(self.function.graph.nodes) + 64
        before = -1
        while before != (before := sum(self.fired.values())):
            todo = [n for n in self.function.graph.nodes if kind_of(n.target) in self.matchers]
            while todo:
                todo.extend(self.visit(todo.pop()))
                if sum(self.fired.values()) > bound:
                    raise PassError(
                        f"rules {self.fired} still match after {bound} rewrites of "
                        f"{self.function.name}: does a replacement contain its own pattern?"
                    )
        near = "" if self.fired else self.near_miss()
        return Rewritten(before, dict(self.fired), self.builder.weights, near)

    def prepare(self) -> dict[Any, list[tuple[Rule, Matcher]]]:
        types = [n.meta.get("type") for n in self.function.graph.nodes]
        present = {t.dtype for t in types if isinstance(t, TensorType)}
        kinds = {kind_of(n.target) for n in self.function.graph.nodes}
        table: dict[Any, list[tuple[Rule, Matcher]]] = {}
        for rule in self.rules:
            if rule.needs is not None and kind_of(rule.needs) not in kinds:
                continue
            dtypes = [d for d in _FLOATS if d in present] if rule.generic else [torch.float32]
            for dtype in dtypes:
                pattern = rule.traced(dtype)
                matcher = Matcher(pattern, rule.optional_casts)
                table.setdefault(kind_of(pattern.root.target), []).append((rule, matcher))
        return table

    def visit(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Rewrite at a node if a rule matches; returns nodes to visit next."""
        if node in self.erased:
            return []
        for rule, matcher in self.matchers[kind_of(node.target)]:
            match = matcher.match(node)
            if match is None:
                continue
            reason = rule.guard(match) if rule.guard else None
            if reason is None:
                return self.rewrite(rule, match)
            matcher.miss.note(matcher.pattern.size, reason, node)
        return []

    def rewrite(self, rule: Rule, match: Match) -> list[torch.fx.Node]:
        self.fired[rule.name] = self.fired.get(rule.name, 0) + 1
        builder, old = self.builder, match.root
        builder.site, builder.made = match.site, []
        with self.function.graph.inserting_before(old):
            new = rule.replace(builder, match)
        if type_of(old) != type_of(new):
            raise VerifyError(
                f"rule {rule.name} at %{old.name}{match_site(old)}: expected {type_of(old)}, "
                f"the replacement gives {type_of(new)}"
            )
        again = [*old.users, *builder.made]
        old.replace_all_uses_with(new)
        self.erase(match)
        return [n for n in again if kind_of(n.target) in self.matchers]

    def erase(self, match: Match) -> None:
        dead = sorted(match.interior, reverse=True)
        captured = [n for n in match.inputs.values() if n.op == "get_attr"]
        for node in [*dead, *captured]:
            if not node.users and node not in self.erased:
                self.function.graph.erase_node(node)
                self.erased.add(node)

    def near_miss(self) -> str:
        """Description of the nearest miss."""
        attempts = [(rule, m) for group in self.matchers.values() for rule, m in group]
        if not attempts:
            return "no rule applies to the ops and dtypes of the function"
        rule, matcher = max(attempts, key=lambda a: a[1].miss.matched / a[1].pattern.size)
        miss: Miss = matcher.miss
        if miss.root is None:
            return f"rule {rule.name}: {self.function.name} has no {matcher.pattern.root.target}"
        place = match_site(miss.root)
        return (
            f"rule {rule.name}: {miss.matched} of {matcher.pattern.size} ops matched at "
            f"%{miss.root.name}{place}; {miss.reason}"
        )


def match_site(node: torch.fx.Node) -> str:
    """`` (module)`` of a node for messages, or nothing."""
    site = node.meta.get("site")
    return f" ({site.module})" if site and site.module else ""
