"""Weights of a few bits in ONNX Runtime: which kernel takes them, and what it makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handmade import Shape, cached_llama
from onnxruntime_helpers import run_session
from selection import one_in
from test_onnxruntime_executable import executable, logits_by_widths, reference_logits, step_of
from test_onnxruntime_export import Loop, expected, tokens_of
from tiny import in_int8

from graftwork.backends.cuda_blocks import runs_on_cuda
from graftwork.backends.onnxruntime import probe, routing, rows_quantized
from graftwork.backends.onnxruntime import session as sessions
from graftwork.backends.onnxruntime.decompose import decompose
from graftwork.backends.onnxruntime.emit import emit
from graftwork.backends.onnxruntime.probe import rows_of_few_bits_are_exact
from graftwork.backends.target import Target
from graftwork.backends.tiles import kernel_name
from graftwork.exporting.onnx_folder import export_onnx
from graftwork.ir import Function, Program, TensorType, UnsupportedError, Weight, WeightStore
from graftwork.ir.ops.numerics import WIDTHS, Numeric
from graftwork.ir.ops.quantized import quantized_linear
from graftwork.passes.numerics.quantize_weights import QuantizeWeights

G = torch.ops.graftwork
K, N = 192, 40
TOLERANCE = 0.02
"""Of the largest result: what rounding activations by block and by row may differ by."""


FORMATS = [
    (bits, kind)
    for bits in WIDTHS
    for kind in ("symmetric", "affine", "codebook")
    if (bits, kind) != (1, "symmetric")
]


def call(
    bits: int,
    group: int,
    kind: Any,
    rounded: bool = True,
    scale: torch.dtype = torch.float16,
    columns: int = K,
) -> tuple[Function, dict[str, Weight], dict[str, Any]]:
    """A function y = quantized_linear(a, ...) of a random weight; its operands and options."""
    random = torch.Generator().manual_seed(bits)
    book = torch.linspace(-127, 127, 2**bits).round() if kind == "codebook" else None
    weight = torch.randn(N, columns, generator=random)
    stored = Numeric(bits, group, kind, scale).quantize(weight, book)
    given: dict[str, Any] = {**stored._asdict(), "codebook": book}
    given["bias"] = torch.randn(N, generator=random)
    options: dict[str, Any] = {"bits": bits, "group": group, "rounded": rounded}
    fn = Function("call")
    x = fn.add_input("a", TensorType.parse(f"f32[B,T,{columns}]"))
    weights = {name: Weight.of(name, t) for name, t in given.items() if t is not None}
    nodes = [fn.weight(weights[name]) if name in weights else None for name in given]
    fn.set_outputs({"y": fn.call(G.quantized_linear.default, x, *nodes, **options)})
    return fn, weights, {**given, **options}


def rows(count: int, columns: int = K) -> torch.Tensor:
    """Rows f32[1,count,K] of different sizes, one of zeros."""
    found = torch.randn(1, count, columns, generator=torch.Generator().manual_seed(count))
    found *= torch.logspace(-2, 2, count)[:, None]
    found[0, count // 2] = 0
    return found


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of a row, over the largest of its values."""
    wide = wanted.abs().amax(-1).clamp(min=1e-9)
    return float(((found - wanted).abs().amax(-1) / wide).max())


def kernels(fn: Function, weights: dict[str, Weight], standard: bool = False) -> list[Any]:
    assert decompose(fn) == 0
    graph = emit(fn, WeightStore(weights), standard=standard).model.graph
    return [node for node in graph if node.op_type in ("MatMulNBits", "MatMul")]


@pytest.mark.parametrize("group", [16, 32, 48, 64, 192, 8])
@pytest.mark.parametrize(("bits", "kind"), FORMATS)
def test_rounded_products_are_the_meaning_but_for_rounding(
    bits: int, kind: str, group: int, tmp_path: Path
) -> None:
    fn, weights, operands = call(bits, group, kind)
    x = rows(6)
    wanted = quantized_linear(x, **operands)
    found = run_session(fn, {"a": x}, tmp_path, weights)["y"]
    assert error(found, wanted) < TOLERANCE
    assert torch.equal(found[0, 3], operands["bias"])


