"""Texts that a grammar describes: a JSON schema, a regular expression, or rules in Lark's notation.

A grammar is a processor (see `processors`): tokens that it does not allow after a text get -inf.
Tokens that it forces are drafts. The work is llguidance's (Moskal et al. 2024), whose masks follow
the model's own tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...ir import InputError
from ...ir.support.packages import require
from ...ir.support.tokenizer import refusing
from .filters import NOTHING
from .options import GenerationOptions

GRAMMARS = ("json_schema", "regex", "grammar")
"""Options of which a call takes one."""
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written as Python's `json.dumps` does, unless the schema says otherwise (``x-guidance``):
where any space may stand, small models write nothing else."""


class Grammar:
    """One text's grammar, from its prompt on: called as a processor. ends: ids that end a text."""

    def __init__(self, matcher: Any, name: str, prompt: int, ends: Sequence[int]) -> None:
        self.matcher, self.name, self.prompt, self.ends = matcher, name, prompt, frozenset(ends)
        self.taken: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Errors: `InputError` for a text that another option has led out of the grammar."""
        for row, text in enumerate(ids.tolist()):
            if not self.ends.isdisjoint(text[self.prompt :]):
                continue  # a draft went on behind the end: nothing looks at this row
            self._go_to(text[self.prompt :])
            bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(np.bool_)
            scores[row, : len(allowed)].masked_fill_(~torch.from_numpy(allowed), NOTHING)
            scores[row, len(allowed) :] = NOTHING
        return scores

    def forced(self, text: Sequence[int]) -> list[int]:
        """Tokens that have to follow a text, prompt included."""
        self._go_to(text[self.prompt :])
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens

    def _go_to(self, tokens: Sequence[int]) -> None:
        """Lead the matcher to a text, from the one that it is at."""
        both = zip(self.taken, tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(both) if a != b), None)
        same = min(len(self.taken), len(tokens)) if same is None else same
        if same < len(self.taken):
            self.matcher.rollback(len(self.taken) - same)
        rest = list(tokens[same:])
        if (rest and self.matcher.try_consume_tokens(rest) < len(rest)) or self.matcher.is_error():
            why = self.matcher.get_error() or "another option forced a token that it does not allow"
            raise InputError(f"{self.name}: the text has left it: {why}")
        self.taken = list(tokens)


def grammar_asked(options: GenerationOptions) -> str | None:
    """The option that asks for a grammar. Errors: `InputError` for more than one."""
    asked = [name for name in GRAMMARS if getattr(options, name) is not None]
    if len(asked) > 1:
        raise InputError(f"both {asked[0]} and {asked[1]} are given; give one")
    return asked[0] if asked else None


def grammars_for(
    options: GenerationOptions,
    prompts: Sequence[int],
    tokenizer: Any,
    eos: Sequence[int],
    vocabulary: int,
) -> list[Grammar]:
    """A grammar for each of some prompts, whose lengths these are; [] if a call asks for none.

    tokenizer: the `tokenizers` one, or transformers'. Errors: `InputError` for a schema, expression
    or rules that cannot be read or that no text fits; without an end token; where llguidance is
    missing.
    """
    name = grammar_asked(options)
    if name is None:
        return []
    if not eos:
        raise InputError(f"{name}: expected an end token, which ends such texts: give eos_token_id")
    require("llguidance", name, "grammar")
    from llguidance import LLMatcher

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    with refusing(f"{name}: llguidance cannot read the tokenizer"):
        read = _tokenizer(backend.to_str(), vocabulary, tuple(eos))
    with refusing(name):
        rules = _rules(name, getattr(options, name))
    wrong, messages = LLMatcher.validate_grammar_with_warnings(rules, read)
    first = LLMatcher(read, rules, log_level=0)
    if wrong or first.is_error():
        why = " ".join((messages[0] if wrong else first.get_error()).split())[:300]
        raise InputError(f"{name}: no text can fit: {why}")
    return [Grammar(first.deep_copy(), name, prompt, eos) for prompt in prompts]


def _rules(name: str, value: Any) -> str:
    """What llguidance makes of an option's value."""
    from llguidance import LLMatcher

    if name == "json_schema":
        schema = value if isinstance(value, str) else json.dumps(value)
        rules: str = LLMatcher.grammar_from_json_schema(schema, defaults=WRITTEN)
    elif name == "regex":
        rules = LLMatcher.grammar_from_regex(value)
    else:
        rules = LLMatcher.grammar_from_lark(value)
    return rules


@lru_cache(maxsize=4)
def _tokenizer(text: str, vocabulary: int, eos: tuple[int, ...]) -> Any:
    """A tokenizer as llguidance reads it, which takes about a second."""
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocabulary, eos_token=list(eos))
