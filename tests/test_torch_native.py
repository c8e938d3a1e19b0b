"""Native kernels: few rows, the meaning of the ops, the same bits in any company."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from graftwork.backends import cached_library
from graftwork.backends.torch import cpu, native
from graftwork.backends.torch.emit import emit
from graftwork.backends.torch.rows import Prepared
from graftwork.ir import Function, InputError, TensorType, UnsupportedError, Weight
from graftwork.ir.ops import norm
from graftwork.ir.ops.attention import attend as attend_meaning
from graftwork.ir.ops.quant import linear_int8

INTEL = platform.machine() == "x86_64"


def int8_case(rows: tuple[int, ...], columns: int, most: int) -> tuple[torch.Tensor, ...]:
    """Rows, weights and scales, extreme sums among them."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randint(-most, most + 1, (41, columns), generator=generator).to(torch.int8)
    weight[0], weight[1] = most, -most
    x = torch.randn(*rows, columns, generator=generator)
    x[0, 0] = 1
    return x, weight, torch.rand(41, generator=generator)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("columns", [5, 8, 128, 1300])
def test_int8_has_the_bits_of_its_meaning(columns, coarse, processor):
    for rows in ((1, 1), (1, 3), (2, 4), (1, 9), (3, 7), (1, 32), (1, 33), (5, 21)):
        x, weight, scale = int8_case(rows, columns, 63 if coarse else 127)
        sums, bias = cpu.row_sums(weight), torch.arange(41.0)
        result = cpu.linear_int8(x, weight, scale, bias, coarse=coarse, sums=sums)
        assert torch.equal(result, linear_int8(x, weight, scale, bias, coarse=coarse)), rows


def test_rows_of_zeros_and_halves_round_as_they_should(processor):
    x = torch.zeros(1, 3, 8)
    x[0, 1] = torch.arange(8) + 0.5
    x[0, 1, 7] = 127
    weight = torch.eye(8, dtype=torch.int8)
    sums, scale = cpu.row_sums(weight), torch.ones(8)
    result = cpu.linear_int8(x, weight, scale, sums=sums)
    assert result[0, 0].eq(0).all() and result[0, 2].eq(0).all()
    assert result[0, 1].tolist() == [0, 2, 2, 4, 4, 6, 6, 127]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1, 1), (2, 4), (1, 9), (1, 64), (1, 65), (5, 27), (1, 160)])
@pytest.mark.parametrize("columns", [7, 100, 530])
def test_float_rows_are_a_linear_layer(columns, rows, dtype, processor):
    x, weight = torch.randn(*rows, columns).to(dtype), torch.randn(101, columns).to(dtype)
    bias = torch.randn(101).to(dtype)
    for given in (None, bias):
        found, meaning = cpu.linear(x, weight, given), F.linear(x, weight, given)
        if dtype == torch.bfloat16:
            torch.testing.assert_close(found, meaning)
            continue
        # The rounding of a sum grows with the root of the number of its terms, and with their size.
        exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
        sizes = F.linear(x.double().abs(), weight.double().abs())
        bound = torch.finfo(dtype).eps * (columns**0.5 * sizes + exact.abs())
        assert bool(((found - exact).abs() <= bound).all())


@pytest.mark.parametrize("count", [1, 3, 8, 64])
@pytest.mark.parametrize("rows", [(1,), (2, 5), (0, 3)])
def test_the_largest_of_rows(rows, count, processor):
    """The largest first, and of equal ones the first; infinities and what is no number, too."""
    x = torch.randn(*rows, 1000).mul(8).round()
    if x.numel():
        x[..., 17], x[..., 40], x[..., 900] = float("-inf"), float("inf"), float("nan")
    values, places = cpu.topk(x, count)
    order = torch.where(x.isnan(), torch.tensor(float("inf")), x.clamp(max=1e30))
    wanted = order.argsort(dim=-1, descending=True, stable=True)[..., :count]
    assert torch.equal(places, wanted)
    torch.testing.assert_close(values, x.gather(-1, wanted), rtol=0, atol=0, equal_nan=True)


def test_the_largest_are_the_librarys_where_the_kernel_takes_none():
    x = torch.randn(3, 50)
    for options in ((2, 0), (2, -1, False)):
        wanted = torch.ops.aten.topk.default(x, *options)
        assert all(map(torch.equal, cpu.topk(x, *options), wanted))
    doubled = cpu.topk(x.double(), 5)
    assert doubled[0].dtype == torch.float64
    with pytest.raises(InputError, match="1 to N values of rows of N=50, got 51"):
        native.topk(x, 51)


