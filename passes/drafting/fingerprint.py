"""What tells one model's weights from another's."""

from __future__ import annotations

import hashlib

import torch

from ...ir.program import Program
from ...ir.weights import Weight, piece


def fingerprint(program: Program) -> str:
    """A hash of the step's vocabulary-sized weights' first rows, whatever their dtype.

    Heads that were trained on one model fit another of the same shape, but know nothing of it.
    """
    digest = hashlib.sha256(f"{program.info.vocab_size}".encode())
    wholes = (_whole(program.weights[name]) for name in program.step.weights)
    used = {weight.name: weight for weight in wholes}
    names = sorted(
        name
        for name, weight in used.items()
        if weight.type.dims[:1] == (program.info.vocab_size,)
        and weight.type.dtype.is_floating_point
    )
    for name in names[:2]:
        rows = used[name].load()[:32].to(torch.bfloat16).view(torch.int16)
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()[:32]


def _whole(weight: Weight) -> Weight:
    """The weight that this one is a piece of, else itself."""
    return _whole(weight.inputs[0]) if weight.made.target is piece else weight
