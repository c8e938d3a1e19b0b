"""What a plan record is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class Record:
    """Base of all plan records. `kind` is the name in the text form; `slot` the plan's field.

    A field may hold plain values, tuples of them, and further records of the same slot.
    """

    kind: ClassVar[str] = ""
    slot: ClassVar[str] = ""

    @property
    def weights(self) -> set[str]:
        """Names of the weights that the record needs: its fields called weight, and its parts'."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        named = {values["weight"]} if "weight" in values else set()
        nested = [value if isinstance(value, tuple) else (value,) for value in values.values()]
        parts = [part for value in nested for part in value if isinstance(part, Record)]
        return named.union(*(part.weights for part in parts))

    def __str__(self) -> str:
        shown = ", ".join(f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self))
        return f"{self.kind}({shown})"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, Record) else repr(value)


RECORDS: dict[tuple[str, str], type[Record]] = {}


def record(cls: type[Record]) -> type[Record]:
    """Class decorator: make a record known to the parser under (slot, kind)."""
    RECORDS[cls.slot, cls.kind] = cls
    return cls
