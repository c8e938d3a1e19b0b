"""Weights of few bits whose values a method chooses without text: made when they are loaded."""

from __future__ import annotations

import hashlib
import math
import threading

import torch

from ...ir import TensorType, Weight, WeightStore, derivation, derive
from ...ir.rewrite.subgraph import fresh_name
from .methods.base import Method
from .rounding import SCALES
from .stored import Form


def computed(weight: Weight, form: Form, method: Method, weights: WeightStore) -> dict[str, Weight]:
    """The parts of a weight, or a stack of some, by name as it would be alone: made by a method
    that needs no text, when they are loaded."""
    *outer, columns = weight.type.shape
    parts = {}
    types = form.types(math.prod(outer), columns)
    for place, (name, flat) in enumerate(zip(form.names(weight.name), types, strict=True)):
        by_row = flat.dtype in (torch.uint8, *SCALES.values()) and len(outer) > 1
        type = TensorType(flat.dtype, (*outer, flat.dims[-1])) if by_row else flat
        options = {"method": method, "form": form, "place": place, "shape": type.shape}
        part = derive(fresh_name(weights, name), type, quantized, weight, **options)
        parts[name] = weights.alike(part)
    return parts


@derivation
def quantized(
    tensor: torch.Tensor, *, method: Method, form: Form, place: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """The part of this number and shape of a weight, or of a stack of some, that a method makes
    without text."""
    rows = tensor.flatten(0, -2)
    if method.quick:
        return method.parts(rows.float(), form, None)[place].view(shape)
    data = rows.contiguous().view(torch.uint8).numpy().data
    mark = hashlib.blake2b(data).digest(), repr(method), form
    return _ONCE.part(mark, place, rows, method).view(shape)


class _Once:
    """Parts of weights, which a method makes together: those of the latest few weights are kept
    until each has been asked for."""

    MOST = 4

    def __init__(self) -> None:
        self.left: dict[tuple[bytes, str, Form], dict[int, torch.Tensor]] = {}
        self.lock = threading.Lock()

    def part(
        self, mark: tuple[bytes, str, Form], place: int, rows: torch.Tensor, method: Method
    ) -> torch.Tensor:
        """A part of the weight of this mark."""
        with self.lock:
            if place not in self.left.get(mark, {}):
                self.left[mark] = dict(enumerate(method.parts(rows.float(), mark[2], None)))
            parts = self.left.pop(mark)
            found = parts.pop(place)
            if parts:
                self.left[mark] = parts  # the latest comes last
            while len(self.left) > self.MOST:
                del self.left[next(iter(self.left))]
            return found


_ONCE = _Once()
