"""Stages of a program and the ops that each allows: one table, which backends extend.

``traced``: from a frontend. ``canonical``: norms, rotary embeddings and gated MLPs are single ops.
``cached``: reads and writes states. ``lowered:<backend>``: accepted by a backend.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..support.errors import GraftworkError
from . import all_ops
from .decompositions import decompositions, is_kept

# Core ATen ops whose result type depends on data or memory layout.
_EXCLUDED = frozenset(
    {
        "aten._local_scalar_dense.default",
        "aten.as_strided.default",
        "aten.masked_select.default",
        "aten.nonzero.default",
    }
)
# Internal halves of other ops mostly do not check sizes and indices; these do.
_CHECKED_HALVES = frozenset({"_log_softmax", "_softmax", "_to_copy", "native_layer_norm"})
# Allowed beside core ATen: frontends or passes produce them.
_EXTRA = frozenset(
    {
        "aten.masked_fill.Scalar",
        "aten.reshape.default",
        "aten.scaled_dot_product_attention.default",
        "aten.softmax.int",
        "aten.softplus.default",
        "aten.transpose.int",
    }
)


@dataclass(frozen=True)
class Stage:
    """One row of the legality table. only: allowed graftwork ops (None: all). without: forbidden
    ones. states: whether functions may have states. accepts: a backend's test of an op, which
    replaces the other rules."""

    name: str
    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    states: bool = False
    accepts: Callable[[Any], bool] | None = None


# Made by raising passes on the way from traced to canonical.
_RAISED = frozenset({"rms_norm", "layer_norm", "rotary", "glu"})
# Quantized checkpoints are imported with these.
_STORED = frozenset(op.name for op in all_ops().values() if op.stored)
# Ops that mix tokens of a sequence, before and after there are states.
_MIXERS = frozenset(
    {"attention", "causal_conv", "linear_attention", "source_attention", "target_attention"}
)
_CACHE_OPS = frozenset(
    {
        *("attend", "cache_write", "step_mask", "alibi", "distance_bias", "seen_mask"),
        *("causal_conv_step", "linear_attention_step", "linear_attention_step_int8"),
    }
)

_STAGES = {
    stage.name: stage
    for stage in (
        Stage("traced", only=_MIXERS | frozenset({"hidden", "moe"}) | _RAISED | _STORED),
        Stage("canonical", without=_CACHE_OPS),
        Stage("cached", without=_MIXERS, states=True),
    )
}


def register_lowered(backend: str, accepts: Callable[[Any], bool] | None = None) -> None:
    """Declare the stage ``lowered:<backend>``. accepts: tests a node's target; None: core ATen and
    every graftwork op but markers and cacheless attention."""
    without = _MIXERS | {"hidden"} if accepts is None else frozenset()
    name = f"lowered:{backend}"
    _STAGES[name] = Stage(name, without=without, states=True, accepts=accepts)


def stage_of(name: str) -> Stage:
    """The row of a stage. Errors: `GraftworkError` listing the stages."""
    if name not in _STAGES:
        raise GraftworkError(f"unknown stage {name!r}; expected one of {list(_STAGES)}")
    return _STAGES[name]


@lru_cache(maxsize=4096)
def is_core(target: Any) -> bool:
    """Whether a target is an ATen op that programs may hold at any stage."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    name, schema = str(target), target._schema
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if any(not isinstance(r.type, (torch.TensorType, torch.ListType)) for r in schema.returns):
        return False
    if not _is_safe(schema.name.partition("::")[2]):
        return False
    core = torch.Tag.core in target.tags or is_kept(target) or name in _EXTRA
    return core and name not in _EXCLUDED


def _is_safe(name: str) -> bool:
    """Whether an op is memory-safe and deterministic for any arguments; programs come from files.

    Backward ops index by unchecked saved values, and "empty" ops return uninitialized memory.
    """
    half = name.startswith(("_", "native_")) and name not in _CHECKED_HALVES
    return not half and "backward" not in name and not re.search(r"(^|_)empty(_|$)", name)


@lru_cache(maxsize=1)
def to_core() -> Mapping[Any, Callable[..., Any]]:
    """Torch's decompositions of ops that no program may hold."""
    return {op: meaning for op, meaning in decompositions().items() if not is_core(op)}


def why_illegal(stage_name: str, target: Any) -> str | None:
    """Why an op is illegal at a stage; None if it is legal."""
    stage = stage_of(stage_name)
    if target is operator.getitem:
        return None
    if stage.accepts is not None:
        return None if stage.accepts(target) else f"{stage.name} does not take {target}"
    if getattr(target, "namespace", None) != "graftwork":
        return None if is_core(target) else f"{target} is neither core ATen nor a graftwork op"
    name = target._schema.name.partition("::")[2]
    if name in stage.without or (stage.only is not None and name not in stage.only):
        return f"graftwork.{name} is not legal at stage {stage.name}"
    return None


def find_op(name: str) -> Any:
    """The core ATen or graftwork op of a name, ``aten.add.Tensor`` or ``graftwork.glu``; None if
    there is none."""
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    if namespace == "graftwork":
        known = all_ops().get(packet_name)
        return known.overload if known is not None and overload in ("", "default") else None
    packet = getattr(torch.ops.aten, packet_name, None) if packet_name.isidentifier() else None
    if namespace != "aten" or not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    if (overload or "default") not in packet.overloads():
        return None
    found = getattr(packet, overload or "default")
    return found if is_core(found) else None


def op_name(target: Any) -> str:
    """The text of an op: ``aten.linear`` for default overloads, else ``aten.add.Tensor``."""
    return str(target).removesuffix(".default")