@pytest.mark.parametrize("group", [16, 64, 8])
@pytest.mark.parametrize(("bits", "kind"), FORMATS)
def test_float_products_are_the_meaning(bits: int, kind: str, group: int, tmp_path: Path) -> None:
    fn, weights, operands = call(bits, group, kind, rounded=False, scale=torch.float32)
    x = rows(6)
    found = run_session(fn, {"a": x}, tmp_path, weights)["y"]
    assert error(found, quantized_linear(x, **operands)) < 1e-5


@pytest.mark.parametrize("group", [16, 96, 192])
@pytest.mark.parametrize(("bits", "kind"), [each for each in FORMATS if each[1] != "codebook"])
def test_products_for_cuda_are_the_meaning_of_what_is_not_rounded(
    bits: int, kind: str, group: int, tmp_path: Path
) -> None:
    """Its provider's graph, on the CPU's: the same layout, and no op that it has not."""
    fn, weights, operands = call(bits, group, kind, scale=torch.float32)
    x = rows(6)
    found = run_session(fn, {"a": x}, tmp_path, weights, cuda=True)["y"]
    assert error(found, quantized_linear(x, **{**operands, "rounded": False})) < 1e-5
    graph = emit(fn, WeightStore(weights), cuda=True).model.graph
    ops = {node.op_type for node in graph}
    assert "MatMulNBits" in ops and not ops & {"MatMulIntegerToFloat", "QuantizeLinear"}


