"""A page on a program: its facts and plan, what each pass changed, its functions as graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..ir import Program
from .changes import CAME, CHANGED, WENT, Changes, Line
from .fold import folded
from .html import escaped, folding, page, table
from .svg import function_svg, plan_lines

_CLASS = {CAME: "came", WENT: "went", CHANGED: "changed"}
MOST = 200
"""Lines of changes that are shown of one function."""


def program_page(program: Program, passes: Sequence[Changes] = (), title: str = "") -> str:
    """One HTML file that loads nothing. passes: see `Watch`; title: beside the program's name."""
    info = program.info
    facts = [
        ("architecture", info.model_type),
        ("stage", program.stage),
        ("vocabulary", f"{info.vocab_size:,}"),
        ("context", f"{info.context:,}"),
        ("functions", ", ".join(program.functions)),
        ("weights", _weights_text(program)),
        ("states", f"{len(program.states)}"),
    ]
    body = [table(("", ""), facts, text=(1,)), "<h2>Plan</h2>", _lines(plan_lines(program.plan))]
    if passes:
        what = "In the order in which they ran. + came, - went, ~ changed, > reads other values."
        body += ["<h2>Passes</h2>", f'<p class="quiet">{escaped(what)}</p>', *map(_pass, passes)]
    elif program.provenance:  # of an artifact: what ran is known, what it changed is not
        ran = [(p.name, p.matches, f"{p.seconds:.2f}", p.contract) for p in program.provenance]
        heads = ("pass", "matches", "seconds", "contract")
        body += ["<h2>Passes</h2>", table(heads, ran, text=(3,))]
    body.append("<h2>Functions</h2>")
    for i, function in enumerate(program.functions.values()):
        calls = len(function.calls())
        blocks = len(folded(function))
        head = f"<b>{escaped(function.name)}</b> ({function.role.value}): {calls} calls"
        if blocks > 1:
            head += f", folded into {blocks} blocks"
        picture = f'<div class="wide">{function_svg(function)}</div>'
        body.append(folding(head, picture, shown=i == 0))
    name = f"{program.name}, {title}" if title else program.name
    return page(name, *body)


def _pass(found: Changes) -> str:
    record = found.record
    before, after = found.counts
    matches = "1 match" if record.matches == 1 else f"{record.matches} matches"
    nodes = f"{before} calls" if before == after else f"{before} to {after} calls"
    head = (
        f"<b>{escaped(record.name)}</b> <span class='quiet'>{matches}, {nodes}, "
        f"{record.seconds:.2f} s, {escaped(record.contract)}</span>"
    )
    parts = [f'<div class="lines quiet">{escaped(found.title)}</div>']
    for name, lines in found.functions.items():
        parts.append(f"<div>function <b>{escaped(name)}</b></div>{_changed(lines)}")
    for name, lines in found.others.items():
        parts.append(f"<div>{escaped(name)}</div>{_changed(lines)}")
    if not found.functions and not found.others:
        parts.append('<p class="quiet">nothing changed</p>')
    return folding(head, *parts)


def _changed(lines: Sequence[Line]) -> str:
    shown = []
    for line in lines[:MOST]:
        count = f"{line.count} x " if line.count > 1 else ""
        where = f"  (layers {line.layers})" if line.layers else ""
        kind = _CLASS.get(line.mark, "quiet")
        text = escaped(f"{line.mark} {count}{line.text}")
        shown.append(f'<span class="{kind}">{text}</span><span class="quiet">{where}</span>')
    if len(lines) > MOST:
        shown.append(f'<span class="quiet">and {len(lines) - MOST} more</span>')
    return '<div class="lines">' + "\n".join(shown) + "</div>"


def _lines(lines: Sequence[str]) -> str:
    return '<div class="lines">' + escaped("\n".join(lines)) + "</div>"


def _weights_text(program: Program) -> str:
    sizes: dict[str, int] = defaultdict(int)
    for weight in program.weights.values():
        sizes[str(weight.type).partition("[")[0]] += weight.type.nbytes
    kinds = ", ".join(f"{n / 1e6:.1f} MB {kind}" for kind, n in sorted(sizes.items()))
    return f"{len(program.weights)}: {kinds}"
