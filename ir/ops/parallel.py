"""Collectives of tensor parallelism.

Each process holds a part of the weights and runs the same functions on the same inputs. Results of
these ops are the same in all processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .operands import Operands


def started() -> tuple[int, int] | None:
    """This process's rank and the number of processes, from torch.distributed or torchrun's
    environment variables; None for a single process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def join(part: int, parts: int, device: str) -> None:
    """Join the process group that runs a program's parts, unless done. Errors: `InputError` if the
    process's rank is not this part."""
    found = started()
    if found != (part, parts):
        here = "it was started alone" if found is None else f"it is {found[0]} of {found[1]}"
        raise InputError(
            f"this program is part {part} of {parts} (counted from 0), for the process of that "
            f"rank; {here}: start {parts} processes, torchrun --nproc-per-node {parts} SCRIPT, and "
            f"let each make or load its own part"
        )
    if not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", part)))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")


def agreed_seed() -> int:
    """A random number drawn by the first process, the same in all of the group."""
    drawn: list[int] = [int(torch.randint(2**62, (1,)))]
    dist.broadcast_object_list(drawn)
    return drawn[0]


def _check(given: Operands, part: int, parts: int) -> None:
    if not 0 <= part < parts:
        raise InputError(f"{given.op}: expected 0 <= part < parts, got part={part}, parts={parts}")


def _samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8),), {"part": 0, "parts": 1}


@op("x: any ...H -> x", samples=_samples, also=_check)
def all_reduce(x: Tensor, *, part: int, parts: int) -> Tensor:
    """The sum over all processes, with the same bits in each.

    ``%y: f32[B,T,H] = graftwork.all_reduce(%x, part=0, parts=2)``

    x of one shape in all processes. part: this process's rank, of `parts`. Errors: `InputError`.
    """
    total = x.contiguous().clone()
    if parts > 1:
        join(part, parts, x.device.type)
        dist.all_reduce(total)
    return total


@op("x: any ...H, P = H * parts -> ...P", samples=_samples, also=_check)
def all_gather(x: Tensor, *, part: int, parts: int) -> Tensor:
    """All processes' values, concatenated along the last axis in the order of their ranks.

    ``%y: f32[B,T,V] = graftwork.all_gather(%x, part=0, parts=2)``

    x [...,V/parts] of one shape in all processes. Errors: as `all_reduce`.
    """
    mine = x.contiguous()
    if parts == 1:
        return mine.clone()
    join(part, parts, x.device.type)
    found = [torch.empty_like(mine) for _ in range(parts)]
    dist.all_gather(found, mine)
    return torch.cat(found, -1)


def _token_samples() -> Iterator[Sample]:
    yield (torch.tensor([[0, 3, 5], [4, 7, 2]]),), {"part": 1, "rows": 4}


@op("tokens: i64 BT -> tokens", samples=_token_samples)
def tokens_part(tokens: Tensor, *, part: int, rows: int) -> Tensor:
    """Rows of tokens in one part of an embedding table, clamped to it; `rows_part` zeroes tokens of
    other parts.

    ``%i: i64[B,T] = graftwork.tokens_part(%tokens, part=1, rows=4096)``

    tokens i64[B,T]; the part has the rows from part * rows on.
    """
    return (tokens - part * rows).clamp(min=0, max=rows - 1)


def _row_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8), torch.tensor([[0, 3, 5], [4, 7, 2]])), {"part": 1, "rows": 4}


@op("x: BTH, tokens: i64 BT -> x", samples=_row_samples)
def rows_part(x: Tensor, tokens: Tensor, *, part: int, rows: int) -> Tensor:
    """Embeddings of tokens from one part of a table, zeros for tokens of other parts: the sum over
    parts is the whole table's embedding.

    ``%h: f32[B,T,H] = graftwork.rows_part(%x, %tokens, part=1, rows=4096)``

    x [B,T,H], looked up with `tokens_part`; tokens i64[B,T].
    """
    own = tokens - part * rows
    return x.masked_fill(((own < 0) | (own >= rows))[..., None], 0.0)
