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
