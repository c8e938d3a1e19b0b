"""Tokens of the text form, and a cursor over them whose errors name line and column."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, TypeVar

from ..support.errors import InputError, ParseError
from ..support.names import is_name, shown
from ..types import TensorType, ValueType

T = TypeVar("T")

MAX_CHARACTERS = 64 * 2**20
MAX_BYTES = 4 * MAX_CHARACTERS  # in UTF-8
MAX_DEPTH = 24  # of brackets, which bounds the recursion of everything that reads expressions
MAX_NUMBER = 40  # characters

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    rf"""(?P<value>%(?:[A-Za-z0-9_.]+|{_STRING}))
    | (?P<weight>@(?:[A-Za-z0-9_.]+|{_STRING}))
    | (?P<string>{_STRING})
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[0-9]+(?![A-Za-z0-9_]))?)
    | (?P<punct>->|\*\*|[()\[\]{{}}=,:*+.-])
    | (?P<newline>\n)
    | (?P<comment>\#[^\n]*)
    | (?P<space>[ \t\r]+)
    | (?P<bad>.)""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Token:
    """kind: value, weight, string, number, name, punct, newline, comment or end."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Offset just after the token."""
        return self.start + len(self.text)

    def __str__(self) -> str:
        return {"newline": "the end of the line", "end": "the end of the text"}.get(
            self.kind, repr(self.text)
        )


class Source:
    """The text, and errors that point into it."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ParseError(
                f"the program text has {len(text)} characters; at most {MAX_CHARACTERS} are read"
            )
        self.text = text

    @cached_property
    def starts(self) -> list[int]:
        """Offset of every line."""
        return [0, *(m.end() for m in re.finditer("\n", self.text))]

    def fail(self, offset: int, message: str) -> NoReturn:
        """Raise a `ParseError` that quotes the line."""
        row = bisect_right(self.starts, offset) - 1
        column = offset - self.starts[row]
        line = self.text[self.starts[row] :].partition("\n")[0]
        shown = max(0, column - 70)
        quoted = line[shown : shown + 100]
        head = f"line {row + 1}, column {column + 1}: {message}"
        raise ParseError(f"{head}\n    {quoted}\n    {' ' * (column - shown)}^")

    def tokens(self) -> Iterator[Token]:
        """All tokens but blanks; newlines within brackets are left out."""
        depth: list[str] = []
        for match in _TOKEN.finditer(self.text):
            token = Token(match.lastgroup or "bad", match.group(), match.start())
            if token.kind == "space" or (token.kind in ("newline", "comment") and depth):
                continue
            if token.kind == "punct":
                self._nest(token, depth)
            if token.kind == "bad":
                self.fail(token.start, f"unexpected character {token.text!r}")
            if token.kind == "number" and len(token.text) > MAX_NUMBER:
                self.fail(token.start, f"a number may have at most {MAX_NUMBER} digits")
            yield token
        yield Token("end", "", len(self.text))

    def _nest(self, token: Token, depth: list[str]) -> None:
        # Braces outside brackets open blocks, whose lines count; inside, they are dicts.
        opening = {"(": ")", "[": "]"} | ({"{": "}"} if depth else {})
        if token.text in opening:
            depth.append(opening[token.text])
        elif token.text == "}" and not depth:
            return
        elif token.text in (")", "]", "}") and (not depth or depth.pop() != token.text):
            self.fail(token.start, f"{token.text!r} closes nothing")
        if len(depth) > MAX_DEPTH:
            self.fail(token.start, f"brackets are nested deeper than {MAX_DEPTH}")


class Cursor:
    """Walks the tokens; every method that expects something fails with line and column."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tokens = list(source.tokens())
        self.index = 0

    @property
    def here(self) -> Token:
        """The next token."""
        return self.tokens[self.index]

    def fail(self, expected: str, token: Token | None = None) -> NoReturn:
        """Raise: expected this, found that."""
        found = token or self.here
        self.source.fail(found.start, f"expected {expected}, found {found}")

    def skip_lines(self) -> None:
        """Go past empty lines and comment lines."""
        while self.here.kind in ("newline", "comment"):
            self.index += 1

    def next(self) -> Token:
        """Take the next token, whatever it is."""
        token = self.here
        self.index += token.kind != "end"
        return token

    def at(self, text: str) -> bool:
        """Whether the next token is this punctuation or name."""
        return self.here.text == text and self.here.kind in ("punct", "name")

    def accept(self, text: str) -> bool:
        """Take the next token if it is this punctuation or name."""
        found = self.at(text)
        self.index += found
        return found

    def expect(self, text: str, what: str = "") -> Token:
        """Take this punctuation or name."""
        if not self.at(text):
            self.fail(what or repr(text))
        return self.next()

    def take(self, kind: str, what: str) -> Token:
        """Take a token of a kind."""
        if self.here.kind != kind:
            self.fail(what)
        return self.next()

    def end_line(self) -> None:
        """Expect the end of the line (a comment may precede it)."""
        if self.here.kind == "comment":
            self.index += 1
        if self.here.kind != "end":
            self.take("newline", "the end of the line")

    def unquote(self, token: Token, sigil: int = 0) -> str:
        """The name in a value, weight or string token, after `sigil` characters."""
        body = token.text[sigil:]
        if not body.startswith('"'):
            return body
        try:
            name = str(json.loads(body))
            name.encode()  # escapes can spell a lone surrogate
        except ValueError:
            self.source.fail(token.start, f"not a valid quoted name: {ascii(body)[:100]}")
        return name

    def dotted(self, what: str) -> str:
        """A name such as ``kv.0.key``, or a quoted one."""
        if self.here.kind == "string":
            return self.unquote(self.next())
        start = self.here
        if start.kind not in ("name", "number"):
            self.fail(what)
        end = start.start
        while self.here.start == end and (
            self.here.kind in ("name", "number") or self.here.text == "."
        ):
            end = self.next().end
        return self.source.text[start.start : end]

    def identifier(self, what: str) -> str:
        """A name that `names` allows, such as ``kv.0.key``."""
        start = self.here
        name = self.dotted(what)
        if not is_name(name):
            # The token may be long, or no valid Unicode.
            self.source.fail(start.start, f"expected {what}, such as kv.0.key, found {shown(name)}")
        return name

    def span(self, *, call: bool = False) -> list[Token]:
        """Tokens up to the end of the line; of a call, up to its closing bracket."""
        taken, depth = list[Token](), 0
        while self.here.kind not in ("newline", "comment", "end"):
            depth += (self.here.text in ("(", "[", "{")) - (self.here.text in (")", "]", "}"))
            taken.append(self.next())
            if call and not depth and len(taken) > 1:
                break
        return taken

    def tensor_type(self) -> TensorType:
        """A type such as ``f32[B,T,384]``."""
        start = self.take("name", "a tensor type, such as f32[B,T,384]")
        if not self.at("["):
            self.fail("[", self.here)
        opening = end = self.next()
        depth = 1
        while depth:
            end = self.next()
            depth += (end.text == "[") - (end.text == "]")
            if end.kind == "end":
                self.fail("]", opening)
        try:
            return TensorType.parse(self.source.text[start.start : end.end])
        except InputError as error:
            self.source.fail(start.start, f"expected a tensor type: {error}")

    def value_type(self) -> ValueType:
        """A tensor type, or several in brackets."""
        if not self.accept("("):
            return self.tensor_type()
        parts: list[ValueType] = []
        while not self.accept(")"):
            parts.append(self.value_type())
            if not self.at(")"):
                self.expect(",")
        return tuple(parts)

    def declare(self, table: dict[str, T], name: str, value: T, at: Token) -> None:
        """Put what a token names into a table. Errors: `ParseError` if the name is there."""
        if name in table:
            self.fail(f"another name ({name} is declared already)", at)
        table[name] = value
