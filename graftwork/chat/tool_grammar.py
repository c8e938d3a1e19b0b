"""Grammars of answers that call tools, in llguidance's notation, by a template's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..ir.support.errors import InputError
from ..runtime.asking.grammar import WRITTEN
from .tool_calls import LLAMA, MISTRAL, ToolFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def tool_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    must: bool,
    several: bool = True,
) -> str:
    """The rules of answers that call some of these tools, with arguments that fit their schemas.

    tools: OpenAI's ``function`` objects: ``name``, and ``parameters``, a JSON schema. must: the
    answer is calls alone; else text that may go on with calls. several: more than one call.
    Errors: `InputError` for parameters that are no object's schema.
    """
    begin = _token(form.begin, tokenizer)
    calls = [f"call_{number}" for number in range(len(tools))]
    rules = [f"call: {' | '.join(calls)}"]
    for name, tool in zip(calls, tools, strict=True):
        rules.append(f"{name}: {_text(_head(form, tool))} args_{name} {_text('}')}")
        rules.append(f"args_{name}: %json {json.dumps(_schema(tool))}")
    if form == LLAMA:
        first, rest = "call", ""
    elif form == MISTRAL:
        first = f"{begin} {_text('[')} call" + (f" ({_text(', ')} call)*" if several else "")
        first, rest = f"{first} {_text(']')}", ""
    else:
        first = f"{begin} {_text(chr(10))} call {_text(chr(10) + form.end)}"
        rest = f" ({_text(chr(10))} {first})*" if several else ""
    start = first + rest if must else _after_text(form, begin, first + rest, rules)
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _after_text(form: ToolFormat, begin: str, calls: str, rules: list[str]) -> str:
    """Text that may go on with calls. Where a token of its own begins them, no text holds it; else
    the text ends where it is first written."""
    if form.bare:
        rules.append("TEXT: /[^{](.|\\n)*/")
        return f"TEXT | {calls}"
    rules.append("TEXT: /(.|\\n)*/")
    if begin.startswith("<["):
        return f"TEXT ({calls})?"
    rules.append(f"opening[lazy]: TEXT {begin}")
    return f"TEXT | opening {calls.removeprefix(begin).lstrip()}"


def _head(form: ToolFormat, tool: Mapping[str, Any]) -> str:
    return f'{{"name": {json.dumps(tool["name"])}, "{form.key}": '


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("parameters") or ANY_OBJECT
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InputError(
            f"tools: {tool['name']}: parameters: expected the JSON schema of an object"
        )
    return {"type": "object", **schema, "x-guidance": WRITTEN}


def _text(text: str) -> str:
    return json.dumps(text)


def _token(text: str, tokenizer: Tokenizer) -> str:
    """A text, or the special token that it is, by its id: special tokens are written by no text."""
    added = tokenizer.get_added_tokens_decoder()
    for id, token in added.items():
        if token.content == text and token.special:
            return f"<[{id}]>"
    return _text(text)
