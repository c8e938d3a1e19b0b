"""Checkpoint folders: lazy weights, conversions, dtypes, and errors that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, TOLERANCE, build, error, logits_of, tokens_and_positions
from safetensors.torch import load_file, save_file
from selection import mostly_long

from graftwork.frontends import import_model
from graftwork.ir import GraftworkError, InputError, UnsupportedError


def saved(name: str, folder: Path, shard: str = "50GB") -> Path:
    """An architecture's model saved as a checkpoint; expert weights are split as on the hub."""
    build(ARCHS[name]).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.mark.parametrize(
    "name",
    mostly_long(
        ["llama-tied-yarn", "mixtral", "qwen2_moe", "gpt2", "bloom"],
        keep=["llama-tied-yarn", "qwen2_moe", "gpt2"],
    ),
)
def test_folder(name: str, tmp_path: Path) -> None:
    """Renamed, tied, prefixed and per-expert tensors become the weights that the model has."""
    folder = saved(name, tmp_path)
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        expected = build(ARCHS[name])(input_ids=ids).logits
    program = import_model(str(folder))
    assert error(logits_of(program, ids, positions), expected) < TOLERANCE
    assert set(program.assets) == {"config.json", "generation_config.json"}
    assert program.info.eos == (2,) and program.info.context > 0


def test_experts_are_split_on_disk(tmp_path: Path) -> None:
    """The conversion above is not vacuous: the file holds one tensor for each expert."""
    names = load_file(saved("mixtral", tmp_path) / "model.safetensors")
    assert any(".experts.3." in name for name in names)


