"""Dataclasses whose fields keep to their annotations, bounds included, whoever fills them in."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from .errors import InputError
from .names import shown


@lru_cache(maxsize=256)
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(cls)}


def check_fields(instance: Any) -> None:
    """Errors: `InputError` naming the first field whose value its annotation does not allow."""
    for name, adapter in _adapters(type(instance)).items():
        value = getattr(instance, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise InputError(f"{shown(value)} is not a valid {name}: {reason}") from error
