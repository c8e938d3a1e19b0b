"""Plain modules that map token ids to logits, as programs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ...ir import ModelInfo, Program, UnsupportedError
from ..importer import INPUTS, import_exported
from ..program import build_program
from ..trace import export, fake_mode, twin_of, weights_of

_POSITIONS = ("positions", "position_ids", "pos_ids")
_CONTEXT = (
    "block_size",
    "context",
    "context_length",
    "max_position_embeddings",
    "max_seq_len",
    "n_ctx",
    "n_positions",
)
_DEFAULT_CONTEXT = 2048


def import_module(module: nn.Module, dtype: torch.dtype | None = None) -> Program:
    """A module as a program that shares its weights.

    module: ``forward(tokens: i64[B,T]) -> logits [B,T,V]`` (or a tuple or dict whose first or
    "logits" entry they are), made of causal attention blocks; it may take positions i64[B,T] under
    one of the names ``positions``, ``position_ids``, ``pos_ids``. The context is read from a
    ``block_size``, ``max_seq_len``, ... of the module or its ``config``, else from what the trace
    allows, else 2048 tokens; tokens that end, begin and fill sequences from its ``eos_token_id``
    (one or several), ``bos_token_id`` and ``pad_token_id``. dtype: of the floating weights; None
    keeps them. Errors: `UnsupportedError` naming module, line and op of what cannot be imported.
    """
    mode = fake_mode()
    twin = twin_of(module, mode, dtype)
    name = type(module).__name__
    wrapper = _Wrapper(twin)
    taken = list(INPUTS.values())[: 2 if wrapper.positions else 1]
    exported = export(wrapper, mode, None, name, taken)
    info = ModelInfo(
        model_type=name,
        vocab_size=0,
        context=_context(module, exported),
        eos=_tokens(module, "eos_token_id"),
        bos=next(iter(_tokens(module, "bos_token_id")), None),
        pad=next(iter(_tokens(module, "pad_token_id")), None),
    )
    imported = import_exported(exported, "model", weights_of(module, twin))
    return build_program(name, imported, info, {})


def _tokens(module: nn.Module, name: str) -> tuple[int, ...]:
    """Token ids that the module, or its ``config``, has under a name: one, several or none."""
    for owner in (module, getattr(module, "config", None)):
        value = getattr(owner, name, None)
        if isinstance(value, int):
            return (value,)
        if isinstance(value, (list, tuple)):
            return tuple(value)
    return ()


class _Wrapper(nn.Module):
    """Token ids (and positions) [B,T] to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.positions = next((name for name in _POSITIONS if name in parameters), None)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        extra = {self.positions: positions} if self.positions else {}
        return _logits(self.model(tokens, **extra))


def _logits(out: Any) -> torch.Tensor:
    if isinstance(out, dict):
        out = out.get("logits")
    elif isinstance(out, (tuple, list)):
        out = out[0]
    out = getattr(out, "logits", out)
    if not isinstance(out, torch.Tensor):
        raise UnsupportedError(
            f"the module returns a {type(out).__name__}; expected logits [B,T,V], or a tuple or "
            "dict that holds them"
        )
    return out


def _context(module: nn.Module, exported: ExportedProgram) -> int:
    """Positions the module supports."""
    for owner in (module, getattr(module, "config", None)):
        for name in _CONTEXT:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    bounds = [r.upper for r in exported.range_constraints.values() if r.upper.is_Integer]
    return min([_DEFAULT_CONTEXT, *(int(bound) for bound in bounds)])
