"""What clients may ask: OpenAI's requests, checked, and what they mean to `generate`.

Unknown fields are refused by name. So are known ones that this server does not carry out, unless
they hold a value that asks for nothing, which clients send of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..ir import InputError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("auto", "none"),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "functions": (),
    "function_call": ("auto", "none"),
    "prediction": (),
    "audio": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
}
"""Fields that are not carried out, and the values, besides null, at which they ask for nothing."""

SHAPES = ("top_p", "top_k", "min_p")
"""Fields that only sampling looks at."""

MOST_CHOICES = 16
"""Answers to one request."""

Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
Ids = Annotated[list[int], Field(min_length=1)]
Body = TypeVar("Body", bound=BaseModel)


class Strict(BaseModel):
    """Refuses unknown fields, and takes no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """include_usage: a last event with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Strict):
    """json_schema: OpenAI's wrapper, whose `schema` is the schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Asked(Strict):
    """What both kinds of request have. The names and meanings are OpenAI's; top_k, min_p and
    repetition_penalty are `generate`'s. What is left out is as the checkpoint says."""

    usual: ClassVar[int | None] = None

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    stop: Stops = []
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Errors: `ValueError` naming what is not carried out."""
        if not isinstance(fields, Mapping):
            return fields
        known = {name: value for name, value in fields.items() if value is not None}
        for name in known.keys() & NEUTRAL.keys() - cls.model_fields.keys():
            value = known.pop(name)
            if not _asks_for_nothing(name, value):
                raise ValueError(f"{name}={value!r} is not supported here; leave it out")
        return known

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def tokens(self) -> int | None:
        """New tokens at most; None: as many as the server gives."""
        return self.max_tokens or self.usual

    def options(self, choice: int = 0) -> dict[str, Any]:
        """Options of `generate`. choice: which of the answers. Errors: `InputError` for a format of
        answers that this version cannot hold to."""
        asked = {name: getattr(self, name) for name in ("temperature", *SHAPES)}
        asked = {name: value for name, value in asked.items() if value is not None}
        found: dict[str, Any] = {}
        if self.temperature == 0:
            found["do_sample"] = False
        elif asked:
            found = {"do_sample": True, **asked}
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty
        if self.seed is not None:
            found["seed"] = self.seed + choice
        return {**found, **self._format()}

    def _format(self) -> dict[str, Any]:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return {}
        if asked.type == "json_object":
            return {"json_schema": {"type": "object"}}
        schema = (asked.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise InputError("response_format: json_schema: expected an object with a schema")
        return {"json_schema": schema}


class CompletionRequest(Asked):
    """POST /v1/completions. prompt: a text, token ids, or several of either."""

    usual: ClassVar[int | None] = 16

    prompt: str | Ids | list[str | Ids]

    @property
    def prompts(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]

    @field_validator("prompt")
    @classmethod
    def _some(cls, prompt: Any) -> Any:
        several = bool(prompt) and not isinstance(prompt, str) and not isinstance(prompt[0], int)
        if not prompt or (several and len(prompt) > MOST_CHOICES):
            raise ValueError(f"expected one to {MOST_CHOICES} prompts that are not empty")
        return prompt


class Part(Strict):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message; what else it holds (`name`, `tool_calls`, `tool_call_id`) is the template's."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, Any]:
        """For a chat template: parts as one text, a developer's message as the system's."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "\n".join(part.text for part in self.content)
        if self.role == "developer":
            found["role"] = "system"
        return found


class ChatRequest(Asked):
    """POST /v1/chat/completions. tools: given to the chat template. chat_template_kwargs: variables
    of the template, such as enable_thinking."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @field_validator("chat_template_kwargs")
    @classmethod
    def _more(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if taken := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise ValueError(f"{', '.join(sorted(taken))}: the server gives these to the template")
        return variables

    @property
    def variables(self) -> dict[str, Any]:
        """What the template is given besides messages."""
        tools = self.tools if self.tools and self.tool_choice != "none" else None
        return {**self.chat_template_kwargs, "tools": tools}


def _asks_for_nothing(name: str, value: object) -> bool:
    """Whether a field of `NEUTRAL` need not be carried out; False is not 0 here."""
    return any(
        value == idle and isinstance(value, bool) is isinstance(idle, bool)
        for idle in NEUTRAL[name]
    )


def read_body(kind: type[Body], body: bytes) -> Body:
    """A request from JSON. Errors: `InputError` naming the field that is wrong, or unknown."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise InputError("; ".join(map(_said, error.errors()[:5]))) from error


def _said(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"{_place(error)}: this server knows no such field"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{place}: {message}" if (place := _place(error)) else message


def _place(error: Any) -> str:
    return ".".join(map(str, error["loc"]))
