"""The JSON schema of recipes, by which editors complete and check them.

A file that begins with ``# yaml-language-server: $schema=recipe.schema.json`` is checked against
it. What a schema cannot say (a contract that is too strong, passes that need others) `Recipe.load`
checks.
"""

from __future__ import annotations

from typing import Any

from .passes import Contract, all_passes
from .recipe import KEYS, NEEDS

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> dict[str, Any]:
    """The schema, as plain data."""
    text = {"type": "string"}
    described = {
        "title": {**text, "description": "What it does, in one line."},
        "paper": {**text, "description": "Where it comes from."},
        "differs": {**text, "description": "Where it departs from that."},
        "contract": {
            "enum": [contract.value for contract in Contract],
            "description": "The weakest of its passes'.",
        },
        "extends": {**text, "description": "A recipe whose passes come first: a name or a path."},
        "needs": {"type": "array", "items": {"enum": list(NEEDS)}},
        "passes": {"type": "array", "items": {"anyOf": _entries()}},
        "knob": {
            "type": "object",
            "description": "pass.option: values, from the one that saves most.",
            "propertyNames": {"pattern": "^[a-z0-9_]+\\.[a-z0-9_]+$"},
            "additionalProperties": {"type": "array", "minItems": 1},
            "maxProperties": 1,
        },
    }
    return {
        "$schema": DRAFT,
        "title": "A recipe of graftwork",
        "type": "object",
        "properties": {key: described[key] for key in KEYS},
        "additionalProperties": False,
        "$defs": {name: _options(name) for name in sorted(all_passes())},
    }


def _entries() -> list[dict[str, Any]]:
    """How an entry of `passes` may look: a name, a name with options, or in full."""
    names = sorted(all_passes())
    whole = [
        {
            "type": "object",
            "properties": {
                "pass": {"const": name},
                "options": {"$ref": f"#/$defs/{name}"},
                "optional": {"type": "boolean", "description": "It may match nothing."},
            },
            "required": ["pass"],
            "additionalProperties": False,
        }
        for name in names
    ]
    short = {
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return [{"enum": names}, short, *whole]


def _options(name: str) -> dict[str, Any]:
    kind = all_passes()[name]
    schema = kind.model_json_schema()
    return {key: value for key, value in schema.items() if key != "title"}
