"""A program: functions, states, weights, a decode plan, and provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .function import Function, Role
from .plan import DecodePlan
from .plan.defaults import Defaults
from .support.errors import GraftworkError, InputError
from .support.fields import check_fields
from .support.names import check_name, check_program_name
from .text.notebook import program_html
from .text.printer import (
    call_text,
    fields_of,
    function_lines,
    literal,
    made_of,
    name_text,
    record_text,
)
from .types import Sym, TensorType
from .weights import WeightStore

_SYMBOL = re.compile(r"B|W|E|C(?:\.[0-9]+)?", re.ASCII)

LOG = "W"
"""The capacity symbol of logs: rows of the last step that may be rolled back."""

SOURCE = "E"
"""The capacity symbol of rows of an encoder's source."""

STAGES = ("traced", "canonical", "cached")


@dataclass(frozen=True)
class State:
    """A buffer that lives across steps, such as one layer's keys.

    type: with the symbol ``B``, unless the batch shares the state, and at most one capacity in
    rows: ``C``, ``C.1``, ..., `LOG` or `SOURCE`. layer: its index. part: "key", "value", ...
    Errors: `InputError` for other symbols.
    """

    name: str
    type: TensorType
    layer: int
    part: str

    def __post_init__(self) -> None:
        check_name("a state", self.name)
        check_name("a state's part", self.part)
        symbols = [dim for dim in self.type.dims if isinstance(dim, Sym)]
        strange = [str(dim) for dim in symbols if not _SYMBOL.fullmatch(dim.text)]
        if strange or len(set(symbols)) < len(symbols) or len(set(symbols) - {Sym("B")}) > 1:
            raise InputError(
                f"state {self.name}: expected a type with the symbol B and at most one capacity "
                f"(C, C.1, C.2, ..., {LOG} or {SOURCE}), got {self.type}"
            )

    @property
    def capacity(self) -> str | None:
        """The capacity symbol; None for a state without rows."""
        return next((str(d) for d in self.type.dims if isinstance(d, Sym) and str(d) != "B"), None)

    @property
    def grows(self) -> bool:
        """Whether steps append rows for the tokens of a text."""
        return self.capacity not in (None, LOG, SOURCE)

    @property
    def together(self) -> bool:
        """Whether all sequences of a batch share it."""
        return Sym("B") not in self.type.dims

    @property
    def recurrent(self) -> bool:
        """Whether it accumulates tokens, or logs the last step: a text cannot be rolled back to an
        earlier position."""
        return self.capacity in (None, LOG)


@dataclass(frozen=True)
class ModelInfo:
    """Facts of the model for generation. context: maximum positions, in tokens. eos: ids that end a
    sequence. defaults: of generation options."""

    model_type: str
    vocab_size: int
    context: int
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    defaults: Defaults = field(default_factory=Defaults)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def generation_config(self) -> dict[str, Any]:
        """End, begin and pad tokens, and the defaults that `generate` takes, by transformers'
        names."""
        eos: Any = self.eos[0] if len(self.eos) == 1 else [*self.eos] or None
        tokens = {"bos_token_id": self.bos, "eos_token_id": eos, "pad_token_id": self.pad}
        known = {name: value for name, value in tokens.items() if value is not None}
        return {**known, **self.defaults.supported}


