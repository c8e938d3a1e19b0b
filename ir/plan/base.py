"""What a plan record is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, dataclass_transform

from ..support.errors import InputError
from ..support.fields import check_fields
from ..types import ValueType
from .contract import Contract

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan


Size: TypeAlias = int | str
"""A size that is known; "V", the vocabulary; "K", the same integer everywhere; or "": any."""

Returned: TypeAlias = Mapping[str, tuple[Size, ...]]
"""Sizes of outputs by name."""


@dataclass(frozen=True)
class Record:
    """Base of all plan records. `kind` is the name in the text form; `slot` the plan's field.

    A field may hold plain values, tuples of them, and further records of the same slot. Annotations
    bound them. Fields of these names mean the same in all records: `weight` names a weight of the
    program; `exit` is a number of layers after which the step must be cut; `trained`: whether its
    weights know anything. Errors: `InputError` naming the field that is out of bounds.

    What the pass that puts it into plans declares, it declares here (see `policy`). contract: what
    holds of the output, next to decoding without it. requires, provides: facts about programs, such
    as "cached", "trees". brings: what the user brings for it besides the model, in a few words.
    repeatable: whether a recipe may have several of its kind. noun: what its slot holds.
    """

    kind: ClassVar[str] = ""
    slot: ClassVar[str] = ""
    noun: ClassVar[str] = ""
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    brings: ClassVar[str] = ""
    repeatable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:
        """What the fields' annotations (see `bounds`) cannot say. Errors: `InputError`."""

    @classmethod
    def maker(cls) -> Callable[..., Record]:
        """What makes a record of the options of its pass: its parameters are the options."""
        return cls

    def lacking(self, step: Mapping[str, ValueType]) -> str | None:
        """What the step does not return for it, and what to do; None if nothing is missing.

        step: the types of the step's outputs.
        """
        return None

    def into(self, plan: DecodePlan) -> DecodePlan:
        """The plan with the record in its slot. Errors: `InputError` if that is taken, or if the
        record needs others than the plan has."""
        held = getattr(plan, self.slot)
        if held != getattr(type(plan)(), self.slot):
            raise InputError(f"the plan has a {self.noun} already: {held.brief}")
        changed: dict[str, Any] = {self.slot: self}
        return replace(plan, **changed)

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """What contradicts it in the rest of a plan: a sentence each."""
        yield from ()

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """The functions that the runtime calls for it, and what it reads of each. Errors:
        `InputError` for a record that cannot be carried out, whatever the functions return."""
        yield from ()

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        """The weights that the runtime reads for it: the name, whether they are token ids, and
        their sizes."""
        yield from ()

    @property
    def weights(self) -> set[str]:
        """Names of the weights that the record needs: its fields called weight, and its parts'."""
        values = (getattr(self, f.name) for f in fields(self) if f.name == "weight")
        return {name for name in values if name is not None}.union(
            *(part.weights for part in self.inside)
        )

    @property
    def inside(self) -> tuple[Record, ...]:
        """The records in its fields."""
        values = [getattr(self, f.name) for f in fields(self)]
        nested = [value if isinstance(value, tuple) else (value,) for value in values]
        return tuple(part for value in nested for part in value if isinstance(part, Record))

    @property
    def trains(self) -> tuple[Record, ...]:
        """The records in it, itself included, whose weights somebody trains: they say `trained`."""
        return (self,) if hasattr(self, "trained") else ()

    def with_inside(self, change: Callable[[Any], Any]) -> Self:
        """The same with the records in its fields changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            return change(value) if isinstance(value, Record) else value

        values: dict[str, Any] = {f.name: changed(getattr(self, f.name)) for f in fields(self)}
        return replace(self, **values)

    @property
    def brief(self) -> str:
        """As printed, where that is short; else what is not the default, and how tuples begin."""
        whole = str(self)
        if len(whole) <= MOST_CHARACTERS:
            return whole
        told = [
            f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default
        ]
        shown = ", ".join(f"{f.name}={_text(getattr(self, f.name), True)}" for f in told)
        return f"{self.kind}({shown})"

    @property
    def every(self) -> list[Record]:
        """The record, and the records in its fields and in theirs."""
        return [self, *(deep for part in self.inside for deep in part.every)]

    def __str__(self) -> str:
        shown = ", ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self))
        return f"{self.kind}({shown})"


MOST_CHARACTERS, MOST_VALUES = 80, 5
"""Of a record and of a tuple, what a message shows."""


def _text(value: Any, short: bool = False) -> str:
    if isinstance(value, Record):
        return value.brief if short else str(value)
    if not isinstance(value, tuple):
        return repr(value)
    texts = [_text(part, short) for part in value]
    if short and len(value) > MOST_VALUES:
        texts[2:] = [f"... {len(value)} in all"]
    return f"({', '.join(texts)}{',' if len(value) == 1 else ''})"


RECORDS: dict[tuple[str, str], type[Record]] = {}
POLICIES: dict[str, type[Record]] = {}
"""Records that are all that is to do, by the name of the pass that puts them into plans."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[Record]) -> type[Record]:
    """Class decorator: a class, made a frozen dataclass unless it is one, is known to the parser
    under (slot, kind). Errors: `InputError` naming both records if another one has that place."""
    if "__dataclass_params__" not in vars(cls):
        cls = dataclass(frozen=True)(cls)
    known = RECORDS.setdefault((cls.slot, cls.kind), cls)
    if _path(known) != _path(cls):
        raise InputError(
            f"{_path(cls)} cannot be {cls.slot}={cls.kind}: {_path(known)} is; choose another kind"
        )
    RECORDS[cls.slot, cls.kind] = cls
    return cls


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def policy(cls: type[Record]) -> type[Record]:
    """Class decorator: a `record` that needs nothing but its place in the plan. A pass called
    ``slot_kind``, such as length_svip, puts it there (see `passes/policies.py`)."""
    POLICIES[f"{cls.slot}_{cls.kind}"] = record(cls)
    return cls


def _path(cls: type[Record]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def untrained(records: Iterable[Record]) -> list[Record]:
    """The records, and parts of them, whose own weights know nothing.

    >>> from graftwork.ir.plan import CachedDraft, FirstDraft, HeadsDraft
    >>> draft = FirstDraft((CachedDraft(trained=True), HeadsDraft()))
    >>> [record.kind for record in untrained([draft])]
    ['heads']
    """
    parts = [part for record in records for part in record.trains]
    return [part for part in parts if not getattr(part, "trained", True)]
