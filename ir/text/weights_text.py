"""The text form of weights: one line a weight with the call that computes it, operands first.

    %0 "q": bf16[6,4] = stored_tensor(file=SafetensorsFile(path="m", stamp=(1, 2)), key="q")
    %1 "q": f32[6,4] = aten._to_copy(%0, dtype=f32)
    %2 "k": f32[3,4] = given("model.k")
    %3 "qk": f32[9,4] = joined(%1, %2, sizes=(6, 3))
    return %3

``given(key)`` is a weight that the reader has, ``held(key)`` a tensor that is kept beside the text.
Calls are of ops and of functions that `derivation` knows; values of classes that `option` knows are
written as calls of the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..support.errors import GraftworkError
from ..weights import DERIVATIONS, OPTIONS, Call, Held, Operand, Weight
from .expressions import Expression
from .lexer import Cursor, Source, Token
from .printer import argument_text, literal, target_name


def weights_text(
    weights: Mapping[str, Weight], given: Mapping[str, str]
) -> tuple[str, dict[str, torch.Tensor]]:
    """Weights as text, and the tensors that ``held(key)`` refers to, by key.

    given: keys of weights that the reader has, by name. Errors: `GraftworkError` for a weight whose
    call has no text form.
    """
    lines, labels = list[str](), dict[int, str]()
    tensors: dict[str, torch.Tensor] = {}

    def made(weight: Weight) -> str:
        if weight.name in given and weights.get(weight.name, weight) is weight:
            return f"given({literal(given[weight.name])})"
        if isinstance(weight.made.target, Held):
            tensors[str(len(tensors))] = weight.load()
            return f"held({literal(str(len(tensors) - 1))})"
        return _call_text(weight, [label(part) for part in weight.inputs])

    def label(weight: Weight) -> str:
        if id(weight) not in labels:
            text = made(weight)
            labels[id(weight)] = f"%{len(labels)}"
            lines.append(f"{labels[id(weight)]} {literal(weight.name)}: {weight.type} = {text}")
        return labels[id(weight)]

    order = [label(weight) for weight in weights.values()]
    return "\n".join([*lines, f"return {', '.join(order)}", ""]), tensors


def _call_text(weight: Weight, inputs: Sequence[str]) -> str:
    call, names = weight.made, {Operand(place): label for place, label in enumerate(inputs)}
    target = target_name(call.target)
    if "." not in target and DERIVATIONS.get(target) is not call.target:
        raise GraftworkError(f"weight {weight.name}: {call.target} has no text form")
    args = [argument_text(arg, names) for arg in call.args]
    args += [f"{key}={argument_text(arg, names)}" for key, arg in call.kwargs.items()]
    return f"{target}({', '.join(args)})"


def parse_weights(
    text: str, tensors: Mapping[str, torch.Tensor], given: Callable[[str], Weight]
) -> dict[str, Weight]:
    """The weights of a text, by name. tensors: by the keys of ``held``. given: the weight of a key
    of ``given``. Errors: `ParseError`, and those of `given` and of the classes of options."""
    reader = _Reader(Cursor(Source(text)), tensors, given)
    cursor, weights = reader.cursor, dict[str, Weight]()
    cursor.skip_lines()
    while not cursor.accept("return"):
        reader.line()
        cursor.skip_lines()
    while cursor.here.kind == "value":
        start = cursor.next()
        weight = reader.weight(start)
        cursor.declare(weights, weight.name, weight, start)
        cursor.accept(",")
    cursor.end_line()
    return weights


@dataclass
class _Reader:
    """Reads lines. used: operands of the line's call."""

    cursor: Cursor
    tensors: Mapping[str, torch.Tensor]
    given: Callable[[str], Weight]
    weights: dict[str, Weight] = field(default_factory=dict)
    used: list[Weight] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def line(self) -> None:
        cursor, self.used = self.cursor, []
        label = cursor.take("value", "a weight, as in %0, or return")
        name = cursor.unquote(cursor.take("string", "the weight's name in quotes"))
        cursor.expect(":")
        type = cursor.tensor_type()
        cursor.expect("=")
        expression = Expression(cursor, cursor.span(), self.operand, self.option)
        node, target = expression.call()
        args, kwargs = expression.arguments(node)
        if target == "given":
            weight = self.given(*args)
        elif target == "held":
            weight = Weight.of(name, self.tensors[args[0]])
        elif (function := DERIVATIONS.get(target) or _op(target)) is not None:
            weight = Weight(name, type, Call(function, tuple(args), kwargs), tuple(self.used))
        else:
            cursor.fail(f"an op or a function that derives weights (not {target})", label)
        if weight.name != name or weight.type != type:
            cursor.fail(f"{weight.name} {weight.type}, which was given", label)
        cursor.declare(self.weights, label.text, weight, label)
        cursor.end_line()

    def weight(self, token: Token) -> Weight:
        if token.text not in self.weights:
            self.cursor.fail("a weight defined above", token)
        return self.weights[token.text]

    def operand(self, token: Token) -> Operand:
        self.used.append(self.weight(token))
        return Operand(len(self.used) - 1)

    def option(self, kind: str, values: dict[str, Any], at: Token) -> Any:
        if kind not in OPTIONS:
            self.cursor.fail(f"one of {', '.join(sorted(OPTIONS))}", at)
        key = f"{kind} {values}"  # a file is opened once
        if key not in self.options:
            self.options[key] = getattr(OPTIONS[kind], "from_text", OPTIONS[kind])(**values)
        return self.options[key]


def _op(name: str) -> Any:
    """The op that ``aten.add.Tensor`` or ``graftwork.glu`` names; None if there is none."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    known = getattr(torch.ops, namespace) if namespace in ("aten", "graftwork") else None
    return getattr(getattr(known, packet, None), overload or "default", None)
