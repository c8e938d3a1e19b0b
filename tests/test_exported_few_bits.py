"""Weights of few bits in ONNX models for others: kernels of ONNX Runtime's, or ONNX's own ops."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from handmade import Shape, cached_llama, llama
from quantized_checkpoints import awq_config, awq_layer, gptq_config, gptq_layer, write
from selection import one_in
from test_onnxruntime_export import Loop, tokens_of
from typer.testing import CliRunner

import graftwork as gw
from graftwork.cli.commands import app
from graftwork.exporting.onnx_folder import export_genai, export_onnx
from graftwork.ir import run
from graftwork.passes.numerics.quantize_weights import QuantizeWeights

SHAPE = Shape()
FLOAT: dict[str, Any] = {"group": 16, "rounded": False}


@pytest.fixture(autouse=True)
def _float_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime makes MatMulNBits of DequantizeLinear, by default with activations in int8."""

    def exact(folder: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        return onnxruntime.InferenceSession(
            folder / "model.onnx", options, providers=["CPUExecutionProvider"]
        )

    monkeypatch.setattr("test_onnxruntime_export.open_plain", exact)


def kinds(folder: Path) -> list[str]:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    return [node.op_type for node in model.graph.node]


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize(("bits", "symmetric"), one_in(3, product([2, 3, 4, 6, 8], [False, True])))
def test_both_forms_mean_what_the_program_means(bits: int, symmetric: bool, tmp_path: Path) -> None:
    """Float products, in steps of several tokens and of one; every layer is stored in few bits."""
    passed = QuantizeWeights(bits=bits, symmetric=symmetric, scales="f32", **FLOAT)
    tokens = tokens_of(1, 7)
    feeds = {"tokens": tokens, "positions": torch.arange(7).unsqueeze(0)}
    wanted = run(passed.run(llama(SHAPE)).program, "step", feeds)["logits"]
    program = passed.run(cached_llama(SHAPE)).program
    plain = bytes_of(export_onnx(cached_llama(SHAPE), tmp_path / "float"))
    for qdq, kind in ((False, "MatMulNBits"), (True, "DequantizeLinear")):
        folder = export_onnx(program, tmp_path / kind, qdq=qdq)
        found = kinds(folder)
        assert found.count(kind) >= 7 and ("MatMulNBits" in found) != qdq
        assert bytes_of(folder) < plain
        loop = Loop(folder, 1)
        got = torch.cat([loop.step(tokens[:, :5]), loop.step(tokens[:, 5:6])], 1)
        torch.testing.assert_close(got, wanted[:, :6], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_activations(bits: int, tmp_path: Path) -> None:
    """MatMulNBits rounds activations by block, the program by row: near, and both are exported."""
    passed = QuantizeWeights(bits=bits, group=16, symmetric=True)
    tokens = tokens_of(1, 6)
    feeds = {"tokens": tokens, "positions": torch.arange(6).unsqueeze(0)}
    wanted = run(passed.run(llama(SHAPE)).program, "step", feeds)["logits"]
    program = passed.run(cached_llama(SHAPE)).program
    for qdq, allowed in ((False, 0.1), (True, 1e-4)):
        folder = export_onnx(program, tmp_path / str(qdq), qdq=qdq)
        error = (Loop(folder, 1).step(tokens) - wanted).abs().max() / wanted.abs().max()
        assert float(error) < allowed


@pytest.mark.long
@pytest.mark.parametrize("layer", ["gptq", "awq"])
def test_a_checkpoint_s_zero_points_are_dequantize_linear_s(layer: str, tmp_path: Path) -> None:
    """Whole zero points need no further node, and MatMulNBits folders run in onnxruntime-genai."""
    how = (gptq_config(), gptq_layer()) if layer == "gptq" else (awq_config(), awq_layer())
    source, plain = write(tmp_path, *how, num_hidden_layers=1)
    made = gw.optimize(source, target="onnxruntime:cpu:float32")
    folder = made.export_onnx(tmp_path / "qdq", qdq=True)
    floats = gw.optimize(plain, target="onnxruntime:cpu:float32").export_onnx(tmp_path / "floats")
    assert kinds(folder).count("Add") == kinds(floats).count("Add")
    tokens = tokens_of(1, 6)
    wanted = Loop(floats, 1).step(tokens)
    for other in (folder, made.export_onnx(tmp_path / "nbits")):
        torch.testing.assert_close(Loop(other, 1).step(tokens), wanted, rtol=1e-4, atol=1e-4)
    if layer == "gptq":
        _generates(made, tmp_path)


def _generates(made: gw.Model, folder: Path) -> None:
    import numpy as np

    genai = pytest.importorskip("onnxruntime_genai")
    prompt, count = [5, 9, 2, 17], 8
    model = genai.Model(str(export_genai(made.program, folder / "genai")))
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=12, min_length=12, do_sample=False)
    generator = genai.Generator(model, options)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    said = made.generate([prompt], max_new_tokens=count, do_sample=False, eos_token_id=[])
    assert [int(token) for token in generator.get_sequence(0)] == said[0].tolist()


def test_the_command_line(tmp_path: Path) -> None:
    """`graftwork export --qdq`, which is for ONNX only."""
    source, _ = write(tmp_path, awq_config(), awq_layer(), num_hidden_layers=1)
    asked = ["export", str(source), "--out", str(tmp_path / "out"), "--qdq", "--format"]
    done = CliRunner().invoke(app, [*asked, "genai"])
    assert done.exit_code != 0 and "--qdq is for onnx" in str(done.exception)
    done = CliRunner().invoke(app, [*asked, "onnx"])
    assert done.exit_code == 0 and "DequantizeLinear" in kinds(tmp_path / "out")
