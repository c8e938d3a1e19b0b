"""Requests of an asyncio loop, answered by the engine's thread."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chat.conversation import Conversation, ends_of_turn
from ..chat.files import template_of
from ..ir import GraftworkError, GraftworkWarning, InputError
from ..ir.support.tokenizer import decode, encode
from ..model import Model
from ..runtime.reading import check_pooling
from ..runtime.serving.engine import Engine
from .asked import Asked, ChatRequest, CompletionRequest
from .choices import Choices, Prompt
from .problems import Problem, problem_of

# Late imports: what trains is imported where a server learns.

if TYPE_CHECKING:
    from ..runtime.asking.request import Request
    from ..runtime.serving.ticket import Ticket
    from ..training.learner import Learner


class Service:
    """A model, by a name, and the engine that decodes for it.

    usual: new tokens of a message if the request does not say; seconds: that a request may take.
    template: the chat template, instead of the checkpoint's. pooling: of embeddings, "mean" or
    "last". learn: a new folder, in which the drafter goes on learning from the texts that are
    written (`Learner`); what it learned serves where no request runs. learner: options of that.
    Errors: those of `Engine` and `Learner`, and for a template or a pooling that is none.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        *,
        usual: int = 1024,
        seconds: float | None = None,
        template: str | None = None,
        pooling: str = "mean",
        learn: Path | None = None,
        learner: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self.model, self.name, self.usual, self.seconds = model, name, usual, seconds
        self.tokenizer, self.template = model.tokenizer.backend_tokenizer, template
        check_pooling(pooling)
        self.pooling = pooling
        if template is not None:
            template_of(model.program, given=template)
        self.learner: Learner | None = None
        if learn is not None:
            from ..training.learner import Learner

            self.learner = Learner(
                model, learn, background=True, ready=self._renew, **(learner or {})
            )
            engine["heard"] = self._hear
        self.engine = Engine(model.executable, **engine)

    def close(self) -> None:
        """End all requests, and an update that runs."""
        self.engine.close()
        if self.learner is not None:
            self.learner.stop()

    def _hear(self, ticket: Ticket) -> None:
        """The learner hears of an answer. Pictures and rows are not read by what teaches."""
        assert self.learner is not None
        if ticket.pooling or ticket.request.pictures or ticket.request.embeds:
            return
        try:
            self.learner.hear(ticket.text.tokens, ticket.text.prompt, ticket.foreseen)
        except Exception as error:  # of an update: drafts stay as they were, and so do answers
            warnings.warn(f"the drafter did not learn: {error}", GraftworkWarning, stacklevel=1)

    def _renew(self, model: Model) -> None:
        """Serve what was learned."""
        self.engine.renew(model.executable)
        self.model = model

    def check_name(self, asked: str | None) -> None:
        """Errors: `Problem` for another model than this one."""
        if asked not in (None, "", self.name):
            message = f"the model {asked!r} is not here; there is {self.name!r}"
            raise Problem(404, message, code="model_not_found")

    async def completion(self, asked: CompletionRequest, client: str) -> Choices:
        """Begin to answer. Errors: `Problem`."""
        return await self._begin(
            asked, lambda: [self._continued(text, asked) for text in asked.prompts], client
        )

    async def chat(self, asked: ChatRequest, client: str) -> Choices:
        """Begin to answer messages. Errors: `Problem`."""
        return await self._begin(asked, lambda: [self._prompt(asked)], client)

    def _continued(self, text: str | list[int], asked: CompletionRequest) -> Prompt:
        ids = encode(self.tokenizer, text) if isinstance(text, str) else text
        if not ids:
            raise InputError("prompt: expected some text; it has no tokens")
        if not asked.echo:
            return Prompt(ids)
        return Prompt(ids, echo=text if isinstance(text, str) else decode(self.tokenizer, ids))

    def _prompt(self, asked: ChatRequest) -> Prompt:
        tools = bool(asked.variables["tools"])
        template = template_of(self.model.program, given=self.template, tools=tools)
        form = None if asked.calls is None else asked.calls.form(template)
        options = {} if asked.calls is None else asked.calls.options(form, self.tokenizer)
        talk = Conversation(self.model, template, [one.plain() for one in asked.messages])
        ids = talk.prompt(**asked.variables)[1]
        return Prompt(ids, ends_of_turn(self.model, template), form, options)

    async def _begin(
        self, asked: Asked, prompts: Callable[[], Sequence[Prompt]], client: str
    ) -> Choices:
        self.check_name(asked.model)
        choices = Choices(self.engine, self.tokenizer, self.seconds, asked)
        try:
            # Long texts take a while to read: the loop goes on meanwhile.
            requests = await asyncio.to_thread(lambda: self._read_all(asked, prompts()))
            for number, (request, prompt) in enumerate(requests):
                choices.add(request, prompt, asked.user or client)
                choices.usage.prompt += 0 if number % asked.made else len(prompt.ids)
        except GraftworkError as error:
            choices.cancel()
            raise problem_of(error) from error
        return choices

    def _read_all(self, asked: Asked, prompts: Sequence[Prompt]) -> list[tuple[Request, Prompt]]:
        """All that is asked for, checked."""
        each = [(prompt, number) for prompt in prompts for number in range(asked.made)]
        return [(self._read(asked, prompt, number), prompt) for prompt, number in each]

    def _read(self, asked: Asked, prompt: Prompt, number: int) -> Request:
        options = {**asked.options(number), **prompt.options}
        if hooks := asked.processors(len(prompt.ids), self.model.program.info.vocab_size):
            options["logits_processor"] = hooks
        left = self.engine.context - len(prompt.ids)
        if left < 1:
            raise Problem(
                400,
                f"the prompt has {len(prompt.ids)} tokens, and a request may have "
                f"{self.engine.context}, new ones included: shorten the prompt",
                code="context_length_exceeded",
            )
        options["max_new_tokens"] = asked.tokens or min(left, self.usual)
        if "json_schema" in options:
            options["tokenizer"] = self.tokenizer
        if prompt.ends is not None:
            options["eos_token_id"] = list(prompt.ends)
        return self.engine.read(prompt.ids, options)
