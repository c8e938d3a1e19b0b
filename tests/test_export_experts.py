"""Mixtures of experts as checkpoints of compressed-tensors: expert by expert, the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build, error, logits_of, tokens_and_positions
from evidence import tokens
from quantized_checkpoints import awq_config, awq_layer, gptq_config, gptq_layer, write
from safetensors.torch import load_file
from selection import mostly_long
from test_export_compressed import EAGER, OPTIONS, PROMPT, saved

import graftwork as gw
from graftwork.frontends import import_model
from graftwork.frontends.huggingface import CheckpointNames
from graftwork.ir import Program, UnsupportedError, arguments
from graftwork.ir.ops.numerics import dequantize

G = torch.ops.graftwork
STACKS = ("gate_up", "down")
PARTS = ("", "_scale", "_offset")


def recipe(**options: Any) -> dict[str, Any]:
    given = {"symmetric": True, "group": 8, "rounded": False, "exclude": ["*gate.weight"]}
    passes = [{"quantize_weights": given | options}]
    return {"title": "t", "contract": "approximate", "extends": "baseline", "passes": passes}


def parts(program: Program) -> Iterator[tuple[torch.Tensor, ...]]:
    """The stored parts of all stacks of a program, in order."""
    for node in program.step.calls(G.quantized_moe.default):
        given = arguments(node)
        for stack in STACKS:
            operands = [given[stack + part] for part in PARTS]
            yield tuple(program.weights[str(o.target)].load() for o in operands if o is not None)


def same_parts(one: Program, other: Program) -> None:
    both = list(zip(parts(one), parts(other), strict=True))
    assert both
    for first, second in both:
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b.to(a.dtype)) and torch.equal(a.to(b.dtype), b)


def test_names_of_experts_by_hand() -> None:
    """A stack's rows, expert by expert: first the gate's, then the up projection's."""
    names = CheckpointNames(build(ARCHS["mixtral"]))
    stem = "model.layers.1.block_sparse_moe"
    found = names.pieces("model.layers.1.mlp.experts.gate_up_proj", 4, 96)
    assert [(piece.expert, piece.start, piece.stop) for piece in found[:3]] == [
        (0, 0, 48), (0, 48, 96), (1, 0, 48)
    ]  # fmt: skip
    assert [piece.name for piece in found[:2]] == [
        f"{stem}.experts.0.w1.weight", f"{stem}.experts.0.w3.weight"
    ]  # fmt: skip
    assert len(found) == 8 and found[-1].name == f"{stem}.experts.3.w3.weight"
    assert names.of("model.layers.1.mlp.gate.weight") == f"{stem}.gate.weight"
    assert names.of("model.norm.weight") == "model.norm.weight"


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 bits": ("qwen3_moe", {}),
    "3 bits, rounded": ("mixtral", {"bits": 3, "rounded": True}),
    "8 bits by channel": ("qwen3_moe", {"bits": 8, "group": 0, "rounded": True}),
    "experts alone": ("deepseek_v3", {"select": ["*.experts.*"], "exclude": []}),
}


@pytest.mark.parametrize("case", mostly_long(CASES, keep=("4 bits",)))
def test_what_is_read_back_is_what_was_written(case: str, tmp_path: Path) -> None:
    """By the package, whose values are the program's; by transformers, as far as it reads such
    files; and by graftwork, bit for bit, from an artifact, too."""
    arch, options = CASES[case]
    made = gw.optimize(saved(tmp_path / "model", arch), recipe(**options), target=EAGER)
    made.save(tmp_path / "artifact")
    out = gw.load(tmp_path / "artifact").export_compressed_tensors(tmp_path / "out")
    again = gw.optimize(out, target=EAGER)
    same_parts(made.program, again.program)
    assert torch.equal(made.generate(PROMPT, **OPTIONS), again.generate(PROMPT, **OPTIONS))
    check_package(made.program, out, arch)
    if case == "8 bits by channel":  # transformers 5.23 reads packed experts alone
        return
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    said = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    model, loaded = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, **said)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        theirs = model(input_ids=ids).logits
    allowed = 0.05 if options.get("rounded") else 2e-3  # it dequantizes to float16
    assert error(theirs, logits_of(import_model(out, torch.float32), ids, positions)) < allowed


