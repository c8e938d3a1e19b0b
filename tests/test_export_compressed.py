"""Checkpoints of compressed-tensors that programs are exported as: the same bits, everywhere."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build, error, logits_of, tokens_and_positions
from quantized_checkpoints import (
    awq_config,
    awq_layer,
    gptq_config,
    gptq_layer,
    nf4_config,
    nf4_layer,
    write,
)
from selection import mostly_long
from typer.testing import CliRunner

import graftwork as gw
from graftwork.cli.commands import app
from graftwork.frontends import import_model
from graftwork.ir import GraftworkWarning, InputError, Program, UnsupportedError, arguments
from graftwork.ir.ops.numerics import unpack

G = torch.ops.graftwork
EAGER = "eager:cpu:float32"
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
PROMPT = [[1, 5, 9, 30]]

RECIPES: dict[str, list[dict[str, Any]]] = {
    "4 bits": [{"quantize_weights": {"symmetric": True, "group": 16, "rounded": False}}],
    "4 bits, rounded": [{"quantize_weights": {"symmetric": True, "group": 16}}],
    "8 bits by channel": [{"quantize_weights": {"bits": 8, "group": 0, "symmetric": True}}],
    "3 bits": [{"quantize_weights": {"bits": 3, "symmetric": True, "group": 16, "scales": "f32"}}],
    "mixed": [
        {"quantize_weights": {"symmetric": True, "group": 16, "select": ["*mlp*"]}},
        {
            "quantize_weights": {
                "bits": 8,
                "symmetric": True,
                "group": 0,
                "select": ["*attn*"],
                "rounded": False,
            }
        },
    ],
}


@pytest.fixture(autouse=True)
def _nothing_is_dequantized() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraftworkWarning)
        yield


def saved(folder: Path, arch: str = "llama") -> Path:
    build(ARCHS[arch]).save_pretrained(folder)
    return folder


def recipe(name: str) -> dict[str, Any]:
    return {
        "title": name,
        "contract": "approximate",
        "extends": "baseline",
        "passes": [
            {"pass": key, "options": value} for use in RECIPES[name] for key, value in use.items()
        ],
    }


def codes(program: Program) -> dict[str, tuple[torch.Tensor, ...]]:
    """Codes and scales of the products with weights of few bits, in order."""
    found = []
    for node in program.step.calls(G.quantized_linear.default):
        given = arguments(node)
        weight, scale = (program.weights[given[n].target].load() for n in ("weight", "scale"))
        found.append((unpack(weight, given["bits"]), scale.float()))
    return {str(place): parts for place, parts in enumerate(found)}


@pytest.mark.parametrize("name", mostly_long(RECIPES, keep=("mixed",)))
def test_what_is_read_back_is_what_was_written(name: str, tmp_path: Path) -> None:
    """A program exported, from memory or from an artifact, and optimized again: the same codes,
    scales and tokens."""
    made = gw.optimize(saved(tmp_path / "model"), recipe(name), target=EAGER)
    made.save(tmp_path / "artifact")
    gw.load(tmp_path / "artifact").export_compressed_tensors(tmp_path / "out")
    again = gw.optimize(tmp_path / "out", target=EAGER)
    for one, other in zip(codes(made.program).values(), codes(again.program).values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(made.generate(PROMPT, **OPTIONS), again.generate(PROMPT, **OPTIONS))


FROM: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (gptq_config(), gptq_layer()),
    "gptq-symmetric": (gptq_config(sym=True), gptq_layer(sym=True)),
    "awq": (awq_config(), awq_layer()),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["4 bits", "8 bits by channel", *FROM])
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    """The package and transformers read the values that the program has: the same logits. GPTQ and
    AWQ checkpoints become the format, zero points and all."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    if name in FROM:
        source, _ = write(tmp_path, *FROM[name])
        made = gw.optimize(source, target=EAGER)
    else:
        made = gw.optimize(saved(tmp_path / "model"), recipe(name), target=EAGER)
    out = made.export_compressed_tensors(tmp_path / "out")
    # Kept in its bits, transformers 5.23 expects zero points as the package has them in memory.
    options: dict[str, Any] = {"output_loading_info": True}
    if name in ("gptq", "awq"):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model, loaded = AutoModelForCausalLM.from_pretrained(out, **options)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        theirs = model(input_ids=ids).logits
    # Their 8 bits round activations as the configuration says, with steps of 1/127.5; what they
    # dequantize, they round to the scales' float16.
    allowed = {"8 bits by channel": 0.05, "gptq": 2e-3, "awq": 2e-3}.get(name, 1e-4)
    assert error(theirs, logits_of(import_model(out, torch.float32), ids, positions)) < allowed


