"""Models as GGUF files: logits of transformers' model when read again, and bits as they were."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from archs import ARCHS, TOLERANCE, build, error, logits_of, tokens_and_positions  # noqa: E402
from gguf_archs import FILES, tiny, write  # noqa: E402
from selection import mostly_long  # noqa: E402
from tokenizers import (  # noqa: E402
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import graftwork as gw  # noqa: E402
from graftwork.cli.commands import app  # noqa: E402
from graftwork.frontends import import_model  # noqa: E402
from graftwork.frontends.gguf.blocks import TYPES, encoded  # noqa: E402
from graftwork.ir import GraftworkWarning, InputError, UnsupportedError  # noqa: E402
from graftwork.ir.ops.numerics import Numeric, Quantized, pack  # noqa: E402

EAGER = "eager:cpu:float32"
DECODERS = [name for name in FILES if name != "t5"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": []}
PROMPTS = [[1, 5, 9, 30], [7, 3, 77, 2]]


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def exported(source: Path, out: Path, recipe: Any = "baseline") -> Path:
    """Written without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraftworkWarning)
        return gw.optimize(source, recipe, target=EAGER).export_gguf(out)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries, and types and bytes of the tensors."""
    file = gguf.GGUFReader(path)
    entries = {key: entry.contents() for key, entry in file.fields.items()}
    return entries, {t.name: (t.tensor_type.name, t.data.tobytes()) for t in file.tensors}


@pytest.mark.parametrize("which", mostly_long(DECODERS, keep=("llama (experts)",)))
def test_a_folder_as_a_file(which: str, tmp_path: Path) -> None:
    """A checkpoint's file gives transformers' logits, and has the tensors that llama.cpp's
    converter writes."""
    model = tiny(which)
    out = exported(saved(model, tmp_path / "model"), tmp_path / "out.gguf")
    ids, positions = tokens_and_positions()
    with torch.no_grad(), pytest.warns(GraftworkWarning, match="no_vocab"):
        assert error(logits_of(import_model(out), ids, positions), model(ids).logits) < TOLERANCE
    write(tmp_path / "wanted.gguf", which)
    assert read(out)[1].keys() == read(tmp_path / "wanted.gguf")[1].keys()


@pytest.mark.parametrize("which", mostly_long(DECODERS, keep=("gpt2", "gemma2")))
def test_a_file_as_a_file(which: str, tmp_path: Path) -> None:
    """Every entry and every byte of a file's tensors is there again, also of those that are laid in
    another way here."""
    write(tmp_path / "in.gguf", which, "Q5_1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)  # of what is dequantized when it runs
        out = gw.optimize(tmp_path / "in.gguf", target=EAGER).export_gguf(tmp_path / "out.gguf")
    assert read(tmp_path / "in.gguf") == read(out)


def test_frequencies_that_are_divided(tmp_path: Path) -> None:
    """Llama 3.1's are, by a tensor of the file."""
    model = build(ARCHS["llama"])
    out = exported(saved(model, tmp_path / "model"), tmp_path / "out.gguf")
    assert "rope_freqs.weight" in read(out)[1]
    ids, positions = tokens_and_positions()
    with torch.no_grad(), pytest.warns(GraftworkWarning, match="no_vocab"):
        assert error(logits_of(import_model(out), ids, positions), model(ids).logits) < TOLERANCE