@pytest.mark.long
def test_base_model_checkpoint(tmp_path: Path) -> None:
    """Checkpoints of a model without its head have no prefix in their names."""
    folder = saved("gpt2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    ids, positions = tokens_and_positions()
    expected = logits_of(import_model(folder), ids, positions)
    save_file(bare, folder / "model.safetensors")
    assert torch.equal(logits_of(import_model(folder), ids, positions), expected)


@pytest.mark.long
def test_dtype(tmp_path: Path) -> None:
    """Weights come in the checkpoint's dtype or the one asked for; frequencies stay float32."""
    build(ARCHS["qwen3"]).to(torch.bfloat16).save_pretrained(tmp_path)
    native, wide = import_model(tmp_path), import_model(tmp_path, torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    assert native.weights[name].type.dtype == native.weights[name].load().dtype == torch.bfloat16
    assert wide.weights[name].type.dtype == wide.weights[name].load().dtype == torch.float32
    frequencies = [w for w in native.weights.values() if "inv_freq" in w.name]
    assert frequencies and all(w.type.dtype == torch.float32 for w in frequencies)
    ids, positions = tokens_and_positions()
    low, high = (logits_of(program, ids, positions) for program in (native, wide))
    assert low.dtype == torch.bfloat16 and high.dtype == torch.float32
    assert error(low.float(), high) < 0.05


def test_nothing_is_read_before_it_is_needed(tmp_path: Path) -> None:
    """Import reads headers only: data that is not there is missed at the first load."""
    folder = saved("llama", tmp_path)
    program = import_model(folder)
    path = folder / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    weight = program.weights["lm_head.weight"]
    before = weight.load().clone()
    raw = bytearray(path.read_bytes())
    raw[header:] = bytes(len(raw) - header)
    path.write_bytes(raw)
    assert before.abs().sum() > 0 and weight.load().abs().sum() == 0


def test_missing_shard(tmp_path: Path) -> None:
    """A shard that the index names but nobody downloaded."""
    folder = saved("llama", tmp_path, shard="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InputError, match=rf"shard {shard.name} is missing"):
        import_model(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot read .*index.json: expected a JSON object"),
        ("[]", "whose weight_map names a shard"),
        ('{"weight_map": {"a": "../b.safetensors"}}', r"'\.\./b\.safetensors'.*without a path"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd'.*without a path"),
    ],
)
def test_damaged_index(tmp_path: Path, text: str, reason: str) -> None:
    """An index that cannot be read, or that points out of the folder."""
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=reason):
        import_model(tmp_path)


def test_damaged_generation_config(tmp_path: Path) -> None:
    """Defaults of generation that are no JSON."""
    (saved("llama", tmp_path) / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot read generation_config\.json"):
        import_model(tmp_path)


def test_names_with_digits_that_are_no_numbers(tmp_path: Path) -> None:
    file = saved("llama-tied-yarn", tmp_path) / "model.safetensors"
    save_file({**load_file(file), "extra.².weight": torch.zeros(1)}, file)
    assert import_model(tmp_path).info.model_type == "llama"


def test_missing_tensor(tmp_path: Path) -> None:
    """A tensor that the architecture needs and the file lacks."""
    path = saved("llama", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(InputError, match=r"lacks 1 .*model\.layers\.1\.mlp\.down_proj\.weight"):
        import_model(tmp_path)


def test_wrong_shape(tmp_path: Path) -> None:
    """A tensor whose shape contradicts the configuration."""
    path = saved("llama", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.zeros(100, 32)
    save_file(tensors, path)
    with pytest.raises(InputError, match=r"lm_head\.weight.*f32\[100,32\].*f32\[128,32\]"):
        import_model(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    """A download that stopped half way."""
    path = saved("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"model\.safetensors.*fetch it again"):
        import_model(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Old checkpoints hold pickles, which are never read."""
    path = saved("llama", tmp_path) / "model.safetensors"
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"convert pytorch_model\.bin to safetensors"):
        import_model(tmp_path)


def test_unknown_and_quantized_configurations(tmp_path: Path) -> None:
    """Model types that transformers does not know, and weights quantized by an unknown method."""
    config = saved("llama", tmp_path) / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "model_type": "nonesuch"}))
    with pytest.raises(UnsupportedError, match="nonesuch"):
        import_model(tmp_path)
    config.write_text(json.dumps({**content, "quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(UnsupportedError, match="quantized by quip"):
        import_model(tmp_path)
    config.unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        import_model(tmp_path)


def test_paths(tmp_path: Path) -> None:
    """Paths that are no folders, and things that are no models."""
    with pytest.raises(InputError, match="does not exist"):
        import_model(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        import_model(tmp_path / "file")
    with pytest.raises(InputError, match="cannot import a list"):
        import_model([])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"use_cache": 1}, "use_cache"),
        ({"hidden_size": 256, "num_attention_heads": 6}, "multiple of the number of attention"),
        (
            {"num_hidden_layers": 2**40, "layer_types": None},
            r"num_hidden_layers=\d+, but there are",
        ),
        ({"vocab_size": 2**50}, "no language model of this configuration of llama"),
        ({"max_position_embeddings": 2**40}, "expected 1 to 1073741824 positions"),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "a"}}, "factor|unsupported operand"),
        ({"model_type": ["llama"]}, r"config\.json"),
        ({"quantization_config": "gptq"}, "quantization_config: expected an object, got 'gptq'"),
        ({"quantization_config": [1]}, "quantization_config: expected an object"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_settings_that_are_none(tmp_path: Path, said: dict[str, Any], reason: str) -> None:
    """Of other types and sizes than transformers' own code expects."""
    config = saved("qwen3", tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama", **said}))
    with pytest.raises(GraftworkError, match=reason):
        import_model(tmp_path)


def test_an_end_that_is_no_token(tmp_path: Path) -> None:
    path = saved("llama", tmp_path) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": "float16"}))
    with pytest.raises(InputError, match="eos_token_id: expected token ids, got 'float16'"):
        import_model(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "7", "[" * 100_000])
def test_damaged_configurations(tmp_path: Path, text: str) -> None:
    (saved("llama", tmp_path) / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        import_model(tmp_path)


@pytest.mark.parametrize("shard", ["[" * 500, 7, None, "a\0b"])
def test_shards_that_are_no_files(tmp_path: Path, shard: object) -> None:
    saved("llama", tmp_path, shard="20KB")
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["lm_head.weight"] = shard
    index.write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"index\.json"):
        import_model(tmp_path)
