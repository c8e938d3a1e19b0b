"""The text form of functions, records and literals. `program.program_text` prints programs,
`parser.parse_program` reads them.

    program "tiny" stage=traced {
      info(model_type="tiny", vocab_size=100, context=64, eos=(2,), bos=None, pad=None)
      weight emb: f32[100,8]
      func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,100] {
        %h: f32[B,T,8] = aten.embedding(@emb, %tokens)  # model.embed layer=0 at model.py:12
        %y: f32[B,T,100] = aten.linear(%h, @emb)
        return logits=%y
      }
      decode {
        draft = suffix(tokens=6, longest=16, shortest=2)
      }
    }

``%`` names values, ``@`` weights; names with other characters than letters, digits, ``_`` and
``.`` are quoted. Arguments are Python literals, dtypes (``f32``), symbolic sizes (``B*T``) and
values. Roles other than the target's stand before ``func`` (``draft func``). Slots of the plan with
default records are left out.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.fx

from ..function import Function, Role, Site, site_of
from ..ops.stages import op_name
from ..plan import Record
from ..support.errors import GraftworkError
from ..types import DTYPE_NAMES, Sym, type_text
from ..weights import Operand, Weight, option_fields

WIDTH = 100
PLAIN_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.]*[A-Za-z0-9_])?")
PLAIN_MODULE = re.compile(r"[A-Za-z0-9_.\[\]<>/-]+")
CONSTANTS: dict[Any, str] = {
    torch.contiguous_format: "contiguous_format",
    torch.preserve_format: "preserve_format",
    torch.channels_last: "channels_last",
    torch.strided: "strided",
}


@dataclass(frozen=True)
class Line:
    """One line of a printed function, and its node (None: header and footer)."""

    text: str
    node: torch.fx.Node | None = None


def function_text(function: Function) -> str:
    """One function as text."""
    return "\n".join(line.text for line in function_lines(function)) + "\n"


def function_lines(function: Function, *, strict: bool = True) -> list[Line]:
    """One function as lines.

    strict: raise `GraftworkError` for an argument without a text form; False: show its class, for
    messages about invalid functions.
    """
    names = value_names(function)
    params = [f"{name_text(str(n.target))}: {_type(n)}" for n in function.inputs]
    outputs = _outputs(function)
    results = [f"{name_text(name)} {_type(node)}" for name, node in outputs.items()]
    role = "" if function.role is Role.TARGET else f"{function.role.value} "
    start = f"{role}func {name_text(function.name)}"
    lines = [Line(text) for text in _header(start, params, results)]
    for node in function.graph.nodes:
        if node.op == "call_function":
            lines.append(Line("  " + _node_text(node, names, strict), node))
    returned = [f"{name_text(k)}={argument_text(v, names)}" for k, v in outputs.items()]
    end = next(iter(function.graph.find_nodes(op="output")), None)
    lines += [Line("  " + text, end) for text in _wrapped("return ", returned, "(", ")", "")]
    return [*lines, Line("}")]


def record_text(record: Record) -> str:
    """A plan record as ``kind(field=value)``."""
    return call_text(record.kind, fields_of(record))


def name_text(name: str) -> str:
    """A name after ``%`` or ``@``: quoted if it has unusual characters."""
    return name if PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def value_names(function: Function) -> dict[torch.fx.Node, str]:
    """The name behind ``%`` or ``@`` of every node, sigil included."""
    names = {node: f"%{name_text(str(node.target))}" for node in function.inputs}
    taken = {text for node, text in names.items()} | {f"%{n.name}" for n in function.inputs}
    for node in function.graph.nodes:
        if node.op == "get_attr":
            names[node] = f"@{name_text(str(node.target))}"
        elif node.op == "call_function":
            names[node] = _unused(f"%{node.name}", taken)
            taken.add(names[node])
    return names


def _unused(name: str, taken: set[str]) -> str:
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def literal(value: Any) -> str:
    """A Python literal, strings in double quotes. Errors: `GraftworkError` for other objects."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return _tuple([literal(v) for v in value])
    if isinstance(value, list):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, Record):
        return record_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    raise GraftworkError(f"{value!r} ({type(value).__name__}) has no text form; use plain values")


