"""What clients may ask: OpenAI's requests, checked, and what they mean to `generate`.

Unknown fields are refused by name. So are known ones that this server does not carry out, unless
they hold a value that asks for nothing, which clients send of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..ir import InputError
from .penalties import Biased, Repeated
from .strict import Strict
from .tools import MOST_TOOLS, Calls, NamedTool, Tool, opened

NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
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
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "moderation": (),
}
"""Fields that are not carried out, and the values, besides null, at which they ask for nothing."""

SHAPES = ("top_p", "top_k", "min_p")
"""Fields that only sampling looks at."""

MOST_CHOICES = 16
"""Answers to one request."""

MOST_LIKELY = 20
"""Tokens of each place that a request may see the probabilities of, besides the one there."""

Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Ids = Annotated[list[int], Field(min_length=1)]
Body = TypeVar("Body", bound=BaseModel)


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
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias] = Field({})
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    stop: Stops = Field([])
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

    @property
    def likeliest(self) -> int | None:
        """Tokens of each place whose probabilities are asked for; None: not even of its own."""
        return None

    @property
    def listed(self) -> bool:
        """Whether the answer has probabilities."""
        return self.likeliest is not None

    @property
    def scored(self) -> bool:
        """Whether the answer has probabilities of the prompt's tokens, too."""
        return False

    @property
    def silent(self) -> bool:
        """Whether no new token is wanted."""
        return False

    @property
    def made(self) -> int:
        """Answers to each prompt, of which the `n` best are given."""
        return self.n

    def processors(self, prompt: int, vocabulary: int) -> list[Any]:
        """What changes scores behind a prompt of so many tokens. Errors: `InputError`."""
        found: list[Any] = []
        if self.logit_bias:
            biases = {int(id): bias for id, bias in self.logit_bias.items()}
            if (largest := max(biases)) >= vocabulary:
                raise InputError(f"logit_bias: {largest}: expected token ids below {vocabulary}")
            found.append(Biased(biases))
        if self.presence_penalty or self.frequency_penalty:
            found.append(Repeated(prompt, self.presence_penalty, self.frequency_penalty))
        return found

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
        if self.likeliest is not None:
            found |= {"return_dict_in_generate": True, "output_logits": True}
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
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)

    @field_validator("logprobs", mode="before")
    @classmethod
    def _none(cls, logprobs: Any) -> Any:
        return None if logprobs is False else logprobs

    @model_validator(mode="after")
    def _agreeing(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of}: expected n={self.n} or more")
        if self.made > self.n and self.stream:
            raise ValueError(
                f"best_of={self.best_of}: which answers are best shows when all have ended, so "
                f"they cannot be streamed, here as at OpenAI: leave out stream, or give "
                f"n={self.best_of} for all of them"
            )
        return self

    @property
    def made(self) -> int:
        return self.best_of or self.n

    @property
    def likeliest(self) -> int | None:
        return 0 if self.logprobs is None and self.made > self.n else self.logprobs

    @property
    def listed(self) -> bool:
        return self.logprobs is not None

    @property
    def tokens(self) -> int | None:
        return 1 if self.silent else super().tokens

    @property
    def silent(self) -> bool:
        return self.max_tokens == 0

    @property
    def scored(self) -> bool:
        return self.echo and self.logprobs is not None

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
    """A message; what else it holds (`name`, `tool_call_id`) is the template's."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any) -> Any:
        """Errors: `ValueError` for parts that are pictures, sound or files."""
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"parts of type {kind!r} are not read here, only 'text'")
        return content

    def plain(self) -> dict[str, Any]:
        """For a chat template: parts as one text, a developer's message as the system's, arguments
        of calls as objects."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "\n".join(part.text for part in self.content)
        if self.role == "developer":
            found["role"] = "system"
        if self.tool_calls:
            found["tool_calls"] = [opened(call) for call in self.tool_calls]
            found.setdefault("content", "")
        return found


class ChatRequest(Asked):
    """POST /v1/chat/completions. tools: given to the chat template. chat_template_kwargs: variables
    of the template, such as enable_thinking."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LIKELY)
    tools: list[Tool] = Field([], max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})

    @model_validator(mode="after")
    def _agreeing(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs=true besides")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice: expected tools to choose from")
        if self.calls is not None and self.response_format not in (
            None,
            ResponseFormat(type="text"),
        ):
            raise ValueError(
                "response_format: an answer that may call tools has no other format: leave one "
                "out, or give tool_choice none"
            )
        return self

    @property
    def tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def calls(self) -> Calls | None:
        """What may be called. Errors: `ValueError` for a choice that is no tool."""
        if not self.tools or self.tool_choice == "none":
            return None
        return Calls.of(self.tools, self.tool_choice, several=self.parallel_tool_calls)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _more(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if taken := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise ValueError(f"{', '.join(sorted(taken))}: the server gives these to the template")
        return variables

    @property
    def variables(self) -> dict[str, Any]:
        """What the template is given besides messages."""
        shown = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return {**self.chat_template_kwargs, "tools": shown if self.calls else None}


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
