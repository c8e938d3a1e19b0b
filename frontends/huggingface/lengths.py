"""How far texts of a model may go, and rotary embeddings that change with a text's length.

Angles are frequencies times positions, and some models take other frequencies for longer texts
("longrope": Ding et al., 2024; "dynamic": NTK scaling). A program has one set, that of texts up to
the length at which transformers begins to change them, and its texts end there: the rows in a cache
were turned by the frequencies of shorter ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ...ir import GraftworkWarning, InputError

_DEFAULT, _MOST = 2048, 2**30
_CHANGING = ("longrope", "dynamic")


def context_of(config: Any) -> int:
    """Positions that a model supports; models without a limit may say how they were trained.

    A rope that stretches what was trained ("yarn", "linear") reaches further than
    max_position_embeddings says, which model cards leave as it was. Where layers have ropes of
    their own, the shortest counts. Errors: `InputError` for settings that are no numbers.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    found = (getattr(config, name, None) for name in (*names, "max_target_positions"))
    trained = next((n for n in found if isinstance(n, int) and n > 0), _DEFAULT)
    reach = min([_reach(trained, rope) for rope in _ropes(config)], default=trained)
    if not 0 < reach <= _MOST:
        raise InputError(f"config.json: expected 1 to {_MOST} positions, got {reach}")
    return reach


def warn_of_change(config: Any) -> None:
    """Warn (`GraftworkWarning`) where texts end although the model goes on with another rope."""
    there = {said.get("rope_type") for said in _ropes(config)}
    if kinds := [kind for kind in _CHANGING if kind in there]:
        warnings.warn(
            f"{config.model_type}: its rotary embedding ({kinds[0]}) changes for texts of "
            f"more than {context_of(config)} tokens; the program has that of shorter ones, and "
            "texts end there",
            GraftworkWarning,
            stacklevel=2,
        )


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The settings of every kind of rope that layers have."""
    said = getattr(config, "rope_parameters", None)
    if not isinstance(said, Mapping):
        return []
    if "rope_type" in said:
        return [said]
    return [part for part in said.values() if isinstance(part, Mapping)]


def _reach(trained: int, said: Mapping[str, Any]) -> int:
    """Positions that a rope reaches."""
    kind, original = said.get("rope_type"), said.get("original_max_position_embeddings")
    if kind == "longrope":
        return int(_number(said, "original_max_position_embeddings", trained))
    if kind == "yarn":
        start = _number(said, "original_max_position_embeddings", trained)
        return max(trained, int(start * _number(said, "factor", 1)))
    if kind == "linear" and original is None:
        return max(trained, int(trained * _number(said, "factor", 1)))
    return trained


def _number(said: Mapping[str, Any], name: str, default: float) -> float:
    value = said.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
        raise InputError(f"config.json: rope_parameters.{name}: expected a number, got {value!r}")
    return value


def frozen_ropes(twin: Any) -> dict[str, torch.Tensor]:
    """Keep the ropes of a model from changing with the length, in place: those of short texts stay.

    Returns the frequencies by the names of the model's buffers, which hold others where the model
    has read a long text before.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in twin.named_modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {"": kind}
        for layers, name in kinds.items():
            if name not in _CHANGING:
                continue
            prefix = f"{layers}_" if layers else ""
            usual = getattr(module, f"{prefix}original_inv_freq").detach().clone()
            found[".".join(filter(None, (path, f"{prefix}inv_freq")))] = usual
            setattr(module, f"{prefix}inv_freq", usual)
        if any(name in _CHANGING for name in kinds.values()):
            # What the model asks before it changes them.
            module.rope_type = {k: "default" for k in kind} if isinstance(kind, dict) else "default"
            _freeze_scale(module)
    return found


def _freeze_scale(module: Any) -> None:
    """Phi-MoE asks for the length again, to scale what it turns."""
    said = module.config.rope_parameters
    if "short_mscale" not in said:
        return
    usual, short = module.original_inv_freq, _number(said, "short_mscale", 1)
    module.config = SimpleNamespace(rope_parameters={"rope_type": "default"})
    module.rope_init_fn = lambda config: (usual, short)
