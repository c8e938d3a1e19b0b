"""Tools of a chat request: what may be called, and by which rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..chat.templates import ChatTemplate
from ..chat.tool_calls import ToolFormat, format_of
from ..chat.tool_grammar import tool_grammar
from ..ir import InputError
from .strict import Strict

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOOLS = 128
"""Tools of a request."""

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class ToolFunction(Strict):
    """parameters: a JSON schema. strict: arguments must fit it."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """OpenAI's wrapper."""

    type: Literal["function"]
    function: ToolFunction


class _Chosen(Strict):
    name: Name


class NamedTool(Strict):
    """tool_choice: this one."""

    type: Literal["function"]
    function: _Chosen


@dataclass(frozen=True)
class Calls:
    """functions: that may be called. must: the answer has to call one. strict: arguments fit the
    schemas even where it need not. several: it may call more than one."""

    functions: Sequence[Mapping[str, Any]]
    must: bool
    strict: bool
    several: bool

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: str | NamedTool | None, *, several: bool) -> Calls:
        """Errors: `ValueError` for tools of one name, and for a choice that is none of them."""
        functions = [tool.function for tool in tools]
        names = [function.name for function in functions]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"tools: expected different names; twice there is {min(twice)}")
        if isinstance(choice, NamedTool):
            functions = [one for one in functions if one.name == choice.function.name]
            if not functions:
                raise ValueError(
                    f"tool_choice: {choice.function.name} is none of the tools {', '.join(names)}"
                )
        must = choice == "required" or isinstance(choice, NamedTool)
        return cls(
            [one.model_dump(exclude_none=True) for one in functions],
            must,
            any(one.strict for one in functions),
            several and not isinstance(choice, NamedTool),
        )

    def form(self, template: ChatTemplate) -> ToolFormat | None:
        """How a template writes calls; None: in a way that is not read here, so that calls come as
        text. Errors: `InputError` for one that shows the model no tools, and where calls are asked
        for that cannot be read."""
        if "tools" not in template.source:
            raise InputError(
                f"tools: {template.where} shows the model no tools: serve it with a template that "
                f"does (--template FILE), or leave tools out"
            )
        form = format_of(template.source)
        if form is None and (self.must or self.strict):
            raise InputError(
                f"tool_choice: {template.where} writes calls in a form that is not read here, so "
                f"that none can be asked for: expected <tool_call>, [TOOL_CALLS] or Llama 3's JSON"
            )
        return form

    def options(self, form: ToolFormat | None, tokenizer: Tokenizer) -> dict[str, Any]:
        """Options of `generate` that hold an answer to them."""
        if form is None or not (self.must or self.strict):
            return {}
        rules = tool_grammar(form, self.functions, tokenizer, must=self.must, several=self.several)
        return {"grammar": rules, "tokenizer": tokenizer}


def opened(call: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier call with its arguments as an object: OpenAI has them as text, templates write
    them as JSON. Errors: `InputError`."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError("messages: tool_calls: expected a function with a name")
    given = function.get("arguments", "{}")
    try:
        given = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise InputError(f"messages: tool_calls: arguments: expected JSON: {error}") from error
    return {**call, "function": {**function, "arguments": given}}
