"""Recurrences whose state is stored in 8 bits, with a scale for each column of each head.

The state is rounded after every token, not at the end of a step, so results do not depend on how
tokens are split into steps: verifying a draft gives the same tokens as decoding one by one. A state
that no row is folded into is not rounded again.
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
    Tokens,
    check_decays,
    heads_of,
    logged,
    pending,
    step_samples,
    tokens_of,
)

I8 = torch.int8
LARGEST = 127
"""Codes are -LARGEST .. LARGEST."""

SMALLEST = 1e-30
"""A column whose values are all smaller is stored as zeros."""

State = tuple[Tensor, Tensor]
"""Codes f32[B,H,K,V], integers, and scales f32[B,H,V]."""


def rounded(state: Tensor) -> State:
    """Codes and scales of a state f32[B,H,K,V]: a column's largest magnitude becomes 127; half to
    even."""
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
    """One step of `linear_attention` over a state in 8 bits, with the state and log after it.

    ``%y, %c, %s, %lk, %lv, %lg = graftwork.linear_attention_step_int8(%codes, %scale, %keys,
    %values, %decays, %folded, %past, %certain, None, %q, %k, %v, %g, %beta)``

    codes i8[B,H,K,V] times scale f32[B,H,V] are the state of `linear_attention_step`; keys, values,
    decays, folded, past, certain, ancestors, q, k, v, g, beta and results as there. After every
    token the state is rounded (`rounded`). A token reads its own state before rounding; later
    tokens, and log rows, continue from the rounded one.
    Errors: `UnsupportedError` if T or W is symbolic, because tokens are computed in sequence.
    """
    if not isinstance(k.shape[2], int) or not isinstance(keys.shape[2], int):
        raise UnsupportedError(
            "states in 8 bits are rounded after every token, and a graph without graftwork's own "
            "kernels has no loop over tokens: take the target torch or eager, and for exports "
            "leave out quantize_state"
        )
    begun = (past > 0)[:, None, None]
    state = codes.float() * begun[..., None], scale * begun
    state = _fold(state, heads_of(keys, v.shape[1]), values, decays, pending(folded, past))
    tokens = tokens_of(q, k, v, g, beta, ancestors)
    y, u = _read(state, tokens)
    after = _fold(state, tokens.k, u, g, certain)
    log = logged(keys, certain, k, u, g)
    return y.to(v.dtype), after[0].to(I8), after[1].contiguous(), *log


def _decayed(state: State, g: Tensor) -> Tensor:
    """The state f32[B,H,K,V] times decays exp(g), g [B,H,D]."""
    decay = g.float().clamp(min=LEAST).exp()
    return state[0] * state[1][:, :, None] * decay[..., None]


def _fold(state: State, k: Tensor, u: Tensor, g: Tensor, count: Tensor) -> State:
    """The state after the first `count` i64[B] of N rows, k f32[B,H,N,K], rounded after each."""
    codes, scale = state
    for row in range(k.shape[2]):
        added = k[:, :, row, :, None] * u[:, :, row, None]
        new = rounded(_decayed((codes, scale), g[:, :, row]) + added)
        counts = (count > row)[:, None, None]
        codes = torch.where(counts[..., None], new[0], codes)
        scale = torch.where(counts, new[1], scale)
    return codes, scale


def _read(state: State, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The tokens' results and what each adds to the state: two f32[B,H,T,V]."""
    q, k, v, g, beta, ancestors = tokens
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
    """The nearest ancestor i64[B] of a token of the step, -1 for none; ancestors bool[B,T,T]."""
    places = torch.arange(token, device=ancestors.device)
    seen = torch.where(ancestors[:, token, :token], places, -1)
    return torch.nn.functional.pad(seen, (1, 0), value=-1).amax(1)


RECURRENCES = (
    torch.ops.graftwork.linear_attention_step.default,
    torch.ops.graftwork.linear_attention_step_int8.default,
)
"""Step ops of recurrences, for each dtype of states."""

STEPS = (*RECURRENCES, torch.ops.graftwork.causal_conv_step.default)
"""Ops that update a state without rows."""