def test_a_lone_token_is_one_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is rounded; here its attention is that of two."""
    monkeypatch.setattr(routing, "attention_kernel_works", lambda *_: True)
    program = in_int8().run(cached_llama(Shape())).program
    found = {}
    for device in ("cpu", "cuda"):
        target = Target("onnxruntime", device)
        router = routing.Router(program, program.step, target, native=False)
        found[device] = router.pairs or router.widens
    assert found == {"cpu": True, "cuda": False}


def test_products_that_cuda_has_no_kernel_for_are_refused() -> None:
    for bits, group, kind in ((4, 8, "affine"), (4, 32, "codebook")):
        fn, weights, _ = call(bits, group, kind)
        assert not any(
            runs_on_cuda(node, "onnxruntime") for node in fn.calls(G.quantized_linear.default)
        )
        with pytest.raises(UnsupportedError, match=r"CUDA's provider.*groups of"):
            emit(fn, WeightStore(weights), cuda=True)


@pytest.mark.parametrize(
    ("bits", "group", "kind", "rounded", "kept"),
    [
        (4, 32, "affine", True, 4),
        (4, 128, "symmetric", True, 4),
        (3, 32, "affine", True, 4),
        (6, 32, "symmetric", True, 8),
        (2, 64, "codebook", True, 8),
        (3, 32, "affine", False, 4),
        (8, 32, "affine", False, 0),
        (4, 8, "affine", True, 0),
    ],
)
def test_weights_stay_in_few_bits_where_a_kernel_takes_them(
    bits: int, group: int, kind: str, rounded: bool, kept: int
) -> None:
    fn, weights, _ = call(bits, group, kind, rounded, columns=256)
    found = [node for node in kernels(fn, weights) if node.op_type == "MatMulNBits"]
    assert len(found) == (1 if kept else 0)
    for node in found:
        options = {name: value.value for name, value in node.attributes.items()}
        assert options["bits"] == kept and group % options["block_size"] == 0
        assert options["accuracy_level"] == (4 if rounded else 1)


@pytest.mark.parametrize("group", one_in(3, [32, 64, 8]))
@pytest.mark.parametrize(("bits", "kind"), [f for f in FORMATS if f[1] != "codebook"])
def test_a_row_has_the_same_bits_alone_and_among_others(
    bits: int, kind: str, group: int, tmp_path: Path
) -> None:
    fn, weights, _ = call(bits, group, kind, columns=1536)
    x = rows(13, 1536)

    # Float products have another order for a lone row where weights are used as they lie in a file.
    packed = any(node.op_type == "MatMulNBits" for node in kernels(fn, weights))

    def run(part: torch.Tensor) -> torch.Tensor:
        return run_session(fn, {"a": part}, tmp_path, weights, paired=True, prepacked=packed)["y"]

    whole = run(x)
    assert torch.equal(torch.cat([run(row[None, None])[0] for row in x[0]]), whole[0])
    assert torch.equal(run(x[:, 2:7]), whole[:, 2:7])


def test_blocks_whose_rows_depend_on_each_other_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rows_quantized, "rows_of_few_bits_are_exact", lambda bits, block: block < 32
    )
    fn, weights, _ = call(4, 64, "symmetric")
    (node,) = kernels(fn, weights)
    assert node.attributes["block_size"].value == 16
    monkeypatch.setattr(rows_quantized, "rows_of_few_bits_are_exact", lambda bits, block: False)
    (node,) = kernels(*call(4, 64, "symmetric")[:2])
    assert node.op_type == "MatMul"
    # A model for others to run has the weight's own groups.
    (node,) = kernels(*call(4, 64, "symmetric")[:2], standard=True)
    assert node.attributes["block_size"].value == 64


def test_the_probe_tells_blocks_apart() -> None:
    """Four bits in blocks of 32 are what recipes use, and exact with dot products of bytes; without
    these the library takes a lone row another way. Three bits have no kernel."""
    if "VNNI" in kernel_name():
        assert rows_of_few_bits_are_exact(4, 32)
    assert any(rows_of_few_bits_are_exact(4, block) for block in rows_quantized.BLOCKS)
    assert not rows_of_few_bits_are_exact(3, 32)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_what_the_probe_says_is_so(block: int) -> None:
    """Where it promises the same bits alone and in company, other weights and values have them."""
    random = np.random.default_rng(7)
    stored = random.integers(0, 256, (40, 3, block // 2), np.uint8)
    model = probe._few_bits_model(stored, random.random((40, 3), np.float32), 4, block)
    x = random.standard_normal((9, 3 * block), np.float32)
    whole = probe._run(model, {"x": x}, Target())[0]
    alone = [probe._run(model, {"x": x[n : n + 1]}, Target())[0] for n in range(9)]
    alike = all(np.array_equal(row[0], whole[n]) for n, row in enumerate(alone))
    assert alike or not rows_of_few_bits_are_exact(4, block)


PASSES = {
    "layers": QuantizeWeights(group=16),
    "all": QuantizeWeights(group=16, embedding=True),
    "all, symmetric": QuantizeWeights(bits=8, group=0, symmetric=True, embedding=True),
}


def few_bits_llama(name: str, shape: Shape | None = None, trees: bool = True) -> Program:
    return PASSES[name].run(cached_llama(shape, trees=trees)).program


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("batch", "trees"), one_in(3, [(3, True), (1, False), (1, True)]))
def test_tokens_are_the_same_bits_at_every_width(name: str, batch: int, trees: bool) -> None:
    program = few_bits_llama(name, trees=trees)
    whole = logits_by_widths(program, batch, [24])
    for widths in ([1] * 24, [2] * 12, [5, 1, 1, 8, 1, 7, 1], [20, 4]):
        assert torch.equal(logits_by_widths(program, batch, widths), whole)


@pytest.mark.parametrize(("name", "columns"), [("layers", 2), ("all", 1)])
def test_a_lone_token_takes_one_row_unless_floats_are_summed(name: str, columns: int) -> None:
    """The head of `layers` is float, so its steps of one token take a column more."""
    ort = executable(few_bits_llama(name))
    ort.begin(1, 8)
    ort.run("step", step_of(1), ["logits"])
    (made,) = ort._made["step"].values()
    (bound,) = made.bound.values()
    fed = {feed.name: feed.buffer for feed in bound.feeds}
    assert fed["tokens"].shape == (1, columns)


@pytest.mark.parametrize("name", PASSES)
def test_steps_mean_what_the_interpreter_says(name: str) -> None:
    program = few_bits_llama(name)
    tokens = torch.randint(0, 61, (1, 24), generator=torch.Generator().manual_seed(0))
    wanted, found = reference_logits(program, tokens), logits_by_widths(program, 1, [24])
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 0.05


def test_few_bits_are_packed_however_short_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked, the kernel would make float weights of them at every step."""
    monkeypatch.setattr(sessions, "free_memory", lambda: 1000)
    program = few_bits_llama("all")
    whole = logits_by_widths(program, 1, [24])
    assert torch.equal(logits_by_widths(program, 1, [1] * 24), whole)


