"""Weights of few bits as ONNX Runtime's ops: torch's bits, its threads, no second copy."""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as oir
import onnxruntime
import pytest
import quantized
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.backends import cached_library, tiles
from graftwork.backends.onnxruntime import probe
from graftwork.backends.onnxruntime.emit import IR_VERSION, OWN, Emitted, Emitter
from graftwork.backends.onnxruntime.rows_tiles import quantized_embedding, quantized_linear
from graftwork.backends.onnxruntime.session import open_session, register_own_ops
from graftwork.backends.onnxruntime.store import WeightFile, store
from graftwork.backends.pages import Trimmer
from graftwork.backends.target import Target
from graftwork.backends.torch import native_quantized as native
from graftwork.ir import Function, Weight, WeightStore
from graftwork.ir.support.errors import GraftworkWarning


def weights_of(w: quantized.Weight) -> list[Weight | None]:
    named = {"w": w.packed, "scale": w.scale, "offset": w.offset, "codebook": w.codebook}
    return [None if t is None else Weight.of(name, t) for name, t in named.items()]


def session_of(w: quantized.Weight, folder: Path, threads: int, kind: str = "linear") -> Any:
    """A session with one node: x -> out."""
    e = Emitter(Function("call"), WeightStore())
    looks_up = kind == "embedding"
    element = oir.DataType.INT64 if looks_up else oir.DataType.FLOAT
    x = oir.val("x", dtype=element, shape=["R"] if looks_up else [*"RS", w.q.shape[1]])
    e.graph.inputs.append(x)
    sizes = {"bits": w.bits, "group": w.group}
    if looks_up:
        out = quantized_embedding(e, x, weights_of(w), **sizes)
    else:
        bias = None if w.bias is None else e.weight(Weight.of("bias", w.bias))
        rounded = kind == "linear"
        out = quantized_linear(e, x, weights_of(w), bias, **sizes, rounded=rounded, span=w.span)
    out.name, out.dtype = "out", oir.DataType.FLOAT
    e.graph.outputs.append(out)
    path = folder / "model.onnx"
    model = oir.Model(e.graph, ir_version=IR_VERSION)
    emitted = Emitted(model, tuple(e.pending.values()))
    assert emitted.has_own_ops
    store(emitted, path, WeightFile(folder / "weights"))
    return open_session(path, Target.parse("onnxruntime:cpu"), threads=threads, own_ops=True)


