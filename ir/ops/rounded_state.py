"""Recurrences whose state is held in 8 bits, with a scale for every column of every head.

A state that is rounded wherever a step happens to end would depend on how tokens were shared out
among steps: a draft that is verified would then be judged by another target than the one that
decodes alone. So it is rounded after every token, as if each had a step of its own, whether a token
is read in its own step or folded out of the log. Where no row is folded nothing is rounded again.
Source: Chiang et al., "Quamba2: A Robust and Scalable Post-training Quantization Framework for
Selective State Space Models" (2025), whose states are rounded after every decoded token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import UnsupportedError
from . import Sample, op
from .recurrent import (
    COUNTS,
    LEAST,
    LOG,
    RECURRENCE,
    SEQUENCE,
    check_decays,
    heads_of,
    pending,
    rows_after,
    step_samples,
)

I8 = torch.int8
LARGEST = 127
"""The largest code; the least is its negative."""

SMALLEST = 1e-30
"""A column whose numbers are all smaller than this is held as zeros."""

State = tuple[Tensor, Tensor]
"""Codes [B,H,K,V], whole numbers in float32, and scales f32[B,H,V]."""


def rounded(state: Tensor) -> State:
    """Codes and scales of a state f32[B,H,K,V]: the largest number of a column has the code 127,
    and halves go to the even code."""
    most = state.abs().amax(2)
    scale = torch.where(most < SMALLEST, 0.0, most / LARGEST)
    inverse = torch.where(most < SMALLEST, 0.0, 1.0 / scale)
    codes = torch.round(state * inverse[:, :, None]).clamp(-LARGEST, LARGEST)
    return codes, scale


def _samples() -> Iterator[Sample]:
    for (state, *others), options in step_samples():
        codes, scale = rounded(state)
        yield (codes.to(I8), scale, *others), options


@op(
    f"{SEQUENCE}, codes: i8 BHKV, scale: f32 BHV, {LOG}, {COUNTS} -> v, codes, scale, keys, "
    "values, decays",
    samples=_samples,
    also=check_decays,
    native=RECURRENCE,
)
def linear_attention_step_int8(
    codes: Tensor,
    scale: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    folded: Tensor,
    past: Tensor,
    certain: Tensor,
    ancestors: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One step of `linear_attention` over a state in 8 bits, and the state and log after it.

    ``%y, %c, %s, %lk, %lv, %lg = graftwork.linear_attention_step_int8(%codes, %scale, %keys,
    %values, %decays, %folded, %past, %certain, None, %q, %k, %v, %g, %beta)``

    codes i8[B,H,K,V] times scale f32[B,H,V] are the state of `linear_attention_step`. The log
    (keys, values, decays), folded, past, certain, ancestors, q, k, v, g, beta and the results are
    as there, codes and scale in the place of the state. After every token the state is rounded: of
    every column the largest number gets the code 127. A token reads the state that it made before
    that is rounded; those after it, and the log's, go on from the rounded one. Errors: `InputError`
    naming an operand that does not fit; `UnsupportedError` where the number of tokens is not known,
    as one follows another.
    """
    if not isinstance(k.shape[2], int) or not isinstance(keys.shape[2], int):
        raise UnsupportedError(
            "states in 8 bits are rounded after every token, and a graph without graftwork's own "
            "kernels has no loop over tokens: take the target torch or eager, and for exports "
            "leave out quantize_state"
        )
    heads, begun = v.shape[1], (past > 0)[:, None, None]
    state = codes.float() * begun[..., None], scale * begun
    state = _fold(state, heads_of(keys, heads), values, decays, pending(folded, past))
    new = heads_of(k, heads)
    y, u = _read(state, heads_of(q, heads), new, v, g, beta, ancestors)
    after = _fold(state, new, u, g, certain)
    rows = keys.shape[2]
    logged = [rows_after(x.float(), certain, rows, 2) for x in (k, u, g)]
    return y.to(v.dtype), after[0].to(I8), after[1].contiguous(), logged[0], logged[1], logged[2]


def _decayed(state: State, g: Tensor) -> Tensor:
    """A state f32[B,H,K,V] as it is before a token with decays g [B,H,D] adds to it."""
    decay = g.float().clamp(min=LEAST).exp()
    return state[0] * state[1][:, :, None] * decay[..., None]


def _fold(state: State, k: Tensor, u: Tensor, g: Tensor, count: Tensor) -> State:
    """The state after the first `count` i64[B] of some rows, k f32[B,H,N,K], one by one."""
    codes, scale = state
    for row in range(k.shape[2]):
        added = k[:, :, row, :, None] * u[:, :, row, None]
        new = rounded(_decayed((codes, scale), g[:, :, row]) + added)
        counts = (count > row)[:, None, None]
        codes = torch.where(counts[..., None], new[0], codes)
        scale = torch.where(counts, new[1], scale)
    return codes, scale


def _read(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    ancestors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What tokens read, and what each adds to the state: two f32[B,H,T,V]; q, k f32[B,H,T,K]."""
    batch, width = torch.arange(k.shape[0], device=k.device), k.shape[2]
    before, scales = state[0][:, None], state[1][:, None]
    read, added = [], []
    for t in range(width):
        parent = torch.full_like(batch, t) if ancestors is None else _parent(ancestors, t) + 1
        was = _decayed((before[batch, parent], scales[batch, parent]), g[:, :, t])
        key, mine = k[:, :, t, :, None], v[:, :, t].float()
        if beta is not None:
            mine = (mine - (key * was).sum(2)) * beta[:, :, t, None].float()
        now = was + key * mine[:, :, None]
        read.append((q[:, :, t, :, None] * now).sum(2))
        added.append(mine)
        codes, scale = rounded(now)
        before = torch.cat([before, codes[:, None]], 1)
        scales = torch.cat([scales, scale[:, None]], 1)
    return torch.stack(read, 2), torch.stack(added, 2)


def _parent(ancestors: Tensor, token: int) -> Tensor:
    """The token i64[B] of a step that another continues, -1 for none; ancestors bool[B,T,T]."""
    places = torch.arange(token, device=ancestors.device)
    seen = torch.where(ancestors[:, token, :token], places, -1)
    return torch.nn.functional.pad(seen, (1, 0), value=-1).amax(1)


RECURRENCES = (
    torch.ops.graftwork.linear_attention_step.default,
    torch.ops.graftwork.linear_attention_step_int8.default,
)
"""Steps of recurrences, whatever their states are held in."""

STEPS = (*RECURRENCES, torch.ops.graftwork.causal_conv_step.default)
"""What carries a state from step to step."""