@pytest.mark.parametrize("number", [n for n, kind in TYPES.items() if kind.written])
def test_blocks_are_written_as_they_are_read(number: int) -> None:
    """Codes, scales and offsets of random blocks become the same blocks, of the same type."""
    kind, rng = TYPES[number], np.random.default_rng(number)
    blocks = rng.integers(0, 256, (64, kind.size), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(2, 250, 64)
    else:
        words = 2 if kind.offsets else 1
        scale = rng.normal(size=(64, words)).astype(np.float16)
        blocks[:, : 2 * words] = scale.view(np.uint8)
    given = torch.from_numpy(blocks)
    book = torch.tensor(kind.codebook).float() if kind.codebook else None
    offset = None if kind.offsets is None else kind.offsets(given)
    stored = Quantized(pack(kind.codes(given), kind.bits), kind.scales(given), offset, book)
    found = encoded(kind.numeric, stored)
    assert found is not None and found[0] == number and torch.equal(found[1], given)


@pytest.mark.parametrize(
    ("numeric", "name"),
    [
        (Numeric(4, 64, "symmetric", torch.float16), "Q4_0"),
        (Numeric(3, 32, "symmetric", torch.float16), "Q4_0"),
        (Numeric(6, 32, "symmetric", torch.float16), "Q8_0"),
        (Numeric(2, 128, "affine", torch.float16), "Q4_1"),
        (Numeric(8, 32, "affine", torch.float16), None),
        (Numeric(8, 32, "symmetric", torch.float32), None),
        (Numeric(4, 16, "symmetric", torch.float16), None),
    ],
)
def test_types_of_other_weights(numeric: Numeric, name: str | None) -> None:
    """A weight has a type if that holds exactly its values."""
    stored = numeric.quantize(torch.randn(8, 256, generator=torch.Generator().manual_seed(1)))
    found = encoded(numeric, stored)
    assert (None if found is None else TYPES[found[0]].name) == name
    if found is not None:
        values = gguf.dequantize(found[1].numpy(), gguf.GGMLQuantizationType(found[0]))
        assert torch.equal(torch.from_numpy(values.copy()), numeric.dequantize(stored))


def _byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {word: id for id, word in enumerate([*letters, "ab", "\u0120ab", "12"])}
    made = Tokenizer(models.BPE(ids, [("a", "b"), ("\u0120", "ab"), ("1", "2")]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _by_score() -> Tokenizer:
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", *spelled, *"ab12!\u2581", "ab"]
    words.append("\u2581ab")
    ids = {word: id for id, word in enumerate(words)}
    pairs = [("a", "b"), ("\u2581", "ab")]
    model = models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(model)
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(steps)
    undone = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*undone, decoders.Strip(" ", 1, 0)])
    return made


TEXTS = [
    "ab ab 12 1212!",
    " ab\n\nab",
    "caf\u00e9 \u4e2d\u6587 \U0001f600",
    "<s>ab</s> ab",
    "b<own>a",
]


@pytest.mark.parametrize("kind", [_byte_level, _by_score])
def test_tokens_are_those_of_the_tokenizer(kind: Any, tmp_path: Path) -> None:
    """Special tokens, the user's own and what a text begins with among them; and the template."""
    config = {**ARCHS["olmo2"].config, "vocab_size": 300}
    model = build(replace(ARCHS["olmo2"], config=config))
    model.config.bos_token_id = model.generation_config.bos_token_id = 270
    model.config.eos_token_id = model.generation_config.eos_token_id = 271
    folder, made = saved(model, tmp_path / "model"), kind()
    start = made.get_vocab_size()
    made.add_special_tokens([f"<x{i}>" for i in range(270 - start)] + ["<s>", "</s>"])
    made.add_tokens([AddedToken("<own>", normalized=False)])
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 270)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    out = exported(folder, tmp_path / "out.gguf")
    entries, _ = read(out)
    assert entries["tokenizer.chat_template"] == "{{ messages }}"
    assert entries["tokenizer.ggml.eos_token_id"] == 271 and entries["tokenizer.ggml.add_bos_token"]
    again = gw.optimize(out, target=EAGER).tokenizer
    for text in TEXTS:
        ids = made.encode(text).ids
        assert again.encode(text).ids == ids, text
        assert again.decode(ids) == made.decode(ids), text


@pytest.mark.long
def test_tokenizers_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    folder = saved(tiny("qwen3"), tmp_path / "model")
    made = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json: model\.type is 'WordPiece'"):
        exported(folder, tmp_path / "out.gguf")
    other = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match=r"decoder is None"):
        exported(folder, tmp_path / "out.gguf")
    other.decoder = decoders.ByteLevel()
    other.pre_tokenizer = pre_tokenizers.Split(Regex("a"), "isolated")
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match=r"texts are split by \('a',\)"):
        exported(folder, tmp_path / "out.gguf")


def _int4(**options: Any) -> gw.Recipe:
    given = {"symmetric": True, "rounded": False, "embedding": 8, **options}
    return gw.Recipe.load("int4").with_options(
        [f"quantize_weights.{name}={json.dumps(value)}" for name, value in given.items()]
    )


@pytest.mark.parametrize("which", mostly_long(("llama", "qwen35", "qwen3next"), keep=("llama",)))
def test_weights_of_few_bits(which: str, tmp_path: Path) -> None:
    """What a recipe stores in few bits is in the file in those bits, its rows and columns in
    another order, and says the same."""
    parts = ("attn_q", "ffn_down", "ffn_up")
    if which != "llama":
        parts = ("attn_qkv", "attn_gate", "ssm_out")
    folder = saved(tiny(which), tmp_path / "model")
    fast = gw.optimize(folder, _int4(), target=EAGER)
    out = fast.export_gguf(tmp_path / "out.gguf")
    kinds = {name: type for name, (type, _) in read(out)[1].items()}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert {kinds[f"blk.0.{part}.weight"] for part in parts} == {"Q4_0"}
    assert kinds["output_norm.weight"] == "F32"
    again = gw.optimize(out, target=EAGER)
    assert torch.equal(fast.generate(PROMPTS, **OPTIONS), again.generate(PROMPTS, **OPTIONS))