def ran(session: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@given(quantized.weights, st.sampled_from(((1, 1), (2, 3), (1, 9), (5, 8), (0, 2))))
def test_products_have_torchs_bits(w, shape):
    w = w._replace(span=w.spans[0] if w.bias is None else 0)
    x = quantized.rows(1, *shape, w.q.shape[1])
    want = native.quantized_linear(x, *w.in_tiles(), *w.sizes, w.span)
    assert torch.equal(want, quantized.linear(x, w))
    for threads in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            assert torch.equal(ran(session_of(w, Path(folder), threads), x), want)


@given(quantized.weights, st.sampled_from(((1, 1), (2, 3), (1, 9))))
def test_float_products_have_torchs_bits(w, shape):
    x = quantized.rows(1, *shape, w.q.shape[1])
    want = native.float_linear(x, *w.table_in_tiles(), w.bias, *w.table_sizes)
    with tempfile.TemporaryDirectory() as folder:
        assert torch.equal(ran(session_of(w, Path(folder), 2, "float"), x), want)


@pytest.mark.parametrize("kind", quantized.KINDS)
@pytest.mark.parametrize("bits", quantized.BITS)
def test_work_that_is_shared_out_has_the_same_bits(bits, kind, tmp_path):
    w = quantized.weight(bits, 2100, 64, 4, bits, kind, bias=True)
    session = session_of(w, tmp_path, 2)
    for count in (1, 8, 70):
        x = quantized.rows(count, 1, count, 256)
        assert torch.equal(ran(session, x), native.quantized_linear(x, *w.in_tiles(), *w.sizes))


@given(quantized.weights)
def test_rows_of_a_table_have_torchs_bits(w):
    ids = torch.randint(0, len(w.q), (7,))
    with tempfile.TemporaryDirectory() as folder:
        session = session_of(w, Path(folder), 2, "embedding")
        assert torch.equal(ran(session, ids), quantized.table(w)[ids])
        with pytest.raises(Exception, match="index 70 lies outside"):
            ran(session, torch.tensor([0, 70]))


def test_runs_of_several_threads_at_once_do_not_disturb_each_other(tmp_path):
    w = quantized.weight(3, 1000, 32, 32, 4, "offset", half=True)
    session = session_of(w, tmp_path, 2)
    given = [quantized.rows(n, 1, n, 1024) for n in (1, 8, 30, 70)]
    want = [quantized.linear(x, w) for x in given]
    wrong: list[int] = []

    def work(n: int) -> None:
        same = (torch.equal(ran(session, given[n]), want[n]) for _ in range(100))
        if not all(same):
            wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what memory is what")
def test_weights_stay_in_the_mapped_file(tmp_path):
    w = quantized.weight(0, 4096, 128, 32, 4, "symmetric", half=True)
    packed = tiles.tile_values(w.packed, bits=4, group=128).nbytes
    session_of(w, tmp_path, 1)  # what a session takes by itself
    x = torch.randn(1, 1, 4096)
    before = anonymous()
    session = session_of(w, tmp_path, 1)
    result = ran(session, x)
    assert anonymous() - before < packed / 2
    assert torch.equal(result, quantized.linear(x, w))


def anonymous() -> int:
    """Bytes of this process' memory that belong to no file."""
    gc.collect()
    Trimmer().done()
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(found.split()[1]) << 10


def node(op: str, sizes: dict[str, int], **operands: torch.Tensor | None) -> Any:
    """Run one node on operands that are all inputs."""
    values = {}
    for name, tensor in operands.items():
        if tensor is not None:
            made = oir.tensor(tensor.numpy())
            values[name] = oir.val(name, dtype=made.dtype, shape=[None] * tensor.dim())
    inputs = [values.get(name) for name in operands]
    made = oir.node(op, inputs, sizes, domain=OWN)
    made.outputs[0].name, made.outputs[0].dtype = "out", oir.DataType.FLOAT
    given, opsets = [v for v in inputs if v is not None], {"": 24, OWN: 1}
    graph = oir.Graph(given, made.outputs, nodes=[made], opset_imports=opsets, name="one")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    register_own_ops(options)
    data = oir.to_proto(oir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    return session.run(None, {v.name: operands[v.name].numpy() for v in given})[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"x": torch.randn(3, 33)}, "multiple of group"),
        ({"x": torch.randn(3, 0)}, "multiple of group"),
        ({"x": torch.tensor(1.0)}, "x must be"),
        ({"packed": torch.zeros(2, 2, 127, dtype=torch.uint8)}, "packed must be"),
        ({"packed": torch.zeros(1, 2, 128, dtype=torch.uint8)}, "packed must be"),
        ({"packed": torch.zeros(512, dtype=torch.uint8)}, "packed must be"),
        ({"scale": torch.zeros(2, 2, 15)}, "scale must be"),
        ({"scale": torch.zeros(2, 2, 16).double()}, "float or half"),
        ({"offset": torch.zeros(2, 1, 16)}, "offset must be"),
        ({"offset": torch.zeros(2, 2, 16).int()}, "float or half"),
        ({"table": torch.zeros(16, dtype=torch.int8)}, "goes with no offset"),
        ({"table": torch.zeros(15, dtype=torch.int8), "offset": None}, "codebooks must be of"),
        (
            {"table": torch.zeros(2, 16, dtype=torch.int8), "offset": None},
            "must be of whole tiles",
        ),
        ({"bias": torch.zeros(19)}, "bias must be"),
        ({"bits": 5}, "bits must be"),
        ({"bits": 3}, "packed must be"),
        ({"group": 0}, "group must be"),
        ({"group": 1 << 40}, "group must be"),
        ({"N": 33}, "packed must be"),
        ({"N": -1}, "N must"),
        ({"span": 24}, "spans must divide K"),
        ({"span": -16}, "spans must divide K"),
        ({"span": 8}, "whole spans of 16"),
    ],
)
def test_a_product_whose_operands_do_not_fit_is_refused(changes, says):
    w = quantized.weight(0, 20, 16, 2, 4, "offset", bias=True)
    packed, scale, offset, table, bias = w.in_tiles()
    given = {"x": quantized.rows(0, 3, 32), "packed": packed, "scale": scale, "offset": offset}
    given |= {"table": table, "bias": bias, "bits": 4, "group": 16, "N": 20}
    given |= {"span": 0, **changes}
    sizes = {name: given.pop(name) for name in ("bits", "group", "N", "span")}
    if says is None:
        want = quantized.linear(given["x"], w)
        assert torch.equal(torch.from_numpy(node("QuantizedLinear", sizes, **given)), want)
        return
    with pytest.raises(Exception, match=says):
        node("QuantizedLinear", sizes, **given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"x": torch.zeros(2, 4, 32)}, "x must be"),
        ({"experts": torch.tensor([0, 1, 0])}, "experts must be"),
        ({"experts": torch.tensor([[0], [2], [1]])}, "index 2 lies outside 0..1"),
        ({"experts": torch.tensor([[0], [-1], [1]])}, "index -1 lies outside 0..1"),
        ({"packed": torch.zeros(1, 2, 128, dtype=torch.uint8)}, "packed must be"),
        ({"scale": torch.zeros(2, 2, 15)}, "scale must be"),
        ({"offset": torch.zeros(1, 2, 16)}, "offset must be"),
        ({"bias": torch.zeros(32)}, "bias must be"),
        ({"N": 20}, "whole tiles"),
        ({"E": 0}, "whole tiles"),
        ({"E": 1 << 50}, "too many experts"),
    ],
)
def test_products_of_experts_that_do_not_fit_are_refused(changes, says):
    w = quantized.weight(0, 32, 16, 2, 4, "offset")
    packed, scale, offset, _ = w.table_in_tiles()
    given = {"x": quantized.rows(0, 3, 32), "experts": torch.tensor([[0], [1], [1]])}
    given |= {"packed": packed, "scale": scale, "offset": offset, "bias": torch.zeros(2, 16)}
    given |= {"bits": 4, "group": 16, "N": 16, "E": 2, "rounded": 1, "span": 0}
    given |= changes
    sizes = {name: given.pop(name) for name in ("bits", "group", "N", "E", "rounded", "span")}
    if says is None:
        every = quantized.linear(given["x"], w).view(3, 2, 16)
        want = torch.stack([every[0, 0], every[1, 1], every[2, 1]])[:, None]
        assert torch.equal(torch.from_numpy(node("QuantizedExperts", sizes, **given)), want)
        return
    with pytest.raises(Exception, match=says):
        node("QuantizedExperts", sizes, **given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"packed": torch.zeros(2, 2, 127, dtype=torch.uint8)}, "packed must be"),
        ({"packed": torch.zeros(1, 2, 128, dtype=torch.uint8)}, "packed must be"),
        ({"scale": torch.zeros(20)}, "scale must be"),
        ({"scale": torch.zeros(2, 0, 16)}, "must have columns"),
        ({"scale": torch.zeros(2, 2, 15)}, "scale must be"),
        ({"offset": torch.zeros(2, 1, 16)}, "offset must be"),
        ({"N": 33}, "packed must be"),
        ({"N": -1}, "N must"),
        ({"codebook": torch.zeros(16)}, "goes with no offset"),
        ({"codebook": torch.zeros(8), "offset": None}, "codebook must be"),
        ({"ids": torch.tensor([20])}, "lies outside 0..19"),
        ({"ids": torch.tensor([-1])}, "lies outside 0..19"),
    ],
)
def test_rows_of_a_table_that_does_not_fit_are_refused(changes, says):
    w = quantized.weight(0, 20, 16, 2, 4, "offset")
    given = dict(zip(("packed", "scale", "offset", "codebook"), w.table_in_tiles(), strict=True))
    given = {"ids": torch.tensor([3]), **given, "bits": 4, "group": 16, "N": 20} | changes
    sizes = {name: given.pop(name) for name in ("bits", "group", "N")}
    with pytest.raises(Exception, match=says):
        node("QuantizedEmbedding", sizes, **given)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The probe looks again, in this test and after it."""
    probe.quantized_ops_available.cache_clear()
    cached_library.library.cache_clear()
    yield
    probe.quantized_ops_available.cache_clear()
    cached_library.library.cache_clear()


def test_here_they_can_be_used():
    assert probe.quantized_ops_available() == ""


def test_without_a_compiler_the_reason_says_so(asked_anew, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    missing = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with missing, pytest.warns(GraftworkWarning, match="no-such-compiler"):
        assert probe.quantized_ops_available()


def test_a_runtime_that_takes_no_libraries_is_a_reason(asked_anew, monkeypatch):
    monkeypatch.delattr(onnxruntime.SessionOptions, "register_custom_ops_library")
    with pytest.warns(GraftworkWarning, match="does not run ops of other libraries"):
        assert probe.quantized_ops_available()


def test_wrong_numbers_are_a_reason(asked_anew, monkeypatch):
    monkeypatch.setattr(probe.tiles, "tile_columns", lambda scale: tiles_columns(scale) * 2)
    with pytest.warns(GraftworkWarning, match="wrong numbers"):
        assert probe.quantized_ops_available()


tiles_columns = tiles.tile_columns
