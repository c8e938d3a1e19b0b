"""Validation of dataclass fields by their annotations, bounds included."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from .errors import InputError
from .names import shown


@cache
def _adapters(cls: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(cls)}


def check_fields(instance: Any) -> None:
    """Errors: `InputError` naming the first field that does not fit its annotation."""
    cls: Any = type(instance)
    for name, adapter in _adapters(cls).items():
        value = getattr(instance, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            owner = getattr(instance, "kind", "") or cls.__name__
            raise InputError(f"{owner}: {shown(value)} is not a valid {name}: {reason}") from error
