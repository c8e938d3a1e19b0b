"""The format of plan.json: pydantic records, which also define its JSON Schema.

Types are text such as ``f32[B,T,64]``: a dtype and dims; B sequences, T tokens of a call, S of them
chosen, C (C.1, ...) rows of a state.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION = 1
"""Format version; runners refuse other versions."""

Type = Annotated[str, Field(pattern=r"^[a-z]+[0-9]*\[.*\]$")]
File = Annotated[str, Field(pattern=r"^[0-9]+\.[a-z]+\.onnx$")]
Variant = Literal["chain", "tree", "batch"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelRecord(_Record):
    """Facts of the model."""

    name: str
    model_type: str
    vocab_size: int = Field(ge=1)
    context: int = Field(ge=1)
    """Positions that there are, in tokens."""
    eos: list[int]
    """Ids that end a text."""
    bos: int | None
    pad: int | None
    generation: dict[str, Any]
    """Defaults, as generation_config.json names them."""
    contract: Literal["exact", "lossless", "tuned", "approximate"]
    license: str


class StateRecord(_Record):
    """A buffer that persists across calls. A function reads it as the input of its name and writes
    it as the output `next`. Rows beyond a later call's past are discarded."""

    type: Type
    layer: int
    part: str
    next: str
    rows: str | None
    """The symbol of its rows in its type; null: it has none. C, C.1, ...: rows of the text; E: of
    the source that it is written from; W: of the last step's tokens behind its certain ones."""
    in_place: bool
    """Whether both may be bound to one buffer; false: to two, which change places after the
    call."""


class VariantRecord(_Record):
    """A function's graph in one variant."""

    file: File
    inputs: dict[str, Type]
    outputs: dict[str, Type]


class FunctionRecord(_Record):
    """A function."""

    role: Literal["target", "draft", "upkeep"]
    """target: its results count; draft: they are verified; upkeep: it moves states."""
    layers: int = Field(ge=0)
    lone_token: Literal["once", "twice"]
    """twice: a call of one token repeats it (tokens, positions, hidden) and takes the first column,
    so that its bits are those of wider calls; the second row is forgotten."""
    variants: dict[Variant, VariantRecord] = Field(min_length=1)
    """chain: tokens follow one another; batch 1, or one token each, or first prompts. tree: batch 1
    with ancestors. batch: everything."""


class StepFunctions(_Record):
    """Functions that are called in order."""

    decode: list[str] = Field(min_length=1)
    prompt: list[str] = Field(min_length=1)
    plain: str
    """The function that gives the target's results and does nothing else."""
    most_columns: int = Field(ge=1)
    """Tokens of a step, at most."""
    spare_rows: int = Field(ge=0)
    """Rows that a step makes for itself behind those of its tokens."""
    chunk: int = Field(ge=1)
    """Tokens of a prompt that a call is fed at most."""


class Table(_Record):
    """Position of a weight that the runner reads, in the file of weights."""

    type: Type
    offset: int
    bytes: int


class PlanFile(_Record):
    """How the ONNX files of a folder become generation. B sequences, T tokens of a call, S of them
    chosen, C rows of a state."""

    format: Literal["graftwork-plan"] = "graftwork-plan"
    version: Literal[1] = 1
    sha256: str = Field(default="0" * 64, pattern="^[0-9a-f]{64}$")
    """Of this file's bytes, zeros standing for it: a runner refuses a file that is damaged."""
    requires: list[Annotated[str, Field(pattern=r"^[a-z]+:[a-z_0-9]+$")]]
    """slot:kind of the records that decide which tokens come out, or without which nothing is
    drafted, and states:recurrent where some are not in_place. A runner that does not know one must
    refuse."""
    instead: str
    """What carries the recipe where a runner must refuse it."""
    model: ModelRecord
    weights: str
    """The file that all models name as their external data."""
    tables: dict[str, Table]
    states: dict[str, StateRecord]
    functions: dict[str, FunctionRecord]
    step: StepFunctions
    derived: dict[str, str]
    """Inputs that follow from others, and how."""
    overhang: int = Field(ge=0)
    """Rows beyond a text that buffers must have room for."""
    plan: dict[str, dict[str, Any]]
    """A record for each slot: `kind` names it, other fields are its options."""
