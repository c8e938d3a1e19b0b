"""A program as an SVG file: its functions side by side, each folded by layer, and its plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ir import Function, Program
from ..ir.function import Role
from ..ir.plan import DecodePlan
from ..ir.text.printer import fields_of, record_text
from .fold import Block, folded, layers_of
from .graph import Box, Drawn, drawn, outputs_of
from .html import escaped
from .layout import layout

COLOURS = {
    "product": ("#dbe9fb", "#3a6ea5"),
    "attention": ("#fde6cf", "#b8691b"),
    "norm": ("#dff2df", "#3d8b40"),
    "cache": ("#eadff5", "#7b4fa3"),
    "view": ("#f4f4f4", "#b5b5b5"),
    "port": ("#ffffff", "#888888"),
    "other": ("#eeeeee", "#777777"),
}
"""Fill and stroke."""
CHAR, LINE, PAD, STEP, HEAD = 6.05, 13.0, 8.0, 30.0, 26.0
LONGEST = 46
"""Characters of a line in a box; the pointer shows the whole."""
MARGIN = 20.0

_STYLE = """
text { font: 10px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #222 }
.t { font: bold 11px system-ui, 'DejaVu Sans', sans-serif } .h { font-size: 13px }
.f { font-size: 16px } .y { fill: #666; font-size: 9px } .v { fill: #666 }
.e { fill: none; stroke: #777; stroke-width: 1.2 } .m { fill: #1d6b2f } .l { fill: #a02c2c }
""".replace("\n", " ")


@dataclass(frozen=True)
class Part:
    """A piece of a picture: SVG around the origin, and its size in pixels."""

    body: str
    width: float
    height: float


def program_svg(program: Program, title: str = "") -> str:
    """The picture of a program. title: beside its name. All text is escaped; nothing is loaded."""
    columns = [function_part(function) for function in program.functions.values()]
    plan = plan_lines(program.plan)
    head = [f"{program.name}: {program.info.model_type}, stage {program.stage}"]
    head[0] += f", {title}" if title else ""
    texts = [_text(MARGIN, MARGIN + 12, head[0], "t f")]
    y = MARGIN + 34
    for line in plan:
        texts.append(_text(MARGIN, y, _cut(f"plan: {line}", 150), whole=line))
        y += LINE
    texts.append(_legend(MARGIN, y + 8))
    y += 36
    x, parts = MARGIN, []
    for column in columns:
        parts.append(f'<g transform="translate({x:.1f},{y:.1f})">{column.body}</g>')
        x += column.width + 3 * MARGIN
    width = max(x - 2 * MARGIN, 700.0)
    height = y + max((column.height for column in columns), default=0.0) + MARGIN
    return svg(Part("".join([*texts, *parts]), width, height))


def function_svg(function: Function) -> str:
    """The picture of one function."""
    part = function_part(function)
    return svg(Part(f'<g transform="translate(4,4)">{part.body}</g>', part.width + 8, part.height))


def svg(part: Part) -> str:
    """A part as a file of its own."""
    size = f'width="{part.width:.0f}" height="{part.height:.0f}"'
    box = f'viewBox="0 0 {part.width:.0f} {part.height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}><style>{_STYLE}</style><defs>'
        '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#777"/></marker></defs>'
        f'<rect width="100%" height="100%" fill="#fff"/>{part.body}</svg>\n'
    )


def plan_lines(plan: DecodePlan) -> list[str]:
    """The slots of a plan that say something else than usual, as text."""
    usual = fields_of(DecodePlan())
    slots = fields_of(plan).items()
    found = [f"{name} = {record_text(record)}" for name, record in slots if record != usual[name]]
    return found or ["one token a step"]


def function_part(function: Function) -> Part:
    """A function: its inputs and results, and its blocks from top to bottom."""
    role = "" if function.role is Role.TARGET else f"{function.role.value} "
    inputs = [str(n.target) for n in function.inputs]
    lines = [f"takes {_few(inputs)}", f"returns {_few(function.outputs)}"]
    where, returned = layers_of(function), outputs_of(function.outputs)
    blocks = []
    for block in folded(function):
        if block.beside:
            blocks.append(_differences(block))
        else:
            blocks.append(_framed(block.title, _graph(drawn(block, where, returned))))
    width = max([part.width for part in blocks] + [CHAR * max(map(len, lines))])
    body = [_text(0, 14, f"{role}function {function.name}", "t f")]
    body += [_text(0, 32 + LINE * i, line, "v") for i, line in enumerate(lines)]
    y = 40 + LINE * len(lines)
    for i, part in enumerate(blocks):
        if i:
            body.append(_arrow(width / 2, y, width / 2, y + STEP))
            y += STEP
        left = (width - part.width) / 2
        body.append(f'<g transform="translate({left:.1f},{y:.1f})">{part.body}</g>')
        y += part.height
    return Part("".join(body), width, y)


def _graph(found: Drawn) -> Part:
    """A block's boxes and edges."""
    outlets = _outlets(found)
    sizes = {key: _size(box, len(outlets[key])) for key, box in found.boxes.items()}
    placed = layout(sizes, [(a, b) for a, b, _ in found.edges], STEP)
    body = []
    for source, kinds in outlets.items():
        x, top = placed.at[source]
        width, height = sizes[source]
        for i, kind in enumerate(kinds):
            start = x - width / 2 + width * (i + 1) / (len(kinds) + 1)
            body.append(_text(start + 4, top + height + 11, kind, "y"))
            for a, b, type_ in found.edges:
                if (a, type_) == (source, kind):
                    end = (placed.at[b][0], placed.at[b][1] - 1, placed.at[b][1] - 1)
                    path = [*placed.through[a, b], end]
                    body.append(_curve((start, top + height), path))
    for key, box in found.boxes.items():
        body.append(_box(box, placed.at[key], sizes[key]))
    return Part("".join(body), placed.width, placed.height)


def _outlets(found: Drawn) -> dict[str, list[str]]:
    """The types that leave each box."""
    outlets: dict[str, list[str]] = defaultdict(list)
    for source, _, kind in found.edges:
        if kind not in outlets[source]:
            outlets[source].append(kind)
    return defaultdict(list, outlets)


def _size(box: Box, outlets: int) -> tuple[float, float]:
    texts = [_cut(line) for line in box.lines]
    wide = max([CHAR * len(text) for text in texts] + [6.6 * len(_cut(box.title))])
    least = 90.0 if box.kind in ("view", "port") else 120.0
    apart = 105.0 * (outlets + 1) if outlets > 1 else 0.0
    return max(wide + 2 * PAD, least, apart), 18.0 + LINE * len(texts)


def _box(box: Box, at: tuple[float, float], size: tuple[float, float]) -> str:
    (x, y), (width, height) = at, size
    fill, stroke = COLOURS[box.kind]
    round_ = 9 if box.kind in ("view", "port") else 3
    dash = ' stroke-dasharray="3 2"' if box.kind == "port" else ""
    parts = [
        f"<g><title>{escaped(box.whole)}</title>"
        f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{round_}" fill="{fill}" stroke="{stroke}"{dash}/>'
    ]
    style = "v" if box.kind in ("view", "port") else "t"
    parts.append(_text(x, y + 13, _cut(box.title), style, middle=True))
    for i, line in enumerate(box.lines, 1):
        parts.append(_text(x, y + 12 + LINE * i, _cut(line), middle=True))
    return "".join([*parts, "</g>"])


def _framed(title: str, inner: Part) -> Part:
    """A part in a frame with a title."""
    width = max(inner.width, 7.6 * len(title)) + 2 * PAD
    height = inner.height + HEAD + 2 * PAD
    left = (width - inner.width) / 2
    return Part(
        f'<rect x="0.5" y="0.5" width="{width - 1:.1f}" height="{height - 1:.1f}" rx="8" '
        f'fill="#fcfcfc" stroke="#999"/>{_text(PAD + 2, 18, title, "t h")}'
        f'<g transform="translate({left:.1f},{HEAD + PAD:.1f})">{inner.body}</g>',
        width,
        height,
    )


def _differences(block: Block) -> Part:
    """A block of layers by what it has and what it lacks beside another."""
    lines = [(f"as {block.beside}, but", "v")]
    lines += [(f"+ {text}", "m") for text in block.more]
    lines += [(f"- {text}", "l") for text in block.less]
    if not (block.more or block.less):
        lines.append(("~ calls read other results", "v"))
    texts = [(_cut(text, 80), style, text) for text, style in lines]
    body = [_text(0, 10 + LINE * i, text, s, whole=w) for i, (text, s, w) in enumerate(texts)]
    width = max(CHAR * len(text) for text, _, _ in texts)
    return _framed(block.title, Part("".join(body), width, LINE * len(texts)))


def _legend(x: float, y: float) -> str:
    parts = []
    for kind in ("product", "attention", "norm", "cache", "other", "view"):
        fill, stroke = COLOURS[kind]
        rect = f'width="12" height="12" rx="3" fill="{fill}" stroke="{stroke}"'
        parts.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" {rect}/>{_text(x + 17, y, kind, "v")}')
        x += 34 + CHAR * len(kind)
    return "".join(parts)


def _curve(start: tuple[float, float], path: Sequence[tuple[float, float, float]]) -> str:
    """An edge that passes rows of boxes straight, at x from top to bottom, and bends between."""
    (x, y), parts = start, [f"M{start[0]:.1f},{start[1]:.1f}"]
    begin = y + 14  # the type stands right of where it begins
    for to_x, top, bottom in path:
        middle = (begin + top) / 2
        parts.append(
            f"L{x:.1f},{begin:.1f} C{x:.1f},{middle:.1f} {to_x:.1f},{middle:.1f} "
            f"{to_x:.1f},{top:.1f}" + (f" V{bottom:.1f}" if bottom > top else "")
        )
        x, begin = to_x, bottom
    return f'<path class="e" d="{" ".join(parts)}" marker-end="url(#a)"/>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    line = f"M{x:.1f},{y:.1f} L{to_x:.1f},{to_y - 1:.1f}"
    return f'<path class="e" d="{line}" marker-end="url(#a)"/>'


def _text(
    x: float, y: float, text: str, style: str = "", *, middle: bool = False, whole: str = ""
) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    chosen = f' class="{style}"' if style else ""
    tip = f"<title>{escaped(whole)}</title>" if whole and whole != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{chosen}{anchor}>{escaped(text)}{tip}</text>'


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _few(names: Iterable[str]) -> str:
    """Names, those of layers' states once.

    >>> _few(["tokens", "kv.0.key", "kv.1.key"])
    'tokens, kv.*.key (2)'
    """
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        counts[".".join(parts)] += 1
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items())
