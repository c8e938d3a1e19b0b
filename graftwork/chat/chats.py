"""What a `Model` does with messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ..ir import Program
from ..ir.support.tokenizer import encode
from .conversation import Conversation
from .files import template_of
from .templates import Message, check_messages

if TYPE_CHECKING:
    from ..runtime.asking.keywords import GenerateOptions
    from .tokenizer import Tokenizer


class Chats:
    """Base of `Model`: methods that take messages, ``{"role": "user", "content": "..."}``."""

    program: Program

    if TYPE_CHECKING:

        @property
        def tokenizer(self) -> Tokenizer:
            """See `Model`."""

        def generate(self, input_ids: Any = None, /, **options: Unpack[GenerateOptions]) -> Any:
            """See `Model`."""

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Messages as the prompt that the checkpoint's chat template makes of them: token ids, or
        text if not `tokenize`; as transformers' method of that name with ``return_dict=False``.

        tools: JSON schemas, or functions. documents: with ``title`` and ``text``. chat_template:
        instead of the checkpoint's. variables: further ones that the template reads, such as
        ``enable_thinking``. Errors: `InputError` if there is no template, or it refuses them.
        """
        template = template_of(self.program, given=chat_template, tools=tools is not None)
        text = template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return encode(self.tokenizer.backend_tokenizer, text, marked=False) if tokenize else text

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        **options: Any,
    ) -> str:
        """The text of the answer to messages; `messages` stays as it is.

        It ends with the checkpoint's end tokens, the token that the template writes behind an
        answer, or a text of `stop`, which is left out. tools, documents, chat_template: as in
        `apply_chat_template`, template_options: its variables. options: of `generate`;
        ``max_new_tokens`` is the checkpoint's by default, else 1024, and never more than fits.
        Of messages that go on from an earlier call's only tokens that are new are fed. Errors: as
        `generate` and `apply_chat_template`, and `InputError` if no answer fits the context.
        """
        template = template_of(self.program, given=chat_template, tools=tools is not None)
        variables = {"tools": tools, "documents": documents, **(template_options or {})}
        stops = [stop] if isinstance(stop, str) else stop
        talk = Conversation(self, template, check_messages(messages))
        return talk.answer(variables=variables, stop=stops, **options).text