def check_package(program: Program, folder: Path, arch: str) -> None:
    """compressed-tensors makes the program's values of every expert."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="not installed")
    from compressed_tensors.quantization import QuantizationConfig

    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    groups = config.config_groups.values()  # the embedding may have one of its own
    (scheme,) = (g for g in groups if any(t == "Linear" or "experts" in t for t in g.targets))
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    tensors = load_file(folder / "model.safetensors")
    names = CheckpointNames(build(ARCHS[arch]))
    for node in program.step.calls(G.quantized_moe.default):
        given = arguments(node)
        for stack in STACKS:
            held = [given[stack + part] for part in PARTS]
            loaded = [None if h is None else program.weights[str(h.target)].load() for h in held]
            weight = dequantize(*loaded, bits=given["bits"])  # type: ignore[arg-type]
            name = f"{node.meta['site'].module}.{stack}_proj"
            for piece in names.pieces(name, *weight.shape[:2]):
                module = piece.name.removesuffix("weight")
                state = {k.removeprefix(module): t for k, t in tensors.items() if module in k}
                values = compressor.decompress(state, scheme)["weight"]
                wanted = weight[piece.expert, piece.start : piece.stop].to(values.dtype)
                assert torch.equal(values, wanted), piece


FROM: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (gptq_config(4, 8), gptq_layer(4, 8)),
    "awq": (awq_config(8), awq_layer(8)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_checkpoints_of_other_formats_become_it(name: str, tmp_path: Path) -> None:
    """With zero points, that are whole there."""
    source, _ = write(tmp_path, *FROM[name], arch="qwen2_moe")
    made = gw.optimize(source, target=EAGER)
    out = made.export_compressed_tensors(tmp_path / "out")
    same_parts(made.program, import_model(out))
    check_package(made.program, out, "qwen2_moe")


@pytest.mark.parametrize("arch", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_weights_that_a_method_scaled_are_those_that_are_written(arch: str, tmp_path: Path) -> None:
    """AWQ puts factors into norms: the file has these, and the values that were chosen for them."""
    options = ["group=8", "windows=8", "length=64", "symmetric=true", "rounded=false"]
    options += ["embedding=false", 'exclude=["*gate.weight"]' if arch != "llama" else "bits=4"]
    given = gw.Recipe.load("awq").with_options([f"quantize_weights.{one}" for one in options])
    text = tokens(128, 4096).view(8, -1).tolist()
    made = gw.optimize(saved(tmp_path / "model", arch), given, target=EAGER, data=text)
    out = made.export_compressed_tensors(tmp_path / "out")
    ids, positions = tokens_and_positions()
    wanted = made(ids)
    found = logits_of(import_model(out), ids, positions)
    assert error(found, wanted) < 1e-5
    assert error(logits_of(import_model(tmp_path / "model"), ids, positions), wanted) > 1e-3
    if arch != "llama":
        same_parts(made.program, import_model(out))


@pytest.mark.long
def test_experts_that_stay_floats_are_written_one_by_one(tmp_path: Path) -> None:
    made = gw.optimize(
        saved(tmp_path / "model", "qwen3_moe"),
        recipe(exclude=["*gate.weight", "*experts*"]),
        target=EAGER,
    )
    out = made.export_compressed_tensors(tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.experts"
    stack = made.program.weights[f"{name}.gate_up_proj"].load()
    assert torch.equal(tensors[f"{name}.2.up_proj.weight"], stack[2, 24:])
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"{name}.2.up_proj", "model.layers.0.mlp.gate", "lm_head"} <= set(ignored)
    again = gw.optimize(out, target=EAGER)
    assert torch.equal(made.generate(PROMPT, **OPTIONS), again.generate(PROMPT, **OPTIONS))


REFUSED = {
    "qwen3_moe": (
        {"exclude": []},
        r"no Linear.*exclude=\['model\.layers\.\*\.mlp\.gate\.weight'\]",
    ),
    "gpt_oss": ({"exclude": ["*router*"]}, r"gate_up_proj cannot be written as.* in another order"),
    "granitemoe": (
        {"exclude": ["*router*"]},
        r"have no weight for each expert, but .*input_linear",
    ),
}


@pytest.mark.parametrize("arch", ["qwen3_moe", *(
    pytest.param(arch, marks=pytest.mark.long) for arch in ("gpt_oss", "granitemoe")
)])  # fmt: skip
def test_what_the_format_cannot_say(arch: str, tmp_path: Path) -> None:
    """Routers, which are no layers there, and experts that have no tensor each in checkpoints."""
    options, message = REFUSED[arch]
    made = gw.optimize(saved(tmp_path / "model", arch), recipe(**options), target=EAGER)
    with pytest.raises(UnsupportedError, match=message):
        made.export_compressed_tensors(tmp_path / "out")
    assert not (tmp_path / "out").exists()
