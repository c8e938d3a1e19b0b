"""Find attention that a model computes by hand and raise it to ``graftwork.attention``.

Before::

    %s = aten.matmul(%q, %kt)                     scores [B,H,T,T]
    ... scaled, ALiBi added, masked: any ops that need no tokens besides %s ...
    %p = aten._softmax(%s2, 3, False)
    %y = aten.matmul(%p, %v)

After::

    %y = graftwork.attention(%q, %k, %v, None, @slopes, layer=0, scale=0.125, window=5)

What happens between the scores and the softmax is not matched op by op: it is *run*, with zeros and
ones in place of the scores, and must turn out as scale * scores + ALiBi on a causal mask, of a
sliding window or in chunks, too. So it does not matter how a model spells its mask.
``scaled_dot_product_attention`` is raised alike.
Refuses, naming module and line: masks that are not causal, biases that are not ALiBi, scores that
are not scaled linearly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from ..ir import Dim, Function, Site, Sym, UnsupportedError, Weight, site_of, type_of
from .grouped_heads import repeats, ungrouped
from .importer import Imported
from .regions import evaluated, reached_from
from .sites import where

A, G = torch.ops.aten, torch.ops.graftwork
_BATCH, _TOKENS = 2, 12
_SIZES = {"B": _BATCH, "T": _TOKENS}
_HIDDEN_BELOW = -1e4
"""Scores below this weigh nothing after a softmax; models mask with the dtype's minimum or -inf."""


@dataclass(frozen=True)
class Scores:
    """What a model does with its scores. span: how far back a token sees (`ops.attention.SPANS`).
    slopes: ALiBi, one a head, or None."""

    scale: float
    span: Mapping[str, int]
    slopes: torch.Tensor | None


def raise_attention(imported: Imported) -> None:
    """Replace every hand-written attention of the function, in place."""
    fn = imported.fn
    reach = reached_from(fn, fn.inputs[0])
    for node in fn.calls(A._softmax.default):
        _raise_softmax(imported, node, reach)
    for node in fn.calls(A.scaled_dot_product_attention.default):
        _raise_fused(imported, node, reach)
    fn.graph.eliminate_dead_code()


def _raise_softmax(imported: Imported, softmax: torch.fx.Node, reach: set[torch.fx.Node]) -> None:
    found = _find_scores(softmax, reach)
    if found is None:
        return
    scores, product = found
    described = _describe(imported, scores, softmax.args[0])  # type: ignore[arg-type]
    (q, by), (k_transposed, more) = (_unscaled(side) for side in scores.args)  # type: ignore
    scale = described.scale * by * more
    described = replace(described, scale=_exact(scale, type_of(q).dims[-1]))
    v = product.args[1]
    fn = imported.fn
    with fn.graph.inserting_before(product):
        site = site_of(softmax)
        axes = list(range(len(type_of(scores).dims)))
        axes[-2:] = axes[-2:][::-1]
        k = _permute(fn, k_transposed, axes)
        out = _attention(imported, (q, k, v), described, site)
        out = _shaped(fn, out, product)
    product.replace_all_uses_with(out)


