"""Rewriting functions by rules: a pattern in plain torch code, a guard, and a replacement.

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

The driver is greedy, looks at the last nodes first, and tries the rules in their order; candidates
are indexed by root op, so the time is linear in the graph. Matches whose inner values are used
elsewhere are left alone, unless the pattern returns those values as well (the root comes first):
then the replacement returns as many.
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
from ..weights import Weight, WeightStore, derive
from .match import Match, Matcher, Miss
from .normal import kind_of
from .pattern import InputSpec, Pattern, parse_spec, trace_pattern

Replacement = Callable[["Builder", Match], "torch.fx.Node | Sequence[torch.fx.Node]"]
Guard = Callable[[Match], "str | None"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Rule:
    """One rewrite. Hold it at module level: tracing the pattern happens once per rule and dtype.

    inputs: the pattern's parameters by name, described as in `ir.pattern`. replace: builds the new
    nodes; its result must have the type of what it replaces. guard: None if the match may be
    rewritten, else why not. optional_casts: dtype casts may be missing from, or extra in, the
    program, and inputs may have any dtype. needs: an op of the pattern without which there is
    nothing to look for, so that it is not even traced.
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
        """Whether an input is described with F, so that there is a pattern for each dtype."""
        specs = [parse_spec(text) for text in self.inputs.values()]
        return any(isinstance(s, InputSpec) and s.dtype is None for s in specs)


@lru_cache(maxsize=1024)
def _traced(rule: Rule, dtype: torch.dtype) -> Pattern:
    return trace_pattern(rule.pattern, rule.inputs, dtype)


