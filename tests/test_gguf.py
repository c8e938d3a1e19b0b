"""GGUF files: blocks kept in their bits, values and tokens those of the `gguf` package."""

from __future__ import annotations

import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf_files import moved, write  # noqa: E402
from selection import mostly_long  # noqa: E402

import graftwork as gw  # noqa: E402
from graftwork.frontends import import_model  # noqa: E402
from graftwork.frontends.gguf import rows  # noqa: E402
from graftwork.frontends.gguf.blocks import EIGHT, TYPES, BlockType  # noqa: E402
from graftwork.frontends.gguf.config import SILENT, architecture_of, config_of  # noqa: E402
from graftwork.frontends.gguf.metadata import Metadata  # noqa: E402
from graftwork.frontends.gguf.reader import GgufFile, Passed  # noqa: E402
from graftwork.ir import (  # noqa: E402
    GraftworkWarning,
    InputError,
    UnsupportedError,
    arguments,
)
from graftwork.ir.ops.numerics import Quantized, pack  # noqa: E402

G = torch.ops.graftwork
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
PROMPTS = [[1, 5, 9, 30], [7, 3, 77, 2]]


@pytest.fixture(autouse=True)
def _nothing_is_dequantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraftworkWarning)
        yield


@pytest.mark.parametrize("number", TYPES, ids=[kind.name for kind in TYPES.values()])
def test_blocks(number: int) -> None:
    """Random blocks stand for the values that the package makes of them, bit for bit."""
    kind: BlockType = TYPES[number]
    which = gguf.GGMLQuantizationType(number)
    assert (kind.name, kind.values, kind.size) == (which.name, *gguf.GGML_QUANT_SIZES[which])
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (64, kind.size), dtype=np.uint8)
    scale = rng.normal(size=(64, 2)).astype(np.float16).view(np.uint8)
    for start in _floats_at(kind):
        blocks[:, start : start + 2] = scale[:, start % 4 : start % 4 + 2]
    given = torch.from_numpy(blocks.copy())
    numeric = kind.numeric
    stored = Quantized(
        pack(kind.codes(given), kind.bits),
        kind.scales(given),
        None if kind.offsets is None else kind.offsets(given),
    )
    assert stored.scale.dtype == numeric.scale and int(kind.codes(given).max()) < 2**kind.bits
    book = torch.tensor(kind.codebook).float() if kind.codebook else None
    expected = torch.from_numpy(gguf.dequantize(blocks, which).copy())
    assert torch.equal(numeric.dequantize(stored, book), expected)


def _floats_at(kind: BlockType) -> tuple[int, ...]:
    """The bytes at which blocks hold float16, which random bytes would make NaN."""
    held = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    held |= {"TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": ()}
    return held.get(kind.name, (0, 2) if kind.name in ("Q4_K", "Q5_K") else (0,))


def test_blocks_are_decoded_some_rows_at_a_time(tmp_path: Path, monkeypatch: Any) -> None:
    """With rows in an order of their own, too; the values are those of all rows at once."""
    path = tmp_path / "m.gguf"
    write(path, {"": "Q4_1", "down_proj.weight": "Q8_0"}, **SIZES)
    program = import_model(path)
    whole = {name: weight.load() for name, weight in program.weights.items()}
    monkeypatch.setattr(rows, "AT_ONCE", 500)
    for name, weight in program.weights.items():
        assert torch.equal(weight.load(), whole[name]), name


CASES: dict[str, tuple[str, dict[str, str], dict[str, int], tuple[str, ...]]] = {
    "llama": (
        "llama",
        {"": "Q4_0", "embed_tokens.weight": "Q8_0", "lm_head.weight": "Q8_0"},
        SIZES,
        ("eager:cpu:float32", "torch:cpu:float32", "onnxruntime:cpu:float32"),
    ),
    "qwen2": ("qwen2", {"": "Q5_1", "lm_head.weight": "F16"}, SIZES, ("eager:cpu:float32",)),
    "qwen3": (
        "qwen3",
        {"": "Q8_0", "down_proj.weight": "Q5_0", "embed_tokens.weight": "F32"},
        SIZES,
        ("eager:cpu:float32",),
    ),
}


