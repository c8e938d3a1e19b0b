"""How the format keeps tensors otherwise than transformers, both ways: rows and columns in another
order (`ORDERS`), which blocks keep their bits in, and floats in other ways (`LAID`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...ir import derivation
from ...ir.weights import option

Sizes = tuple[int, ...]


def _pairs(count: int, heads: int) -> tuple[Tensor, ...]:
    """Rows i and i + half of a head are 2i and 2i+1 in the file."""
    return (torch.arange(count).reshape(heads, 2, -1).swapaxes(1, 2).flatten(),)


def _by_parts(count: int, groups: int, *sizes: int, tensors: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Of groups of rows, each of parts of these sizes, the file has the first parts of all groups,
    then the second parts, and so on. tensors: parts in each of several tensors."""
    parts = torch.arange(count).reshape(groups, sum(sizes)).split(sizes, 1)
    rows = iter([part.flatten() for part in parts])
    return tuple(torch.cat([next(rows) for _ in range(each)]) for each in tensors)


def _in_turns(count: int, before: int, groups: int, each: int) -> tuple[Tensor, ...]:
    """So many rows, then heads of groups one after the other, of which the file has the first of
    all groups, then the second of all groups, and so on. each: heads of a group."""
    heads = torch.arange(before, count).reshape(groups, each, -1)
    return (torch.cat([torch.arange(before), heads.swapaxes(0, 1).flatten()]),)


ORDERS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "pairs": _pairs,
    "grouped": partial(_by_parts, tensors=(3,)),
    "grouped with gates": partial(_by_parts, tensors=(3, 1)),
    "in turns": _in_turns,
}
"""For so many rows or columns and an order's sizes, which of transformers' lie in each tensor of
the file. Errors: RuntimeError for others than the sizes ask for."""


@option
@dataclass(frozen=True)
class Order:
    """The order of a parameter's rows (axis 0) or columns (axis 1). kind: see `ORDERS`, which is
    given the sizes."""

    kind: str
    sizes: Sizes
    axis: int = 0

    def fits(self, count: int) -> bool:
        """Whether so many rows or columns can be in this order."""
        try:
            return bool(ORDERS[self.kind](count, *self.sizes))
        except RuntimeError:
            return False

    def written(self, x: Tensor) -> list[Tensor]:
        """The file's tensors, of transformers' parameter or of a part of its stored rows."""
        places = ORDERS[self.kind](x.shape[self.axis], *self.sizes)
        return [x.index_select(self.axis, place.to(x.device)) for place in places]


@derivation
def in_order(x: Tensor, *, order: Order) -> Tensor:
    """A parameter, or a part of its stored rows, of what the file has one behind the other."""
    places = ORDERS[order.kind](x.shape[order.axis], *order.sizes)
    return x.index_select(order.axis, torch.cat(places).argsort())


@dataclass(frozen=True)
class Laid:
    """read: the tensors of the file as transformers' parameter, which is given its dims afterwards.
    write: the parameter as the file's tensors, by the layout's sizes."""

    read: Callable[..., Tensor]
    write: Callable[[Tensor, Sizes], tuple[Tensor, ...]]


def _columns_in_turns(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up, of which transformers has columns in turns."""
    both = torch.stack([gate, up], 2).flatten(1, 2)
    return both.transpose(1, 2) if both.dim() == 3 else both


def _gate_and_up(x: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    rows = x.transpose(1, 2) if x.dim() == 3 else x
    return rows[:, 0::2], rows[:, 1::2]


def _of_heads(keys: Tensor, *values: Tensor) -> Tensor:
    """Of each head its keys' rows, which lie the other way, then its values'. Older files hold them
    as transformers does."""
    return torch.cat([keys.transpose(1, 2), *values], 1) if values else keys


def _keys_and_values(x: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """sizes: heads, and the rows of a head's keys."""
    heads, rows = sizes
    by_head = x.reshape(heads, -1, x.shape[-1])
    return by_head[:, :rows].transpose(1, 2), by_head[:, rows:]


def _reshaped(x: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """sizes: the file's dims, one of them -1 as it comes; none: the parameter's without those of 1.

    >>> [part.shape for part in _reshaped(torch.zeros(4, 1, 3), ())]
    [torch.Size([4, 3])]
    """
    return (x.reshape(sizes) if sizes else x.squeeze(1) if x.dim() == 3 else x,)


LAID: dict[str, Laid] = {
    "interleaved": Laid(_columns_in_turns, _gate_and_up),
    "latent": Laid(_of_heads, _keys_and_values),
    "transposed": Laid(
        lambda x: x.transpose(-1, -2), lambda x, sizes: (x.transpose(-1, -2).contiguous(),)
    ),
    "less one": Laid(lambda x: x - 1.0, lambda x, sizes: (x + 1.0,)),
    "log of minus": Laid(lambda x: torch.log(-x), lambda x, sizes: _reshaped(-torch.exp(x), sizes)),
    "reshaped": Laid(lambda x: x, _reshaped),
}
"""By `architectures.Layout.kind`."""


@derivation
def laid(*parts: Tensor, layout: str, dims: tuple[int, ...]) -> Tensor:
    """Floats as transformers has them, [dims], that the format keeps in another way."""
    return LAID[layout].read(*parts).reshape(dims).contiguous()
