"""Recurrent layers: linear attention, state-space models, delta rules.

A state covers the rows of a sequence that cannot be rolled back. Keys, values and decays of the
step's other tokens, such as drafts, are kept in a log. The next step folds the log rows that its
`past` counts into the state and drops the rest. Rollback thus needs no copy of the state, and a
path of a draft tree is committed by moving log rows, like rows of a key-value cache. Within a step
an ancestor mask replaces the causal mask.
Source: Wu et al., "STree: Speculative Tree Decoding for Hybrid State-Space Models" (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .operands import Operands

LEAST = -200.0
"""Lower bound of a log decay; exp of less is 0 in float32."""

BLOCK, SHORT_BLOCK = 64, 16
"""Tokens computed at once if T is a number. SHORT_BLOCK: with a decay for each key (D = K), where
every pair of tokens has K decays."""

WIDEST = 1024
"""Largest T of a step if T is symbolic."""

SEQUENCE = "q: BGTK, k: BGTK, v: BHTV, g: BHTD, beta: BHT, H % G, also"
LOG = "keys: f32 BGWK, values: f32 BHWV, decays: f32 BHWD"
COUNTS = "folded: i64 B, past: i64 B, certain: i64 B, ancestors: bool BTT, T >= 1, W >= 1"
"""Declarations of a sequence, of its log, and of row counts."""

RECURRENCE = Native("BHGTKVDW")


def check_decays(given: Operands) -> None:
    """Errors: `InputError` unless D is 1 or K."""
    if given.sizes["D"] not in (1, given.sizes["K"]):
        raise InputError(
            f"{given.op}: g must have one decay a head or one a key, D=1 or D=K; "
            f"here D={given.sizes['D']}, K={given.sizes['K']}"
        )


def _cumulative(g: Tensor, ancestors: Tensor | None) -> Tensor:
    """Log decays f64[B,H,T,D] from the step's beginning to each token, inclusive."""
    logs = g.double().clamp(min=LEAST)
    if ancestors is None:
        return logs.cumsum(2)
    return torch.matmul(ancestors[:, None].double(), logs)


def _visible(k: Tensor, ancestors: Tensor | None) -> Tensor:
    """bool[.,1,T,T]: whether token j (column) is token i (row) or an ancestor of it."""
    if ancestors is not None:
        return ancestors[:, None]
    steps = torch.arange(k.shape[2], device=k.device)
    return (steps[:, None] >= steps[None, :])[None, None]


def _pair_scores(rows: Tensor, columns: Tensor, total: Tensor, seen: Tensor) -> Tensor:
    """f32[B,H,T,T]: product of row i and column j, decayed from j to i; 0 where i does not see j.

    rows, columns f32[B,H,T,K]; total f64[B,H,T,D] from `_cumulative`; seen bool[.,1,T,T].
    """
    if total.shape[3] == 1:
        between = total - total.transpose(2, 3)
        decay = between.masked_fill(~seen, float("-inf")).exp().float()
        return torch.matmul(rows, columns.transpose(2, 3)) * decay
    apart = total[:, :, :, None] - total[:, :, None]
    decay = apart.masked_fill(~seen[..., None], float("-inf")).exp().float()
    return (rows[:, :, :, None] * columns[:, :, None] * decay).sum(-1)


