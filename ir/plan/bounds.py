"""What the numbers of plan records may be: one alias a kind of number, for records and options.

Records come out of files of others. A number below its least fails somewhere inside the runtime, or
never ends; one above its most asks for more memory and time than any machine has. The largest
values are many times what pays off anywhere: a step of 4,096 columns is a long prompt's.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import Field

T = TypeVar("T")
FILLED = "filled"
Filled: TypeAlias = Annotated[T, FILLED]
"""A field that is no option: the pass that makes the record's functions or weights fills it."""

MOST_NODES = 4096
MOST_LEVELS = 256
MOST_PARTS = 32

Nodes: TypeAlias = Annotated[int, Field(ge=1, le=MOST_NODES)]
"""Tokens, or nodes of a tree, or columns of a step."""

Levels: TypeAlias = Annotated[int, Field(ge=1, le=MOST_LEVELS)]
"""Tokens that are predicted one after the other, or the depth of a tree."""

Ngram: TypeAlias = Annotated[int, Field(ge=2, le=MOST_LEVELS)]
"""Tokens of an n-gram, the one it is found by included."""

Aim: TypeAlias = Literal["text", "distribution", "both"]
"""What training asks of a draft at a place: the text's next token; the target's distribution of it;
or half that and half the target's best token."""

Place: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A place in a text, or a number of places."""

Opening: TypeAlias = Annotated[tuple[Place, ...], Field(min_length=1, max_length=MOST_LEVELS)]
"""Ids of the tokens that texts begin with."""

Following: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=-1, le=2**31 - 1)], ...], Field(max_length=MOST_NODES)
]
"""Ids of tokens, or -1 for one that is known later; or none."""

Words: TypeAlias = Annotated[
    tuple[Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")], ...], Field(max_length=MOST_NODES)
]
"""Names, or none."""

Axes: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0, le=2)], ...], Field(max_length=MOST_NODES)
]
"""Time (0), height (1) or width (2), one an angle of rotary embeddings."""

Context: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Positions that a model supports."""

Width: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Numbers of a row."""

Budgets: TypeAlias = Annotated[tuple[Context, ...], Field(max_length=MOST_LEVELS)]
"""Rows that layers keep, or none."""

Rollout: TypeAlias = Annotated[int, Field(ge=0, le=MOST_LEVELS)]
"""Levels, or none."""

Seed: TypeAlias = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Where random numbers begin."""

Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A probability, or a part of a whole."""

Part: TypeAlias = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""A probability that is not 0."""

Inside: TypeAlias = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
"""A probability that is neither 0 nor 1."""

Amount: TypeAlias = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""A weight or a factor that may be 0."""

Factor: TypeAlias = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
"""A weight or a factor."""

Widths: TypeAlias = Annotated[tuple[Nodes, ...], Field(min_length=1, max_length=MOST_LEVELS)]
"""Children of a node, by depth."""

Rank: TypeAlias = Annotated[int, Field(ge=0, le=MOST_NODES)]
"""A place among siblings."""

Chances: TypeAlias = Annotated[
    tuple[Annotated[tuple[Share, ...], Field(max_length=MOST_NODES)], ...],
    Field(max_length=MOST_LEVELS),
]
"""Probabilities, in rows, or none."""

Rates: TypeAlias = Annotated[
    tuple[Annotated[tuple[Part, ...], Field(min_length=1, max_length=MOST_NODES)], ...],
    Field(min_length=1, max_length=MOST_LEVELS),
]
"""Rates of acceptance, in rows."""
