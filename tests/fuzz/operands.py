"""Calls with random operands: legal ones, of any size down to none, some of them then spoilt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F32, I8, I32, BOOL = torch.float32, torch.int8, torch.int32, torch.bool
SIZES = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 33, 70, 130, 300)
DTYPES = (F32, torch.float64, torch.bfloat16, torch.float16, torch.int64, I32, I8, BOOL)
AROUND = 64
"""Elements on both sides of an operand that nobody may read."""


@dataclass
class Case:
    """A call: how to make it, how its meaning is worked out, and with what."""

    op: str
    call: Callable[..., Any]
    meaning: Callable[..., Any]
    operands: dict[str, Any]
    options: dict[str, Any]
    fake: bool = False
    """Whether the shape rule is to answer, too."""
    tolerance: dict[str, float] | None = None
    """How near results must be, where that is not as for others of their dtype."""
    kept: frozenset[str] = frozenset()
    """Operands whose values say something only together: none of them is laid out otherwise."""


class Refusal(Exception):
    """What a meaning that is written here raises."""


def want(holds: bool) -> None:
    """Refuse what does not hold."""
    if not holds:
        raise Refusal


class Maker:
    """Random operands."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def size(self, *, none: float = 0.06) -> int:
        return 0 if self.random.random() < none else self.random.choice(SIZES[1:])

    def rows(self) -> tuple[int, ...]:
        """Leading axes of a few rows; now and then of many, for which kernels work otherwise."""
        if self.random.random() < 0.1:
            return (self.random.choice((65, 100, 131)),)
        small = (0, 1, 1, 2, 3, 4) if self.random.random() < 0.1 else (1, 1, 2, 3, 4)
        return tuple(self.random.choice(small) for _ in range(self.random.randrange(3)))

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def bytes(self, *shape: int, most: int = 127) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=self.generator).to(I8)

    def tree(self, batch: int, width: int) -> Tensor:
        """Of each token, which tokens it continues, and itself: bool[batch,width,width]."""
        seen = torch.eye(width, dtype=torch.bool)
        for token in range(1, width):
            seen[token] |= seen[self.random.randrange(token)]
        return seen.expand(batch, width, width).contiguous()

    def maybe(self, tensor: Tensor) -> Tensor | None:
        return tensor if self.random.random() < 0.5 else None

    def guarded(self, tensor: Tensor) -> Tensor:
        """The same, laid out the same, amid what nobody may read."""
        wrong = float("nan") if tensor.is_floating_point() else 1
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        span = span if tensor.numel() else 0
        room = torch.full((span + 2 * AROUND,), wrong, dtype=tensor.dtype)
        twin = room.as_strided(tensor.shape, tensor.stride(), AROUND)
        if 0 in tensor.stride():
            room[AROUND : AROUND + span] = tensor.as_strided((span,), (1,))
        else:
            twin.copy_(tensor)
        return twin

    def laid_out(self, tensor: Tensor, *, varied: bool) -> Tensor:
        """Equal in shape and dtype, not in rows. varied: but not all columns the same, of which a
        norm leaves rounding errors alone."""
        ways: list[Callable[[Tensor], Tensor]] = [lambda t: t]
        if tensor.dim() > 1:
            ways += [
                lambda t: t.mT.contiguous().mT,
                lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
                lambda t: t[:1].expand_as(t) if len(t) else t,
                lambda t: torch.cat([t, t], -1)[..., t.shape[-1] :],
            ]
        if tensor.dim():
            ways += [
                lambda t: t.repeat_interleave(2, -1)[..., ::2],
                lambda t: torch.stack([t, t], -1)[..., 0],
            ]
        if tensor.dim() and not varied:
            ways.append(lambda t: t[..., :1].expand_as(t) if t.shape[-1] else t)
        return self.random.choice(ways)(tensor)

    def spoilt(self, tensor: Tensor) -> Tensor:
        """Of another size, rank or dtype."""
        kind = self.random.choice(("less", "more", "one", "none", "rank", "rank", "dtype", "dtype"))
        if kind == "dtype":
            return tensor.to(self.random.choice(DTYPES))
        if kind == "rank" or not tensor.dim():
            drops = tensor.dim() and tensor.shape[0] and self.random.random() < 0.5
            return tensor[0] if drops else tensor[None]
        axis = self.random.randrange(tensor.dim())
        if kind == "more" or not tensor.shape[axis]:
            return torch.cat([tensor, tensor.narrow(axis, 0, min(1, tensor.shape[axis]))], axis)
        lengths = {"less": tensor.shape[axis] - 1, "one": 1, "none": 0}
        return tensor.narrow(axis, 0, lengths[kind])

    def case(self, makers: Sequence[Callable[[Maker], Case]]) -> Case:
        """A call by one of the makers, more often than not a legal one."""
        case = self.random.choice(makers)(self)
        names = [name for name, value in case.operands.items() if value is not None]
        spoilt = {self.random.choice(names)} if self.random.random() < 0.4 else set()
        if self.random.random() < 0.1:
            spoilt.add(self.random.choice(names))
        for name in names:
            tensor = case.operands[name]
            tensor = self.spoilt(tensor) if name in spoilt else tensor
            if name not in case.kept and self.random.random() < 0.4:
                tensor = self.laid_out(tensor, varied=name == "x")
            case.operands[name] = self.guarded(tensor)
        return case