def _solved(lower: Tensor, right: Tensor) -> Tensor:
    """Solve (1 + lower) x = right: f32[B,H,T,V]; lower f32[B,H,T,T], strictly lower triangular.

    Inverts diagonal blocks of doubling size: intermediate values stay in the inverse's range.
    """
    width = lower.shape[2]
    steps = torch.arange(width, device=lower.device)
    inverse = (steps[:, None] == steps[None, :]).float().expand(lower.shape)
    known = width if isinstance(width, int) else WIDEST
    size = 1
    while size < known:
        block, half = steps // (2 * size), steps // size
        joined = (block[:, None] == block[None, :]) & (half[:, None] > half[None, :])
        corner = lower.masked_fill(~joined, 0.0)
        inverse = inverse - torch.matmul(torch.matmul(inverse, corner), inverse)
        size *= 2
    return torch.matmul(inverse, right)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Groups [B,G,T,K] repeated for their heads: f32[B,H,T,K]."""
    batch, groups, width, size = x.shape
    if groups == heads:
        return x.float()
    each = x.float()[:, :, None].expand(batch, groups, heads // groups, width, size)
    return each.reshape(batch, heads, width, size)


class Tokens(NamedTuple):
    """Operands of the tokens of a step: q, k f32[B,H,T,K]; v [B,H,T,V]; g [B,H,T,D]; beta [B,H,T];
    ancestors bool[B,T,T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    ancestors: Tensor | None


def tokens_of(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, ancestors: Tensor | None
) -> Tokens:
    """Tokens from operands of an op, whose q and k are [B,G,T,K]."""
    return Tokens(heads_of(q, v.shape[1]), heads_of(k, v.shape[1]), v, g, beta, ancestors)


def _block(state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The tokens' results and what each adds to the state: two f32[B,H,T,V]."""
    q, k, v, g, beta, ancestors = tokens
    total = _cumulative(g, ancestors)
    seen = _visible(k, ancestors)
    since = total.exp().float()
    values = v.float()
    if beta is not None:
        rate = beta.float()[..., None]
        known = torch.matmul(k * since, state)
        steps = torch.arange(k.shape[2], device=k.device)
        others = seen & (steps[:, None] != steps[None, :])
        lower = _pair_scores(k, k, total, others) * rate
        values = _solved(lower, (values - known) * rate)
    read = torch.matmul(q * since, state)
    return read + torch.matmul(_pair_scores(q, k, total, seen), values), values


def _folded(state: Tensor, k: Tensor, u: Tensor, g: Tensor, count: Tensor) -> Tensor:
    """The state f32[B,H,K,V] after the first `count` i64[B] of some rows, k f32[B,H,N,K]."""
    rows = torch.arange(k.shape[2], device=k.device)
    beyond = (rows[None] >= count[:, None])[:, None, :, None]
    logs = g.double().clamp(min=LEAST).masked_fill(beyond, 0.0)
    total = logs.cumsum(2)
    last = logs.sum(2, keepdim=True)
    weight = (last - total).exp().float()
    keys = k.masked_fill(beyond, 0.0) * weight
    added = torch.matmul(keys.transpose(2, 3), u.masked_fill(beyond, 0.0))
    return state * last.exp().float().transpose(2, 3) + added


def _run(state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """As `_block`, for any number of tokens: block by block for chains of known length."""
    q, k, v, g, beta, ancestors = tokens
    width = k.shape[2]
    size = BLOCK if g.shape[3] == 1 else SHORT_BLOCK
    if ancestors is not None or not isinstance(width, int) or width <= size:
        return _block(state, tokens)
    read, added = [], []
    for start in range(0, width, size):
        count = min(size, width - start)
        rate = None if beta is None else beta.narrow(2, start, count)
        mine, keys, values, decay = (x.narrow(2, start, count) for x in (q, k, v, g))
        y, u = _block(state, Tokens(mine, keys, values, decay, rate, None))
        everything = torch.full((k.shape[0],), count, device=k.device)
        state = _folded(state, keys, u, decay, everything)
        read.append(y)
        added.append(u)
    return torch.cat(read, 2), torch.cat(added, 2)


def _linear_samples() -> Iterator[Sample]:
    for heads, groups, decays, delta in ((2, 2, 1, True), (4, 2, 1, False), (2, 1, 4, True)):
        q, k = torch.randn(2, groups, 5, 4), torch.randn(2, groups, 5, 4) * 0.5
        v, g = torch.randn(2, heads, 5, 3), -torch.rand(2, heads, 5, decays)
        beta = (torch.rand(2, heads, 5),) if delta else ()
        yield (q, k, v, g, *beta), {"layer": 0}


@op(f"{SEQUENCE} -> v", samples=_linear_samples, also=check_decays)
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, *, layer: int
) -> Tensor:
    """A recurrence over a whole sequence, as frontends produce it, without a persistent state.

    ``%y: f32[B,H,T,V] = graftwork.linear_attention(%q, %k, %v, %g, %beta, layer=0)``

    q, k [B,G,T,K]; v [B,H,T,V], H a multiple of G; g [B,H,T,D], D = 1 or K, the logarithm of a
    decay; beta [B,H,T]. Each head has a state S [K,V], 0 at first. Token t sets S to
    exp(g) S + k u^T and returns y = q S. u is v (Mamba, Mamba-2, RG-LRU), or with `beta` the delta
    rule's beta (v - k exp(g) S) (gated delta nets, Kimi delta attention). layer: the state's owner.
    Sources: Yang et al., "Gated Delta Networks" (2024); Dao and Gu, "Transformers are SSMs" (2024);
    Gu and Dao, "Mamba" (2023); De et al., "Griffin" (2024).
    """
    tokens = tokens_of(q, k, v, g, beta, None)
    state = tokens.k.new_zeros((k.shape[0], v.shape[1], k.shape[3], v.shape[3]))
    return _run(state, tokens)[0].to(v.dtype)


def step_samples() -> Iterator[Sample]:
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, 3, 3)
    counts = torch.tensor([4, 0]), torch.tensor([5, 0]), torch.tensor([1, 2])
    for heads, groups, decays, delta in ((2, 2, 1, True), (4, 2, 1, False), (2, 1, 4, True)):
        held = (
            torch.randn(2, heads, 4, 3),
            torch.randn(2, groups, 2, 4),
            torch.randn(2, heads, 2, 3),
            -torch.rand(2, heads, 2, decays),
        )
        q, k = torch.randn(2, groups, 3, 4), torch.randn(2, groups, 3, 4) * 0.5
        v, g = torch.randn(2, heads, 3, 3), -torch.rand(2, heads, 3, decays)
        beta = torch.rand(2, heads, 3) if delta else None
        for ancestors in (None, tree):
            yield (*held, *counts, ancestors, q, k, v, g, beta), {}


@op(
    f"{SEQUENCE}, state: f32 BHKV, {LOG}, {COUNTS} -> v, state, keys, values, decays",
    samples=step_samples,
    also=check_decays,
    native=RECURRENCE,
)
def linear_attention_step(
    state: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One step of `linear_attention`, with the state and log after it.

    ``%y, %s, %lk, %lv, %lg = graftwork.linear_attention_step(%state, %keys, %values, %decays,
    %folded, %past, %certain, None, %q, %k, %v, %g, %beta)``

    state f32[B,H,K,V] covers `folded` i64[B] rows. The log holds the following rows: keys
    f32[B,G,W,K], values f32[B,H,W,V], decays f32[B,H,W,D]. `past` i64[B] rows are valid, folded <=
    past <= folded + W; past 0 starts a new sequence. q, k, v, g, beta of T tokens as in
    `linear_attention`; ancestors bool[B,T,T] as in `step_mask`. The first `certain` i64[B] tokens
    of the step are final: the new state covers past + certain rows, and the new log holds the W
    rows after those (undefined beyond the step). Results: y [B,H,T,V], then the new state, keys,
    values and decays.
    """
    before = _folded(state, heads_of(keys, v.shape[1]), values, decays, pending(folded, past))
    before = before.masked_fill(~(past > 0)[:, None, None, None], 0.0)
    tokens = tokens_of(q, k, v, g, beta, ancestors)
    y, u = _run(before, tokens)
    after = _folded(before, tokens.k, u, g, certain)
    return y.to(v.dtype).contiguous(), after.contiguous(), *logged(keys, certain, k, u, g)


def pending(folded: Tensor, past: Tensor) -> Tensor:
    """Number of valid log rows, i64[B]; 0 for a new sequence."""
    return (past - folded).clamp(min=0)


def logged(
    keys: Tensor, certain: Tensor, k: Tensor, u: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The log after a step that adds u: as many rows as `keys` has, from row `certain` on."""
    rows = keys.shape[2]
    made = [rows_after(x.float(), certain, rows, 2) for x in (k, u, g)]
    return made[0], made[1], made[2]


def rows_after(x: Tensor, first: Tensor, rows: int, axis: int) -> Tensor:
    """`rows` rows of x from row first i64[B] on; rows beyond the end repeat the last one."""
    width = x.shape[axis]
    index = first[:, None] + torch.arange(rows, device=x.device)
    index = index.clamp(min=0, max=width - 1)
    shape = [x.shape[0], *[1] * (axis - 1), rows, *[1] * (x.dim() - axis - 1)]
    wanted = [*x.shape[:axis], rows, *x.shape[axis + 1 :]]
    return x.gather(axis, index.reshape(shape).expand(wanted))
