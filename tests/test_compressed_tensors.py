"""Checkpoints that the package compressed-tensors made: read to the values that it reads."""

from __future__ import annotations

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import compressed_config, compressed_layer, write
from safetensors.torch import load_file, save_file

import graftwork as gw
from graftwork.frontends import import_model
from graftwork.frontends.huggingface.checkpoint import tensors_of
from graftwork.frontends.huggingface.formats import format_of, read
from graftwork.ir import GraftworkWarning, InputError, UnsupportedError, arguments

# Importing it takes seconds, which processes that run other files would take, too.
pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is None,
    reason="the package compressed-tensors is not installed",
)

G = torch.ops.graftwork
INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 16}
INT8: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
AFFINE: dict[str, Any] = {"symmetric": False}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
BY_TOKEN: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True}
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"

CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "4 bits": (PACKED, INT4, torch.float16),
    "4 bits, bfloat16": (PACKED, INT4, torch.bfloat16),
    "4 bits, affine": (PACKED, {**INT4, **AFFINE}, torch.float16),
    "3 bits, affine": (PACKED, {**INT4, **AFFINE, "num_bits": 3}, torch.bfloat16),
    "8 bits": (PACKED, INT8, torch.float16),
    "8 bits, affine": (PACKED, {**INT8, **AFFINE}, torch.float16),
    "int8": (INT, INT8, torch.float16),
    "int8, affine": (INT, {**INT8, **AFFINE}, torch.bfloat16),
    "int8, one scale": (INT, {"num_bits": 8, "strategy": "tensor"}, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str, tmp_path: Path) -> None:
    """Weights keep their bits, and stand for what the package takes them for."""
    format, args, scales = CASES[case]
    quantized, plain = write(
        tmp_path, compressed_config(format, args), compressed_layer(format, args, scales)
    )
    expected = load_file(plain / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    _, stored = read(format_of(config, quantized), quantized, tensors_of(quantized))
    assert len(stored) == 14
    for name, weight in stored.items():
        values = weight.values(name).load()
        assert torch.equal(values.to(expected[name].dtype), expected[name]), name
        assert weight.weight.load().shape[1] == weight.dims[1] * args["num_bits"] // 8


@pytest.mark.parametrize(
    ("strategy", "scales"),
    [
        ("channel", torch.bfloat16),
        pytest.param("tensor", torch.float32, marks=pytest.mark.long),
        pytest.param("channel", torch.float32, marks=pytest.mark.long),
        pytest.param("tensor", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_float8(scales: torch.dtype, strategy: str, tmp_path: Path) -> None:
    """Weights in float8 become the floats that the package makes of them."""
    args = {**FLOAT8, "strategy": strategy}
    quantized, plain = write(
        tmp_path, compressed_config(FLOAT, args), compressed_layer(FLOAT, args, scales)
    )
    expected = load_file(plain / "model.safetensors")
    program = import_model(quantized, torch.float32)
    for name in expected:
        values = program.weights[name].load().to(expected[name].dtype)
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("rounds", [False, pytest.param(True, marks=pytest.mark.long)])
def test_tokens(rounds: bool, tmp_path: Path) -> None:
    """Products are float, and give the tokens of the dequantized model; or rounded by token, where
    the checkpoint says so."""
    config = compressed_config(INT, INT8, BY_TOKEN if rounds else None)
    quantized, plain = write(tmp_path, config, compressed_layer(INT, INT8), num_hidden_layers=1)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
    fast = gw.optimize(quantized, target="onnxruntime:cpu:float32")
    found = fast.generate([[1, 5, 9, 30]], **options)
    calls = fast.program.step.calls(G.quantized_linear.default)
    assert len(calls) == 4 and all(arguments(call)["rounded"] is rounds for call in calls)
    other = quantized if rounds else plain
    wanted = gw.optimize(other, target="eager:cpu:float32").generate([[1, 5, 9, 30]], **options)
    assert torch.equal(found, wanted)


def test_what_is_not_done_is_said(tmp_path: Path) -> None:
    """Activations and caches that the checkpoint quantizes in other ways stay float, aloud."""
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    config = compressed_config(INT, INT8, inputs, kv_cache_scheme={"num_bits": 8})
    quantized, _ = write(tmp_path, config, compressed_layer(INT, INT8), num_hidden_layers=1)
    with pytest.warns(GraftworkWarning, match="input_activations and kv_cache_scheme: only weig"):
        import_model(quantized)


NAME = "model.layers.1.mlp.down_proj"
LIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "format": (
        {"format": "marlin-24"},
        {},
        "format: expected one of pack-quantized, .*'marlin-24'",
    ),
    "no groups": ({"config_groups": {}}, {}, r"of 4 bits in groups of 16; expected a group of"),
    "rotations": ({"transform_config": {"R1": {}}}, {}, "rotations of activations"),
    "bits": (
        {"config_groups": {"g": {"weights": {**INT4, "num_bits": 8}}}},
        {},
        "the tensors are symmetric, of 4 bits in groups of 16; expected",
    ),
    "codes": (
        {},
        {"weight_packed": lambda t: t[:, 2:]},
        r"weight_packed: expected i32\[32,48\*bit",
    ),
    "shape": ({}, {"weight_shape": lambda t: t + 1}, "weight_packed: expected"),
    "no shape": ({}, {"weight_shape": lambda t: None}, "no tensor .*weight_shape"),
    "scales": ({}, {"weight_scale": lambda t: t[1:]}, r"weight_scale: expected \[32,G\]"),
    "infinite": ({}, {"weight_scale": lambda t: t / 0}, "weight_scale: expected finite numbers"),
}


@pytest.mark.parametrize("case", LIES)
def test_lies(case: str, tmp_path: Path) -> None:
    """What the configuration or a tensor says wrongly is named."""
    says, changes, message = LIES[case]
    config = {**compressed_config(PACKED, INT4), **says}
    quantized, _ = write(tmp_path, config, compressed_layer(PACKED, INT4))
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    for part, change in changes.items():
        changed = change(tensors.pop(f"{NAME}.{part}"))
        if changed is not None:
            tensors[f"{NAME}.{part}"] = changed.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises((InputError, UnsupportedError), match=message), warnings.catch_warnings():
        warnings.simplefilter("error", GraftworkWarning)
        import_model(quantized)
