"""The last steps of every import: raise attention, mark the residual stream, check, assemble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..ir import ModelInfo, Program, UnsupportedError, WeightStore, type_of
from .check import check_traced
from .importer import Imported
from .mark_hidden import mark_hidden
from .number_layers import number_layers
from .positions import tabulate_positions
from .raise_attention import raise_attention
from .source_attention import settle_attention


def build_program(
    name: str, imported: Imported, info: ModelInfo, assets: Mapping[str, Path]
) -> Program:
    """The program of a trace, at stage "traced".

    Errors: `UnsupportedError` naming the op, module and source line that cannot be imported.
    """
    context = settle(imported, info.context)
    mark_hidden(imported.fn)
    info = described(imported, replace(info, context=context), name)
    weights = WeightStore(imported.weights)
    return Program(
        name, {imported.fn.name: imported.fn}, weights, info, assets=dict(assets)
    ).pruned()


def settle(imported: Imported, context: int) -> int:
    """Bring the function of a trace into the ops of programs, in place; returns for how many
    positions it is one.

    context: positions to be ready for. Errors: as `build_program`.
    """
    settle_attention(imported, context)
    raise_attention(imported)
    if imported.fn.has_input("positions"):
        context = tabulate_positions(imported, context)
    number_layers(imported.fn)
    check_traced(imported.fn)
    return context


def described(imported: Imported, info: ModelInfo, name: str) -> ModelInfo:
    """What is known of a model with this step. Errors: `UnsupportedError` for no logits."""
    vocabulary = _vocabulary(imported, name)
    # No text has tokens that the vocabulary lacks: configurations name some, or -1 for none.
    known = range(vocabulary)
    return replace(
        info,
        vocab_size=vocabulary,
        eos=tuple(token for token in info.eos if token in known),
        bos=info.bos if info.bos in known else None,
        pad=info.pad if info.pad in known else None,
    )


def _vocabulary(imported: Imported, name: str) -> int:
    logits = type_of(imported.fn.outputs["logits"])
    tokens = type_of(imported.fn.input("tokens"))
    if (
        len(logits.dims) != 3
        or logits.dims[:2] != tokens.dims
        or not isinstance(logits.dims[2], int)
    ):
        raise UnsupportedError(f"{name}: expected logits [B,T,V] for each token, got {logits}")
    return logits.dims[2]
