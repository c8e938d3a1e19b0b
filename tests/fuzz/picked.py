"""Random calls of the kernels that pick rows of a cache, or say what attention they get."""

from __future__ import annotations

from typing import Any

import torch
from operands import F32, Case, Maker, want
from torch import Tensor

from graftwork.backends.torch import native
from graftwork.ir.ops import eviction, sparse


def stored(make: Maker) -> tuple[int, bool, int]:
    """Bits, whether rows are turned, and a row's width, now and then one that does not fit them."""
    bits, turned = make.random.choice((4, 8)), make.random.random() < 0.5
    width = make.random.choice((2, 8, 64) if turned else (2, 6, 34))
    strange = make.random.random()
    if strange < 0.1:
        return make.random.choice((0, 3, 32)), turned, width
    return bits, turned, width if strange < 0.9 else make.random.choice((1, 6, 7))


def _picking(make: Maker, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Queries and a mask over 19 rows, as whole numbers: products are exact; and options."""
    draw, groups, tokens = make.random.choice, make.random.choice((1, 2)), make.size()
    shape = draw((1, 2)), groups * draw((1, 3)), tokens, width
    q = torch.randint(-3, 4, shape, generator=make.generator).float()
    mask = torch.rand(shape[0], 1, tokens, 19, generator=make.generator) < draw((0.0, 0.6, 1.0))
    options = {"rows": draw((0, 1, 4, 30)), "scale": 0.25, "softcap": draw((None, 5.0))}
    options["picks"] = draw((shape[1], shape[1], groups, 0))
    return {"q": q, "groups": groups, "mask": mask}, options


def native_top_rows(make: Maker) -> Case:
    given, options = _picking(make, make.random.choice((1, 8, 24)))
    q, groups = given["q"], given["groups"]
    k = torch.randint(-3, 4, (len(q), groups, 19, q.shape[3]), generator=make.generator).float()

    def meaning(*tensors: Any, **how: Any) -> Tensor:
        want(all(t.dtype == F32 for t in tensors[:2]))
        return sparse.top_rows(*tensors, **how)

    def call(*tensors: Any, rows: int, picks: int, scale: float, softcap: float | None) -> Any:
        return native.OPS["top_rows"](*tensors, rows, picks, scale, softcap or 0.0)

    operands = {"q": q, "k": k, "mask": given["mask"]}
    return Case("top_rows", call, meaning, operands, options, fake=True)


def native_top_stored_rows(make: Maker) -> Case:
    bits, _, width = stored(make)
    given, options = _picking(make, width)
    shape = len(given["q"]), given["groups"], 19
    codes = torch.randint(0, 256, (*shape, width * bits // 8), generator=make.generator)
    steps = torch.randint(-2, 3, (*shape, 2), generator=make.generator).float()

    def meaning(*tensors: Any, **how: Any) -> Tensor:
        want(tensors[0].dtype == F32)
        return sparse.top_stored_rows(*tensors, **how)

    def call(*tensors: Any, bits: int, rows: int, picks: int, **how: float | None) -> Any:
        scale, softcap = how["scale"], how["softcap"] or 0.0
        return native.OPS["top_stored_rows"](*tensors, bits, rows, picks, scale, softcap)

    operands = {"q": given["q"], "codes": codes.to(torch.uint8), "steps": steps}
    operands["mask"] = given["mask"]
    how = {"bits": bits, **options}
    return Case("top_stored_rows", call, meaning, operands, how, fake=True)


def native_chunk_rows(make: Maker) -> Case:
    given, options = _picking(make, 6)
    q, groups, draw = given["q"], given["groups"], make.random.choice
    marks = torch.randint(-1, 2, (len(q), groups, draw((0, 9)), 6), generator=make.generator)
    past = torch.tensor([draw((0, 3, 9, 19, 20, -1)) for _ in q])
    how: dict[str, Any] = {"chunks": options["rows"], "chunk": draw((2, 2, 3)), "block": 4}
    how |= {"latest": draw((3, 6)), "scale": 0.5, "softcap": options["softcap"]}

    def meaning(*tensors: Any, **told: Any) -> Tensor:
        *floats, mask, past = tensors
        want(all(t.dtype == F32 for t in floats) and mask.dim() == 4 and mask.shape[3] > 0)
        want(bool(((past >= 0) & (past <= mask.shape[3])).all()))
        return sparse.chunk_rows(*tensors, **told)

    def call(*tensors: Any, softcap: float | None, **told: Any) -> Any:
        return native.OPS["chunk_rows"](*tensors, *told.values(), softcap or 0.0)

    # What `past` is worth no shape rule knows.
    operands = {"q": q, "marks": marks.float(), "mask": given["mask"], "past": past}
    return Case("chunk_rows", call, meaning, operands, how)


def native_take_channels(make: Maker) -> Case:
    q, groups = (_picking(make, 8)[0][name] for name in ("q", "groups"))
    last = 8 + (make.random.random() < 0.1)
    channels = torch.randint(0, last, (groups, 3), generator=make.generator)

    def meaning(x: Tensor, channels: Tensor) -> Tensor:
        want(x.dtype == F32 and bool(((channels >= 0) & (channels < x.shape[-1])).all()))
        return sparse.take_channels(x, channels)

    # What channels are worth no shape rule knows.
    operands = {"x": q, "channels": channels}
    return Case("take_channels", native.OPS["take_channels"], meaning, operands, {})


def native_row_attention(make: Maker) -> Case:
    draw, groups, width = make.random.choice, make.random.choice((1, 2)), make.size()
    shape = draw((1, 2)), groups * draw((1, 3)), draw((3, 4, 9)), width
    past = torch.tensor([draw((0, 1, 4, 9, 18, 19) * 2 + (20, -1)) for _ in range(shape[0])])
    operands = {"queries": make.numbers(*shape), "keys": make.numbers(shape[0], groups, 19, width)}
    operands["past"] = past
    options = {"block": draw((1, 3, 3, 4)), "last": draw((1, 1, 3, 3, 0)), "scale": 0.25}
    options["softcap"] = draw((None, 5.0))

    def meaning(*tensors: Any, **told: Any) -> Tensor:
        want(all(t.dtype == F32 for t in tensors[:2]))
        want(told["block"] <= tensors[0].shape[2])
        want(bool(((tensors[2] >= 0) & (tensors[2] <= tensors[1].shape[2])).all()))
        return eviction.row_attention(*tensors, **told)

    def call(*tensors: Any, softcap: float | None, **told: Any) -> Any:
        return native.OPS["row_attention"](*tensors, *told.values(), softcap or 0.0)

    # What `past` is worth no shape rule knows.
    return Case("row_attention", call, meaning, operands, options)


def native_keep_top(make: Maker) -> Case:
    draw = make.random.choice
    shape = draw((1, 2)), draw((1, 3)), draw((5, 9, 24))
    most = draw((3, 2**24))
    scores = torch.randint(-most, most, shape, generator=make.generator).float()
    past = torch.tensor([draw((0, 4, 8, 9, 24)) for _ in range(shape[0])])
    options = {"rows": draw((4, 4, 5, 9)), "full": draw((8, 8, 9))}
    options |= {"sinks": draw((0, 1, 1, -1)), "recent": draw((0, 2, 2, 5))}

    def meaning(*tensors: Tensor, **told: int) -> Tensor:
        want(told["rows"] <= tensors[0].shape[2])
        return eviction.keep_top(*tensors, **told)

    def call(*tensors: Tensor, **told: int) -> Any:
        return native.OPS["keep_top"](*tensors, *told.values())

    operands = {"scores": scores, "past": past}
    return Case("keep_top", call, meaning, operands, options)
