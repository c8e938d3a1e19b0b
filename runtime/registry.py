"""Which class carries out which plan record: filled by decorators, one file a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..ir import GraftworkError, UnsupportedError
from ..ir.plan import Record
from ..ir.support.discovery import import_all

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by plan record (and a trait, where one record has several classes).

    Every file of `package` is imported at the first look-up, so a new class needs its own file and
    no other edit.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.classes: dict[tuple[type[Record], str], type[T]] = {}

    def register(self, record: type[Record], trait: str = "") -> Callable[[type[Any]], type[Any]]:
        """Class decorator: the class carries out `record`. Errors: `GraftworkError` if one does."""

        def add(cls: type[Any]) -> type[Any]:
            known = self.classes.setdefault((record, trait), cls)
            if known is not cls:
                raise GraftworkError(
                    f"{cls.__name__} cannot carry out {record.__name__}: {known.__name__} does"
                )
            return cls

        return add

    def has(self, record: Record, trait: str = "") -> bool:
        """Whether there is a class for a record."""
        import_all(self.package)
        return (type(record), trait) in self.classes

    def find(self, record: Record, trait: str = "") -> type[T]:
        """The class for a record. Errors: `UnsupportedError` naming the records that have one."""
        import_all(self.package)
        if (type(record), trait) not in self.classes:
            known = sorted({f"{r.slot}={r.kind}" for r, _ in self.classes})
            what = f"{record.slot}={record}" + (f" when {trait}" if trait else "")
            raise UnsupportedError(
                f"the runtime cannot carry out {what}: no class is registered for "
                f"{type(record).__name__}; there are {known}"
            )
        return self.classes[type(record), trait]
