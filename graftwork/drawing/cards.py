"""Short pieces of HTML for notebooks, which have styles of their own for tables."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from .html import escaped

_LEFT = ' style="text-align:left"'


def card(
    title: str,
    facts: Sequence[str],
    heads: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
    *more: str,
) -> str:
    """A title, facts in a line each, and a table. All text is escaped. more: HTML behind it."""
    lines = "".join(f"<div>{escaped(fact)}</div>" for fact in facts)
    head = "".join(f"<th{_LEFT}>{escaped(text)}</th>" for text in heads)
    body = "".join(
        f"<tr>{''.join(f'<td{_LEFT}>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if heads else ""
    return f"<div><b>{escaped(title)}</b>{lines}{table}{''.join(more)}</div>"


def fold(summary: str, inner: str) -> str:
    """What is shown when it is asked for. inner: HTML."""
    return f"<details><summary>{escaped(summary)}</summary>{inner}</details>"


def picture(svg: str) -> str:
    """An SVG as an image, so that its styles stay in it."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img style="max-width:none" src="data:image/svg+xml;base64,{data}"/>'
