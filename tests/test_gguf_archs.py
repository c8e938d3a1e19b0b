"""GGUF files of every architecture: logits of transformers' model, blocks kept in their bits.

The files are made as llama.cpp's converter makes them, see `gguf_archs`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from archs import TOLERANCE, error, logits_of, tokens_and_positions  # noqa: E402
from gguf_archs import FILES, write  # noqa: E402
from selection import mostly_long  # noqa: E402
from source_models import sources, written  # noqa: E402

import graftwork as gw  # noqa: E402
from graftwork.frontends import import_model  # noqa: E402
from graftwork.frontends.gguf.architectures import ARCHITECTURES  # noqa: E402
from graftwork.frontends.gguf.config import config_of  # noqa: E402
from graftwork.frontends.gguf.metadata import Metadata  # noqa: E402
from graftwork.frontends.gguf.reader import GgufFile  # noqa: E402
from graftwork.ir import (  # noqa: E402
    GraftworkWarning,
    InputError,
    UnsupportedError,
    arguments,
    site_of,
)

A, G = torch.ops.aten, torch.ops.graftwork


def test_every_row_has_a_file() -> None:
    plain = {name.split(" ")[0] for name in FILES}
    assert {name.split(" ")[0] for name in ARCHITECTURES} == plain


DECODERS = [name for name in FILES if name != "t5"]


@pytest.mark.parametrize("which", mostly_long(DECODERS, keep=("falcon", "llama (experts)")))
def test_logits(which: str, tmp_path: Path) -> None:
    """Those of transformers' model, with every key of its metadata read."""
    path = tmp_path / "tiny.gguf"
    model = write(path, which)
    ids, positions = tokens_and_positions()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", GraftworkWarning)
        found = logits_of(import_model(path), ids, positions)
        assert error(found, model(ids).logits) < TOLERANCE


@pytest.mark.long
def test_a_model_with_an_encoder(tmp_path: Path) -> None:
    """T5 writes what transformers' model writes."""
    path = tmp_path / "t5.gguf"
    model = write(path, "t5")
    given = sources("t5", 3)
    fast = gw.optimize(path, target="eager:cpu:float32")
    found = fast.generate(**given, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, written(model, given, max_new_tokens=12))


@pytest.mark.parametrize(
    "which",
    mostly_long(
        ("llama (experts)", "gptneox", "falcon", "gemma2", "qwen35", "qwen3next"),
        keep=("gptneox",),
    ),
)
def test_rows_in_another_order_keep_their_bits(which: str, tmp_path: Path) -> None:
    """A file of blocks gives the logits of the file of the floats that they stand for, and no
    product is one of floats but that with a router or a gate."""
    ids, positions = tokens_and_positions()
    found = []
    for floats in (False, True):
        write(tmp_path / "tiny.gguf", which, "Q5_1", floats=floats)
        program = import_model(tmp_path / "tiny.gguf")
        found.append(logits_of(program, ids, positions))
        if not floats:
            kept = program.step.calls(G.quantized_linear.default, G.quantized_moe.default)
            assert len(kept) >= 4
            assert all(arguments(call)["bits"] == 6 for call in kept)
            others = program.step.calls(A.linear.default, G.moe.default)
            assert all(site_of(call).module.endswith("gate") for call in others)
    assert error(*found) < TOLERANCE


