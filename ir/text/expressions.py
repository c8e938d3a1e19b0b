"""Expressions of the text form: literals, arguments and calls, parsed by `ast` and never run.

Before parsing, values (``%x``) and weights (``@w``) are replaced by names that no text can contain;
they are looked up when the tree is converted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

from ..support.errors import InputError
from ..types import DOT, DTYPES, Sym, make_dim
from .lexer import Cursor, Token
from .printer import CONSTANTS

MAX_OPERATORS = 400  # in one expression; bounds the depth of its tree
_MARK = "\u00f8"
_NAMED: dict[str, Any] = {
    "inf": float("inf"),
    "nan": float("nan"),
    **DTYPES,
    **{text: value for value, text in CONSTANTS.items()},
}

Lookup = Callable[[Token], Any]
Build = Callable[[str, dict[str, Any], Token], Any]


class Expression:
    """Tokens as a tree. lookup: the object of a value or weight token. build: the object of a call
    ``name(key=value)`` inside the expression; None: calls are refused."""

    def __init__(
        self,
        cursor: Cursor,
        tokens: list[Token],
        lookup: Lookup | None,
        build: Build | None = None,
    ) -> None:
        self.cursor, self.lookup, self.build = cursor, lookup, build
        self.tokens = tokens
        self.marked: dict[str, Token] = {}
        self.columns: dict[int, Token] = {}
        self.tree = self._tree()

    def _tree(self) -> ast.expr:
        if not self.tokens:
            self.cursor.fail("an expression")
        if sum(token.kind == "punct" and token.text in "**+-" for token in self.tokens) > (
            MAX_OPERATORS
        ):
            self.cursor.fail(f"at most {MAX_OPERATORS} operators", self.tokens[0])
        pieces, column = [], 0
        for token in self.tokens:
            shown = token.text
            if token.kind == "name":
                shown = shown.replace(".", DOT)
            if token.kind in ("value", "weight"):
                shown = f"{_MARK}{len(self.marked)}"
                self.marked[shown] = token
            self.columns[column] = token
            pieces.append(shown + " ")
            column += len(pieces[-1].encode())
        text = "".join(pieces)
        try:
            return ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            at = getattr(error, "offset", None) or 1
            token = self._token(len(text[: at - 1].encode()))
            self.cursor.fail("a well-formed expression", token)

    def _token(self, column: int) -> Token:
        known = [start for start in self.columns if start <= column]
        return self.columns[max(known, default=0)]

    def fail(self, node: ast.expr, expected: str) -> Any:
        """Raise an error at a part of the tree."""
        self.cursor.fail(expected, self._token(node.col_offset))

    def call(self) -> tuple[ast.Call, str]:
        """The tree as a call of a dotted name."""
        if not isinstance(self.tree, ast.Call):
            self.fail(self.tree, "a call, name(arguments)")
        assert isinstance(self.tree, ast.Call)
        return self.tree, self.name(self.tree.func)

    def name(self, node: ast.expr) -> str:
        """A dotted name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.marked:
            self.fail(node, "a name")
        assert isinstance(node, ast.Name)
        return ".".join([node.id, *reversed(parts)]).replace(DOT, ".")

    def arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a call, converted."""
        args = [self.value(arg) for arg in node.args]
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in kwargs:
                self.fail(keyword.value, "every keyword once, by name")
            kwargs[str(keyword.arg)] = self.value(keyword.value)
        return args, kwargs

    def value(self, node: ast.expr) -> Any:
        """Convert a part of the tree."""
        plain = (str, int, float, type(None))
        if isinstance(node, ast.Constant) and isinstance(node.value, plain):
            if isinstance(node.value, str) and not node.value.isascii():
                self._whole(node)
            return node.value
        if isinstance(node, ast.Name):
            return self._name_value(node)
        if isinstance(node, ast.List):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self.value(item) for item in node.elts)
        if isinstance(node, ast.Dict) and self.lookup is None:
            return self._dict(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self.value(node.operand)
            if isinstance(operand, (int, float)) and not isinstance(operand, bool):
                return -operand
        if isinstance(node, (ast.UnaryOp, ast.BinOp)) and self.lookup is not None:
            return self._size(node)
        if isinstance(node, ast.Call) and self.build is not None:
            return self._built(node, self.build)
        if isinstance(node, ast.Call) and self.lookup is not None:
            return self._device(node)
        return self.fail(node, "a literal, a dtype, a size, a %value or a @weight")

    def _whole(self, node: ast.Constant) -> None:
        """Refuse lone surrogates, which escapes can spell and no file can hold."""
        try:
            str(node.value).encode()
        except UnicodeEncodeError:
            self.fail(node, "a string of whole characters")

    def _built(self, node: ast.Call, build: Build) -> Any:
        args, kwargs = self.arguments(node)
        if args:
            self.fail(node, "keyword arguments only")
        return build(self.name(node.func), kwargs, self._token(node.col_offset))

    def _name_value(self, node: ast.Name) -> Any:
        if node.id in self.marked and self.lookup is not None:
            return self.lookup(self.marked[node.id])
        if node.id in _NAMED:
            return _NAMED[node.id]
        if node.id in self.marked or self.lookup is None:
            return self.fail(node, "a literal")
        return Sym(node.id.replace(DOT, "."))

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        keys = [self.value(key) for key in node.keys if key is not None]
        if len(keys) != len(node.keys) or not all(isinstance(k, (str, int)) for k in keys):
            self.fail(node, "a dict with strings or integers as keys")
        return dict(zip(keys, (self.value(v) for v in node.values), strict=True))

    def _size(self, node: ast.expr) -> Any:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and (part.id in self.marked or part.id in _NAMED):
                self.fail(part, "integers and size names")
        try:
            return make_dim(ast.unparse(node).replace(DOT, "."))
        except InputError as error:
            return self.fail(node, f"a size ({error})")

    def _device(self, node: ast.Call) -> torch.device:
        plain = isinstance(node.func, ast.Name) and node.func.id == "device" and not node.keywords
        name = node.args[0] if plain and len(node.args) == 1 else None
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            self.fail(node, 'a value (of calls, only device("name") is one)')
        assert isinstance(name, ast.Constant)
        try:
            return torch.device(str(name.value))
        except RuntimeError:
            self.fail(name, "a device such as cpu or cuda:0")
            raise