def _find_scores(
    softmax: torch.fx.Node, reach: set[torch.fx.Node]
) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The product q k^T before a softmax over T, and the product with v behind it."""
    dims = type_of(softmax).dims
    if not isinstance(dims[-1], Sym) or softmax.args[1] != len(dims) - 1:
        return None
    behind = softmax
    while len(behind.users) == 1 and next(iter(behind.users)).target in _HARMLESS:
        behind = next(iter(behind.users))
    products = [user for user in behind.users if user.target is A.matmul.default]
    if len(products) != 1 or products[0].args[0] is not behind:
        raise UnsupportedError(f"{where(softmax)}: a softmax over tokens that no values follow")
    before = softmax
    while before.target is not A.matmul.default:
        ahead = [arg for arg in before.all_input_nodes if arg in reach]
        if len(ahead) != 1:
            raise UnsupportedError(
                f"{where(softmax)}: cannot raise this attention: expected scores q k^T with masks "
                f"that need no tokens; {before.target} mixes {len(ahead)} values that do"
            )
        before = ahead[0]
    return before, products[0]


_HARMLESS = (A._to_copy.default, A.reshape.default)


def _unscaled(x: torch.fx.Node) -> tuple[torch.fx.Node, float]:
    """What is multiplied by a number before the scores are made, and the number: exporters put half
    of the scale on each side."""
    by = 1.0
    while x.target is A.mul.Tensor and isinstance(x.args[1], (int, float)):
        by *= float(x.args[1])
        x = x.args[0]  # type: ignore[assignment]
    return x, by


def _exact(scale: float, dim: Dim) -> float:
    """The scale that a measured one means: 1 or 1 / sqrt(D), if it is that up to rounding."""
    usual = [1.0] + ([dim**-0.5] if isinstance(dim, int) else [])
    return next((value for value in usual if abs(scale / value - 1) < 1e-3), scale)


def _describe(imported: Imported, scores: torch.fx.Node, end: torch.fx.Node) -> Scores:
    """Run the ops between the scores and the softmax and see what they do."""
    shape = _concrete(type_of(scores).dims)
    zeros = torch.zeros(shape)
    outputs = [
        _run_between(imported, scores, end, (zeros + fill).to(type_of(scores).dtype))
        for fill in (0.0, 1.0, -2.0)
    ]
    return _recognise([out.float().reshape(_BATCH, -1, _TOKENS, _TOKENS) for out in outputs], end)


def _run_between(
    imported: Imported, start: torch.fx.Node, end: torch.fx.Node, value: torch.Tensor
) -> torch.Tensor:
    """The value of `end` when `start` has this value; only what is needed is computed."""
    positions = torch.arange(_TOKENS).expand(_BATCH, _TOKENS)
    known = {start: value, imported.fn.input("positions"): positions}
    return evaluated(end, imported.weights, _SIZES, known)


def _recognise(outputs: list[torch.Tensor], node: torch.fx.Node) -> Scores:
    """Scores from what zeros, ones and minus twos [B,H,T,T] become. Errors: `UnsupportedError`."""
    zero, one, minus = outputs
    visible = zero[0, 0] > _HIDDEN_BELOW
    span = _span(visible, node)
    if not bool((((zero > _HIDDEN_BELOW) == visible) & ((one > _HIDDEN_BELOW) == visible)).all()):
        raise UnsupportedError(f"{where(node)}: the attention mask differs between heads or scores")
    gain = (one - zero)[:, :, visible]
    scale = float(gain.flatten().median())
    tolerance = 1e-2 * abs(scale)
    linear = (gain - scale).abs().max() < tolerance
    if not linear or ((zero - minus)[:, :, visible] - 2 * scale).abs().max() > 2 * tolerance:
        raise UnsupportedError(f"{where(node)}: scores are not scaled by one number before softmax")
    return Scores(scale, span, _slopes(zero, visible, node))


def _span(visible: torch.Tensor, node: torch.fx.Node) -> dict[str, int]:
    """The sliding window, or the chunks, of a mask [T,T] (True: visible); nothing if all earlier
    tokens are visible."""
    steps = torch.arange(_TOKENS)
    distance = steps[:, None] - steps[None, :]
    width, first = int(visible[-1].sum()), int(visible[:, 0].sum())
    if bool((visible == ((distance >= 0) & (distance < width))).all()):
        return {} if width == _TOKENS else {"window": width}
    if first and bool((visible == ((distance >= 0) & (distance <= steps[:, None] % first))).all()):
        return {"chunk": first}
    raise UnsupportedError(
        f"{where(node)}: the attention mask is neither causal nor a causal sliding window, "
        f"nor causal in chunks"
    )


def _slopes(zero: torch.Tensor, visible: torch.Tensor, node: torch.fx.Node) -> torch.Tensor | None:
    """ALiBi slopes [H] behind the additive bias [B,H,T,T], None if there is none.

    A softmax does not see a constant added to a whole row, so each row counts from its diagonal.
    """
    bias = zero - zero.diagonal(dim1=2, dim2=3)[..., None]
    bias = bias.masked_fill(~visible, 0.0)
    if float(bias.abs().max()) == 0.0:
        return None
    slopes = -bias[0, :, 1, 0]
    steps = torch.arange(_TOKENS)
    expected = slopes[:, None, None] * (steps[None, :] - steps[:, None])
    error = (bias - expected).masked_fill(~visible, 0.0).abs().max()
    if error > 1e-2 * bias.abs().max():
        raise UnsupportedError(f"{where(node)}: the bias of the attention scores is not ALiBi")
    return slopes


def _raise_fused(imported: Imported, node: torch.fx.Node, reach: set[torch.fx.Node]) -> None:
    q, k, v, mask, _, causal = node.args
    described = Scores(1.0, {}, None)
    if mask is None and not causal:
        raise UnsupportedError(
            f"{where(node)}: scaled_dot_product_attention without a mask lets tokens see later "
            "ones; expected is_causal=True or a causal mask"
        )
    if isinstance(mask, torch.fx.Node):
        described = _masked(imported, mask, reach)
    scale = node.kwargs.get("scale")
    scale = float(type_of(q).dims[-1]) ** -0.5 if scale is None else float(scale)  # type: ignore
    described = replace(described, scale=scale)
    with imported.fn.graph.inserting_before(node):
        out = _attention(imported, (q, k, v), described, site_of(node))
        out = _shaped(imported.fn, out, node)
    node.replace_all_uses_with(out)
    imported.fn.graph.erase_node(node)  # torch counts it as random, so dead code removal keeps it


def _masked(imported: Imported, mask: torch.fx.Node, reach: set[torch.fx.Node]) -> Scores:
    """What an explicit mask (boolean, or added to the scores) does."""
    if mask in reach:
        raise UnsupportedError(f"{where(mask)}: the attention mask depends on the tokens")
    value = _run_between(imported, imported.fn.input("tokens"), mask, torch.zeros(0))
    if value.dtype == torch.bool:
        value = torch.zeros(value.shape).masked_fill(~value, float("-inf"))
    while value.dim() < 4:
        value = value[None]
    zero = value.float().expand(_BATCH, -1, _TOKENS, _TOKENS)
    return _recognise([zero, zero + 1, zero - 2], mask)


def _attention(
    imported: Imported, qkv: tuple[Any, Any, Any], described: Scores, site: Site
) -> torch.fx.Node:
    """The op for q, k, v, each [B,H,T,D] or [B*H,T,D]; the result is [B,H,T,E]."""
    fn = imported.fn
    heads = next((type_of(x).dims[1] for x in qkv if len(type_of(x).dims) == 4), None)
    heads = _heads(qkv[0]) if heads is None else heads
    q, k, v = (_unfold(fn, x, heads, site) for x in qkv)
    if repeats(k) == repeats(v) != 1:
        k, v = ungrouped(fn, k), ungrouped(fn, v)
    extra: dict[str, Any] = dict(described.span)
    args: list[Any] = [q, k, v]
    if described.slopes is not None:
        args += [None, _slopes_weight(imported, described.slopes)]
    return fn.call(G.attention.default, *args, layer=0, scale=described.scale, site=site, **extra)


def _shaped(fn: Function, out: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
    """The result in the dims that the product with the values had."""
    dims = list(type_of(like).dims)
    if dims == list(type_of(out).dims):
        return out
    return fn.call(A.reshape.default, out, dims, site=site_of(like))


def _slopes_weight(imported: Imported, slopes: torch.Tensor) -> torch.fx.Node:
    """One weight for all layers that share the slopes."""
    count = 0
    while f"alibi.{count}" in imported.weights:
        known = imported.weights[f"alibi.{count}"]
        if torch.equal(known.load(), slopes):
            return imported.fn.weight(known)
        count += 1
    weight = Weight.of(f"alibi.{count}", slopes.clone())
    imported.weights[weight.name] = weight
    return imported.fn.weight(weight)


def _heads(q: torch.fx.Node) -> Dim:
    """How many heads [B*H,T,D] holds."""
    rows = type_of(q).dims[0]
    heads = rows.bind({"B": 1}) if isinstance(rows, Sym) else rows
    if not isinstance(heads, int) or rows != Sym("B") * heads:
        raise UnsupportedError(f"{where(q)}: cannot tell the heads in {type_of(q)}")
    return heads


def _unfold(fn: Function, x: torch.fx.Node, heads: Dim, site: Site) -> torch.fx.Node:
    """[B*H,T,D] as [B,H,T,D]."""
    if len(type_of(x).dims) == 4:
        return x
    shape = [Sym("B"), heads, *type_of(x).dims[1:]]
    if x.target is A.reshape.default and list(type_of(x.args[0]).dims) == shape:  # type: ignore
        return x.args[0]  # type: ignore[return-value]
    return fn.call(A.reshape.default, x, shape, site=site)


def _permute(fn: Function, x: torch.fx.Node, axes: list[int]) -> torch.fx.Node:
    """x with two axes swapped; what swapped them before is undone instead."""
    if x.target is A.permute.default:
        inner: list[int] = x.args[1]  # type: ignore[assignment]
        order = [inner[axis] for axis in axes]
        if order == sorted(order):
            return x.args[0]  # type: ignore[return-value]
        return fn.call(A.permute.default, x.args[0], order, site=site_of(x))
    return fn.call(A.permute.default, x, axes, site=site_of(x))


def _concrete(dims: tuple[Dim, ...]) -> list[int]:
    return [int(d.bind(_SIZES)) if isinstance(d, Sym) else d for d in dims]  # type: ignore[arg-type]
