"""The text form of weights: what each is made of, a line a weight, operands before what uses them.

    %0 "q": bf16[6,4] = stored_tensor(file=SafetensorsFile(path="m", stamp=(1, 2)), key="q")
    %1 "q": f32[6,4] = aten._to_copy(%0, dtype=f32)
    %2 "k": f32[3,4] = given("model.k")
    %3 "qk": f32[9,4] = joined(%1, %2, sizes=(6, 3), there=(True, True))
    return %3

``given(key)`` is a weight that the reader has, ``held(key)`` a tensor that is kept beside the text.
Calls are of ops and of functions that `derivation` knows; values of classes that `option` knows are
written as calls of the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ..ops.stages import op_name
from ..support.errors import GraftworkError
from ..types import TensorType
from ..weights import DERIVATIONS, OPTIONS, Call, Held, Operand, Weight
from .expressions import Expression
from .lexer import Cursor, Source, Token
from .printer import argument_text, literal


def weights_text(
    weights: Mapping[str, Weight], given: Mapping[str, str]
) -> tuple[str, dict[str, torch.Tensor]]:
    """Weights as text, and the tensors that it holds beside it, by key.

    given: keys of weights that the reader has, by name. Errors: `GraftworkError` for a weight that
    is made by something without a text form.
    """
    lines: list[str] = []
    tensors: dict[str, torch.Tensor] = {}
    labels: dict[int, str] = {}

    def made(weight: Weight) -> str:
        if weight.name in given and weights.get(weight.name, weight) is weight:
            return f"given({literal(given[weight.name])})"
        if isinstance(weight.made.target, Held):
            tensors[key := str(len(tensors))] = weight.load()
            return f"held({literal(key)})"
        names = {Operand(place): label(part) for place, part in enumerate(weight.inputs)}
        return _call_text(weight, names)

    def label(weight: Weight) -> str:
        if id(weight) not in labels:
            text = made(weight)
            labels[id(weight)] = f"%{len(labels)}"
            lines.append(f"{labels[id(weight)]} {literal(weight.name)}: {weight.type} = {text}")
        return labels[id(weight)]

    order = [label(weight) for weight in weights.values()]
    return "\n".join([*lines, f"return {', '.join(order)}", ""]), tensors


def _call_text(weight: Weight, names: Mapping[Any, str]) -> str:
    call = weight.made
    target = getattr(call.target, "__name__", "")
    if isinstance(call.target, torch._ops.OpOverload):
        target = op_name(call.target)
    elif DERIVATIONS.get(target) is not call.target:
        raise GraftworkError(f"weight {weight.name}: {call.target} has no text form")
    args = [argument_text(arg, names) for arg in call.args]
    args += [f"{key}={argument_text(arg, names)}" for key, arg in call.kwargs.items()]
    return f"{target}({', '.join(args)})"


def parse_weights(
    text: str, tensors: Mapping[str, torch.Tensor], given: Callable[[str], Weight]
) -> dict[str, Weight]:
    """The weights of a text, by name. tensors, given: what it refers to.

    Errors: `ParseError`, and what `given` and the classes of options raise.
    """
    reader = _Reader(Cursor(Source(text)), tensors, given)
    cursor = reader.cursor
    cursor.skip_lines()
    while not cursor.accept("return"):
        reader.line()
        cursor.skip_lines()
    weights: dict[str, Weight] = {}
    while cursor.here.kind == "value":
        start = cursor.next()
        weight = reader.lookup(start)
        assert isinstance(weight, Operand)
        found = reader.weights[weight.place]
        cursor.declare(weights, found.name, found, start)
        cursor.accept(",")
    cursor.end_line()
    return weights


class _Reader:
    """Reads lines; an `Operand` stands for each weight above, by its number."""

    def __init__(
        self,
        cursor: Cursor,
        tensors: Mapping[str, torch.Tensor],
        given: Callable[[str], Weight],
    ) -> None:
        self.cursor, self.tensors, self.given = cursor, tensors, given
        self.labels: dict[str, Operand] = {}
        self.weights: list[Weight] = []

    def line(self) -> None:
        cursor = self.cursor
        label = cursor.take("value", "a weight, as in %0, or return")
        name = cursor.unquote(cursor.take("string", "the weight's name in quotes"))
        cursor.expect(":")
        type = cursor.tensor_type()
        cursor.expect("=")
        expression = Expression(cursor, cursor.span(frozenset()), self.lookup, self.option)
        node, target = expression.call()
        args, kwargs = expression.arguments(node)
        weight = self.weight(name, type, target, args, kwargs, label)
        if weight.name != name or weight.type != type:
            cursor.fail(f"{weight.name} {weight.type}, which was given", label)
        cursor.declare(self.labels, label.text, Operand(len(self.weights)), label)
        self.weights.append(weight)
        cursor.end_line()

    def weight(
        self,
        name: str,
        type: TensorType,
        target: str,
        args: list[Any],
        kwargs: dict[str, Any],
        at: Token,
    ) -> Weight:
        if target == "given":
            return self.given(*args)
        if target == "held":
            return Weight.of(name, self.tensors[args[0]])
        function = DERIVATIONS.get(target) or _op(target)
        if function is None:
            self.cursor.fail(f"an op or a function that derives weights (not {target})", at)
        used: dict[Operand, Operand] = {}

        def placed(arg: Any) -> Any:
            return used.setdefault(arg, Operand(len(used))) if isinstance(arg, Operand) else arg

        placed_args: Any = map_aggregate(tuple(args), placed)
        placed_kwargs: Any = map_aggregate(kwargs, placed)
        inputs = tuple(self.weights[operand.place] for operand in used)
        return Weight(name, type, Call(function, placed_args, dict(placed_kwargs)), inputs)

    def lookup(self, token: Token) -> Operand:
        if token.text not in self.labels:
            self.cursor.fail("a weight defined above", token)
        return self.labels[token.text]

    def option(self, kind: str, values: dict[str, Any], at: Token) -> Any:
        if kind not in OPTIONS:
            self.cursor.fail(f"one of {', '.join(sorted(OPTIONS))}", at)
        return getattr(OPTIONS[kind], "from_text", OPTIONS[kind])(**values)


def _op(name: str) -> Any:
    """The op that ``aten.add.Tensor`` or ``graftwork.glu`` names; None if there is none."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    known = getattr(torch.ops, namespace) if namespace in ("aten", "graftwork") else None
    return getattr(getattr(known, packet, None), overload or "default", None)
