"""Matching of one occurrence of a `Pattern`: depth-first search with backtracking over commutative
operands; sizes are unified last.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ..function import Site, site_of, type_of
from ..types import Dim, Sym, TensorType
from .normal import IDENTITIES, kind_of, normal_call
from .pattern import Hole, InputSpec, Pattern, spec_text

ATEN = torch.ops.aten
COMMUTATIVE = frozenset(
    {
        ATEN.add.Tensor,
        ATEN.mul.Tensor,
        ATEN.maximum.default,
        ATEN.minimum.default,
        ATEN.eq.Tensor,
        ATEN.ne.Tensor,
        ATEN.bitwise_and.Tensor,
        ATEN.bitwise_or.Tensor,
        ATEN.logical_and.default,
        ATEN.logical_or.default,
    }
)
_CAST = ATEN._to_copy.default


@dataclass(frozen=True)
class Match:
    """One occurrence of a pattern. ``match["x"]`` is the node of the input x.

    root: the node of the pattern's result. interior: all matched calls.
    """

    root: torch.fx.Node
    interior: frozenset[torch.fx.Node]
    inputs: Mapping[str, torch.fx.Node]
    numbers: Mapping[str, Dim | float]
    sizes: Mapping[str, Dim]

    def __getitem__(self, name: str) -> torch.fx.Node:
        return self.inputs[name]

    def number(self, name: str) -> Any:
        """The value of a scalar input (``float`` or ``int``)."""
        return self.numbers[name]

    def size(self, name: str) -> Dim:
        """The value of a size name of the pattern."""
        return self.sizes[name]

    def type(self, name: str) -> TensorType:
        """The type of an input's node."""
        return type_of(self.inputs[name])

    @property
    def site(self) -> Site:
        """The root's site."""
        return site_of(self.root)


@dataclass
class Miss:
    """The nearest miss: number of calls matched, and the first difference. telling: the difference
    is between two ops."""

    matched: int = -1
    reason: str = ""
    root: torch.fx.Node | None = None
    telling: bool = False

    def note(self, matched: int, reason: str, root: torch.fx.Node, *, telling: bool = True) -> None:
        """Keep this attempt if it matched more calls, or as many and is more telling."""
        if (matched, telling) > (self.matched, self.telling):
            self.matched, self.reason, self.root = matched, reason, root
            self.telling = telling


Goal = tuple[Any, Any]  # (in the pattern, in the program)


