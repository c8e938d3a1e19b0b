"""Declarations of ops: schema, operand checks and result types from one line.

A declaration stands beside the op's meaning::

    "q: BHTD, k: BGCD, v: BGCE, mask: bool B1TC, bias: BHTC, H % G, C >= 1 -> BHTE"

Before the arrow, in the order in which they are checked:

    name: kind axes   An operand. axes: a letter each, equal letters for equal sizes, 1 for a size
                      of 1, `...H` for any axes and H; or an operand, whose shape it has.
                      kind: a dtype (see `DTYPES`), an operand, whose dtype it has, `float` for any
                      floating dtype, `any`, or `float|u8`, chosen by the first such operand for
                      all. Default: `float`, or that of the operand whose shape it has.
                      Operands that are None are not checked.
    H % G             H is a multiple of G, and G at least 1.
    C >= 1            The size C, or an option, is at least 1.
    P = N - 1         A size, by letters and arguments.
    also              The function of this name is called here, and else last.

After it, the results, written like operands without names. `a+b`: the dtype that two operands
promote to. Default kind: the first operand's dtype. Results do not alias operands.

The functions are generated as source and compiled, like those of dataclasses: they are as fast as
code written by hand, and torch.compile traces them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..support.errors import InputError
from ..types import DTYPES
from .operands import Operands

Also = Callable[..., None]
"""Checks that letters cannot express; may set sizes of results. Called with the `Operands` so far
and the op's arguments of its parameters' names. Errors: `InputError`."""

_SOURCE = """
def make(_meaning, _also):
    def check{loose}:
        _given = Operands({op!r})
        {checks}
        return _given
    def checked{signature}:
        _given = Operands({op!r})
        {checks}
        return _meaning({passed})
    def like(_given, {names}):
        return {results}
    def bound{signature}:
        return ({names},)
    return check, checked, like, bound
"""


@dataclass(frozen=True)
class Declared:
    """Derived from a declaration.

    schema: torch's. names: of the arguments. items, results: of the text, see `parts`. check: from
    a call's arguments (options may be left out) to sizes by letter. Errors: `InputError` naming the
    operand. checked: the meaning after `check`. like: uninitialized results, from the values of
    `check` and `bound`. bound: a call's arguments, defaults filled in.
    """

    schema: str
    names: tuple[str, ...]
    items: tuple[str, ...]
    results: tuple[str, ...]
    check: Callable[..., Operands]
    checked: Callable[..., Any]
    like: Callable[..., Any]
    bound: Callable[..., tuple[Any, ...]]

    @property
    def operands(self) -> list[tuple[str, str, str]]:
        """Name, kind and axes of what is declared of operands, in this order."""
        return [parts(item) for item in self.items if ": " in item]

    @property
    def required(self) -> list[str]:
        """The operands that may not be None."""
        return re.findall(r"Tensor (\w+)", self.schema)


def declare(text: str, meaning: Callable[..., Any], also: Also | None) -> Declared:
    """Compile an op's declaration."""
    signature = inspect.signature(meaning)
    schema = torch.library.infer_schema(meaning, op_name=meaning.__name__, mutates_args=())
    positional, star, options = schema.partition("*, ")
    schema = positional + star + options.replace("SymInt", "int")
    required = re.findall(r"Tensor (\w+)", schema)
    operands, _, results = text.partition(" -> ")
    missing = " or ".join(f"{name} is None" for name in required)
    checks = [f"if {missing}: _given.lacks({', '.join(f'{name}={name}' for name in required)})"]
    items = operands.split(", ")
    _check_names(meaning.__name__, text, list(signature.parameters))
    if also is not None and "also" not in items:
        items.append("also")
    asked = [] if also is None else list(inspect.signature(also).parameters)[1:]
    checks += [
        f"_also(_given, {', '.join(asked)})" if item == "also" else _check(item, required, operands)
        for item in items
    ]
    empty = [_result(item, items, required[0]) for item in results.split(", ")]
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    loose = [p.replace(kind=p.POSITIONAL_OR_KEYWORD, default=_default(p)) for p in plain]
    source = _SOURCE.format(
        op=meaning.__name__,
        loose=inspect.Signature(loose),
        checks="\n        ".join(checks),
        names=", ".join(signature.parameters),
        passed=", ".join(
            f"{p.name}={p.name}" if p.kind == p.KEYWORD_ONLY else p.name for p in plain
        ),
        results=empty[0] if len(empty) == 1 else f"({', '.join(empty)})",
        signature=inspect.Signature(plain),
    )
    space: dict[str, Any] = {}
    exec(compile(source, f"<graftwork.{meaning.__name__}>", "exec"), globals(), space)
    made = space["make"](meaning, also)
    parsed = tuple(items), tuple(results.split(", "))
    return Declared(schema, tuple(signature.parameters), *parsed, *made)


