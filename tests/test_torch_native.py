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
from graftwork.ir import InputError, UnsupportedError
from graftwork.ir.ops import norm
from graftwork.ir.ops.attention import attend as attend_meaning

INTEL = platform.machine() == "x86_64"


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
        result = cpu.OWN["attend"](q, k, v, mask, bias, sinks, **how)
        torch.testing.assert_close(result, want, atol=1e-5, rtol=1e-5)


def test_attention_does_not_read_rows_that_no_token_sees(processor):
    q, k, v, mask = attention_case(3, 16, 16)
    want = cpu.OWN["attend"](q, k, v, mask, scale=0.3)
    for rows in (k, v):
        rows[0, :, 6:] = float("nan")
    assert torch.equal(cpu.OWN["attend"](q, k, v, mask, scale=0.3), want)


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
        lambda q, mask: cpu.OWN["attend"](
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
    x, weight = torch.randn(1, 5, 100), torch.randn(41, 100)
    q, k, v, mask = attention_case(5, 16, 16)
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(
                (
                    cpu.linear(x, weight),
                    cpu.linear(x.repeat(1, 20, 1), weight),
                    cpu.OWN["attend"](q, k, v, mask, scale=0.3),
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


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder where kernels are kept, empty. Nothing is optimised, which would be slow."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cached_library, "FLAGS", (*cached_library.FLAGS, "-O0"))
    cached_library.library.cache_clear()
    yield tmp_path / "graftwork"
    cached_library.library.cache_clear()


@pytest.mark.long
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


@pytest.mark.long
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
    code = ""
    for library in (native.library(), cached_library.library(cached_library.SHARED)):
        loaded = library._name.replace("self", str(os.getpid()))
        command = ["objdump", "--disassemble", "--no-show-raw-insn", loaded]
        code += subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "prefetcht1" in code
    if {"avx512_vnni", "avx512bw"} <= able:
        assert "vpdpbusd" in code and "zmm" in code
    elif "avx2" in able:
        assert "vpmaddwd" in code
