"""When a sequence is finished."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ...ir import InputError, ModelInfo
from ...ir.support.tokenizer import refusing
from .checks import Hook
from .options import GenerationOptions
from .processors import from_transformers
from .text import Text


class Stopping:
    """Ends a sequence at its limit, at an end token, at a stop sequence, or when a hook says so.

    last: the token that a text which is full ends with; None: any. tokenizer: for `stop_strings`.
    """

    def __init__(self, options: GenerationOptions, info: ModelInfo, tokenizer: Any = None) -> None:
        self.eos = frozenset(options.eos(info))
        self.stop = [list(tokens) for tokens in options.stop]
        self.hooks: tuple[Hook, ...] = tuple(options.stopping_criteria)  # type: ignore[arg-type]
        if options.stop_strings:
            self.hooks += (_ends_with(options.stop_strings, tokenizer),)
        if options.max_time is not None:
            self.hooks += (partial(_late, perf_counter() + options.max_time),)
        self.simple = not (self.stop or self.hooks or options.first_finish)
        self.last = options.forced_eos_token_id

    @property
    def early(self) -> bool:
        """Whether a sequence may end before its limit."""
        return bool(self.eos) or not self.simple

    def commit(self, text: Text, new: list[int]) -> list[int]:
        """Append new tokens up to the one that ends the sequence; returns those appended: the same
        list if it is all of them. The rows of the token before them, and of all of them but the
        last, were made by the step that they come from, and count from now on."""
        count = len(new)
        if self.simple and len(text.tokens) + count < text.limit and self.eos.isdisjoint(new):
            text.tokens += new
            text.rows += count
            text.position += count
            return new
        count = 0
        full = text.limit - len(text.tokens)
        if self.last is not None and len(new) >= full:
            new = [*new[: full - 1], self.last]
        for token in new:
            text.tokens.append(token)
            count += 1
            if self.ends(text):
                text.done = True
                break
        text.grow(count)
        return new[:count]

    def ends(self, text: Text) -> bool:
        """Whether a text ends with its last token."""
        full, race = len(text.tokens) >= text.limit, text.race
        if race is None:
            return full or text.tokens[-1] in self.eos or self._says_stop(text)
        race.won = race.won or text.tokens[-1] in self.eos or self._says_stop(text)
        return full or race.won

    def _says_stop(self, text: Text) -> bool:
        if self.simple:
            return False
        for tail in self.stop:
            if len(tail) <= text.generated and text.tokens[-len(tail) :] == tail:
                return True
        if not self.hooks:
            return False
        ids = torch.tensor([text.known])
        return any(_says_yes(hook(ids, None)) for hook in self.hooks)


def _late(deadline: float, ids: torch.Tensor, scores: object) -> bool:
    return perf_counter() > deadline


def _ends_with(texts: str | Sequence[str], tokenizer: Any) -> Hook:
    """transformers' criterion: whether a text's last token completes one of some texts."""
    theirs = from_transformers("stop_strings", "PreTrainedTokenizerBase")
    fast = from_transformers("stop_strings", "PreTrainedTokenizerFast")
    with refusing("stop_strings"):
        if not isinstance(tokenizer, theirs):
            tokenizer = fast(tokenizer_object=getattr(tokenizer, "backend_tokenizer", tokenizer))
        made: Hook = from_transformers("stop_strings", "StopStringCriteria")(
            tokenizer=tokenizer, stop_strings=list(texts)
        )
    return made


def _says_yes(answer: object) -> bool:
    """Errors: `InputError` for what is neither true nor false."""
    if isinstance(answer, torch.Tensor):
        return bool(answer.any())
    if isinstance(answer, bool | int | float) or hasattr(answer, "__array__"):
        return bool(torch.as_tensor(answer).any())
    raise InputError(
        f"a stopping criterion returned {answer!r}; expected True or False, or a tensor of them"
    )