def _check_names(op: str, text: str, arguments: list[str]) -> None:
    """Errors: `InputError` for names in a declaration that are not arguments of the op."""
    known = {*arguments, *DTYPES, "also", "any", "float", "len"}
    unknown = [name for name in re.findall(r"[a-z]\w*", text) if name not in known]
    if unknown:
        raise InputError(f"{op}: its declaration names {unknown}; its arguments are {arguments}")


def _default(parameter: inspect.Parameter) -> Any:
    """The default of an argument of `check`: None for options without one."""
    needed = parameter.default is parameter.empty and parameter.kind == parameter.KEYWORD_ONLY
    return None if needed else parameter.default


def _size(letter: str) -> str:
    return f"_given.sizes[{letter!r}]"


def parts(item: str) -> tuple[str, str, str]:
    """Name, kind and axes of an operand or a result."""
    found = re.fullmatch(r"(?:(\w+): )?(?:(\S+) )?(\S+)", item)
    if found is None:
        raise InputError(
            f"{item!r} is no operand; expected name: kind axes, such as mask: bool B1TC"
        )
    name, kind, axes = found.groups(default="")
    return name, kind or (axes if axes.islower() else ""), axes


def _check(item: str, required: list[str], operands: str) -> str:
    """Source of the check of one item of a declaration."""
    if " % " in item:
        axis, _, of = item.partition(" % ")
        return f"_given.multiple({axis!r}, {of!r})"
    if item.endswith(" >= 1"):
        name = item.removesuffix(" >= 1")
        return f"_given.positive({name!r}, {_size(name) if name.isupper() else name})"
    if " = " in item:
        letter, _, size = item.partition(" = ")
        return f"{_size(letter)} = {re.sub('[A-Z]', lambda found: _size(found[0]), size)}"
    name, kind, axes = parts(item)
    way, shape, dtype = "fit", repr(axes), _dtype(kind, name, operands)
    if axes.islower():
        way, shape = "fit_like", f"{axes}.shape"
    elif axes.startswith("..."):
        way, shape = "fit_rows", repr(axes[3:])
    given = "" if name in required else f"if {name} is not None: "
    return f"{given}_given.{way}({name!r}, {name}, {shape}, {dtype})"


def _dtype(kind: str, name: str, operands: str) -> str:
    """Source of an operand's or result's dtype; None: any floating dtype."""
    if kind in ("", "float"):
        return "None"
    if kind == "float|u8":
        chooser = operands.partition(": float|u8")[0].split()[-1]
        return f"None if {chooser}.dtype.is_floating_point else torch.uint8"
    if kind in DTYPES:
        return str(DTYPES[kind])
    if "+" in kind:
        one, _, other = kind.partition("+")
        return f"torch.promote_types({one}.dtype, {other}.dtype)"
    return f"{name if kind == 'any' else kind}.dtype"


def _result(item: str, operands: list[str], first: str) -> str:
    """Source of an empty tensor of a result's type. first: an operand on the results' device."""
    named = [parts(operand) for operand in operands if ": " in operand]
    _, kind, axes = parts(item)
    dtype = _dtype(kind or named[0][0], "", "")
    rows, dots, letters = axes.rpartition("...")
    sizes = [n if n.isdigit() else _size(n) for n in letters]
    if rows:
        sizes.insert(0, f"*{rows}.shape")
    elif dots:
        rows = next(name for name, _, of in named if of.startswith("..."))
        sizes.insert(0, f"*{rows}.shape[:-1]")
    shape = f"{axes}.shape" if axes.islower() else f"({', '.join(sizes)},)"
    return f"{first}.new_empty({shape}, dtype={dtype})"
