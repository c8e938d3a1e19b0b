"""ONNX models as sources: our own exports, those of torch.onnx and of onnxruntime-genai."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from onnx_ir import DataType
from tiny import tiny_llama

import graftwork as gw
from graftwork.backends import Target
from graftwork.frontends import import_model
from graftwork.frontends.onnx import reader
from graftwork.ir import InputError, Program, UnsupportedError
from graftwork.model import Model
from graftwork.optimizing import trace
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe

PROMPTS = ([1, 2, 3, 4], [5, 6, 7, 5, 6, 7, 5, 6], [9])


@cache
def made(recipe: str, dim: int = 16) -> Model:
    chosen = Recipe.load(recipe)
    program, _ = run_passes(tiny_llama(dim=dim, context=96), chosen.steps)
    return Model(program, Target(threads=1), chosen.as_dict())


def texts(model: Model, most: int = 16) -> list[list[int]]:
    return [model.generate([p], max_new_tokens=most)[0, len(p) :].tolist() for p in PROMPTS]


def optimized(source: Path, recipe: Any = "baseline") -> Model:
    return gw.optimize(source, recipe, target=Target(threads=1))


def own_runtime(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The source's logits f32[T,V], in a plain session."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), options, ["CPUExecutionProvider"]
    )
    feeds: dict[str, Any] = {}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, 16), np.float32)
    ids = np.array([tokens])
    named = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    named["position_ids"] = np.arange(len(tokens))[None]
    known = {value.name for value in session.get_inputs()}
    feeds |= {name: value for name, value in named.items() if name in known}
    return torch.from_numpy(session.run(["logits"], feeds)[0][0])


@pytest.mark.parametrize(
    ("dim", "ops"),
    [
        (12, "contrib"),
        pytest.param(16, "standard", marks=pytest.mark.long),
        pytest.param(16, "contrib", marks=pytest.mark.long),
        pytest.param(12, "standard", marks=pytest.mark.long),
    ],
)
def test_our_own_exports_come_back(dim: int, ops: str, tmp_path: Path) -> None:
    """The same tokens, ends and context; drafts work on top; and out it goes again."""
    folder = made("baseline", dim).export_onnx(tmp_path / "out", ops=ops)
    model = optimized(folder)
    assert texts(model) == texts(made("baseline", dim))
    assert (model.program.info.context, model.program.info.eos) == (96, (0,))
    assert model.program.step.calls(torch.ops.graftwork.attend.default)
    copying = optimized(folder, "copyspec")
    assert texts(copying) == texts(model)
    again = optimized(model.export_onnx(tmp_path / "again"))
    assert texts(again) == texts(model)


@pytest.mark.parametrize(
    ("recipe", "qdq"),
    [
        ("int8", True),
        pytest.param("int4", False, marks=pytest.mark.long),
        pytest.param("int4", True, marks=pytest.mark.long),
        pytest.param("int8", False, marks=pytest.mark.long),
    ],
)
def test_exports_of_few_bits_keep_their_bits(recipe: str, qdq: bool, tmp_path: Path) -> None:
    folder = made(recipe).export_onnx(tmp_path / "out", qdq=qdq)
    model = optimized(folder)
    linears = model.program.step.calls(torch.ops.graftwork.quantized_linear.default)
    # Offsets that are no whole steps are added to the weight there, which floats say.
    assert len(linears) == (0 if qdq and recipe == "int4" else 9)
    tokens = list(PROMPTS[1])
    ours, theirs = model([tokens])[0], own_runtime(folder, tokens)
    # ONNX Runtime makes MatMulNBits of both forms, which rounds activations by block.
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 0.1


@pytest.mark.long
def test_passes_work_on_what_was_read(tmp_path: Path) -> None:
    """Quantization finds the weights, heads the residual stream, skipping the layers."""
    folder = made("baseline").export_onnx(tmp_path / "out")
    names = {"int8", "int8_copyspec", "medusa"}
    for name in sorted(names):
        model = optimized(folder, name)
        assert len(texts(model, 4)) == len(PROMPTS)
    skipping = {"extends": "baseline", "passes": [{"skip_layers": {"layers": [0]}}]}
    assert len(optimized(folder, skipping).program.states) == 2
    assert texts(optimized(folder, "medusa"), 8) == texts(optimized(folder), 8)


def traced_by_torch(
    folder: Path, cached: bool, eager: bool, script: bool = False
) -> tuple[Path, Any]:
    """A tiny llama of transformers, exported by torch.onnx; script: as optimum-onnx does it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.config._attn_implementation = "eager" if eager else "sdpa"

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    class Step(Whole):
        def forward(  # type: ignore[override]
            self,
            input_ids: Any,
            attention_mask: Any,
            position_ids: Any,
            k: Any,
            v: Any,
            key: Any,
            value: Any,
        ) -> Any:
            cache = transformers.DynamicCache()
            cache.update(k, v, 0)
            cache.update(key, value, 1)
            out = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
            )
            return out.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))

    ids, auto = torch.zeros(2, 7, dtype=torch.long), torch.export.Dim.AUTO
    names, module, rest, shapes = ["input_ids"], Whole(), (), ({0: auto, 1: auto},)
    if cached:
        past = [torch.randn(2, 2, 5, 8) for _ in range(4)]
        positions = torch.arange(5, 12).expand(2, 7).clone()
        rest = (torch.ones(2, 12, dtype=torch.long), positions, *past)  # type: ignore[assignment]
        shapes = ({0: auto, 1: auto},) * 3 + ({0: auto, 2: auto},) * 4  # type: ignore[assignment]
        module = Step()
        parts = [f"past_key_values.{i}.{part}" for i in (0, 1) for part in ("key", "value")]
        names = ["input_ids", "attention_mask", "position_ids", *parts]
    folder.mkdir()
    path = str(folder / "model.onnx")
    if script:
        axes = {name: {0: "batch", 2 if "past" in name else 1: "rows"} for name in names}
        args, outputs = (ids, *rest), ["logits", *(f"present.{part}" for part in names[3:])]
        torch.onnx.export(
            module, args, path, dynamo=False, opset_version=18,
            input_names=names, output_names=outputs, dynamic_axes=axes,
        )  # fmt: skip
    else:
        program = torch.onnx.export(
            module,
            (ids, *rest),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=names,
            verbose=False,
        )
        assert program is not None
        program.save(path)
    config.save_pretrained(folder)
    return folder, model


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("cached", "eager", "script"),
    [
        (True, False, False),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in ((False, False, False), (False, True, False), (True, False, True))
        ),
    ],
    ids=str,
)
def test_exports_of_torch(cached: bool, eager: bool, script: bool, tmp_path: Path) -> None:
    """With and without a cache; rotary embeddings, norms and gates are found again."""
    folder, theirs = traced_by_torch(tmp_path / "out", cached, eager, script)
    model = optimized(folder)
    for prompt in PROMPTS:
        wanted = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert model.generate([prompt], max_new_tokens=12, pad_token_id=0).equal(wanted)
    program = model.program
    found = {str(node.target) for node in import_raised(folder).step.calls()}
    assert {f"graftwork.{name}.default" for name in ("rms_norm", "rotary", "attention")} <= found
    assert (program.info.context, program.info.eos) == (128, (2,))
    assert texts(optimized(folder, "copyspec")) == texts(model)


