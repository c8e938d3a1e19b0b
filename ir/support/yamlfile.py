"""Strict YAML with line numbers; errors name file and line.

Only plain data: no tags, anchors or duplicate keys. ``1e-5`` is a number, as in JSON (in YAML 1.1
it is text).

    >>> document = parse("a: 1\\nb: [x, 1e-5]", "demo.yaml")
    >>> document.data, document.at("b", 1)
    ({'a': 1, 'b': ['x', 1e-05]}, 'demo.yaml:2')
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from .errors import InputError
from .names import shown

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null")}

DEEPEST = 100
"""Maximum levels of nesting."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """Plain data, and lines of keys and items by path. origin: the file's name."""

    data: Any
    origin: str
    lines: dict[Path, int] = field(default_factory=dict)

    def at(self, *path: str | int) -> str:
        """``file:line`` of the value at `path`, or of the nearest enclosing one."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.origin}:{self.lines[path]}" if path in self.lines else self.origin


def parse(text: str, origin: str) -> Document:
    """Read one YAML document. Errors: `InputError` with file and line."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise _error(origin, event.start_mark, f"nested too deeply: over {DEEPEST} levels")
            if isinstance(event, yaml.AliasEvent):
                raise _error(origin, event.start_mark, "anchors and aliases are not supported")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise _error(origin, mark, f"not valid YAML: {problem}") from error
    if root is None:
        raise InputError(f"{origin}: empty; expected a mapping")
    lines: dict[Path, int] = {}
    return Document(_value(root, (), origin, lines), origin, lines)


def parse_value(text: str, origin: str) -> Any:
    """Parse one value: ``32``, ``true``, ``[1, 2]``, ``text``."""
    return parse(text, origin).data if text.strip() else ""


def _value(node: yaml.Node, path: Path, origin: str, lines: dict[Path, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, origin)
    if node.tag == _TAG + "seq":
        items = enumerate(node.value)
        return [_value(item, (*path, i), origin, lines) for i, item in items]
    if node.tag != _TAG + "map":
        raise _error(origin, node.start_mark, f"the tag {node.tag!r} is not supported")
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _key(key_node, result, origin)
        lines[(*path, key)] = key_node.start_mark.line + 1
        result[key] = _value(value_node, (*path, key), origin, lines)
    return result


def _key(node: yaml.Node, seen: dict[str, Any], origin: str) -> str:
    key = _scalar(node, origin) if isinstance(node, yaml.ScalarNode) else node
    if not isinstance(key, str):
        raise _error(origin, node.start_mark, f"expected a name as key, got {node.value!r}")
    if key in seen:
        raise _error(origin, node.start_mark, f"the key {key!r} is given twice")
    return key


def _scalar(node: yaml.ScalarNode, origin: str) -> Any:
    if node.tag not in _SCALARS:
        what = node.tag.removeprefix(_TAG)
        raise _error(origin, node.start_mark, f"expected plain data, got {what} {node.value!r}")
    if node.tag == _TAG + "str" and node.style is None and _EXPONENT.fullmatch(node.value):
        return float(node.value)
    try:
        made = yaml.SafeLoader("").construct_object(node)
    except (ValueError, LookupError) as error:  # of a tag that the text does not fit
        kind = node.tag.removeprefix(_TAG)
        message = f"cannot read {shown(node.value)} as {kind}: {shown(error)}"
        raise _error(origin, node.start_mark, message) from error
    if isinstance(made, int) and not -(2**63) <= made < 2**63:
        raise _error(origin, node.start_mark, "expected a number of at most 64 bits")
    return made


def _error(origin: str, mark: Any, message: str) -> InputError:
    where = origin if mark is None else f"{origin}:{mark.line + 1}"
    return InputError(f"{where}: {message}")
