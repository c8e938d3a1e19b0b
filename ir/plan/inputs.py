"""What the decode loop feeds to functions: the inputs that have a meaning, said once.

A function takes those of `INPUTS` that it needs, and states. The verifier holds the target's
functions to the types, the feeder and the draft cache fill the inputs by these names, and passes
that add one take its type from here. In a step of a batch of B sequences each is fed T tokens
behind its `past` rows; S of them are chosen, and only their logits are wanted. K is a number that
the function says. A function that
packs (see the pass `pack_tokens`) runs the N tokens that there are, where some sequences have fewer
than T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from ..types import TensorType

if TYPE_CHECKING:
    from ..function import Function


@dataclass(frozen=True)
class Input:
    """An input of a function. form: its type as text; "" for states of the model's own type, f
    [B,T,H]. meaning: what it says. optional: an executable may leave it out."""

    form: str
    meaning: str
    optional: bool = False

    @property
    def type(self) -> TensorType:
        """The type that `form` says. Errors: `InputError` where it says none."""
        return TensorType.parse(self.form)


INPUTS: Mapping[str, Input] = MappingProxyType(
    {
        "tokens": Input("i64[B,T]", "the tokens: ids of the vocabulary"),
        "positions": Input("i64[B,T]", "where in its text each token stands; the first is 0"),
        "features": Input("", "a source that is no text, f[B,...]"),
        "lengths": Input("i64[B]", "rows of the source that each sequence is written from"),
        "past": Input("i64[B]", "rows of its states that each sequence holds before the step"),
        "shift": Input("i64[B]", "positions by which rows from `past` on are to be moved on"),
        "certain": Input(
            "i64[B]", "how many of a step's first tokens will not be taken back, for recurrences"
        ),
        "select": Input("i64[B,S]", "the columns whose logits are wanted"),
        "packed": Input(
            "i64[1,N]", "the columns that have a token, counted sequence by sequence (b * T + t)"
        ),
        "places": Input("i64[B,T]", "each column's place in `packed`, any where it has no token"),
        "picked": Input("i64[1,M]", "those of the chosen columns that are wanted (b * S + s)"),
        "shown": Input("i64[B,S]", "each chosen column's place in `picked`, any where not wanted"),
        "hidden": Input("", "the target's state beside each token, for functions that draft"),
        "seen": Input(
            "i64[B,T]", "rows of the target's states that each token sees, for functions that draft"
        ),
        "before": Input(
            "i64[B,T,2]",
            "the two tokens before each, the text's first where there are fewer, for functions "
            "that draft",
        ),
        "mixed": Input(
            "i64[B,T,K]",
            "tokens whose embeddings are mixed into each token's: see the pass superpose",
        ),
        "shares": Input("f32[B,T,K]", "their parts of the mixture; a token's own is what is left"),
        "ancestors": Input(
            "bool[B,T,T]",
            "whether a token (row) continues another (column), itself included; without it the "
            "tokens are a chain",
            optional=True,
        ),
    }
)

ANCESTORS = "ancestors"
MIXED, SHARES = "mixed", "shares"
BEFORE = "before"
SEEN = "seen"
TARGET = "target"
"""``target.5.key``: an input of a function that drafts, which stands for the state in which the
target keeps the keys of its layer 5, until there are states (see `insert_kv_cache`)."""
PACKED = "packed"
OPTIONAL = frozenset(name for name, given in INPUTS.items() if given.optional)
REQUIRED = ("tokens", "positions")
"""What every step takes; with states it takes ``past``, too."""


def whole_rows(batch: int, width: int) -> dict[str, torch.Tensor]:
    """What a function that packs is fed where each of `batch` sequences has `width` tokens, all
    chosen."""
    places = torch.arange(batch * width)
    row, columns = places[None], places.reshape(batch, width)
    return {"packed": row, "places": columns, "picked": row, "shown": columns}


def nothing_mixed(batch: int, width: int, count: int) -> dict[str, torch.Tensor]:
    """What a function that mixes `count` tokens into each is fed where every token is itself."""
    shape = batch, width, count
    return {MIXED: torch.zeros(shape, dtype=torch.int64), SHARES: torch.zeros(shape)}


def chain_inputs(tokens: torch.Tensor, past: int = 0, mixed: int = 0) -> dict[str, torch.Tensor]:
    """The inputs by name that feed `tokens` i64[B,T] as chains behind `past` rows, all chosen,
    none to be taken back. mixed: see `mixed_into`."""
    batch, width = tokens.shape
    steps = torch.arange(width)
    return {
        "tokens": tokens,
        "positions": (steps + past).expand(batch, width),
        "past": torch.full((batch,), past),
        SEEN: (steps + past).expand(batch, width),
        "certain": torch.full((batch,), width),
        "select": steps.expand(batch, width),
        **whole_rows(batch, width),
        **nothing_mixed(batch, width, mixed),
        ANCESTORS: torch.ones(width, width, dtype=torch.bool).tril().expand(batch, width, width),
    }


def mixed_into(function: Function) -> int:
    """How many tokens a function may mix into each; 0 where it takes tokens alone."""
    if not function.has_input(SHARES):
        return 0
    return int(function.input(SHARES).meta["type"].dims[-1])
