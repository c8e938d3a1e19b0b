"""Products with weights of few bits, worked out another way: exactly, with one rounding a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from graftwork.backends import tiles

BITS = (1, 2, 3, 4, 6, 8)
KINDS = ("symmetric", "offset", "codebook")


class Weight(NamedTuple):
    """A weight, as it is stored, and its whole numbers q i64[N,K]."""

    q: Tensor
    packed: Tensor
    scale: Tensor
    offset: Tensor | None
    codebook: Tensor | None
    bias: Tensor | None
    bits: int
    group: int
    span: int = 0

    def in_tiles(self) -> tuple[Tensor | None, ...]:
        """What a native kernel takes of it: packed, scale, offset, table, bias."""
        how = {"bits": self.bits, "group": self.group, "codebook": self.codebook}
        offset = None if self.offset is None else tiles.tile_columns(self.offset)
        looked_up = self.codebook is not None and self.bits <= 4
        table = tiles.tile_table(self.codebook, bits=self.bits) if looked_up else None
        packed = tiles.tile_values(self.packed, **how)
        return packed, tiles.tile_columns(self.scale), offset, table, self.bias

    def table_in_tiles(self) -> tuple[Tensor | None, ...]:
        """What a native kernel takes to look rows up: packed, scale, offset, codebook."""
        packed = tiles.tile_values(self.packed, bits=self.bits, group=self.group)
        offset = None if self.offset is None else tiles.tile_columns(self.offset)
        return packed, tiles.tile_columns(self.scale), offset, self.codebook

    @property
    def table_sizes(self) -> tuple[int, int, int]:
        """Bits, group, rows."""
        return self.bits, self.group, len(self.q)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bits as they are packed, group, outputs."""
        return tiles.kept_bits(self.bits, self.codebook), self.group, len(self.q)

    @property
    def spans(self) -> list[int]:
        """In how many activations' runs its products may be rounded, but for whole rows."""
        group, columns = self.group, self.q.shape[1]
        parts = [n for n in range(16, group, 16) if group % n == 0]
        return [*parts, *(n for n in range(group, columns + 1, group) if columns % n == 0)]


def stream(q: Tensor, bits: int) -> Tensor:
    """Whole numbers [N,K] as streams of bits u8[N, K*bits/8]."""
    planes = (q.numpy()[:, :, None] >> np.arange(bits)) & 1
    flat = planes.reshape(len(q), q.shape[1] * bits).astype(np.uint8)
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little"))


