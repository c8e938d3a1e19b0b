"""Calls of tools in what a model writes, in the formats of common chat templates.

| format | a call |
|---|---|
| ``hermes`` (also Qwen 2.5, 3) | ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` |
| ``mistral`` (up to tokenizer v7) | ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` |
| ``llama3`` (Llama 3.1 to 3.3) | the whole answer is ``{"name": ..., "parameters": {...}}`` |

What is no call of that form stays text: nothing that a model writes is lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4


@dataclass(frozen=True)
class ToolFormat:
    """begin: what calls begin with; where `bare`, they may also begin without it, as the first of
    an answer. end: what each ends with. between: characters that may stand around calls. key: of
    the arguments. short: whether ids of calls have nine characters, as Mistral's templates want."""

    name: str
    begin: str
    end: str = ""
    between: str = " \n\t\r"
    key: str = "arguments"
    bare: bool = False
    short: bool = False

    def call_id(self) -> str:
        """A new id of a call."""
        return uuid4().hex[:9] if self.short else f"call_{uuid4().hex[:24]}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", between=" \n\t\r[],", short=True)
LLAMA = ToolFormat("llama3", "<|python_tag|>", between=" \n\t\r;", key="parameters", bare=True)


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks for, by its source; None: another one, or none."""
    if HERMES.begin in template:  # in some with calls written as XML within
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if MISTRAL.begin in template:
        return None if "[ARGS]" in template else MISTRAL
    llama = LLAMA.begin in template or "<|start_header_id|>" in template
    return LLAMA if llama and f'"{LLAMA.key}"' in template else None


class CallDelta(NamedTuple):
    """A part of a call, by its number in the answer. id, name: in its first part. arguments: more
    of their JSON."""

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None


class ToolStream:
    """Text as it comes, taken apart into what is said and what is called. single: it is `done`
    after one call. count: of calls."""

    def __init__(self, form: ToolFormat, *, single: bool = False) -> None:
        self.form, self.single, self.count = form, single, 0
        self.rest, self.calling, self.begun = "", False, False
        self.call: _Call | None = None
        self._opening = ""

    @property
    def done(self) -> bool:
        """Whether nothing more is wanted."""
        return self.single and self.count > 0 and self.call is None

    def put(self, text: str) -> tuple[str, list[CallDelta]]:
        """New text; what of it is said, and parts of calls."""
        self.rest += text
        said, calls = "", list[CallDelta]()
        while not self.done:
            before = self.rest, self.calling, self.call is None
            more = self._calls(calls) if self.calling else self._says()
            said += more
            if before == (self.rest, self.calling, self.call is None):
                break
        return said, calls

    def end(self) -> str:
        """What is left at the end is text, unless it is what stands around calls."""
        rest, self.rest = self.rest, ""
        if self.call is not None:
            return "" if self.call.named else self._opening + rest
        return "" if self.done or (self.count and not rest.strip(self.form.between)) else rest

    def _says(self) -> str:
        """Text before calls. Space that a call may follow is held back."""
        form, rest = self.form, self.rest
        if form.bare and not self.begun and rest.lstrip().startswith("{"):
            self.calling = True
            return ""
        place = rest.find(form.begin)
        if place >= 0:
            said = rest[:place].rstrip()
            self.calling, self.rest = True, rest[len(said) :]
            return said
        kept = next((n for n in range(len(form.begin), 0, -1) if rest.endswith(form.begin[:n])), 0)
        said = rest[: len(rest) - kept].rstrip()
        self.begun = self.begun or bool(said)
        self.rest = rest[len(said) :]
        return said

    def _calls(self, calls: list[CallDelta]) -> str:
        """Calls, up to the end of all; what turned out to be none is said."""
        form = self.form
        if self.call is None:
            body = self.rest.lstrip().removeprefix(form.begin).lstrip(form.between)
            if form.end and body.startswith(form.end):
                self.rest, self.calling = body[len(form.end) :], False
                return ""
            if not body or (form.end and form.end.startswith(body)):
                return ""  # not known yet
            if not body.startswith("{"):
                return self._none()
            self.call = _Call(self.count, form)
            self._opening = self.rest[: len(self.rest) - len(body)]
            self.rest = body
        found = self.call.put(self.rest, calls)
        if found is None:  # it goes on
            self.rest = "" if self.call.named else self.rest
            return ""
        if found < 0:
            self.call, self.rest = None, self._opening + self.rest
            return self._none()
        self.rest, self.call = self.rest[found:], None
        self.count += 1
        return ""

    def _none(self) -> str:
        """No call follows: what began one is text."""
        said, self.rest, self.calling, self.begun = self.rest, "", False, True
        return said


class _Call:
    """One call's JSON object. named: its name was handed on."""

    def __init__(self, index: int, form: ToolFormat) -> None:
        self.index, self.form, self.named = index, form, False
        self.depth, self.quoted, self.escaped, self.over = 0, False, False, False
        self.head = re.compile(
            r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"' + form.key + r'"\s*:\s*(?=\{)'
        )

    def put(self, text: str, calls: list[CallDelta]) -> int | None:
        """text: all that is not taken yet. Where the call ends in it; None: it goes on, and what
        was said of a `named` one is taken; -1: it is none."""
        start = 0
        if not self.named:
            head = self.head.match(text)
            name = None if head is None else _parsed(head[1])
            if head is None or not isinstance(name, str):
                return self._whole(text, calls)
            calls.append(CallDelta(self.index, "", self.form.call_id(), name))
            self.named, start = True, head.end()
        inside, end = start, None
        for place in range(start, len(text)):
            self._read(text[place])
            if self.depth < 0:
                end = place + 1
                break
            if not self.over:
                inside, self.over = place + 1, self.depth == 0
        if inside > start:
            calls.append(CallDelta(self.index, text[start:inside]))
        return end

    def _read(self, char: str) -> None:
        if self.escaped:
            self.escaped = False
        elif char == "\\":
            self.escaped = self.quoted
        elif char == '"':
            self.quoted = not self.quoted
        elif not self.quoted:
            self.depth += (char in "{[") - (char in "}]")

    def _whole(self, text: str, calls: list[CallDelta]) -> int | None:
        """A call whose name does not come first, or that has no arguments."""
        try:
            found, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            ended = self.form.end and self.form.end in text
            return -1 if ended or len(text) > MOST_CALL else None
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return -1
        given: Any = found.get(self.form.key, {})
        if isinstance(given, str):  # some write the JSON as a text
            given = _parsed(given)
        if not isinstance(given, dict):
            return -1
        calls.append(CallDelta(self.index, json.dumps(given), self.form.call_id(), found["name"]))
        return end


MOST_CALL = 2**16
"""Characters of an object after which it is no call that has not turned out to be one."""


def _parsed(text: str) -> Any:
    """What JSON says; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