@pytest.mark.long
def test_words_are_the_package_s(tmp_path: Path) -> None:
    """Codes and zero points are packed as `pack_to_int32` packs them."""
    helpers = pytest.importorskip("compressed_tensors.compressors", reason="not installed")
    from safetensors.torch import load_file

    source, _ = write(tmp_path, gptq_config(3, 32), gptq_layer(3, 32), hidden_size=64,
                      intermediate_size=96)  # fmt: skip
    out = gw.optimize(source, target=EAGER).export_compressed_tensors(tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    program = import_model(source)
    name = "model.layers.0.mlp.up_proj"
    values = unpack(program.weights[f"{name}.weight.q3"].load(), 3)
    scale = program.weights[f"{name}.weight.q3.scale"].load().float()
    zeros = (-program.weights[f"{name}.weight.q3.offset"].load() / scale).round()
    packed = helpers.pack_to_int32((values - 4).to(torch.int8), 3)
    assert torch.equal(tensors[f"{name}.weight_packed"], packed)
    down = helpers.pack_to_int32((zeros - 4).to(torch.int8), 3, packed_dim=0)
    assert torch.equal(tensors[f"{name}.weight_zero_point"], down)
    assert tensors[f"{name}.weight_shape"].tolist() == [96, 64]


@pytest.mark.long
def test_what_the_format_cannot_say(tmp_path: Path) -> None:
    """Offsets between steps, codebooks, scattered channels and programs without few bits."""
    folder = saved(tmp_path / "model")
    cases: dict[str, tuple[Any, Any]] = {
        "int4": (folder, r"no multiples of the scale.*symmetric=true"),
        "baseline": (folder, "has no layer of few bits"),
    }
    for name, layer in {
        "order": (gptq_config(), gptq_layer(ordered=False), "order of their groups"),
        "codebook": (nf4_config(), nf4_layer(nested=16), "it has a codebook"),
    }.items():
        source, _ = write(tmp_path / name, *layer[:2], num_hidden_layers=1)
        cases[name] = (source, layer[2])
    for name, (source, message) in cases.items():
        known = name if name in ("int4", "baseline") else "baseline"
        made = gw.optimize(source, gw.Recipe.load(known).with_options(
            ["quantize_weights.group=16", "quantize_weights.embedding=false"]
            if known == "int4" else []
        ), target=EAGER)  # fmt: skip
        with pytest.raises((InputError, UnsupportedError), match=message):
            made.export_compressed_tensors(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    made = gw.optimize(build(ARCHS["llama"]), recipe("4 bits"), target=EAGER)
    with pytest.raises(InputError, match=r"without a config\.json"):
        made.export_compressed_tensors(tmp_path / "out")


@pytest.mark.long
def test_tied_tables_and_heads(tmp_path: Path) -> None:
    """A head in few bits is no longer tied to a table, which becomes floats, aloud."""
    folder = saved(tmp_path / "model", "llama-tied-yarn")
    passes = [{"quantize_weights": {"symmetric": True, "group": 16, "embedding": True}}]
    said = {"title": "t", "contract": "approximate", "extends": "baseline", "passes": passes}
    made = gw.optimize(folder, said, target=EAGER)
    with pytest.warns(
        GraftworkWarning, match=r"no tables in few bits: model\.embed_tokens\.weight"
    ):
        out = made.export_compressed_tensors(tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["quantization_config"]["ignore"] == []
    again = gw.optimize(out, target=EAGER)
    assert torch.equal(made.generate(PROMPT, **OPTIONS), again.generate(PROMPT, **OPTIONS))


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """A checkpoint has no place for a cache of few bits, nor for layers' logits."""
    said = recipe("4 bits")
    said["passes"] += [{"quantize_cache": {}}, {"contrast_layers": {}}]
    made = gw.optimize(saved(tmp_path / "model"), said, target=EAGER)
    with pytest.warns(GraftworkWarning, match="quantize_cache, contrast_layers are left out"):
        made.export_compressed_tensors(tmp_path / "out")


def test_the_command_line(tmp_path: Path) -> None:
    """`graftwork export --format compressed-tensors`."""
    folder = saved(tmp_path / "model")
    options = ["--recipe", "int4", "--set", "quantize_weights.symmetric=true"]
    options += ["--set", "quantize_weights.group=16", "--set", "quantize_weights.embedding=false"]
    out = tmp_path / "out"
    asked = ["export", str(folder), "--format", "compressed-tensors", "--out", str(out)]
    done = CliRunner().invoke(app, [*asked, *options])
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized" and config["ignore"] == ["lm_head"]