def from_tiles(packed: Tensor, bits: int, group: int, outputs: int) -> Tensor:
    """Whole numbers [N,K] of tiles u8[T,G,B], as `kernels/tiles.h` draws them."""
    blocks = packed.to(torch.int64).reshape(*packed.shape[:2], -(-group // 16), 32 * bits)
    low = {6: 4, 3: 2}.get(bits, bits)
    if bits == 1:
        halves = torch.cat([blocks, blocks >> 4], -1)
        return _in_rows(halves[..., None, :] >> torch.arange(4)[:, None] & 1, group, outputs)
    planes = blocks[..., : 32 * low].unflatten(-1, (-1, 1, 64))
    steps = planes >> low * torch.arange(8 // low)[:, None] & (1 << low) - 1
    steps = steps.flatten(-3, -2)
    which = torch.arange(4)[:, None]
    if bits == 6:
        steps = steps | (blocks[..., None, 128:] >> 2 * which & 3) << 4
    if bits == 3:
        high = torch.cat([blocks[..., 64:], blocks[..., 64:] >> 4], -1)
        steps = steps | (high[..., None, :] >> which & 1) << 2
    return _in_rows(steps, group, outputs)


def _in_rows(steps: Tensor, group: int, outputs: int) -> Tensor:
    """Numbers [T,G,block,step,64] by output."""
    values = steps.unflatten(-1, (16, 4)).permute(0, 4, 1, 2, 3, 5)  # T, output, G, block, step, k
    return values.flatten(3)[..., :group].flatten(2).flatten(0, 1)[:outputs]


def weight(
    seed: int,
    outputs: int,
    group: int,
    groups: int,
    bits: int,
    kind: str,
    *,
    half: bool = False,
    bias: bool = False,
) -> Weight:
    """A random weight; more groups if the bits want it. Extreme rows are among its first."""
    random = torch.Generator().manual_seed(seed)
    while group * groups * bits % 8:
        groups += 1
    q = torch.randint(0, 1 << bits, (outputs, group * groups), generator=random)
    q[:1], q[1:2] = (1 << bits) - 1, 0
    dtype = torch.float16 if half else torch.float32
    scale = torch.randn(outputs, groups, generator=random).to(dtype)
    # Of the other dtype than scales.
    other = torch.float32 if half else torch.float16
    offset = torch.randn(outputs, groups, generator=random).to(other) if kind == "offset" else None
    codebook = torch.randint(-127, 128, (1 << bits,), generator=random).float()
    codebook[0], codebook[-1] = -127, 127
    return Weight(
        q,
        stream(q, bits),
        scale,
        offset,
        codebook if kind == "codebook" else None,
        torch.randn(outputs, generator=random) if bias else None,
        bits,
        group,
    )


def rows(seed: int, *shape: int) -> Tensor:
    """Random rows f32 of several sizes; of three or more the first is zeros and the last -1."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random).flatten(0, -2)
    x = x * torch.logspace(-3, 3, len(x))[:, None]
    if len(x) > 2:
        x[0], x[-1] = 0, -1
    return x.reshape(shape)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once.

    In float64 the product is exact; the sum is rounded to odd there, after which another rounding
    is the same as one.
    """
    left, right, more = (t.double().numpy() for t in torch.broadcast_tensors(a, b, c))
    product = left * right
    total = product + more
    back = total - product
    error = (product - (total - back)) + (more - back)
    bits = total.view(np.int64)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + towards, bits)
    return torch.from_numpy(odd.view(np.float64).astype(np.float32))


def linear(x: Tensor, w: Weight) -> Tensor:
    """`graftwork.quantized_linear`, rounded, of x f32[..., K]."""
    span = w.span or x.shape[-1]
    runs = x.unflatten(-1, (-1, span))
    scale = runs.abs().amax(-1, keepdim=True) / 127.0
    scale = torch.where(scale > 0, scale, torch.ones(()))
    steps = torch.round(runs / scale).flatten(-2).long()
    scale = scale.squeeze(-1)
    value = w.q if w.offset is not None else w.q - (1 << (w.bits - 1))
    value = value if w.codebook is None else w.codebook.long()[w.q]
    total = torch.zeros(*x.shape[:-1], len(w.q))
    for g in range(w.scale.shape[1]):
        products, sums = torch.zeros(()), torch.zeros(())
        for first in range(g * w.group, (g + 1) * w.group, min(span, w.group)):
            inside = slice(first, first + min(span, w.group))
            by = scale[..., first // span, None] if w.span else torch.ones(())
            products = fused((steps[..., inside] @ value[:, inside].T).float(), by, products)
            sums = fused(steps[..., inside].sum(-1, keepdim=True).float(), by, sums)
        total = fused(products, w.scale[:, g].float(), total)
        if w.offset is not None:
            total = fused(sums, w.offset[:, g].float(), total)
    result = total if w.span else total * scale
    return result if w.bias is None else result + w.bias


def table(w: Weight) -> Tensor:
    """Every value of a weight, f32[N,K]."""
    scale = w.scale.float().repeat_interleave(w.group, 1)
    if w.codebook is not None:
        return scale * w.codebook[w.q]
    if w.offset is not None:
        return scale * w.q + w.offset.float().repeat_interleave(w.group, 1)
    return scale * (w.q - (1 << (w.bits - 1)))


def zeros(w: Weight) -> Tensor:
    """How far the stored number 0 is from the value 0, f32[N,K]."""
    scale = w.scale.float().repeat_interleave(w.group, 1).abs()
    if w.codebook is not None:
        return 0 * scale
    return scale * (1 << w.bits)


weights = st.builds(
    weight,
    st.integers(0, 999),
    outputs=st.integers(1, 70),
    group=st.sampled_from((1, 3, 4, 8, 12, 16, 20, 32, 64, 130)),
    groups=st.integers(1, 5),
    bits=st.sampled_from(BITS),
    kind=st.sampled_from(KINDS),
    half=st.booleans(),
    bias=st.booleans(),
)
"""Any weight: outputs that fill no tile, groups that fill no block."""