class Builder:
    """What a replacement builds with: typed calls at the match, and new weights."""

    def __init__(self, function: Function, weights: WeightStore) -> None:
        self.function = function
        self.weights = weights
        self.site = Site()
        self.made: list[torch.fx.Node] = []
        self._derived: dict[str, tuple[TensorType, tuple[Weight, ...]]] = {}

    def call(
        self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> torch.fx.Node:
        """A typed call that keeps the site of the match. Errors: `VerifyError` on wrong types."""
        return self._keep(self.function.call(target, *args, site=self.site, name=name, **kwargs))

    def item(self, node: torch.fx.Node, index: int) -> torch.fx.Node:
        """Result `index` of an op with several results."""
        return self._keep(self.function.item(node, index))

    def weight_of(self, node: torch.fx.Node) -> Weight:
        """The weight behind a captured node. Errors: `PassError` if it is not a weight."""
        if node.op != "get_attr":
            raise PassError(f"%{node.name} is {node.op} {node.target}, not a weight")
        return self.weights[str(node.target)]

    def add(self, weight: Weight) -> torch.fx.Node:
        """A reference to a weight, new or not. Errors: `InputError` if another has its name."""
        self.weights = self.weights.adding(weight)
        return self._keep(self.function.weight(weight))

    def derive(
        self,
        name: str,
        type: TensorType,
        function: Callable[..., torch.Tensor],
        /,
        *inputs: torch.fx.Node | Weight,
        **options: Any,
    ) -> torch.fx.Node:
        """A reference to a weight that is computed from others when it is loaded.

        A second request for the same name from the same inputs (shared weights) gives the first.
        Errors: `PassError` if the name stands for something else.
        """
        sources = tuple(w if isinstance(w, Weight) else self.weight_of(w) for w in inputs)
        known = self._derived.get(name)
        if known is not None and known != (type, sources):
            raise PassError(f"two different derived weights would be called {name!r}")
        if known is not None:
            return self._keep(self.function.weight(self.weights[name]))
        self._derived[name] = (type, sources)
        return self.add(derive(name, type, function, *sources, **options))

    def _keep(self, node: torch.fx.Node) -> torch.fx.Node:
        self.made.append(node)
        return node


@dataclass(frozen=True)
class Rewritten:
    """What `apply_rules` did. count: matches rewritten; by_rule: the same for each rule's name;
    weights: the store with what replacements added; near_miss: what came closest to matching.
    """

    count: int
    by_rule: Mapping[str, int]
    weights: WeightStore
    near_miss: str


def apply_rules(
    function: Function,
    rules: Sequence[Rule],
    weights: WeightStore | None = None,
    *,
    limit: int | None = None,
) -> Rewritten:
    """Rewrite a function in place (hand in a copy) until no rule matches.

    limit: rewrites allowed in all; by default as many as the function has nodes, and 64 more.
    Errors: `PassError` when the limit is passed, naming the rules that kept firing; `VerifyError`
    when a replacement's type differs from what it replaces.
    """
    return _Driver(function, rules, weights or WeightStore(), limit).run()


@dataclass
class _Driver:
    function: Function
    rules: Sequence[Rule]
    weights: WeightStore
    limit: int | None
    erased: set[torch.fx.Node] = field(default_factory=set)
    fired: dict[str, int] = field(default_factory=dict)

    def run(self) -> Rewritten:
        self.builder = Builder(self.function, self.weights)
        self.matchers = self.prepare()
        bound = self.limit if self.limit is not None else len(self.function.graph.nodes) + 64
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
        """Rewrite at a node if a rule matches; returns nodes to look at (again)."""
        if node in self.erased:
            return []
        for rule, matcher in self.matchers[kind_of(node.target)]:
            match = matcher.match(node)
            if match is None:
                continue
            reason = rule.guard(match) if rule.guard else None
            reason = reason or _misplaced(match)
            if reason is None:
                return self.rewrite(rule, match)
            matcher.miss.note(matcher.pattern.size, reason, node)
        return []

    def rewrite(self, rule: Rule, match: Match) -> list[torch.fx.Node]:
        self.fired[rule.name] = self.fired.get(rule.name, 0) + 1
        builder = self.builder
        builder.site, builder.made = match.site, []
        place = _place(match)
        for captured in match.inputs.values():
            if captured.op == "get_attr" and not captured < place:
                place.prepend(captured)
        with self.function.graph.inserting_before(place):
            built = rule.replace(builder, match)
        results = (built,) if isinstance(built, torch.fx.Node) else tuple(built)
        _check_results(rule, match, results)
        again = [user for old in match.outputs for user in old.users if user not in match.interior]
        for old, new in zip(match.outputs, results, strict=True):
            old.replace_all_uses_with(new, delete_user_cb=lambda u: u not in match.interior)
        self.erase(match)
        return [n for n in again + builder.made if kind_of(n.target) in self.matchers]

    def erase(self, match: Match) -> None:
        dead = sorted(match.interior, reverse=True)
        captured = [n for n in match.inputs.values() if n.op == "get_attr"]
        for node in [*dead, *captured]:
            if not node.users and node not in self.erased:
                self.function.graph.erase_node(node)
                self.erased.add(node)

    def near_miss(self) -> str:
        """The attempt that came furthest, in words."""
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


def _place(match: Match) -> torch.fx.Node:
    """The first node that needs a result: the replacement goes before it."""
    users = [u for o in match.outputs[1:] for u in o.users if u not in match.interior]
    return min([match.root, *users])


def _misplaced(match: Match) -> str | None:
    place = _place(match)
    values = [node for node in match.inputs.values() if node.op != "get_attr"]
    late = [node for node in values if not node < place]
    return f"%{late[0].name} comes after the first use of a result" if late else None


def _check_results(rule: Rule, match: Match, results: Sequence[torch.fx.Node]) -> None:
    if len(results) != len(match.outputs):
        raise VerifyError(
            f"rule {rule.name}: the pattern has {len(match.outputs)} results, "
            f"the replacement {len(results)}"
        )
    for old, new in zip(match.outputs, results, strict=True):
        if type_of(old) != type_of(new):
            raise VerifyError(
                f"rule {rule.name} at %{old.name}{match_site(old)}: expected {type_of(old)}, "
                f"the replacement gives {type_of(new)}"
            )
