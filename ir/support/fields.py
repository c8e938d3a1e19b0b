"""Validation of dataclass fields by their annotations, bounds included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from .errors import InputError
from .names import shown

M = TypeVar("M", bound=BaseModel)


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


def tuned(options: type[M], owner: str, tuning: Mapping[str, Any]) -> M:
    """The options of a rule or method, as a recipe gives them in `tuning`. Errors: `InputError`
    naming those that the owner takes."""
    try:
        return options(**tuning)
    except ValidationError as error:
        first, known = error.errors()[0], ", ".join(sorted(options.model_fields)) or "no options"
        raise InputError(
            f"tuning: {owner} takes {known}; {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
