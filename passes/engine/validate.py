"""Measures a pass's contract: runs the program before and after on sample prompts and compares.

Both programs run in the reference interpreter, so the comparison does not depend on a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...ir import LOG, SOURCE, PassError, Program, run, type_of
from ...ir.execution.interpret import Run
from ...ir.plan.inputs import chain_inputs, mixed_into
from .base import Contract
from .feed import encoded

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of logits, as a share of their scale, that is float error."""


@dataclass(frozen=True)
class Check:
    """What a comparison measured.

    error: largest absolute difference of logits over their scale. agreement: share of tokens whose
    argmax is the same. divergence: mean KL(before || after) in nats a token. width_error: largest
    difference between running tokens one by one and together, over the scale (None before a cache).
    """

    contract: str
    error: float
    agreement: float
    divergence: float
    width_error: float | None = None


def step_inputs(
    program: Program,
    tokens: torch.Tensor,
    states: dict[str, torch.Tensor],
    past: int = 0,
) -> dict[str, torch.Tensor]:
    """Everything a program's step needs to take `tokens` i64[B,T] as a chain after `past` rows."""
    known = chain_inputs(tokens, past, mixed_into(program.step)) | states
    return {str(n.target): known[str(n.target)] for n in program.step.inputs}


def empty_states(program: Program, batch: int, capacity: int) -> dict[str, torch.Tensor]:
    """Zeroed state tensors for the reference interpreter."""
    sizes = {"B": batch, "C": capacity, LOG: capacity, SOURCE: 1}
    types = {name: state.type.bind(sizes) for name, state in program.states.items()}
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in types.items()}


def reference_logits(
    program: Program, tokens: torch.Tensor, widths: Sequence[int] | None = None
) -> torch.Tensor:
    """Logits [B,T,V] of whole sequences i64[B,T], in the interpreter, at any stage.

    widths: how many tokens each step takes (one step for all by default; needs a cache if several).
    """
    states = empty_states(program, *tokens.shape) | encoded(program, len(tokens))
    parts, past = [], 0
    for width in widths or [tokens.shape[1]]:
        chunk = tokens[:, past : past + width]
        out = run(program, program.step.name, step_inputs(program, chunk, states, past))
        parts.append(out["logits"])
        states = {name: out.get(name, rows) for name, rows in states.items()}  # some are drafters'
        past += width
    return torch.cat(parts, dim=1)


def reference_run(program: Program, tokens: torch.Tensor) -> Run:
    """A run of the step over whole sequences i64[B,T], in the interpreter, that has not begun."""
    states = empty_states(program, *tokens.shape) | encoded(program, len(tokens))
    return Run(program, program.step.name, step_inputs(program, tokens, states))


class Validator:
    """Compares programs on sample prompts i64[B,T]. Keeps the reference logits of the last one."""

    def __init__(self, prompts: torch.Tensor) -> None:
        self.prompts = prompts

    def compare(self, before: Program, after: Program, name: str, contract: Contract) -> Check:
        """Measure `after` against `before`. Errors: `PassError` if an exact contract is broken."""
        old = reference_logits(before, self.prompts).float()
        new = reference_logits(after, self.prompts).float()
        scale = float(old.abs().max())
        error = float((old - new).abs().max()) / scale
        agreement = float((old.argmax(-1) == new.argmax(-1)).float().mean())
        p, q = old.log_softmax(-1), new.log_softmax(-1)
        divergence = float((p.exp() * (p - q)).sum(-1).mean())
        check = Check(contract.value, error, agreement, divergence, self._widths(after, new, scale))
        self._enforce(after, check, name, contract)
        return check

    def _widths(self, program: Program, whole: torch.Tensor, scale: float) -> float | None:
        if not program.states:
            return None
        length = self.prompts.shape[1]
        widths = [1] * min(4, length - 1)
        widths.append(length - len(widths))
        pieces = reference_logits(program, self.prompts, widths).float()
        return float((pieces - whole).abs().max()) / scale

    def _enforce(self, program: Program, check: Check, name: str, contract: Contract) -> None:
        logits = program.step.outputs["logits"]
        bound = TOLERANCE.get(type_of(logits).dtype, 1e-4)
        if not contract.changes and not check.error <= bound:
            raise PassError(
                f"pass {name!r} promises {contract.value} but changes logits by {check.error:.2e} "
                f"of their scale (bound {bound:.0e}); {check.agreement:.1%} of argmaxes agree"
            )
        if check.width_error is not None and not check.width_error <= bound:
            raise PassError(
                f"after pass {name!r} a token's logits depend on how many tokens share its step: "
                f"they differ by {check.width_error:.2e} of their scale (bound {bound:.0e})"
            )
