"""Export of whole generations as one ONNX file: prompts in, tokens out.

    generate.onnx         input_ids i64[B,S] (padded on the right), lengths i64[B], max_new i64[],
                          eos i64[E] -> tokens i64[B,N] (after an end of text the pad id),
                          counts i64[B]; with sample=True also uniforms f32[B,max_new] in [0, 1),
                          temperature f32[] (0: the likeliest token), top_k i64[] (0: all),
                          top_p f32[], repetition_penalty f32[] (1: none)
    generate.onnx.data    its weights

Any ONNX Runtime runs it in one call, from any language; see `backends.onnxruntime.generation`.
"""

from __future__ import annotations

from pathlib import Path

from ..artifact.destinations import MARKS
from ..backends.onnxruntime.generation import generation
from ..backends.onnxruntime.store import WeightFile, store
from ..ir import Program
from .folder import Card, Ops, check_ops, describe, write_folder

LOOP, DATA = MARKS["onnx-loop"], "generate.onnx.data"

_CARD = Card(
    "whole generation in ONNX",
    {
        LOOP: "prompts in, tokens out: the step and what drafts for it, in a loop",
        DATA: "its weights, which the graph names by place",
    },
    """
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("generate.onnx")
feeds = {
    "input_ids": np.array([[1, 2, 3], [4, 5, 0]]),  # token ids, padded on the right
    "lengths": np.array([3, 2]),
    "max_new": np.array(32),
    "eos": np.array(EOS, np.int64),
}
# With sampling inputs also: uniforms float32[2, 32] in [0, 1), temperature, top_k, top_p,
# repetition_penalty.
tokens, counts = session.run(None, feeds)  # the new tokens, and how many of each row count
""",
)


def export_onnx_loop(
    program: Program,
    folder: Path,
    *,
    sample: bool = False,
    plain: bool = False,
    ops: Ops = "contrib",
) -> Path:
    """Write a program as one generation loop; returns the folder.

    sample: add inputs for sampling; equal uniforms give equal tokens with any drafter. plain: leave
    the drafter out. ops: as in `export_onnx`; "standard" loops do not draft. A text ends at one of
    `eos`, after `max_new` tokens, or at the end of the context. Errors: `UnsupportedError` for a
    plan that the loop does not support, naming a format that does, and for an op without an ONNX
    Runtime lowering.
    """
    check_ops(ops)
    emitted = generation(program, sample=sample, plain=plain, contrib=ops == "contrib")
    describe(program, emitted.model, f"Whole generations of {program.name}; see README.md.")
    card = Card(_CARD.title, _CARD.files, _CARD.usage.replace("EOS", str(list(program.info.eos))))

    def fill(new: Path) -> None:
        store(emitted, new / LOOP, WeightFile(new / DATA))

    return write_folder(program, folder, fill, card, ours=LOOP)
