"""Eager and fake kernels take the same calls, and make of them the same types.

A fake kernel that took more would let programs through that fail when they run; one that took less,
or gave another type, would refuse programs that run, or tell passes and compilers what is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graftwork.ir import InputError
from graftwork.ir.ops import OpDef, Sample, all_ops

DTYPES = torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool
BEYOND = "out of bounds", "out of range", "nonnegative", "to be smaller than"
"""What torch says of an index that its operand has no row for: values, which fakes do not have."""

Types = list[tuple[torch.Size, torch.dtype]]


def wrong(x: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Operands that may not fit in the place of x: of another rank, size or dtype, or none."""
    yield "missing", None
    yield "an axis more", x[None]
    if x.dim():
        yield "an axis less", x.select(-1, 0)
        yield "its first axis less", x.select(0, 0)
    for axis, size in enumerate(x.shape):
        yield f"axis {axis} larger", torch.cat([x, x.narrow(axis, size - 1, 1)], axis)
        yield f"axis {axis} of one", x.narrow(axis, 0, 1)
    for dtype in DTYPES:
        yield str(dtype), x.to(dtype)


def calls(op: OpDef, of: slice = slice(None)) -> Iterator[tuple[str, Sample]]:
    """Some of the op's samples, and those with one operand that may not fit, or an option of no
    meaning."""
    names = [argument.name for argument in op.overload._schema.arguments]
    for number, (args, options) in list(enumerate(op.samples()))[of]:
        yield f"sample {number}", (args, options)
        for place, x in enumerate(args):
            for how, other in wrong(x) if isinstance(x, Tensor) else ():
                made = (*args[:place], other, *args[place + 1 :])
                yield f"sample {number}, {names[place]}: {how}", (made, options)
        for name in (name for name, value in options.items() if isinstance(value, str)):
            yield f"sample {number}, {name}: unknown", (args, {**options, name: "unknown"})


def types(op: Callable[..., Any], sample: Sample) -> Types:
    made = op(*sample[0], **sample[1])
    return [(t.shape, t.dtype) for t in (made if isinstance(made, tuple) else (made,))]


def outcome(op: Callable[..., Any], sample: Sample) -> Types | str:
    """The types of a call's results; what it is refused with; "" where an index is to blame."""
    try:
        return types(op, sample)
    except Exception as error:
        beyond = isinstance(error, (RuntimeError, IndexError))
        said = f"{type(error).__name__}: {error}"
        return "" if beyond and any(phrase in said for phrase in BEYOND) else said


def fake_outcome(op: Callable[..., Any], sample: Sample, mode: FakeTensorMode) -> Types | str:
    with mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        args = tuple(map(fake, sample[0]))
        return outcome(op, (args, {name: fake(value) for name, value in sample[1].items()}))


# What backends bring besides is made by their lowering alone.
OPS = {name: op for name, op in all_ops().items() if "graftwork.ir.ops" in op.meaning.__module__}


EVERYDAY = 3
"""Samples of an op that are bent everyday: some ops have a dozen, of twenty operands each."""


@pytest.mark.parametrize(
    ("op", "of"),
    [
        *((op, slice(EVERYDAY)) for op in OPS.values()),
        *(
            pytest.param(op, slice(EVERYDAY, None), marks=pytest.mark.long)
            for op in OPS.values()
            if len(list(op.samples())) > EVERYDAY
        ),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_eager_and_fake_take_the_same_calls(op: OpDef, of: slice) -> None:
    """And what does not fit is refused by name, never by what torch says of it."""
    torch.manual_seed(0)
    apart, mode = [], FakeTensorMode()
    for what, sample in calls(op, of):
        real, fake = outcome(op.overload, sample), fake_outcome(op.overload, sample, mode)
        refused = isinstance(real, str) and isinstance(fake, str) and fake.startswith("InputError")
        if real and real != fake and not refused:
            apart.append(f"{what}: eager {real}, fake {fake}")
    assert not apart, f"{op.name}: {len(apart)} calls differ\n" + "\n".join(apart[:20])


def test_options_that_must_be_at_least_one() -> None:
    found = 0
    for op in all_ops().values():
        for name in (item[:-5] for item in op.declared.items if item.endswith(" >= 1")):
            args, options = next(iter(op.samples()))
            if name in options:
                found += 1
                with pytest.raises(
                    InputError, match=f"{op.name}: {name} must be at least 1, got 0"
                ):
                    op.overload(*args, **{**options, name: 0})
    assert found >= 5