@pytest.mark.parametrize("case", mostly_long(CASES, keep=("qwen3",)))
def test_tokens(case: str, tmp_path: Path) -> None:
    """A file made with the package gives the tokens of its dequantized model; weights stay in their
    bits, tables and heads too."""
    arch, kinds, sizes, targets = CASES[case]
    path = tmp_path / "tiny.gguf"
    model = write(path, kinds, arch, **sizes)
    wanted = gw.optimize(model, target="eager:cpu:float32").generate(PROMPTS, **OPTIONS)
    for target in targets:
        fast = gw.optimize(path, target=target)
        calls = fast.program.step.calls(G.quantized_linear.default)
        assert len(calls) >= 4 and not any(arguments(call)["rounded"] for call in calls)
        assert torch.equal(fast.generate(PROMPTS, **OPTIONS), wanted), target
    assert fast.program.info.eos == (2,) and fast.program.info.bos == 1


def test_weights_are_the_package_s_values(tmp_path: Path) -> None:
    """Every product's bits stand for the values that the package dequantizes, rows of queries and
    keys in transformers' order; and on torch the tokens are the same."""
    path = tmp_path / "tiny.gguf"
    model = write(path, {"": "Q4_1"}, **SIZES)
    program = import_model(path)
    values = dict(model.named_parameters())
    calls = program.step.calls(G.quantized_linear.default, G.quantized_embedding.default)
    assert len(calls) == 9
    for call in calls:
        given = arguments(call)
        name = str(given["weight"].target).removesuffix(".q4")
        parts = [program.weights[given[p].target].load() for p in ("weight", "scale", "offset")]
        numeric = TYPES[3].numeric
        assert torch.equal(numeric.dequantize(Quantized(*parts)), values[name].detach()), name