def test_exports_keep_few_bits_and_run_in_any_session(tmp_path: Path) -> None:
    program = few_bits_llama("all")
    folder = export_onnx(program, tmp_path / "out")
    stored = sum(weight.type.nbytes for weight in program.weights.values())
    assert (folder / "model.onnx.data").stat().st_size < 3 * stored
    tokens = tokens_of(1, 6)
    exact = expected(Shape(), tokens)
    found = (Loop(folder, 1).step(tokens) - exact).abs().max() / exact.abs().max()
    assert 0 < float(found) < 0.3


TAKEN = (("x", "f32"), ("experts", "i64"), ("shares", "f32"))


def mixture() -> tuple[torch.Tensor | None, ...]:
    """What `quantized_moe` takes of four random experts of bytes: 32 values to 24 and back."""
    random, bytes_by_row = torch.Generator().manual_seed(1), []
    for outputs, columns in ((48, 32), (32, 24)):
        stored = Numeric(8, columns).quantize(torch.randn(4 * outputs, columns, generator=random))
        bytes_by_row += [stored.weight.unflatten(0, (4, -1)), stored.scale.unflatten(0, (4, -1))]
        bytes_by_row.append(None)
    biases = (torch.randn(4, count, generator=random) for count in (48, 32))
    return (*bytes_by_row, *biases)


@pytest.mark.parametrize("contrib", [True, False])
@pytest.mark.parametrize("gate", [{}, {"limit": 1.0, "alpha": 1.702}], ids=["silu", "clamped"])
def test_experts_of_bytes_round_what_they_read(
    gate: dict[str, Any], contrib: bool, tmp_path: Path
) -> None:
    """In models for others: rows are the meaning's, but for those where the last bit of an
    activation decides what it is rounded to, and alone they have the same bits."""
    random = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(16)])
    feeds = {"x": rows(16, 32)[0], "experts": chosen, "shares": torch.rand(16, 2, generator=random)}
    how = {"activation": "silu", "bits": 8, "group": 32, "down_group": 24, **gate}
    fn, given = Function("call"), mixture()
    fed = [fn.add_input(k, TensorType.parse(f"{d}[N,{feeds[k].shape[1]}]")) for k, d in TAKEN]
    weights = {f"w{i}": Weight.of(f"w{i}", w) for i, w in enumerate(given) if w is not None}
    held = [None if w is None else fn.weight(weights[f"w{i}"]) for i, w in enumerate(given)]
    fn.set_outputs({"y": fn.call(G.quantized_moe.default, *fed, *held, **how)})

    def run(part: slice) -> torch.Tensor:
        taken = {name: tensor[part] for name, tensor in feeds.items()}
        return run_session(fn, taken, tmp_path, weights, contrib=contrib)["y"]

    wanted, found = G.quantized_moe(*feeds.values(), *given, **how), run(slice(None))
    far = (found - wanted).abs().amax(-1) > 1e-5 * wanted.abs().amax(-1)
    assert far.sum() <= 2 and error(found, wanted) < TOLERANCE
    assert torch.equal(run(slice(5, 6)), found[5:6])
    names = {node.op_type for node in emit(fn, WeightStore(weights), contrib=contrib).model.graph}
    assert "Loop" in names and "MoE" not in names
