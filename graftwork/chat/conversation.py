"""Conversations: messages as prompts that go on from what the caches hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from ..ir.support.errors import InputError
from ..ir.support.tokenizer import check_length, decode, encode
from ..runtime.stats import Stats
from .templates import ChatTemplate
from .text_stream import StopTexts, check_stop, cut

if TYPE_CHECKING:
    import tokenizers

    from ..ir import Program
    from ..runtime.asking.keywords import GenerateOptions
    from .tokenizer import Tokenizer

NEW_TOKENS = 1024
"""New tokens of an answer at most, where neither the call nor the checkpoint says how many."""

_PROBE = "An answer."


class ContextFull(InputError):
    """No answer fits behind a conversation."""


class Speaks(Protocol):
    """A model that answers; see `Model`."""

    @property
    def program(self) -> Program:
        """Its program."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def generate(self, input_ids: Any = None, /, **options: Unpack[GenerateOptions]) -> Any:
        """As `Model.generate`."""


@dataclass(frozen=True)
class Answer:
    """text: without the token that ends a turn, or a text that stopped it. ids: new tokens. prompt:
    number of tokens before them. stats: of the generation. finish: "stop" where the model ended its
    turn, else "length"."""

    text: str
    ids: list[int]
    prompt: int
    stats: Stats
    finish: str


@dataclass
class Conversation:
    """Messages of a model with a template.

    held: texts and tokens of earlier turns, prompt and answer, as they were fed and generated. A
    prompt that begins with such a text begins with its tokens, which may differ from those of the
    text encoded anew; so the caches go on from all of them.
    """

    model: Speaks
    template: ChatTemplate
    messages: list[dict[str, Any]] = field(default_factory=list)
    held: list[tuple[str, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = self.model.program
        if program.plan.source.encoder is not None:
            raise InputError(
                f"{program.name} writes from a source and takes no conversations; call generate"
            )

    def prompt(self, **variables: Any) -> tuple[str, list[int]]:
        """The prompt of the next answer: text and tokens. variables: see `ChatTemplate.render`.
        Errors: `InputError` for messages that the template refuses."""
        text = self.template.render(self.messages, **variables)
        tokenizer, program = self.model.tokenizer.backend_tokenizer, self.model.program
        if not program.plan.cache.endless:
            check_length(tokenizer, text, program.info.context)
        for before, ids in reversed(self.held):
            rest = text.removeprefix(before)
            # Tokenizers split texts at added tokens before anything else.
            if len(rest) < len(text) and _leading(tokenizer, rest) is not None:
                return text, [*ids, *encode(tokenizer, rest, marked=False)]
        return text, encode(tokenizer, text, marked=False)

    def room(self, ids: list[int]) -> int:
        """New tokens that fit behind a prompt. Errors: `ContextFull` if none does."""
        program = self.model.program
        if program.plan.cache.endless:
            return NEW_TOKENS
        left = program.info.context - len(ids)
        if left < 1:
            raise ContextFull(
                f"the conversation has {len(ids)} tokens, and the model's context "
                f"{program.info.context}: no answer fits any more. Begin anew, or take turns back"
            )
        return left

    def answer(
        self,
        *,
        variables: Mapping[str, Any] | None = None,
        stop: Iterable[str] = (),
        **options: Any,
    ) -> Answer:
        """Generate the next message and append it. variables: see `ChatTemplate.render`. stop:
        texts that end it. options: of `Model.generate`. Errors: `InputError`; no message is
        appended then."""
        text, ids = self.prompt(**(variables or {}))
        info, stops = self.model.program.info, [check_stop(one) for one in stop]
        room = self.room(ids)
        if not {*options, *info.defaults.supported} & {"max_new_tokens", "max_length"}:
            options["max_new_tokens"] = min(NEW_TOKENS, room)
        elif type(options.get("max_new_tokens")) is int:
            options["max_new_tokens"] = min(options["max_new_tokens"], room)
        given = options.setdefault("eos_token_id", [*ends_of_turn(self.model, self.template)])
        ends = [given] if isinstance(given, int) else [*(given or ())]
        if stops:
            hooks = options.pop("stopping_criteria", None) or ()
            hooks = hooks if isinstance(hooks, (list, tuple)) else [hooks]
            watch = StopTexts(self.model.tokenizer.backend_tokenizer, stops, len(ids))
            options["stopping_criteria"] = [*hooks, watch]
        result = self.model.generate([ids], **{**options, "return_dict_in_generate": True})
        new = result.sequences[0, len(ids) :].tolist()
        ended = bool(new) and new[-1] in ends
        said = new[:-1] if ended else new
        found = cut(decode(self.model.tokenizer.backend_tokenizer, said), stops)
        self._hold(text, ids, said)
        self.messages.append({"role": "assistant", "content": found[0]})
        finish = "stop" if ended or found[1] else "length"
        return Answer(found[0], new, len(ids), result.stats, finish)

    def _hold(self, text: str, ids: list[int], said: list[int]) -> None:
        """Remember an answer's tokens, if its text says all of them."""
        tokenizer = self.model.tokenizer.backend_tokenizer
        shown = decode(tokenizer, said)
        if shown == tokenizer.decode(said, skip_special_tokens=False):
            self.held.append((text + shown, [*ids, *said]))


def ends_of_turn(model: Speaks, template: ChatTemplate) -> tuple[int, ...]:
    """Ids that end an answer: the checkpoint's end tokens, and the token that the template writes
    behind an answer, which base models with a template do not know as their end."""
    known = model.program.info.eos
    turn = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _PROBE}]
    try:
        text = template.render(turn, add_generation_prompt=False)
    except InputError:  # it wants other messages than these
        return known
    token = _leading(model.tokenizer.backend_tokenizer, text.rpartition(_PROBE)[2].lstrip())
    return known if token is None or token in known else (*known, token)


def _leading(tokenizer: tokenizers.Tokenizer, text: str) -> int | None:
    """The added token that a text begins with."""
    added = tokenizer.get_added_tokens_decoder()
    found = {token.content: id for id, token in added.items() if text.startswith(token.content)}
    return found[max(found, key=len)] if found else None