def test_rounded_activations(tmp_path: Path) -> None:
    """Native kernels run on the file's bits, scales of either sign, where that is asked for."""
    path = tmp_path / "tiny.gguf"
    write(path, {"": "Q4_0", "down_proj.weight": "Q8_0"}, **SIZES)
    found = [
        gw.optimize(path, "round_activations", target=target).generate(PROMPTS, **OPTIONS)
        for target in ("eager:cpu:float32", "onnxruntime:cpu:float32")
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("recipe", mostly_long(("eagle_chain", "medusa"), keep=("eagle_chain",)))
def test_heads_grow_on_a_head_of_few_bits(recipe: str, tmp_path: Path) -> None:
    """Drafts read the file's table and head, or float copies to be trained; texts stay the same."""
    path = tmp_path / "tiny.gguf"
    write(path, {"": "Q4_0"}, **SIZES)
    plain, drafting = (
        gw.optimize(path, r, target="eager:cpu:float32") for r in ("baseline", recipe)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)  # the heads are untrained
        found = drafting.generate(PROMPTS, **OPTIONS)
    assert torch.equal(found, plain.generate(PROMPTS, **OPTIONS))


def test_the_tokenizer_comes_with_it(tmp_path: Path) -> None:
    """Texts are encoded with the file's vocabulary, and an artifact carries it and its bits."""
    path = tmp_path / "tiny.gguf"
    write(path, {"": "Q4_0"}, **SIZES)
    made = gw.optimize(path, target="eager:cpu:float32")
    assert made.tokenizer.encode("!", add_special_tokens=False).ids == [3]
    made.save(tmp_path / "out")
    loaded = gw.load(tmp_path / "out")
    assert loaded.tokenizer.encode("!", add_special_tokens=False).ids == [3]
    for name, weight in made.program.weights.items():
        assert torch.equal(weight.load(), loaded.program.weights[name].load()), name


def test_frequencies(tmp_path: Path) -> None:
    """What a file divides the rotary embedding's frequencies by is heeded (the tiny llama has
    llama 3's), and checked."""
    path = tmp_path / "tiny.gguf"
    model = write(path, {"": "F16"}, **SIZES)
    found = next(w for w in import_model(path).weights.values() if "inv_freq" in w.name).load()
    assert torch.allclose(found.flatten(), model.model.rotary_emb.inv_freq, rtol=1e-6)
    start = GgufFile.open(path).tensors["rope_freqs.weight"].start
    raw = bytearray(path.read_bytes())
    raw[start : start + 4] = bytes(4)
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"rope_freqs\.weight: expected positive numbers"):
        import_model(path)


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to install."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"needs the package gguf.*pip install .*\[gguf\]"):
        import_model(path)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "bert"}, "expected one of .*llama, .*got 'bert'"),
    "experts": ({"llama.expert_count": 8}, "expert_used_count: expected a number, got nothing"),
    "text": ({"llama.embedding_length": "64"}, "embedding_length: expected a number, got '64'"),
    "no heads": ({"llama.attention.head_count": 0}, "0 heads over 2 of 64 channels"),
    "no groups": ({"llama.attention.head_count_kv": 0}, "4 heads over 0 of 64 channels"),
    "groups": ({"llama.attention.head_count_kv": 3}, "4 heads over 3 of 64 channels"),
    "many heads": ({"llama.attention.head_count": 2**36}, r"heads over 2|\[64, 64\], and the"),
    "odd heads": ({"llama.attention.head_count": 6}, r"attn_q.weight has the size \[64, 64\]"),
    "odd channels": ({"llama.attention.key_length": 5}, "value_length=16: expected 5, as keys"),
    "rotary": ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8: expected 16"),
    "context": ({"llama.context_length": 0}, "context_length is 0"),
    "endless": ({"llama.context_length": 2**39}, "context_length is 5497"),
    "base": ({"llama.rope.freq_base": 0.0}, "rope.freq_base is 0"),
    "scaling": ({"llama.rope.scaling.type": "su"}, "expected none, linear or yarn, got 'su'"),
    "scale": ({"llama.attention.scale": 0.5}, "attention.scale=0.5: expected 0.25"),
    "window": ({"llama.attention.sliding_window": 16}, "sliding_window=16: expected none"),
    "no layers": ({"llama.block_count": 0}, "block_count is 0, and the file has tensors of 1 lay"),
    "layers": ({"llama.block_count": 10_000}, "block_count is 10000, and the file has tensors of"),
    "width": ({"llama.feed_forward_length": 128}, r"ffn_up.*\[96, 64\], and the .* \[128, 64\]"),
    "hidden": ({"llama.embedding_length": 32}, "rows of 64 channels, and llama.embedding_length"),
    "of layers": ({"llama.attention.head_count_kv": (2, 2)}, "has 2 entries; .* each of 1 layers"),
    "a text's end": ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id: expected a number"),
    "unknown": ({"llama.attention.chunk_size": 4}, "attention.chunk_size is 4, and .* without th"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer in Q4_0."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, {"": "Q4_0"}, **SIZES)
    return path


def saying(path: Path, changes: dict[str, Any]) -> GgufFile:
    """A file whose metadata says something else."""
    opened = GgufFile.open(path)
    opened.metadata.update(changes)
    return opened


@pytest.mark.parametrize("case", LIES)
def test_metadata_that_lies(case: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the metadata says is held against the tensors, and refused by name, before a model of
    its sizes is made."""
    changes, message = LIES[case]
    opened = saying(tiny, changes)
    monkeypatch.setattr(GgufFile, "open", lambda path: opened)
    monkeypatch.setattr("graftwork.frontends.gguf.model.import_tensors", lambda *given: None)
    with pytest.raises((InputError, UnsupportedError), match=message):
        import_model(tiny)


def known_keys() -> set[str]:
    """What the package knows that an architecture may say, without the architecture."""
    families = (vars(family) for name, family in vars(gguf.Keys).items() if name[0] != "_")
    entries = (value for family in families for value in family.values())
    return {e.removeprefix("{arch}.") for e in entries if str(e).startswith("{arch}.")}


@pytest.mark.parametrize("value", [0.37, True, "other", (3, 4)], ids=str)
def test_nothing_that_llama_cpp_reads_is_passed_over(value: Any, tiny: Path) -> None:
    """Whatever the format knows of an architecture is read, refused by name, or in the short list
    of what changes nothing."""
    keys = known_keys()
    assert len(keys) > 90 and "attention.clamp_kqv" in keys
    for key in keys - SILENT:
        expected = {"attention.causal": True, "rope.freq_base": 0.37}
        if expected.get(key) == value or key == "attention.layer_norm_rms_epsilon":
            continue
        metadata = Metadata(saying(tiny, {f"llama.{key}": value}))
        if key == "rope.scaling.factor" and value == 0.37:
            assert config_of(metadata)["rope_parameters"]["factor"] == value
            continue
        with pytest.raises((InputError, UnsupportedError), match=key.replace(".", r"\.")):
            architecture_of(metadata)
            config_of(metadata)


ROPES: dict[str, tuple[dict[str, Any], float]] = {
    "no type": ({"rope.scaling.factor": 4.0}, 4.0),
    "the old key": ({"rope.scale_linear": 4.0}, 4.0),
    "both": ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
    "zero": ({"rope.scaling.factor": 0.0}, 1.0),
}


@pytest.mark.parametrize("case", ROPES)
def test_rope_factors_mean_what_llama_cpp_makes_of_them(case: str, tiny: Path) -> None:
    said, factor = ROPES[case]
    changed = saying(tiny, {f"llama.{key}": value for key, value in said.items()})
    found = config_of(Metadata(changed))["rope_parameters"]
    assert found.get("factor", 1.0) == factor
    assert found["rope_type"] == ("default" if factor == 1 else "linear")


def test_a_rope_factor_without_a_type_divides_the_frequencies(tmp_path: Path) -> None:
    made = {}
    for factor in (1.0, 4.0):
        path = tmp_path / f"{factor}.gguf"
        write(path, {"": "F16"}, "qwen3", metadata={"qwen3.rope.scaling.factor": factor}, **SIZES)
        weights = import_model(path).weights.values()
        made[factor] = next(w for w in weights if "inv_freq" in w.name).load()
    assert torch.allclose(made[4.0] * 4, made[1.0])


def test_counts_of_layers(tmp_path: Path, tiny: Path) -> None:
    """An array with an entry for each layer is read where they are alike, and refused if not."""
    path = tmp_path / "two.gguf"
    write(path, {"": "F16"}, **{**SIZES, "num_hidden_layers": 2})
    assert config_of(Metadata(GgufFile.open(path)))["num_key_value_heads"] == 2
    for key, given in (("attention.head_count_kv", (2, 2)), ("feed_forward_length", (96, 96))):
        config = config_of(Metadata(saying(path, {f"llama.{key}": given})))
        assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 96)
        with pytest.raises(UnsupportedError, match=rf"{key} differs from layer to layer"):
            config_of(Metadata(saying(path, {f"llama.{key}": (given[0], 1)})))


def test_arrays_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    given = {"llama.rope.dimension_sections": [4, 4, 0, 0], "llama.long": [1] * 20_000}
    write(path, {"": "F16"}, metadata=given, **SIZES)
    found = GgufFile.open(path).metadata
    assert found["llama.rope.dimension_sections"] == (4, 4, 0, 0)
    assert found["llama.long"] == Passed(20_000)
    assert found["tokenizer.ggml.merges"] == Passed(2)
    with pytest.raises(UnsupportedError, match=r"dimension_sections is \(4, 4, 0, 0\)"):
        import_model(path)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (-1, "no multiple of 32"),
        (-32, "begins at byte .*, within"),
        (32, "begins at byte .*, within"),
    ],
)
def test_tensors_that_overlap_or_begin_anywhere(
    by: int, message: str, tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "moved.gguf"
    path.write_bytes(moved(tiny.read_bytes(), "blk.0.ffn_up.weight", by))
    with pytest.raises(InputError, match=rf"tensor '[\w.]+' .*{message}"):
        import_model(path)


def test_names_that_come_twice(tiny: Path, tmp_path: Path) -> None:
    """Neither an entry nor a tensor takes another's place, however it is spelled."""
    raw, path = tiny.read_bytes(), tmp_path / "twice.gguf"
    for old, new, message in (
        (b"llama.context_length", b"general.architecture", "two entries are called 'general.arch"),
        (b"blk.0.attn_k.weight", b"blk.0.attn_v.weight", "two tensors have one name"),
        (b"blk.0.attn_k.weight", b"blk.00.ffn_k.weight", "1 tensors are none that a"),
    ):
        path.write_bytes(raw.replace(old, new))
        with pytest.raises((InputError, UnsupportedError), match=message):
            import_model(path)


def test_files_that_are_cut_or_no_gguf(tmp_path: Path) -> None:
    """A file that ends early, announces more than it has, or is something else."""
    path = tmp_path / "tiny.gguf"
    write(path, {"": "Q4_0"}, **SIZES)
    whole = path.read_bytes()
    for size in (0, 3, 20, 200, len(whole) // 3, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"tiny\.gguf"):
            import_model(path)
    many = struct.pack("<Q", 2**60)
    for start, data in (
        (0, b"PK\3\4"),
        (4, struct.pack("<I", 9)),
        (8, many),
        (16, many),
        (24, many),
    ):
        path.write_bytes(whole[:start] + data + whole[start + len(data) :])
        with pytest.raises(InputError, match=r"no GGUF file|version 9|are announced"):
            import_model(path)


def test_scales_must_be_finite(tmp_path: Path) -> None:
    """A block whose scale is NaN is found when the file is opened."""
    path = tmp_path / "tiny.gguf"
    write(path, {"": "Q4_0"}, **SIZES)
    start = GgufFile.open(path).tensors["blk.0.ffn_up.weight"].start
    raw = bytearray(path.read_bytes())
    raw[start : start + 2] = b"\xff\x7f"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"blk\.0\.ffn_up\.weight has scales that are not finite"):
        import_model(path)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ3_S", "IQ1_M"])
def test_other_types_are_kept_in_eight_bits_aloud(kind: str, tmp_path: Path) -> None:
    """Codebooks of vectors have no form here: their values are rounded, and a warning says so."""
    path, which = tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[which]
    model = write(path, {"": "Q4_0", "v_proj.weight": "TQ2_0"}, **{**SIZES, "hidden_size": 256})
    raw, name = path.read_bytes(), b"blk.0.attn_v.weight"
    opened = GgufFile.open(path)
    entry = opened.tensors[name.decode()]
    rows = entry.dims[0]
    place = raw.index(name) + len(name) + 4 + 8 * len(entry.dims)
    blocks = np.random.default_rng(0).integers(0, 256, (rows, size), dtype=np.uint8)
    if kind != "IQ1_M":  # whose scale lies in nibbles of its bytes
        blocks[:, :2] = np.full((rows, 1), 0.01, np.float16).view(np.uint8)
    else:
        blocks[:, -8:] &= 0x3F
    moved = -(-len(raw) // 32) * 32
    start = moved - entry.start + struct.unpack_from("<Q", raw, place + 4)[0]
    changed = raw[:place] + struct.pack("<IQ", int(which), start) + raw[place + 12 :]
    path.write_bytes(changed.ljust(moved, b"\0") + blocks.tobytes())
    with pytest.warns(GraftworkWarning, match=r"1 tensors of types without.*8 bits.*attn_v"):
        program = import_model(path)
    call = next(
        call
        for call in program.step.calls(G.quantized_linear.default)
        if "v_proj" in str(arguments(call)["weight"].target)
    )
    given = arguments(call)
    parts = [program.weights[given[p].target].load() for p in ("weight", "scale")]
    wanted = torch.from_numpy(gguf.dequantize(blocks, which).copy())
    found = EIGHT.dequantize(Quantized(*parts, None))
    most = wanted.reshape(rows, -1, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert wanted.abs().max() > 0 and ((found - wanted).abs() <= most / 250).all()
    assert given["bits"] == 8 and model is not None