def argument_text(value: Any, names: Mapping[Any, str]) -> str:
    """One argument of a call. names: of nodes, or of a weight's operands."""
    if isinstance(value, Operand):
        return names[value]
    if isinstance(value, torch.fx.Node):
        return names.get(value, f"%<{value.name} of another graph>")
    if isinstance(value, Sym):
        return str(value)
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, torch.device):
        return f"device({literal(str(value))})"
    if isinstance(value, (torch.memory_format, torch.layout)):
        return CONSTANTS.get(value, str(value))
    if isinstance(value, list):
        return "[" + ", ".join(argument_text(v, names) for v in value) + "]"
    if isinstance(value, tuple):
        return _tuple([argument_text(v, names) for v in value])
    if (given := option_fields(value)) is not None:
        parts = [f"{name}={argument_text(part, names)}" for name, part in given.items()]
        return f"{type(value).__name__}({', '.join(parts)})"
    return literal(value)


def target_name(target: Any) -> str:
    """The name of an op, or of a function that derives weights; "" for other callables."""
    is_op = isinstance(target, torch._ops.OpOverload)
    return op_name(target) if is_op else getattr(target, "__name__", "")


def made_of(weight: Weight) -> str:
    """A weight's derivation for a comment: functions, and names of weights without inputs."""
    if not weight.inputs:
        return name_text(weight.name)
    text = f"{target_name(weight.made.target)}({', '.join(map(made_of, weight.inputs))})"
    return text if len(text) <= 2 * WIDTH else f"{text[: 2 * WIDTH]} ..."


def site_text(site: Site) -> str:
    """A site as a trailing comment, or nothing."""
    parts = []
    if site.module:
        plain = PLAIN_MODULE.fullmatch(site.module) and site.module not in ("at", "layer")
        parts.append(site.module if plain else json.dumps(site.module, ensure_ascii=False))
    if site.layer is not None:
        parts.append(f"layer={site.layer}")
    if site.line:
        escaped = json.dumps(site.line, ensure_ascii=False)
        plain = escaped[1:-1] == site.line and site.line.strip() == site.line
        parts.append(f"at {site.line if plain else escaped}")
    return f"  # {' '.join(parts)}" if parts else ""


def _node_text(node: torch.fx.Node, names: Mapping[torch.fx.Node, str], strict: bool) -> str:
    def shown(value: Any) -> str:
        try:
            return argument_text(value, names)
        except GraftworkError:
            if strict:
                raise
            return f"<{type(value).__name__}>"

    if node.target is operator.getitem:
        source, index = node.args
        expression = f"{shown(source)}[{index}]"
    else:
        args = [shown(a) for a in node.args]
        args += [f"{k}={shown(v)}" for k, v in node.kwargs.items()]
        expression = f"{op_name(node.target)}({', '.join(args)})"
    return f"{names[node]}: {_type(node)} = {expression}{site_text(site_of(node))}"


def _type(node: Any) -> str:
    value_type = node.meta.get("type") if isinstance(node, torch.fx.Node) else None
    return "?" if value_type is None else type_text(value_type)


def _outputs(function: Function) -> dict[str, Any]:
    for node in function.graph.find_nodes(op="output"):
        result = node.args[0]
        return dict(result) if isinstance(result, Mapping) else {"?": result}
    return {}


def _header(start: str, params: list[str], results: list[str]) -> Iterator[str]:
    line = f"{start}({', '.join(params)}) -> {', '.join(results)} {{"
    if len(line) <= WIDTH - 2:
        yield line
        return
    yield f"{start}("
    yield from (f"  {param}," for param in params)
    yield ") -> ("
    yield from (f"  {result}," for result in results)
    yield ") {"


def _wrapped(start: str, items: list[str], opening: str, closing: str, end: str) -> Iterator[str]:
    line = start + ", ".join(items) + end
    if len(line) <= WIDTH - 4:
        yield line
        return
    yield start + opening
    yield from (f"  {item}," for item in items)
    yield closing + end


def call_text(name: str, values: Mapping[str, Any]) -> str:
    """``name(key=literal, ...)``."""
    return f"{name}({', '.join(f'{k}={literal(v)}' for k, v in values.items())})"


def _tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {f.name: getattr(record, f.name) for f in fields(record)}