def attention_case(width: int, dim: int, wide: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, and a mask with a past of 3 and of 70 rows."""
    capacity = 70 + width
    q, k = torch.randn(2, 4, width, dim), torch.randn(2, 2, capacity, dim)
    past = torch.tensor([3, 70])[:, None, None, None]
    mask = torch.arange(capacity) <= past + torch.arange(width)[:, None]
    return q, k, torch.randn(2, 2, capacity, wide), mask


@pytest.mark.parametrize(("dim", "wide"), [(8, 12), (64, 64), (20, 80)])
@pytest.mark.parametrize("width", [1, 3, 13])
def test_attention_is_attention(width, dim, wide, processor):
    q, k, v, mask = attention_case(width, dim, wide)
    biases = None, torch.randn(2, 4, width, k.shape[2])
    for bias, sinks, softcap in product(biases, (None, torch.randn(4)), (None, 5.0)):
        how = {"scale": 0.3, "softcap": softcap}
        want = attend_meaning(q, k, v, mask, bias, sinks, **how)
        result = cpu.attend(q, k, v, mask, bias, sinks, **how)
        torch.testing.assert_close(result, want, atol=1e-5, rtol=1e-5)


def test_attention_does_not_read_rows_that_no_token_sees(processor):
    q, k, v, mask = attention_case(3, 16, 16)
    want = cpu.attend(q, k, v, mask, scale=0.3)
    for rows in (k, v):
        rows[0, :, 6:] = float("nan")
    assert torch.equal(cpu.attend(q, k, v, mask, scale=0.3), want)


@pytest.mark.parametrize("columns", [8, 100])
def test_norms_are_norms(columns, processor):
    x, other, weight = torch.randn(2, 3, columns), torch.randn(2, 3, columns), torch.rand(columns)
    x = x + 100  # far from zero, where squares minus a square would cancel
    close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-5)
    close(cpu.rms_norm(x, weight, eps=1e-5), norm.rms_norm(x, weight, eps=1e-5))
    result = cpu.add_rms_norm(x, other, weight, eps=1e-5)
    close(result, norm.add_rms_norm(x, other, weight, eps=1e-5))
    for bias in (None, other[0, 0]):
        result = cpu.layer_norm(x, weight, bias, eps=1e-5)
        close(result, norm.layer_norm(x, weight, bias, eps=1e-5))


def on_rows(function: Callable[..., torch.Tensor], width: int, *tensors: torch.Tensor) -> None:
    """Every token of a step alone has the bits it has among the others."""
    together = function(*tensors)
    for t in range(width):
        alone = function(*(tensor[:, t : t + 1].contiguous() for tensor in tensors))
        assert torch.equal(alone, together[:, t : t + 1]), t


@pytest.mark.parametrize("width", [2, 5, 8, 19])
@pytest.mark.parametrize("columns", [100, 128])
def test_a_tokens_bits_do_not_depend_on_the_others(width, columns, processor):
    x, weight, other = torch.randn(1, width, columns), torch.randn(41, columns), torch.rand(columns)
    on_rows(lambda x: cpu.linear(x, weight), width, x)
    on_rows(lambda x: cpu.rms_norm(x, other, eps=1e-5), width, x)
    on_rows(lambda x: cpu.layer_norm(x, other, other, eps=1e-5), width, x)
    q, k, v, mask = attention_case(width, columns, columns)
    on_rows(
        lambda q, mask: cpu.attend(
            q.transpose(1, 2), k, v, mask.transpose(1, 2), scale=0.1
        ).transpose(1, 2),
        width,
        q.transpose(1, 2),
        mask.transpose(1, 2),
    )


@pytest.mark.parametrize("columns", [100, 600])
def test_a_prompts_rows_do_not_depend_on_the_others(columns, processor):
    x, weight = torch.randn(1, 150, columns), torch.randn(53, columns)
    whole = cpu.linear(x, weight)
    for first, last in ((0, 65), (50, 150), (1, 98)):
        assert torch.equal(cpu.linear(x[:, first:last], weight), whole[:, first:last])


def test_threads_do_not_change_bits():
    x, weight, scale = int8_case((1, 5), 100, 127)
    q, k, v, mask = attention_case(5, 16, 16)
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(
                (
                    cpu.linear(x, weight.float()),
                    cpu.linear(x.repeat(1, 20, 1), weight.float()),
                    cpu.linear_int8(x, weight, scale, sums=cpu.row_sums(weight)),
                    cpu.attend(q, k, v, mask, scale=0.3),
                    cpu.rms_norm(x, x[0, 0], eps=1e-5),
                )
            )
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_compiled_code_calls_the_kernels(monkeypatch):
    x, weight = torch.randn(1, 8, 100), torch.randn(41, 100)
    want = cpu.linear(x, weight)
    seen = []

    def kernel(*arguments: object) -> None:
        seen.append(arguments)
        original(*arguments)

    original = native.float32_kernel
    monkeypatch.setattr(native, "float32_kernel", kernel)
    compiled = torch.compile(cpu.linear, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x, weight), want)
    # Transposed rows are laid out anew.
    assert torch.equal(compiled(x.mT.contiguous().mT, weight), want)
    assert len(seen) == 2


def test_a_run_makes_calls_in_order_and_says_what_they_throw(tmp_path):
    source, made = tmp_path / "kernels.cpp", tmp_path / "kernels.so"
    source.write_text(
        "#include <cstdint>\n#include <stdexcept>\n"
        'extern "C" void add(int64_t* to, int64_t what) { *to = 10 * *to + what; }\n'
        'extern "C" void fail() { throw std::runtime_error("no more"); }\n'
        'extern "C" void floats(float* to, const float* what) { *to += *what; }\n'
    )
    subprocess.run([cached_library.compiler(), "-shared", "-fPIC", source, "-o", made], check=True)
    library = ctypes.CDLL(str(made))
    add, fail, floats = (native.address_in(library, name) for name in ("add", "fail", "floats"))
    whole, number = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    run = native.Run([(add, (whole, 1)), (floats, (number, 0.5)), (add, (whole, 2))])
    run()
    run()
    assert whole.item() == 1212 and number.item() == 2
    with pytest.raises(RuntimeError, match="no more"):
        native.Run([(add, (whole, 3)), (fail, ()), (add, (whole, 4))])()
    assert whole.item() == 12123


def test_what_a_row_wants_of_a_weight_is_made_once():
    fn = Function("step")
    x = fn.add_input("x", TensorType.of(torch.zeros(1, 2, 8)))
    weight = torch.randint(-127, 128, (6, 8), dtype=torch.int8)
    given = {"w": weight, "scale": torch.rand(6)}
    nodes = [fn.weight(Weight.of(name, tensor)) for name, tensor in given.items()]
    op = torch.ops.graftwork.linear_int8.default
    fn.set_outputs({"y": fn.call(op, x, *nodes)})
    made: list[torch.Tensor] = []

    def sums(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor)
        return cpu.row_sums(tensor)

    module = emit(fn, given, [], ["y"], rows={op: Prepared(cpu.linear_int8, {"sums": (1, sums)})})
    for seed in range(2):
        values = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(seed))
        want = linear_int8(values, weight, given["scale"])
        assert torch.equal(module(values)[0], want)
    assert len(made) == 1 and made[0] is weight


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder where kernels are kept, empty. Nothing is optimised, which would be slow."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cached_library, "FLAGS", (*cached_library.FLAGS, "-O0"))
    cached_library.library.cache_clear()
    yield tmp_path / "graftwork"
    cached_library.library.cache_clear()


def test_kernels_are_compiled_once_and_kept_for_this_user(no_library, monkeypatch):
    native.library()
    (kept,) = no_library.iterdir()
    assert stat.S_IMODE(no_library.stat().st_mode) == 0o700
    before = kept.stat().st_mtime_ns
    cached_library.library.cache_clear()
    native.library()
    assert [path.stat().st_mtime_ns for path in no_library.iterdir()] == [before]
    # Another processor's are others.
    monkeypatch.setattr(cached_library, "FLAGS", (*cached_library.FLAGS, "-ffp-contract=off"))
    cached_library.library.cache_clear()
    native.library()
    assert len(list(no_library.iterdir())) == 2


@pytest.mark.parametrize("made", [False, True])
def test_kernels_work_where_no_folder_can_be_written(made, no_library, monkeypatch):
    if made:
        no_library.mkdir()
        monkeypatch.setattr(cached_library.os, "access", lambda path, mode: False)
    else:
        no_library.write_text("in the way")
    x = torch.randn(1, 1, 8)
    result = cpu.rms_norm(x, x[0, 0], eps=1e-5)
    torch.testing.assert_close(result, norm.rms_norm(x, x[0, 0], eps=1e-5))
    assert not made or not list(no_library.iterdir())


@pytest.mark.parametrize(
    ("compiler", "says"), [("no-such-compiler", "not installed"), ("false", "failed")]
)
def test_without_a_compiler_the_error_says_what_to_do(compiler, says, no_library):
    other = torch._inductor.config.patch({"cpp.cxx": (None, compiler)})
    with other, pytest.raises(UnsupportedError, match=f"{compiler}.*{says}.*Install g"):
        native.library()
    assert not list(no_library.rglob("*"))


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists() or not INTEL, reason="asks Linux and x86")
def test_kernels_use_what_the_processor_has():
    able = set(Path("/proc/cpuinfo").read_text().split())
    loaded = native.library()._name.replace("self", str(os.getpid()))
    command = ["objdump", "--disassemble", "--no-show-raw-insn", loaded]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "prefetcht1" in code
    if {"avx512_vnni", "avx512bw"} <= able:
        assert "vpdpbusd" in code and "zmm" in code
    elif "avx2" in able:
        assert "vpmaddwd" in code


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_have_no_result(wrong: float) -> None:
    """Rounded to whole numbers they would become some, and a broken model look like a sound one."""
    x, weight, scale = torch.randn(3, 40), torch.ones(5, 40, dtype=torch.int8), torch.ones(5)
    x[1, 33] = wrong
    found = (
        torch.ops.graftwork.linear_int8(x, weight, scale),
        native.linear_int8(x, weight, scale, weight.sum(-1, dtype=torch.int32), False),
    )
    for result in found:
        assert result.isnan().tolist() == [[False] * 5, [True] * 5, [False] * 5]
    coarse = (
        torch.ops.graftwork.linear_int8(x, weight, scale, coarse=True),
        native.linear_int8(x, weight, scale, weight.sum(-1, dtype=torch.int32), True),
    )
    assert all(result.isnan().all() for result in coarse)
