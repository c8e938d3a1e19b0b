"""Attention as models with a source write it, and what programs say instead.

Before, as traced::

    %b = ...                                    any ops that need no tokens: [1,H,T,T]
    %y = graftwork.traced_attention(%q, %k, %v, %b, layer=0, scale=1.0, causal=False)

After::

    func encode(tokens: i64[B,T], ..., lengths: i64[B]) {
      %y = graftwork.source_attention(%q, %k, %v, %lengths, @distance.0, layer=0, scale=1.0)

A bias is not matched op by op: it is *run*, over all positions that there are, and must turn out to
depend on the distance of two tokens alone; what is beyond the distance from which on it stays the
same is left out. Refuses other biases, naming module and line.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx
from torch import Tensor

from ..ir import Function, UnsupportedError, Weight, arguments, site_of
from ..ir.ops import Sample, op
from ..ir.plan.inputs import INPUTS
from .importer import Imported
from .regions import evaluated, reached_from
from .sites import where

G = torch.ops.graftwork


def _samples() -> Iterator[Sample]:
    q, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    yield (q, k, v, torch.randn(1, 2, 3, 5)), {"layer": 0, "scale": 1.0, "causal": False}


@op("q: BHTD, v: BGNE -> BHTE", samples=_samples)
def traced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    layer: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention with a bias [.,H,T,N] of any kind, or to a source; only traces have it.

    ``%y: f32[B,H,T,E] = graftwork.traced_attention(%q, %k, %v, %b, layer=0, scale=1.0,
    causal=False)``

    q [B,H,T,D]; k [B,H,N,D]; v [B,H,N,E]; causal: whether later tokens are hidden.
    """
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    scores = scores if bias is None else scores + bias
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.matmul(scores.softmax(-1), v)


def settle_attention(imported: Imported, context: int) -> None:
    """Replace them in place. context: positions that there are. Errors: `UnsupportedError`."""
    nodes = imported.fn.calls(G.traced_attention.default)
    tables: dict[torch.fx.Node, Weight | None] = {}
    reach = reached_from(imported.fn, imported.fn.inputs[0]) if nodes else set()
    for node in nodes:
        bias = arguments(node)["bias"]
        if bias is not None and bias not in tables:
            if bias in reach:
                raise UnsupportedError(f"{where(node)}: the attention bias depends on the tokens")
            tables[bias] = _table(imported, bias, context, len(tables))
        _settle(imported.fn, node, tables.get(bias))
    imported.fn.graph.eliminate_dead_code()


def _settle(fn: Function, node: torch.fx.Node, table: Weight | None) -> None:
    given = arguments(node)
    options = {name: given[name] for name in ("layer", "scale")}
    with fn.graph.inserting_before(node):
        distances = [] if table is None else [fn.weight(table)]
        qkv = [given[name] for name in "qkv"]
        if given["causal"]:
            args = [*qkv, None, None, *distances]
            settled = fn.call(G.attention.default, *args, site=site_of(node), **options)
        else:
            if not fn.has_input("lengths"):
                fn.add_input("lengths", INPUTS["lengths"].type)
            args = [*qkv, fn.input("lengths"), *distances]
            settled = fn.call(G.source_attention.default, *args, site=site_of(node), **options)
    node.replace_all_uses_with(settled)
    fn.graph.erase_node(node)


def _table(imported: Imported, bias: torch.fx.Node, context: int, index: int) -> Weight | None:
    """The bias [H,2R+1] by distance; None for no bias at all."""
    sizes = {"B": 1, "T": context, "N": context}
    value = evaluated(bias, imported.weights, sizes).detach()
    if not bool(value.any()):
        return None
    value = value.expand(1, -1, context, context)[0]
    if not torch.equal(value[:, 1:, 1:], value[:, :-1, :-1]):
        raise UnsupportedError(
            f"{where(bias)}: the bias of the attention scores depends on more than the distance of "
            "two tokens; not supported yet"
        )
    earlier, later = value[:, :, 0], value[:, 0, :]  # keys 0, 1, ... before, and behind, a query
    reach = max(_reach(earlier), _reach(later))
    table = torch.cat([earlier[:, 1 : reach + 1].flip(-1), later[:, : reach + 1]], -1)
    weight = Weight.of(f"distance.{index}", table.contiguous().clone())
    imported.weights[weight.name] = weight
    return weight


def _reach(values: Tensor) -> int:
    """The distance from which on values [H,N] stay the same; at least 1."""
    differs = (values != values[:, -1:]).any(0).nonzero()
    return max(int(differs[-1]) + 1, 1) if len(differs) else 1
