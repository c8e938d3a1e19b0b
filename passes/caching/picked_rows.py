"""Attention that reads rows which were picked, and the prompts that read all."""

from __future__ import annotations

import torch
import torch.fx

from ...ir import PassError, Program, arguments, site_of
from ..engine.plan_edits import Prompts, with_prefill
from .cached_rows import Written

G = torch.ops.graftwork


def prompts_apart(program: Program, who: str, prefill: Prompts) -> tuple[Program, str]:
    """The program, with a function for prompts if these are not to read sparsely, and its name."""
    if prefill == "same":
        return program, ""
    program = with_prefill(program, who)
    return program, program.plan.step.read(argmax=True)[0]


def attend_rows(write: Written, rows: torch.fx.Node) -> None:
    """Let attention read these rows, i64[B,H,T,R] or i64[B,G,T,R], and no others, in place."""
    fn, attend, given = write.function, write.attend, arguments(write.attend)
    operands, how = (given["q"], given["k"], given["v"], rows), write.options
    how["sinks"] = given["sinks"]
    read = fn.call(G.attend_rows.default, *operands, site=site_of(attend), **how)
    fn.replace(attend, read)


def check_sparse(what: str, write: Written) -> None:
    """Errors: `PassError` for attention that cannot be made to read some rows."""
    given = arguments(write.attend)
    if write.how:
        raise PassError(
            f"{what}: {write.what} stores rows in {write.how['bits']} bits, and picked rows "
            f"are read as they are: leave out quantize_cache, or this pass"
        )
    if not write.whole:
        raise PassError(f"{what}: attention of {write.what} reads what is not a cache's rows")
    if given["bias"] is not None:
        raise PassError(
            f"{what}: {write.what} weighs rows by their distance (ALiBi), and picked rows "
            f"have no weights of that kind"
        )
