"""What a pass changed: calls, states, weights and slots of the plan that came, went or changed.

Calls are the same if they have the same name and op. Those that changed alike in several layers are
one line with the layers' numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch.fx

from ..ir import Function, PassRecord, Program
from ..ir.text.printer import call_text, fields_of, record_text
from .fold import AFTER, BEFORE, is_wire, label, layers_of, name_of, numbered, types_text

CAME, WENT, CHANGED, MOVED = "+", "-", "~", ">"
"""Marks of lines. MOVED: a call is the same, but reads other values."""


@dataclass(frozen=True)
class Line:
    """One change. mark: see above. count: of calls, states or weights. layers: where, or ""."""

    mark: str
    text: str
    count: int = 1
    layers: str = ""


@dataclass(frozen=True)
class Changes:
    """What one pass did. record: its provenance. functions: lines of those that changed, by name.
    others: lines on states, weights and the plan, by heading. counts: calls before and after."""

    record: PassRecord
    functions: Mapping[str, tuple[Line, ...]]
    others: Mapping[str, tuple[Line, ...]]
    counts: tuple[int, int]

    @property
    def title(self) -> str:
        """The pass with its options."""
        return call_text(self.record.name, dict(self.record.options))


class Watch:
    """Collects changes, called with the program before all passes and after each."""

    def __init__(self) -> None:
        self.found: list[Changes] = []
        self.last: Program | None = None

    def __call__(self, program: Program) -> None:
        if self.last is not None:
            self.found.append(changes(self.last, program))
        self.last = program


def changes(before: Program, after: Program) -> Changes:
    """What the last pass of `after` changed in `before`."""
    functions = {}
    for name in dict.fromkeys([*before.functions, *after.functions]):
        old, new = before.functions.get(name), after.functions.get(name)
        if lines := tuple(_of_function(old, new)):
            functions[name] = lines
    others = {
        "states": _of_names(_types(before.states), _types(after.states)),
        "weights": _of_names(_types(before.weights), _types(after.weights)),
        "plan": tuple(_of_plan(before, after)),
        "stage": _of_stage(before.stage, after.stage),
    }
    counts = tuple(sum(len(f.calls()) for f in p.functions.values()) for p in (before, after))
    kept = {name: lines for name, lines in others.items() if lines}
    return Changes(after.provenance[-1], functions, kept, (counts[0], counts[1]))


def _of_function(before: Function | None, after: Function | None) -> Iterator[Line]:
    old, new = _calls(before), _calls(after)
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in dict.fromkeys([*old, *new]):
        if name not in new or (name in old and old[name][0].target is not new[name][0].target):
            found[WENT, label(*old[name])].append(old[name][1])
        if name not in old or (name in new and old[name][0].target is not new[name][0].target):
            found[CAME, label(*new[name])].append(new[name][1])
            continue
        if name in new and name in old and (change := _change(old[name], new[name])):
            found[change].append(new[name][1])
    for mark, names in _inputs(before, after):
        yield Line(mark, f"input {names}")
    order = [WENT, CAME, CHANGED, MOVED]
    for (mark, text), layers in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        where = sorted({layer for layer in layers if layer not in (BEFORE, AFTER)})
        yield Line(mark, text, len(layers), numbered(where))


def _calls(function: Function | None) -> dict[str, tuple[torch.fx.Node, int]]:
    if function is None:
        return {}
    where = layers_of(function)
    return {node.name: (node, layer) for node, layer in where.items() if not is_wire(node)}


def _change(
    old: tuple[torch.fx.Node, int], new: tuple[torch.fx.Node, int]
) -> tuple[str, str] | None:
    before, after = label(*old), label(*new)
    if before != after:
        return CHANGED, f"{before}  →  {after}"
    reads = [[n.name for n in node.all_input_nodes] for node, _ in (old, new)]
    if reads[0] != reads[1]:
        return MOVED, f"{name_of(new[0])} {types_text(new[0])} reads other values"
    return None


def _inputs(before: Function | None, after: Function | None) -> Iterator[tuple[str, str]]:
    old, new = (
        {} if f is None else {f"{n.target}": types_text(n) for n in f.inputs}
        for f in (before, after)
    )
    for mark, one, other in ((WENT, old, new), (CAME, new, old)):
        gone = {name: kind for name, kind in one.items() if other.get(name) != kind}
        for line in _folded(mark, gone.items()):
            yield mark, f"{line.text}" + (f" ({line.count})" if line.count > 1 else "")


def _of_names(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Line, ...]:
    went = {name: kind for name, kind in before.items() if after.get(name) != kind}
    came = {name: kind for name, kind in after.items() if before.get(name) != kind}
    return (*_folded(WENT, went.items()), *_folded(CAME, came.items()))


def _folded(mark: str, named: Iterable[tuple[str, str]]) -> list[Line]:
    """Names that differ in numbers alone are one line."""
    found: dict[str, int] = defaultdict(int)
    for name, kind in named:
        found[f"{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', name)} {kind}"] += 1
    return [Line(mark, text, count) for text, count in found.items()]


def _types(things: Mapping[str, object]) -> dict[str, str]:
    return {name: str(getattr(thing, "type", "")) for name, thing in things.items()}


def _of_plan(before: Program, after: Program) -> Iterator[Line]:
    old, new = fields_of(before.plan), fields_of(after.plan)
    for name, record in new.items():
        if record != old[name]:
            yield Line(CHANGED, f"{name} = {record_text(record)}")


def _of_stage(before: str, after: str) -> tuple[Line, ...]:
    return () if before == after else (Line(CHANGED, f"{before}  →  {after}"),)
