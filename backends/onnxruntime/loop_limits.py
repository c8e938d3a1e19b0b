"""What one loop in a graph has no form for."""

from __future__ import annotations

import torch

from ...ir import Program, UnsupportedError
from ...ir.plan import DecodePlan
from .chains_in_graph import chain_of
from .depths_in_graph import depth_of
from .step_limits import refuse_ahead, refuse_inputs

G = torch.ops.graftwork


def strange_to_loops(plan: DecodePlan) -> list[str]:
    """The slots of a plan whose records one loop has no form for."""
    default = DecodePlan()
    known = {
        "draft": chain_of(plan.draft) is not None,
        "tree": plan.tree.chain,
        "verify": plan.verify == default.verify,
        "depth": depth_of(plan.depth) is not None,
        "cache": plan.cache == default.cache,
    }
    # Nobody draws a tree where nothing drafts.
    strange = [s for s, fits in known.items() if not fits and (s != "tree" or plan.speculates)]
    if plan.depth.stops and (plan.draft.reads or plan.draft.in_step):
        strange += ["depth"]  # what they read, a token may not have come to
    return strange


def check_loop(program: Program, sample: bool, contrib: bool) -> None:
    """Whether a program can become one loop, see `generation`. Errors: `UnsupportedError`."""
    plan = program.plan
    refuse_ahead(program)
    refuse_inputs(program)
    if strange := strange_to_loops(plan):
        said = ", ".join(f"{slot}={getattr(plan, slot).brief}" for slot in strange)
        raise UnsupportedError(
            f"{program.name} cannot become one loop: {said} has no form there, which drafts chains "
            f"by copying, by heads, by the first layers or in the step. The format onnx-plan "
            f"carries it; plain=True (--plain) leaves out what it drafts with"
        )
    if "past" not in {str(node.target) for node in program.step.inputs}:
        raise UnsupportedError(f"{program.name} (stage {program.stage}) has no KV cache")
    if plan.source.encoder is not None and not contrib:
        raise UnsupportedError(
            f"{program.name} writes from a source, which loops of ONNX's own ops have no form for: "
            f"export it with those of ONNX Runtime, too (ops=contrib)"
        )
    if program.step.calls(G.alibi.default) and not contrib:
        raise UnsupportedError(
            f"{program.name} has ALiBi, whose distances in concatenated caches count padding; "
            f"export it with the ops of ONNX Runtime, too (ops=contrib)"
        )
    if sample and plan.draft.in_step:
        raise UnsupportedError(
            f"{program.name} drafts in the step (draft={plan.draft.kind}), which follows the "
            f"argmax and not what is sampled: export it without sample, or plain"
        )
