"""A program in a notebook: facts, and how often each function calls each op."""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING

from .printer import fields_of, record_text, target_name

if TYPE_CHECKING:  # a program shows itself by this file
    from ..program import Program

MOST = 12
"""Ops of a function that are shown."""


def program_html(program: Program) -> str:
    """A short piece of HTML, in which all text is escaped."""
    size = sum(weight.type.nbytes for weight in program.weights.values())
    facts = [
        f"{program.info.model_type}, stage {program.stage}",
        f"{len(program.weights)} weights of {size / 1e6:.1f} MB",
        f"{len(program.states)} states",
    ]
    rows = []
    for function in program.functions.values():
        counts = Counter(target_name(node.target) for node in function.calls())
        counts.pop("getitem", None)
        shown = [f"{name} {count}" for name, count in counts.most_common(MOST)]
        more = len(counts) - len(shown)
        text = ", ".join([*shown, *([f"and {more} more ops"] if more > 0 else [])])
        rows.append((function.name, function.role.value, str(len(function.calls())), text))
    usual = fields_of(type(program.plan)())
    plan = [
        f"{slot} = {record_text(record)}"
        for slot, record in fields_of(program.plan).items()
        if record != usual[slot]
    ]
    heads = "".join(f"<th>{head}</th>" for head in ("function", "role", "calls", "ops"))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    said = html.escape("\n".join(plan) or "one token a step")
    return (
        f"<div><b>{html.escape(program.name)}</b>: {html.escape('; '.join(facts))}"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        f"<details><summary>plan</summary><pre>{said}</pre></details></div>"
    )


def _cell(text: str) -> str:
    return f'<td style="text-align:left">{html.escape(text)}</td>'