@dataclass(frozen=True)
class PassRecord:
    """One line of provenance: a pass, its options, contract, matches and seconds."""

    name: str
    options: tuple[tuple[str, Any], ...]
    contract: str
    matches: int
    seconds: float

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Program:
    """A model: functions over states and weights, and a decode plan. Immutable; see `replace`.

    stage: one of `STAGES`, or ``lowered:<backend>``. assets: files that are saved along (tokenizer,
    generation config), by file name. guests: draft models, by the path in a pass's options, or
    parts of the checkpoint, by name; inputs of passes, which remove them; not part of the text.
    """

    name: str
    functions: Mapping[str, Function]
    weights: WeightStore
    info: ModelInfo
    states: Mapping[str, State] = field(default_factory=dict)
    plan: DecodePlan = field(default_factory=DecodePlan)
    stage: str = "traced"
    provenance: tuple[PassRecord, ...] = ()
    assets: Mapping[str, Path] = field(default_factory=dict)
    guests: Mapping[str, Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_program_name(self.name)

    def replace(self, **changes: Any) -> Program:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def function(self, name: str) -> Function:
        """A function by name. Errors: `GraftworkError` listing the functions."""
        if name not in self.functions:
            raise GraftworkError(f"no function {name!r}; the program has {list(self.functions)}")
        return self.functions[name]

    @property
    def step(self) -> Function:
        """The plan's function `plain`: the target's results and nothing else."""
        return self.function(self.plan.step.plain)

    @property
    def recurrent(self) -> bool:
        """Whether it has recurrent states, see `State.recurrent`."""
        return any(state.recurrent for state in self.states.values())

    def with_function(self, function: Function, **changes: Any) -> Program:
        """A copy in which the function of that name is replaced (or added)."""
        return self.replace(functions={**self.functions, function.name: function}, **changes)

    @property
    def ids(self) -> int:
        """Ids that tokens of texts and of drafts have are below it; those of rows begin there."""
        prompts = [getattr(part, "prompts", 0) for part in self.plan.draft.every]
        return self.info.vocab_size + max(prompts)

    def states_of(self, function: str) -> tuple[str, ...]:
        """The states that a function reads."""
        read = {node.target for node in self.function(function).inputs}
        return tuple(name for name in self.states if name in read)

    def whole_rows(self, function: str) -> str | None:
        """The capacity of a function's states that hold every token of a text, whatever the cache
        drops of it; None: it has none of these."""
        own = {self.states[name].capacity for name in self.states_of(function)}
        return next(iter(self.plan.cache.whole & own), None)

    def shared_with(self, function: str) -> tuple[str, ...]:
        """The target's states that a function reads which drafts, and does not write."""
        fn = self.function(function)
        if fn.role is not Role.DRAFT:
            return ()
        read = [name for name in self.states_of(function) if name not in fn.outputs]
        targets = [other for other in self.functions.values() if other.role is Role.TARGET]
        return tuple(name for name in read if any(name in other.outputs for other in targets))

    def lent_by(self, function: str) -> tuple[str, ...]:
        """The states that a function writes which drafts, and that another reads."""
        fn, others = self.function(function), self.functions.values()
        if fn.role is not Role.DRAFT:
            return ()
        readers = [other for other in others if other.role is Role.DRAFT and other is not fn]
        written = [name for name in self.states_of(function) if name in fn.outputs]
        return tuple(
            name
            for name in written
            if any(other.has_input(name) and name not in other.outputs for other in readers)
        )

    def pruned(self) -> Program:
        """A copy without weights that no function or plan record uses."""
        used: set[str] = set().union(*(f.weights for f in self.functions.values()), set())
        for slot in fields(self.plan):
            used |= getattr(self.plan, slot.name).weights
        return self.replace(weights=self.weights.only(used))

    def __str__(self) -> str:
        return program_text(self)

    def _repr_html_(self) -> str:
        return program_html(self)


def program_text(program: Program, *, made: bool = False) -> str:
    """The program as text (see `printer`), which parses to an equal program but for the weights'
    data. made: add comments with the weights' derivations."""
    lines = [f"program {json.dumps(program.name, ensure_ascii=False)} stage={program.stage} {{"]
    info = fields_of(program.info)
    lines.append("  " + call_text("info", info | info.pop("defaults").said))
    lines += ["  " + _pass_text(record) for record in program.provenance]
    for state in program.states.values():
        attributes = f"layer={state.layer} part={literal(state.part)}"
        lines.append(f"  state {name_text(state.name)}: {state.type} {attributes}")
    for weight in program.weights.values():
        comment = f"  # {made_of(weight)}" if made and weight.inputs else ""
        lines.append(f"  weight {name_text(weight.name)}: {weight.type}{comment}")
    for function in program.functions.values():
        lines.append("")
        lines += ["  " + line.text for line in function_lines(function)]
    lines += _plan_lines(program.plan)
    return "\n".join([*lines, "}", ""])


def _plan_lines(plan: DecodePlan) -> list[str]:
    default = fields_of(DecodePlan())
    slots = [(name, record) for name, record in fields_of(plan).items() if record != default[name]]
    if not slots:
        return []
    lines = [f"    {name} = {record_text(record)}" for name, record in slots]
    return ["", "  decode {", *lines, "  }"]


def _pass_text(record: PassRecord) -> str:
    options = call_text(record.name, dict(record.options))
    facts = f"contract={record.contract} matches={record.matches} seconds={record.seconds!r}"
    return f"pass {options} {facts}"