@pytest.mark.long
def test_weights_without_a_type_become_floats_aloud(tmp_path: Path) -> None:
    """Their values are those of their bits."""
    folder = saved(tiny("qwen3"), tmp_path / "model")
    fast = gw.optimize(folder, _int4(embedding=False, scales="f32"), target=EAGER)
    with pytest.warns(GraftworkWarning, match=r"14 weights of few bits are written as floats"):
        out = fast.export_gguf(tmp_path / "out.gguf")
    assert {type for type, _ in read(out)[1].values()} == {"F32"}
    again = gw.optimize(out, target=EAGER)
    assert torch.equal(fast.generate(PROMPTS, **OPTIONS), again.generate(PROMPTS, **OPTIONS))


def test_a_file_with_other_bits(tmp_path: Path) -> None:
    """Of a file that a recipe quantizes anew, what it left is copied."""
    write(tmp_path / "in.gguf", "qwen3", "Q8_0")
    recipe = _int4(embedding=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)
        out = gw.optimize(tmp_path / "in.gguf", recipe, target=EAGER).export_gguf(
            tmp_path / "out.gguf"
        )
    (_, before), (_, after) = read(tmp_path / "in.gguf"), read(out)
    assert before["token_embd.weight"] == after["token_embd.weight"]
    assert {before["blk.0.ffn_up.weight"][0], after["blk.0.ffn_up.weight"][0]} == {"Q8_0", "Q4_0"}


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_floats_keep_their_bits(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    """A checkpoint of 16-bit floats runs in float32, and its file has 16 bits; vectors have 32."""
    folder = saved(tiny("qwen3").to(dtype), tmp_path / "model")
    _, tensors = read(exported(folder, tmp_path / "out.gguf"))
    kinds = {part: tensors[f"blk.0.{part}.weight"][0] for part in ("attn_k", "attn_norm")}
    assert kinds == {"attn_k": name, "attn_norm": "F32"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("copyspec", r"the pass draft_suffix changes \(decode plan\)"),
        ("streaming_llm", r"the pass evict_cache changes \(cache contents\)"),
        ("quarot", r"the pass rotate_hidden changes \(hidden basis\)"),
        ("skip_layers", r"the pass skip_layers changes \(layer set\)"),
    ],
)
def test_recipes_that_a_file_cannot_say(recipe: str, message: str, tmp_path: Path) -> None:
    """They are refused by name, before the model is read."""
    asked = ["export", str(tmp_path / "none"), "--format", "gguf", "--recipe", recipe]
    done = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "out.gguf")])
    with pytest.raises(UnsupportedError, match=message):
        raise done.exception or AssertionError(done.output)


def test_models_that_a_file_cannot_say(tmp_path: Path) -> None:
    """An option, a type and a scaling of frequencies without a place are named; a model in memory
    has no configuration; and nothing is left behind."""
    out = tmp_path / "out.gguf"
    model = tiny("qwen3")
    model.config.hidden_act = "gelu"
    folder = saved(model, tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"hidden_act is 'gelu', and .* read with 'silu'"):
        exported(folder, out)
    with pytest.raises(InputError, match=r"came without a config\.json"):
        gw.optimize(tiny("qwen3"), target=EAGER).export_gguf(out)
    with pytest.raises(InputError, match=r"ends in \.gguf"):
        gw.optimize(folder, target=EAGER).export_gguf(tmp_path / "out")
    asked = ["export", str(saved(build(ARCHS["opt"]), tmp_path / "opt")), "--format", "gguf"]
    done = CliRunner().invoke(app, [*asked, "--out", str(out)])
    with pytest.raises(UnsupportedError, match="GGUF files of opt models are not written"):
        raise done.exception or AssertionError(done.output)
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))


def test_a_file_takes_its_place_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stops the writing leaves the older file, and no other."""
    fast = gw.optimize(saved(tiny("qwen3"), tmp_path / "model"), target=EAGER)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"older")

    def stop(self: Any, **options: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", stop)
    with pytest.raises(InputError, match="no space left"):
        fast.export_gguf(out)
    assert out.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.gguf"]
