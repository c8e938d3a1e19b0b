"""Random calls of the kernels for steps of recurrences and convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from operands import F32, Case, Maker, want
from torch import Tensor

from graftwork.backends.torch import native
from graftwork.ir.ops import causal_conv, recurrent, rounded_state


def _counts(make: Maker, batch: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a state covers, what counts, and how many tokens will not be taken back."""

    def counts(least: int, most: int) -> Tensor:
        return torch.randint(least, most + 1, (batch,), generator=make.generator)

    folded = counts(0, 5)
    past = folded + counts(0, rows)
    certain = counts(0, width)
    # Counts that no run of the model gives: of rows and tokens that are not there.
    if make.random.random() < 0.1:
        past = past + make.random.choice((-100, -1, 1, 1 << 40))
    if make.random.random() < 0.1:
        # Up to where counting rows from there on would wrap around.
        most = 2**63 - 1 - width - rows - 8
        certain = certain + make.random.choice((-100, 1, 1 << 40, most))
    return folded, past, certain


def native_linear_attention_step(make: Maker) -> Case:
    batch, groups, each, rows = (make.random.choice((1, 1, 2, 3)) for _ in range(4))
    heads, width = groups * each, make.random.choice((1, 1, 2, 5, 9, 70))
    keys, values = (make.random.choice((1, 3, 8, 17, 33)) for _ in range(2))
    decays = make.random.choice((1, keys))

    def unit(*shape: int) -> Tensor:
        return F.normalize(make.numbers(*shape), dim=-1)

    folded, past, certain = _counts(make, batch, rows, width)
    operands = {
        "state": make.numbers(batch, heads, keys, values),
        "keys": unit(batch, groups, rows, keys),
        "values": make.numbers(batch, heads, rows, values),
        "decays": -make.numbers(batch, heads, rows, decays).abs(),
        "folded": folded,
        "past": past,
        "certain": certain,
        "ancestors": make.maybe(make.tree(batch, width)),
        "q": make.numbers(batch, groups, width, keys),
        "k": unit(batch, groups, width, keys),
        "v": make.numbers(batch, heads, width, values),
        "g": -make.numbers(batch, heads, width, decays).abs(),
        "beta": make.maybe(torch.rand(batch, heads, width, generator=make.generator)),
    }

    def meaning(*tensors: Any) -> Any:
        want(all(t is None or t.dtype == F32 for t in tensors[8:]))
        return recurrent.linear_attention_step(*tensors)

    call, near = native.OPS["linear_attention_step"], {"rtol": 1e-3, "atol": 1e-4}
    name = "linear_attention_step"
    tree = frozenset({"ancestors"})
    return Case(name, call, meaning, operands, {}, fake=True, tolerance=near, kept=tree)


def native_linear_attention_step_int8(make: Maker) -> Case:
    case = native_linear_attention_step(make)
    codes, scale = rounded_state.rounded(case.operands.pop("state"))
    operands = {"codes": codes.to(torch.int8), "scale": scale, **case.operands}

    def numbers(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A last bit may move a number to the next code, whose neighbour stands for it as well."""
        y, codes, scale, *log = results
        return y, codes * scale[:, :, None], *log

    def meaning(*tensors: Any) -> Any:
        want(all(t is None or t.dtype == F32 for t in tensors[9:]))
        return numbers(rounded_state.linear_attention_step_int8(*tensors))

    def call(*tensors: Any) -> Any:
        return numbers(native.OPS["linear_attention_step_int8"](*tensors))

    name, near = "linear_attention_step_int8", {"rtol": 0.05, "atol": 0.1}
    return Case(name, call, meaning, operands, {}, fake=True, tolerance=near, kept=case.kept)


def native_causal_conv_step(make: Maker) -> Case:
    batch, rows = (make.random.choice((1, 1, 2, 3)) for _ in range(2))
    width, span = make.random.choice((1, 1, 2, 5, 9, 70)), make.random.choice((2, 3, 4, 4, 7))
    channels = make.random.choice((1, 3, 17, 128, 300))
    folded, past, certain = _counts(make, batch, rows, width)
    operands = {
        "history": make.numbers(batch, span - 1, channels),
        "rows": make.numbers(batch, rows, channels),
        "folded": folded,
        "past": past,
        "certain": certain,
        "ancestors": make.maybe(make.tree(batch, width)),
        "x": make.numbers(batch, width, channels),
        "weight": make.numbers(channels, span),
        "bias": make.maybe(make.numbers(channels)),
    }

    def meaning(*tensors: Any) -> Any:
        want(all(t is None or t.dtype == F32 for t in (*tensors[:2], *tensors[6:])))
        return causal_conv.causal_conv_step(*tensors)

    call, tree = native.OPS["causal_conv_step"], frozenset({"ancestors"})
    return Case("causal_conv_step", call, meaning, operands, {}, fake=True, kept=tree)