def import_raised(source: Path) -> Program:
    """The program before its cache."""
    recipe = Recipe.load("baseline")
    return trace(source, recipe, after="raise_gated_mlp")


@pytest.mark.long
@pytest.mark.parametrize(("precision", "tied"), [("fp32", False), ("int4", False), ("int4", True)])
def test_folders_of_genai(precision: str, tied: bool, tmp_path: Path) -> None:
    """Made by its own builder; the configuration says where the decoder is, and what ends texts. A
    table that is the head, too, is the head's bits in another shape."""
    pytest.importorskip("onnxruntime_genai")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    demo = Path(gw.__file__).parent / "demo_model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, tmp_path / "llama" / name)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", tmp_path / "llama"]
    command += ["-o", out, "-p", precision, "-e", "cpu", "-c", tmp_path / "cache"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    model = optimized(out)
    assert 2 in model.program.info.eos and model.program.info.context == 256
    assert "tokenizer.json" in model.program.assets
    tokens = [1, 5, 900, 33, 7, 5, 900]
    ours, theirs = model([tokens])[0], own_runtime(out, tokens)
    bound = 1e-4 if precision == "fp32" else 0.1  # its kernels round activations to int8
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < bound
    assert texts(optimized(out, "copyspec"), 8) == texts(model, 8)


# -- what is refused


def graph_of(*nodes: Any, inputs: Any = None, outputs: Any = None) -> onnx.ModelProto:
    """A model of a few nodes on token ids."""
    ids = helper.make_tensor_value_info("input_ids", DataType.INT64, ["B", "T"])
    logits = helper.make_tensor_value_info("logits", DataType.FLOAT, ["B", "T", 8])
    table = helper.make_tensor("table", DataType.FLOAT, [8, 8], np.eye(8).flatten())
    graph = helper.make_graph(nodes, "g", inputs or [ids], outputs or [logits], [table])
    domains = ["", "my.ops", "com.microsoft"]
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(d, 1 + 20 * (not d)) for d in domains]
    )


