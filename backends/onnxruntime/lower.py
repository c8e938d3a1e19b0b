"""Lowering: from a cached program to the functions that ONNX Runtime runs.

Where graftwork's own kernels work (see `probe`), one variant serves all steps of a function:

- ``own``: attention, caches and masks are one kernel of its own.

Elsewhere a function is lowered in up to three, because none of ONNX Runtime's serves all of them:

- ``chain``: tokens of a step follow one another; batch 1, or one token a step, or first prompts.
  GroupQueryAttention without a bias.
- ``tree``: batch 1 with an ancestor mask. GroupQueryAttention with a bias.
- ``batch``: everything else. TensorScatter and Attention with a mask.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal

import torch

from ...ir import Function, Program, arguments, type_of
from ...ir.ops.recurrent import BLOCK, SHORT_BLOCK
from ...ir.ops.rounded_state import STEPS
from ...ir.ops.stages import register_lowered
from ...ir.plan.inputs import ANCESTORS
from ...ir.rewrite.cleanup import merge_equal, sweep
from .attention import GQA, OWN, Counted, Kernel, lower_attention
from .calls import source_of
from .decompose import decompose
from .emit import Guard, targets_with_rows
from .fed_rows import read_fed_rows
from .norms import fuse_norms
from .views import join_heads, simplify_views

A = torch.ops.aten
G = torch.ops.graftwork
STAGE = "lowered:onnxruntime"
Variant = Counted | Literal["batch", "own"]
KERNELS: dict[Variant, Kernel] = {"chain": GQA, "tree": GQA, "own": OWN}
"""What attention becomes, by variant."""

for _file in sorted(Path(__file__).parent.glob("rows_*.py")):  # they fill the table of rows
    importlib.import_module(f"{__package__}.{_file.stem}")

register_lowered("onnxruntime", lambda target: target in targets_with_rows())


def lower(
    program: Program,
    name: str,
    variant: Variant = "chain",
    *,
    native: bool = False,
    refused: Guard | None = None,
) -> Program:
    """The program with only function `name`, in ops that have rows.

    native: graftwork's own ops may be among them, see `emit`. refused: see `decompose`.
    Errors: `UnsupportedError` naming an op that has neither a row nor a decomposition.
    """
    fn, weights = program.function(name).copy(), program.weights
    erase_markers(fn)  # first: they stand between what the next steps look for
    if variant == "chain":
        drop_ancestors(fn)
    merge_equal(fn)  # one reference to each weight, so that "used once" means what it says
    simplify_views(fn)
    if variant in KERNELS:
        weights = lower_attention(fn, weights, KERNELS[variant])
        join_heads(fn)
    fuse_norms(fn)
    simplify_views(fn)  # attention's output comes back as a transpose of what the next op wants
    if native:
        read_fed_rows(fn)
    finish(fn, native, refused)
    return program.replace(functions={name: fn}, weights=weights, stage=STAGE).pruned()


def finish(fn: Function, native: bool = False, refused: Guard | None = None) -> None:
    """Leave nothing but ops that have rows, each value worked out once. See `lower`."""
    decompose(fn, native, refused)
    simplify_views(fn)
    merge_equal(fn)
    sweep(fn)


def erase_markers(fn: Function) -> None:
    """Put what a marker marks in the marker's place."""
    for node in fn.calls(G.hidden.default):
        node.replace_all_uses_with(source_of(node))
        fn.graph.erase_node(node)


def drop_ancestors(fn: Function) -> None:
    """Make the step a chain: step masks and recurrences take no ancestors."""
    if not fn.has_input(ANCESTORS):
        return
    given = fn.input(ANCESTORS)
    for node in list(given.users):
        if getattr(node.target, "namespace", None) == "graftwork" and node.args:
            node.args = tuple(None if arg is given else arg for arg in node.args)


def has_states(fn: Function) -> bool:
    """Whether the function reads states of a sequence, so that its variants differ."""
    attention = (G.attend.default, G.cache_write.default)
    return bool(fn.calls(*attention, *STEPS))


def piece_of(fn: Function) -> int | None:
    """Tokens of a prompt that a call is fed at most, because recurrences work out pairs of them at
    once; None: any number."""
    steps = fn.calls(G.linear_attention_step.default)
    alone = [type_of(arguments(node)["g"]).dims[3] == 1 for node in steps]
    if not alone:
        return None
    return BLOCK if all(alone) else SHORT_BLOCK


__all__ = ["STAGE", "Variant", "finish", "has_states", "lower", "piece_of"]