@dataclass
class _State:
    nodes: dict[torch.fx.Node, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    deferred: list[tuple[Sym, Any]] = field(default_factory=list)
    casts: set[torch.fx.Node] = field(default_factory=set)

    def fork(self) -> _State:
        return _State(dict(self.nodes), dict(self.numbers), list(self.deferred), set(self.casts))


class Matcher:
    """Matches one pattern; `miss` collects the nearest miss over all attempts."""

    def __init__(self, pattern: Pattern, optional_casts: bool = False) -> None:
        self.pattern, self.optional_casts = pattern, optional_casts
        self.miss = Miss()
        self.at: torch.fx.Node = pattern.root

    def match(self, root: torch.fx.Node) -> Match | None:
        """The occurrence whose result is `root`, or None."""
        self.at = root
        state = self.solve([(self.pattern.root, root)], _State())
        if state is None:
            return None
        sizes = self.unify(state)
        return None if sizes is None else self.finish(root, state, sizes)

    def solve(self, goals: list[Goal], state: _State) -> _State | None:
        """Depth-first search; recursion only for commutative operands and optional casts."""
        while goals:
            pattern, value = goals.pop()
            choices = list(self.expand(pattern, value, state))
            for choice in choices[:-1]:
                found = self.solve(goals + choice, state.fork())
                if found is not None:
                    return found
            if not choices:
                return None
            goals = goals + choices[-1]
        return state

    def expand(self, pattern: Any, value: Any, state: _State) -> Iterator[list[Goal]]:
        """Ways to satisfy one goal, each a list of further goals."""
        if isinstance(pattern, torch.fx.Node):
            yield from self.expand_node(pattern, value, state)
        elif isinstance(pattern, Hole):
            if self.capture(pattern, value, state):
                yield []
        elif isinstance(pattern, Sym):
            state.deferred.append((pattern, value))
            yield []
        elif isinstance(pattern, (list, tuple)):
            if isinstance(value, (list, tuple)) and len(value) == len(pattern):
                yield list(zip(pattern, value, strict=True))
            else:
                self.failed(state, pattern, value)
        elif _equal(pattern, value):
            yield []
        else:
            self.failed(state, pattern, value)

    def expand_node(
        self, pattern: torch.fx.Node, value: Any, state: _State
    ) -> Iterator[list[Goal]]:
        if pattern in state.nodes:
            if state.nodes[pattern] is value:
                yield []
            else:
                self.failed(state, f"{_describe(state.nodes[pattern])} again", value)
        elif not isinstance(value, torch.fx.Node):
            self.failed(state, pattern, value)
        elif pattern.op == "placeholder":
            yield from self.bind_input(pattern, value, state)
        else:
            yield from self.expand_call(pattern, value, state)

    def expand_call(
        self, pattern: torch.fx.Node, value: torch.fx.Node, state: _State
    ) -> Iterator[list[Goal]]:
        if self.optional_casts and pattern.target == _CAST != value.target:
            state.nodes[pattern] = value
            yield [(pattern.args[0], value)]
        elif value.target in IDENTITIES or (
            self.optional_casts and value.target == _CAST != pattern.target
        ):
            state.casts.add(value)
            yield [(pattern, value.args[0])]
        elif value.op != "call_function" or kind_of(value.target) != kind_of(pattern.target):
            self.failed(state, pattern, value)
        else:
            state.nodes[pattern] = value
            yield from _argument_goals(pattern, value)

    def bind_input(
        self, pattern: torch.fx.Node, value: torch.fx.Node, state: _State
    ) -> Iterator[list[Goal]]:
        spec = self.pattern.inputs[str(pattern.target)]
        assert isinstance(spec, InputSpec)
        given = value.meta.get("type")
        expected = spec.dtype or self.pattern.dtype
        fits = isinstance(given, TensorType) and (self.optional_casts or given.dtype == expected)
        if fits and (value.op == "get_attr" or not spec.weight):
            state.nodes[pattern] = value
            yield []
        else:
            self.failed(state, spec_text(spec, self.pattern.dtype), value)

    def capture(self, hole: Hole, value: Any, state: _State) -> bool:
        wanted = float if self.pattern.inputs[hole.name] is float else int
        fits = isinstance(value, (int, Sym) if wanted is int else (int, float))
        if not fits or isinstance(value, bool):
            self.failed(state, f"a number ({hole.name})", value)
            return False
        if not _equal(state.numbers.setdefault(hole.name, value), value):
            self.failed(state, f"{hole.name} = {state.numbers[hole.name]}", value)
            return False
        return True

    def failed(self, state: _State, expected: Any, found: Any) -> None:
        """Record the nearest miss."""
        calls = sum(node.op == "call_function" for node in state.nodes)
        reason = f"expected {_describe(expected)}, found {_describe(found)}"
        # A difference between an op and an input is less informative than between two ops.
        unlike = isinstance(expected, torch.fx.Node) and getattr(found, "op", "") != "call_function"
        self.miss.note(calls, reason, self.at, telling=not unlike)

    # -- sizes

    def unify(self, state: _State) -> dict[str, Dim] | None:
        """Values of the pattern's size names; None if sizes contradict."""
        goals: list[tuple[Dim, Any]] = list(state.deferred)
        for node, value in state.nodes.items():
            if node.op != "placeholder":
                continue
            spec, dims = self.pattern.inputs[str(node.target)], type_of(value).dims
            assert isinstance(spec, InputSpec)
            extra = len(dims) - len(spec.dims)
            if extra < 0 or (extra and not spec.loose):
                self.failed(state, spec_text(spec, self.pattern.dtype), value)
                return None
            goals.extend(zip(spec.dims, dims[extra:], strict=True))
        # Plain names first: they bind the symbols of compound expressions.
        goals.sort(key=lambda goal: len(str(goal[0])))
        sizes: dict[str, Dim] = {}
        for expected, found in goals:
            if not _unify(expected, found, sizes):
                self.failed(state, f"size {expected} (with {_listing(sizes)})", found)
                return None
        return sizes

    def finish(self, root: torch.fx.Node, state: _State, sizes: dict[str, Dim]) -> Match | None:
        calls = {p: v for p, v in state.nodes.items() if p.op == "call_function"}
        inputs = {str(p.target): v for p, v in state.nodes.items() if p.op == "placeholder"}
        interior = frozenset(calls.values()) | state.casts
        interior -= frozenset(inputs.values())
        for node in interior - {root}:
            outside = [user for user in node.users if user not in interior]
            if outside:
                reason = f"%{node.name} inside the match is also used by %{outside[0].name}"
                self.miss.note(len(calls), reason, root)
                return None
        return Match(root, interior, inputs, state.numbers, sizes)


def _argument_goals(pattern: torch.fx.Node, value: torch.fx.Node) -> Iterator[list[Goal]]:
    wanted, given = normal_call(pattern).arguments, normal_call(value).arguments
    goals = [(wanted[name], given[name]) for name in wanted]
    if pattern.target in COMMUTATIVE:
        (a, x), (b, y) = goals[:2]
        yield _ordered([(a, y), (b, x), *goals[2:]])
    yield _ordered(goals)


def _ordered(goals: list[Goal]) -> list[Goal]:
    """Goals are taken from the end: calls before numbers and inputs, for deep near misses."""
    return sorted(goals, key=lambda goal: getattr(goal[0], "op", "") == "call_function")


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    numeric = (int, float)
    if isinstance(expected, numeric) and isinstance(found, numeric):
        return math.isclose(expected, found, rel_tol=1e-6)
    return bool(expected == found)


def _unify(expected: Dim, found: Any, sizes: dict[str, Dim]) -> bool:
    if not isinstance(found, (int, Sym)) or isinstance(found, bool):
        return False
    if isinstance(expected, int):
        return expected == found
    unknown = [name for name in expected.symbols if name not in sizes]
    if not unknown:
        return expected.bind(sizes) == found
    if len(unknown) > 1:
        return False
    if expected.text == unknown[0]:
        sizes[unknown[0]] = found
        return True
    # k * name = found, with found a number: the one compound form that patterns need.
    factor = expected.bind({**sizes, unknown[0]: 1})
    if not isinstance(factor, int) or not isinstance(found, int) or found % max(factor, 1):
        return False
    sizes[unknown[0]] = found // factor
    return expected.bind(sizes) == found


def _describe(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        if value.op == "placeholder":
            return f"the input {value.target}"
        if value.op == "get_attr":
            return f"@{value.target}"
        name = "a result [i]" if value.target is operator.getitem else str(value.target)
        return f"{name} (%{value.name})" if "site" in value.meta else name
    return str(value)


def _listing(sizes: Mapping[str, Dim]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sizes.items()) or "nothing known"
