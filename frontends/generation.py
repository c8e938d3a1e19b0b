"""What comes beside a model's weights: its files, and how it generates unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from ..ir import Defaults, InputError, ModelInfo
from ..ir.plan.defaults import NEUTRAL, OF_BEAMS
from ..ir.support.files import read_json

ASSETS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files that travel with programs."""


Known: TypeAlias = Callable[[ModelInfo, Mapping[str, Path]], None]
"""Told, before a model is traced, what its files say of it, and which of them come with it."""


def nobody(info: ModelInfo, assets: Mapping[str, Path]) -> None:
    """A `Known` that wants to know nothing."""


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Errors: `InputError`."""
    try:
        said = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(said, dict):
        raise InputError(f"{path}: expected an object, got a {type(said).__name__}")
    return said


def _plain(value: Any) -> Any:
    """A setting's value; of an object its values."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def defaults_of(generation: Any) -> Defaults:
    """What a generation config says of how to generate; None: nothing."""
    said = {f.name: getattr(generation, f.name, None) for f in fields(Defaults)}
    other = {name: getattr(generation, name, None) for name in NEUTRAL}
    never = list(said["suppress_tokens"] or ())
    if all(len(words) == 1 for words in other["bad_words_ids"] or ()):
        never += [words[0] for words in other.pop("bad_words_ids") or ()]
    said["suppress_tokens"] = tuple(never)
    said["begin_suppress_tokens"] = tuple(said["begin_suppress_tokens"] or ())
    if other["num_beams"] in (None, 1):
        other = {name: value for name, value in other.items() if name not in OF_BEAMS}
    wanted = [(n, v) for n, v in other.items() if v is not None and v not in NEUTRAL[n]]
    said["unsupported"] = tuple(f"{name}={_plain(value)!r}" for name, value in wanted)
    try:
        return TypeAdapter(Defaults).validate_python(said)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"the model's generation config (generation_config.json): {first['loc'][0]}: "
            f"{first['msg']}, got {first['input']!r}"
        ) from error
