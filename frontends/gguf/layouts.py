"""How the format keeps tensors of floats otherwise than transformers, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ir import derivation

Sizes = tuple[int, ...]


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
"""By `architectures.Layout.kind`; orders of rows are in `rows.LAYOUTS`."""


@derivation
def laid(*parts: Tensor, layout: str, dims: tuple[int, ...]) -> Tensor:
    """Floats as transformers has them, [dims], that the format keeps in another way."""
    return LAID[layout].read(*parts).reshape(dims).contiguous()
