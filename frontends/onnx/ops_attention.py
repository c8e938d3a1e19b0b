"""ONNX ops of attention and rotary embedding, as graftwork's own.

A decode graph is read as a whole text without a past, so of attention kernels that append to caches
only new keys and values are left, and what counts rows or hides padding has nothing to say.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...ir import UnsupportedError
from .table import MICROSOFT, Context, op
from .values import EmptyPast, Numbers, Value, tensor

G = torch.ops.graftwork


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B,T,H*D] as [B,H,T,D]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, count, width // count).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[B,H,T,D] as [B,T,H*D]."""
    batch, heads, tokens, width = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * width)


def _without_past(*pasts: Value) -> None:
    if any(past is not None and not isinstance(past, EmptyPast) for past in pasts):
        raise UnsupportedError("a past that is no input of the graph")


def _causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of [B,H,T,D] over [B,G,T,D]."""
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    given = {name: value for name, value in options.items() if value}
    exact = q.shape[-1] ** -0.5
    asked = exact if not scale or abs(scale / exact - 1) < 1e-6 else scale
    made: torch.Tensor = G.attention(q, k, v, sinks, None, layer=0, scale=asked, **given)
    return made


def _rotated(
    c: Context, x: torch.Tensor, cos: Value, sin: Value, places: Value, interleaved: bool
) -> torch.Tensor:
    """x [B,H,T,D] by tables [context,R], looked up at `places` or the tokens' own positions."""
    at = c.positions if places is None else tensor(places)
    angles = [F.embedding(at, tensor(table)) for table in (cos, sin)]
    made: torch.Tensor = G.rotary(x, *angles, interleaved=interleaved)
    return made


@op("RotaryEmbedding")
def rotary(c: Context, x: Value, cos: Value, sin: Value, places: Value = None) -> Value:
    y, interleaved = tensor(x), bool(c.attribute("interleaved", 0))
    wide = y if y.dim() == 4 else _heads(y, c.attribute("num_heads"))
    if places is None:
        made = G.rotary(wide, tensor(cos), tensor(sin), interleaved=interleaved)
    else:
        made = _rotated(c, wide, cos, sin, places, interleaved)
    return made if y.dim() == 4 else _flat(made)


@op("RotaryEmbedding", domain=MICROSOFT)
def rotary_of_ort(c: Context, x: Value, places: Value, cos: Value, sin: Value) -> Value:
    y, interleaved = tensor(x), bool(c.attribute("interleaved", 0))
    if c.attribute("scale", 1.0) != 1.0:
        raise UnsupportedError("RotaryEmbedding that scales")
    width = 2 * tensor(cos).shape[-1]
    if c.attribute("rotary_embedding_dim", 0) and not c.attribute("num_heads", 0):
        raise UnsupportedError("RotaryEmbedding of part of a head, without num_heads")
    count = c.attribute("num_heads", 0) or y.shape[-1] // width
    wide = y if y.dim() == 4 else _heads(y, count)
    single = isinstance(places, Numbers)  # one offset for all: the first token's
    made = _rotated(c, wide, cos, sin, None if single else places, interleaved)
    return made if y.dim() == 4 else _flat(made)


@op("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(
    c: Context,
    query: Value,
    key: Value,
    value: Value,
    past_key: Value = None,
    past_value: Value = None,
    seqlens: Value = None,
    total: Value = None,
    cos: Value = None,
    sin: Value = None,
    places: Value = None,
    bias: Value = None,
    sinks: Value = None,
    *more: Value,
) -> Any:
    _without_past(past_key, past_value)
    if bias is not None or any(part is not None for part in more):
        raise UnsupportedError("GroupQueryAttention with a bias, or a quantized cache")
    heads, groups = c.attribute("num_heads"), c.attribute("kv_num_heads")
    packed = tensor(query)
    if key is None or value is None:
        width = packed.shape[-1] // (heads + 2 * groups)
        parts = packed.split([heads * width, groups * width, groups * width], -1)
    else:
        parts = (packed, tensor(key), tensor(value))
    q, k, v = (_heads(x, n) for x, n in zip(parts, (heads, groups, groups), strict=True))
    if c.attribute("do_rotary", 0):
        turn = bool(c.attribute("rotary_interleaved", 0))
        q, k = (_rotated(c, x, cos, sin, places, turn) for x in (q, k))
    window = c.attribute("local_window_size", -1)
    made = _causal(
        q,
        k,
        v,
        c.attribute("scale", 0.0),
        window if window > 0 else None,
        c.attribute("softcap", 0.0),
        None if sinks is None else tensor(sinks),
    )
    return _flat(made), k, v


@op("Attention")
def attention(
    c: Context,
    query: Value,
    key: Value,
    value: Value,
    mask: Value = None,
    past_key: Value = None,
    past_value: Value = None,
    *more: Value,
) -> Any:
    _without_past(past_key, past_value)
    if any(part is not None for part in more):
        raise UnsupportedError("Attention with lengths of its own")
    q, k, v = tensor(query), tensor(key), tensor(value)
    flat = q.dim() == 3
    if flat:
        heads, groups = c.attribute("q_num_heads"), c.attribute("kv_num_heads")
        q, k, v = _heads(q, heads), _heads(k, groups), _heads(v, groups)
    scale, softcap = c.attribute("scale"), c.attribute("softcap", 0.0)
    if mask is None and c.attribute("is_causal", 0):
        made = _causal(q, k, v, scale, None, softcap)
    else:
        made = _masked(q, k, v, mask, scale, softcap)
    return _flat(made) if flat else made, k, v


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Value,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention by a mask, which is looked at later: it must turn out to be causal."""
    if softcap:
        raise UnsupportedError("attention with a mask and a softcap")
    if mask is None:
        raise UnsupportedError("attention that lets tokens see later ones")
    exact = q.shape[-1] ** -0.5
    asked = exact if scale is None or abs(scale / exact - 1) < 1e-6 else scale
    times = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, _repeated(k, times), _repeated(v, times), tensor(mask), scale=asked
    )


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    if times == 1:
        return x
    batch, groups, tokens, width = x.shape
    wide = x[:, :, None].expand(batch, groups, times, tokens, width)
    return wide.reshape(batch, groups * times, tokens, width)


@op("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    c: Context,
    query: Value,
    key: Value,
    value: Value,
    bias: Value = None,
    padding: Value = None,
    mask: Value = None,
    past_key: Value = None,
    past_value: Value = None,
    *more: Value,
) -> Any:
    _without_past(past_key, past_value)
    if bias is not None or padding is not None or any(part is not None for part in more):
        raise UnsupportedError("MultiHeadAttention with a bias of its inputs, or padding")
    heads = c.attribute("num_heads")
    q, k, v = (_heads(tensor(x), heads) for x in (query, key, value))
    scale = c.attribute("scale", 0.0) or None
    if c.attribute("unidirectional", 0) and mask is None:
        made = _causal(q, k, v, scale)
    else:
        made = _masked(q, k, v, mask, scale, None)
    return _flat(made), k, v