@pytest.mark.long
def test_queries_keys_values_and_gates_in_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older files of Qwen3-Next have them as transformers does."""
    row = FILES["qwen3next"]
    monkeypatch.setitem(
        FILES,
        "qwen3next",
        replace(
            row,
            move=lambda name, data, config: (
                iter([(name, data)]) if "ssm_in" in name else row.move(name, data, config)
            ),
        ),
    )
    model = write(tmp_path / "tiny.gguf", "qwen3next")
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        found = logits_of(import_model(tmp_path / "tiny.gguf"), ids, positions)
        assert error(found, model(ids).logits) < TOLERANCE


@pytest.mark.parametrize(
    ("which", "count"),
    [("gpt2", 8), pytest.param("qwen35 (16 channels)", 1, marks=pytest.mark.long)],
)
def test_columns_in_another_order_are_dequantized_aloud(
    which: str, count: int, tmp_path: Path
) -> None:
    """GPT-2's weights lie the other way round in transformers; Qwen3.5's heads are in another
    order, which here cuts through the groups of columns that have a scale."""
    ids, positions = tokens_and_positions()
    write(tmp_path / "floats.gguf", which, "Q8_0", floats=True)
    write(tmp_path / "blocks.gguf", which, "Q8_0")
    with pytest.warns(GraftworkWarning, match=rf"{count} tensors of few bits that are laid in ano"):
        program = import_model(tmp_path / "blocks.gguf")
    wanted = logits_of(import_model(tmp_path / "floats.gguf"), ids, positions)
    assert error(logits_of(program, ids, positions), wanted) < TOLERANCE


@pytest.mark.long
def test_parts(tmp_path: Path) -> None:
    """A model in several files is opened by its first, and what is missing or wrong is named."""
    write(tmp_path / "tiny.gguf", "qwen3", "Q8_0")
    write(tmp_path / "parts.gguf", "qwen3", "Q8_0", parts=5)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) > 2
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": []}
    found = [
        gw.optimize(path, target="eager:cpu:float32").generate([[5, 9, 30]], **options)
        for path in (tmp_path / "tiny.gguf", parts[0])
    ]
    assert torch.equal(*found)
    with pytest.raises(InputError, match=r"is one of \d parts .* expected the first, called NAME"):
        import_model(parts[1])
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(InputError, match=r"expected the first, called NAME-00001-of"):
        import_model(renamed)
    last = parts[-1].read_bytes()
    parts[-1].write_bytes(parts[-2].read_bytes())
    with pytest.raises(InputError, match=r"is not part \d of"):
        import_model(parts[0])
    parts[-1].unlink()
    with pytest.raises(InputError, match=rf"cannot read .*{parts[-1].name}"):
        import_model(parts[0])
    parts[-1].write_bytes(last)
    import_model(parts[0])


def test_layers_that_predict_later_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No logit is made by them; a file that is written again has them, too."""
    row = FILES["qwen35"]

    def move(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
        if name == "output_norm.weight":
            yield "blk.2.attn_norm.weight", data
            yield "blk.2.nextn.eh_proj.weight", np.ones((64, 128), np.float32)
        yield from row.move(name, data, config)

    def keys(config: Any) -> dict[str, Any]:
        return {**row.keys(config), "block_count": 3, "nextn_predict_layers": 1}

    monkeypatch.setitem(FILES, "qwen35", replace(row, keys=keys, move=move))
    path, out = tmp_path / "tiny.gguf", tmp_path / "out.gguf"
    model = write(path, "qwen35")
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        assert error(logits_of(import_model(path), ids, positions), model(ids).logits) < TOLERANCE
    gw.optimize(path, target="eager:cpu:float32").export_gguf(out)
    first, second = (
        {t.name: t.data for t in gguf.GGUFReader(file).tensors} for file in (path, out)
    )
    assert first.keys() == second.keys() and "blk.2.nextn.eh_proj.weight" in second
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize(
    ("which", "key", "value", "message"),
    [
        ("gemma3", "attention.scale", 0.0, ""),
        ("gemma3", "attention.sliding_window_pattern", 5, "pattern=5: expected 6"),
        ("mpt", "attention.max_alibi_bias", 0.0, "max_alibi_bias=0.0: expected more than 0"),
        ("mamba", "ssm.dt_b_c_rms", True, "dt_b_c_rms=True: expected False"),
        ("qwen3", "expert_count", 4, "qwen3 models with experts are not supported"),
        ("falcon", "attention.key_length", 8, "value_length=16: expected 8, as keys have"),
        ("gptneox", "rope.dimension_count", 7, "7 of 16 channels have no rotary embedding"),
        ("stablelm", "use_parallel_residual", 1, "expected true or false, got 1"),
        ("lfm2", "attention.head_count_kv", (2,), "has 1 entries; expected one for each of 2"),
        ("gpt2", "rope.freq_base", 10.0, "gpt2.rope.freq_base is 10.0, and gpt2 models are read"),
        ("qwen3moe", "expert_weights_scale", 2.5, "expert_weights_scale is 2.5, and .* with 0"),
        ("gpt-oss", "expert_gating_func", 2, "expert_gating_func is 2, and"),
        ("qwen35", "attention.recurrent_layers", (True, False), ""),
        ("qwen35", "attention.recurrent_layers", (True,), "expected one for each of 2 layers"),
        ("qwen35", "nextn_predict_layers", 1, "asks for a tensor blk.1.nextn.eh_proj.weight"),
        ("qwen35", "nextn_predict_layers", 2, "block_count is 2, and the file has"),
        ("qwen35", "rope.dimension_sections", (1, 0, 1, 0), "and sections of all 2 pairs"),
        ("qwen35", "ssm.group_count", 4, "6 heads over 4 of 192 channels"),
        ("qwen35", "linear_attn", 4, "linear_attn is 4, and qwen35 models are read"),
        ("qwen3next", "expert_weights_norm", False, "expert_weights_norm is False, and"),
        ("qwen3next", "full_attention_interval", 0, "but in every 0th layer"),
    ],
)
def test_metadata_of_architectures(
    which: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    """What a model here has no place for is refused by name."""
    path = tmp_path / "tiny.gguf"
    write(path, which)
    opened = GgufFile.open(path)
    opened.metadata[f"{which}.{key}"] = value  # type: ignore[assignment]
    if not message:
        config_of(Metadata(opened))
        return
    with pytest.raises((InputError, UnsupportedError), match=message):
        config_of(Metadata(opened))
