"""HTML pages in one file: text is escaped, and nothing is loaded from anywhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with a page: show it."""

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fff; --line: #e4e4e7; --soft: #555;
  --came: #1d6b2f; --went: #a02c2c; --changed: #7a5200; --quiet: #666; --bar: #3a6ea5;
  --note: #fdf8e7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e8; --paper: #17181a; --line: #3a3b3f;
  --soft: #b0b0b6; --came: #7fcf91; --went: #f09a9a; --changed: #e0b45c; --quiet: #a0a0a6;
  --bar: #6ea3da; --note: #2c2715 } }
body { font: 15px/1.5 system-ui, 'DejaVu Sans', sans-serif; color: var(--ink);
  background: var(--paper); max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .5rem 0 }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top }
th { color: var(--soft); font-weight: 600; font-size: 13px }
th:first-child, td:first-child { text-align: left }
td.text, th.text { text-align: left }
code, .lines { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace }
.lines { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 .8rem }
.came { color: var(--came) } .went { color: var(--went) } .changed { color: var(--changed) }
.quiet { color: var(--quiet) }
.note { border-left: 3px solid #d9a400; padding: .1rem .7rem; background: var(--note) }
details { border: 1px solid var(--line); border-radius: 6px; padding: .35rem .8rem;
  margin: .35rem 0 }
summary { cursor: pointer } summary b { font-weight: 600 }
.wide { overflow-x: auto } svg { max-width: 100%; height: auto; border-radius: 6px }
.wide svg { max-width: none }
.bar { display: inline-block; height: .7em; background: var(--bar); border-radius: 2px }
"""
"""Light and dark, as the browser is; pictures have a white ground of their own in both."""


def escaped(text: object) -> str:
    """Text for HTML and SVG; what neither may hold (control characters, halves of characters) is
    shown as a question mark.

    >>> escaped("<b>"), escaped("a\\x00\\ud800")
    ('&lt;b&gt;', 'a??')
    """
    plain = _UNFIT.sub("?", str(text))
    return html.escape(plain)


def page(title: str, *body: str) -> str:
    """A whole page; its heading is the title. body: HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{escaped(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{escaped(title)}</h1>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], text: Sequence[int] = ()) -> str:
    """A table of escaped cells. text: columns that stand on the left, besides the first."""
    sides = {i: ' class="text"' for i in text}
    head = "".join(f"<th{sides.get(i, '')}>{escaped(h)}</th>" for i, h in enumerate(heads))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{sides.get(i, '')}>{escaped(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def folding(summary: str, *body: str, shown: bool = False) -> str:
    """A section that folds. summary and body: HTML."""
    return f"<details{' open' * shown}><summary>{summary}</summary>{''.join(body)}</details>"


def bars(values: Sequence[tuple[str, float, str]]) -> str:
    """A table with bars. values: name, length from 0 to 1, and text of each."""
    rows = "".join(
        f"<tr><td>{escaped(name)}</td><td>{escaped(text)}</td>"
        f'<td class="text"><span class="bar" style="width:{max(share, 0.002) * 20:.2f}rem"></span>'
        "</td></tr>"
        for name, share, text in values
    )
    return f"<table><tbody>{rows}</tbody></table>"