LOOK_UP = helper.make_node("Gather", ["table", "input_ids"], ["x"], name="look_up")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [LOOK_UP, helper.make_node("Fancy", ["x"], ["logits"], domain="my.ops")],
            r"my\.ops\.Fancy",
        ),
        (
            [LOOK_UP, helper.make_node("Hardmax", ["x"], ["logits"], name="h")],
            r"node h \(Hardmax\)",
        ),
        (
            [LOOK_UP, helper.make_node("MatMul", ["x", "x"], ["logits"], name="m")],
            r"node m \(MatMul\): what it is given does not fit",
        ),
        (
            [helper.make_node("Gather", ["table", "input_ids"], ["logits"])],
            "no residual stream|no attention",
        ),
    ],
)
def test_graphs_that_are_refused(nodes: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(graph_of(*nodes), path)
    with pytest.raises(UnsupportedError, match=message):
        import_model(path)


def test_inputs_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    image = helper.make_tensor_value_info("pixels", DataType.FLOAT, ["B", 3, 8])
    node = helper.make_node("Relu", ["pixels"], ["logits"])
    onnx.save(graph_of(node, inputs=[image]), path)
    with pytest.raises(UnsupportedError, match=r"token ids.*input_ids, got the inputs pixels"):
        import_model(path)
    ids = helper.make_tensor_value_info("input_ids", DataType.INT64, ["B", "T"])
    onnx.save(
        graph_of(
            helper.make_node("Gather", ["table", "input_ids"], ["logits"]), inputs=[ids, image]
        ),
        path,
    )
    with pytest.raises(UnsupportedError, match=r"input 'pixels' is"):
        import_model(path)


def test_loops_are_no_sources(tmp_path: Path) -> None:
    folder = made("copyspec").export_onnx_loop(tmp_path / "loop")
    with pytest.raises(UnsupportedError, match="is a Loop; a decode graph has no control flow"):
        import_model(folder)
    plan = made("copyspec").export_onnx_plan(tmp_path / "plan")
    with pytest.raises(InputError, match=r"none is called model.onnx"):
        import_model(plan)


def test_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("baseline").export_onnx(tmp_path / "out")
    data = folder / "model.onnx.data"
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    with pytest.raises(InputError, match=r"ends at byte .*copy it again"):
        import_model(folder)
    data.unlink()
    with pytest.raises(InputError, match="which is not there; put it beside"):
        import_model(folder)
    (tmp_path / "elsewhere").write_bytes(whole)
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="outside"):
        import_model(folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../elsewhere" if entry.key == "location" else entry.value
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="outside"):
        import_model(folder)
    (folder / "model.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match="no ONNX model"):
        import_model(folder)
    monkeypatch.setattr(reader, "MOST", 4)
    with pytest.raises(InputError, match="no protocol buffer has more"):
        import_model(folder / "model.onnx")
    with pytest.raises(InputError, match="does not exist"):
        import_model(tmp_path / "nothing.onnx")
