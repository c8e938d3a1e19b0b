"""Products with weights of few bits as a GPU works them out; without one, by Triton's interpreter
(see conftest.py), which multiplies no tiles of bfloat16."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import quantized
import torch
from selection import one_in

from graftwork.backends.cuda_blocks import Units, units
from graftwork.backends.torch import gpu_products
from graftwork.backends.torch.gpu_products import FEW, WIDE, quantized_linear
from graftwork.ir import InputError
from graftwork.ir.ops import op_of

pytest.importorskip("triton")

MEANING: Any = op_of(torch.ops.graftwork.quantized_linear.default)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


Stored = tuple[torch.Tensor | None, ...]


def check(
    stored: Stored, x: torch.Tensor, bits: int, group: int, rounded: bool, bound: float
) -> None:
    """Whether products are those of the op's meaning. stored: weight, scale, offset, codebook,
    bias."""
    options: dict[str, Any] = {"bits": bits, "group": group, "rounded": rounded}
    wanted = MEANING.meaning(x, *stored, **options)
    there = [None if part is None else part.to(DEVICE) for part in (x, *stored)]
    found = quantized_linear(*there, **options)  # type: ignore[arg-type]
    assert found.dtype == x.dtype and found.shape == wanted.shape
    error = (found.cpu().float() - wanted.float()).abs().amax(-1)
    assert (error <= bound * wanted.float().abs().amax(-1)).all()


def stored_as(weight: quantized.Weight) -> Stored:
    return weight.packed, weight.scale, weight.offset, weight.codebook, weight.bias


@pytest.mark.parametrize(
    ("bits", "kind", "tokens"),
    one_in(4, product(quantized.BITS, quantized.KINDS, [1, FEW + 1, WIDE + 1])),
)
def test_products_are_what_the_op_means(bits: int, kind: str, tokens: int) -> None:
    for dtype, half, rounded in (
        (torch.float32, False, True),
        (torch.float32, True, False),
        (HALF, True, True),
        (HALF, True, False),
    ):
        weight = quantized.weight(bits, 18, 32, 3, bits, kind, half=half, bias=True)
        x = quantized.rows(tokens, 1, tokens, weight.q.shape[1])
        x = x if dtype == torch.float32 else x.sign().to(dtype) * torch.rand_like(x).to(dtype)
        check(stored_as(weight), x, bits, 32, rounded, BOUNDS[dtype])


@pytest.mark.parametrize(
    ("bits", "group", "tokens"), one_in(5, product([3, 4, 8], [8, 96, 128, 1152], [3, 20]))
)
def test_groups_of_any_size(bits: int, group: int, tokens: int) -> None:
    """That fill a tile, share one with others, or span several; those of 96 do none of it."""
    for kind in ("offset", "symmetric"):
        weight = quantized.weight(group, 12, group, 1152 // group, bits, kind)
        x = torch.randn(1, tokens, weight.q.shape[1])
        check(stored_as(weight), x, bits, group, True, BOUNDS[torch.float32])
        check(stored_as(weight), x.to(HALF), bits, group, True, BOUNDS[HALF])


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("entries", [16, 32], ids=["books", "pairs"])
def test_outputs_have_codebooks_of_their_own(entries: int, rounded: bool, tokens: int) -> None:
    weight = quantized.weight(1, 12, 32, 4, 4, "symmetric")
    random = torch.Generator().manual_seed(entries)
    books = torch.randint(-127, 128, (3, entries), generator=random).float()
    if not rounded:
        books = books + 0.25
    stored = weight.packed, weight.scale, None, books, None
    x = quantized.rows(tokens, 1, tokens, 128)
    check(stored, x, 4, 32, rounded, BOUNDS[torch.float32])
    check(stored, x.sign().to(HALF), 4, 32, rounded, BOUNDS[HALF])


@pytest.mark.long
def test_kernels_compile_for_gpus_that_are_not_there() -> None:
    """The interpreter takes what no compiler does, and has no end of shared memory."""
    program = Path(__file__).with_name("gpu_kernels_compile.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(shared) == 44 and max(shared) <= 99 << 10


def test_rows_that_are_not_finite_give_none_that_are(tokens: int = 2) -> None:
    weight = quantized.weight(1, 12, 32, 4, 4, "symmetric")
    x = quantized.rows(1, 1, tokens, 128)
    x[0, 0, 3] = float("inf")
    given = [part.to(DEVICE) for part in (x, weight.packed, weight.scale)]
    found = quantized_linear(*given, bits=4, group=32).cpu()
    assert not found[0, 0].isfinite().any() and found[0, 1].isfinite().all()


def test_units_hold_whole_values_of_one_group() -> None:
    assert units(4, 32, 128) == Units(4, 8, 16, 4)
    assert units(4, 2, 128) == Units(1, 2, 64, 1)  # four bytes would hold four groups
    assert units(8, 5, 10) == Units(1, 1, 10, 5)  # rows are no whole words
    assert units(3, 8, 64) == Units(3, 8, 8, 1)
    assert units(3, 4, 64) is None and units(4, 1, 64) is None


def halves(code: str, dtype: torch.dtype, *given: int) -> tuple[float, float]:
    """What a run of PTX leaves in $0, as its two numbers of 16 bits; $1 and so on as given."""
    held = {f"${place}": value for place, value in enumerate(given, 1)}

    def numbers(word: int) -> torch.Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.uint16).view(dtype)

    def word(pair: torch.Tensor) -> int:
        low, high = pair.to(dtype).view(torch.uint16).tolist()
        return int(low | high << 16)

    def select(a: int, b: int, places: int) -> int:
        every = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
        return int.from_bytes([every[places >> 4 * i & 7] for i in range(4)], "little")

    does: dict[str, Any] = {
        "shr": lambda a, b: a >> b,
        "prmt": select,
        "lop3": lambda a, b, c, table: a & b | c if table == 0xEA else None,
        "mov": lambda a: a,
        "fma": lambda a, b, c: word(
            numbers(a).double() * numbers(b).double() + numbers(c).double()
        ),
    }
    for line in code.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and not name.startswith("."):
            into, *operands = (part.strip() for part in rest.split(","))
            values = [held[o] if o in held else int(o, 0) for o in operands]
            held[into] = does[name.split(".")[0]](*values)
    low, high = numbers(held["$0"]).tolist()
    return low, high


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_code_for_two_neighbours(bits: int, dtype: torch.dtype) -> None:
    """The interpreter runs no PTX, so it is read here: numbers of two units, and what scales and
    offsets make of them."""
    kernels = importlib.import_module("graftwork.backends.torch.gpu_kernels")
    half, size = dtype == torch.float16, 3 if bits in (3, 6) else 4
    if bits == 8 and not half:
        pytest.skip("a mantissa of bfloat16 holds 7 bits")
    units = [random.Random(bits + i).getrandbits(8 * size) for i in range(2)]
    lower, upper = (units[0] >> s & 0xFFFF | (units[1] >> s & 0xFFFF) << 16 for s in (0, 16))
    shared = 8 % bits == 0
    first = (lower, upper) if shared else (units[0], units[1])
    scale = torch.tensor([0.5, -3.0], dtype=dtype).view(torch.int32).item() & 0xFFFFFFFF
    offset = torch.tensor([0.25, 2.0], dtype=dtype).view(torch.int32).item() & 0xFFFFFFFF
    for shift in range(0, 8 * size, bits):
        stored = [unit >> shift & (1 << bits) - 1 for unit in units]
        less = 1 << bits - 1
        wanted = [float(value - less) for value in stored]
        code = [kernels._code(shift, bits, less, half, shared, scaled) for scaled in range(3)]
        assert halves(code[0], dtype, *first) == tuple(wanted)
        scaled = wanted[0] * 0.5, wanted[1] * -3.0
        assert halves(code[1], dtype, *first, scale) == scaled
        assert halves(code[2], dtype, *first, scale, offset) == (scaled[0] + 0.25, scaled[1] + 2.0)


BYTE, UNSIGNED = torch.int8, torch.uint8


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def operands(**other: torch.Tensor) -> list[Any]:
    given = {"x": zeros(2, 1, 16, 4, dtype=BYTE), "weight": zeros(12, 64, dtype=UNSIGNED)}
    given |= {"scale": zeros(12, 4)} | other
    return [*(given[name] for name in ("x", "weight", "scale")), None, None, 4]


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("x", zeros(2, 1, 8, 4, dtype=BYTE), r"x must be \[2, 1, 16, 4\] for"),
        ("x", zeros(4, 1, 16), r"x must be \[8, 1, 16\]"),
        ("x", zeros(16, 4), "three axes of x"),
        ("weight", zeros(12, 128, dtype=UNSIGNED)[:, ::2], "weight must be contiguous"),
        ("weight", zeros(769, dtype=UNSIGNED)[1:].view(12, 64), "multiple of 4 bytes"),
        ("scale", zeros(11, 4), "scale"),
        ("scale", zeros(12, 3), "group"),
        ("scale", zeros(12, 128), "no units hold 4 bits in groups of 1"),
        ("scale", zeros(12, 4, dtype=torch.int32), "scale"),
    ],
)
def test_kernels_read_nothing_but_what_they_were_given(
    name: str, other: torch.Tensor, said: str
) -> None:
    gpu_products.few_bits(*operands())
    with pytest.raises(InputError, match="bits: expected one of"):
        gpu_products.few_bits(*operands()[:-1], 0)
    with pytest.raises(InputError, match=said):
        gpu_products.few_bits(*operands(**{name: other}))
