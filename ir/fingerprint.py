"""What tells one model's weights from another's."""

from __future__ import annotations

import hashlib

import torch

from .program import Program


def fingerprint(program: Program) -> str:
    """A hash of the step's vocabulary-sized weights' first rows, whatever their dtype.

    Heads that were trained on one model fit another of the same shape, but know nothing of it.
    """
    digest = hashlib.sha256(f"{program.info.vocab_size}".encode())
    names = sorted(
        name
        for name in program.step.weights
        if program.weights[name].type.dims[:1] == (program.info.vocab_size,)
        and program.weights[name].type.dtype.is_floating_point
    )
    for name in names[:2]:
        rows = program.weights[name].load()[:32].to(torch.bfloat16).view(torch.int16)
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()[:32]
