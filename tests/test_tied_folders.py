"""Folders whose files hold more, or less, than their configuration makes of them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from safetensors.torch import load_file, save_file
from selection import one_in
from source_models import CONFIGS, made, shrunk

import graftwork as gw
from graftwork.frontends.huggingface.checkpoint import Checkpoint
from graftwork.frontends.huggingface.families import instantiate
from graftwork.frontends.huggingface.model import contents, read_config
from graftwork.frontends.trace import fake_mode, first_names
from graftwork.ir import GraftworkWarning, InputError

TIED = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "opt", "bloom", "granite")
T5 = ("t5", "mt5", "umt5")


def tied(name: str) -> Any:
    """A random model whose embedding and head are one."""
    if name in T5:
        return made("t5") if name == "t5" else shrunk(name)
    model = build(ARCHS[name])
    model.config.tie_word_embeddings = True
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights()
    return model


def stored(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A folder's tensors, its configuration changed."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return load_file(folder / "model.safetensors")


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter by all of its names, as the importer reads it."""
    config = read_config(folder)
    twin = instantiate(config, torch.float32, fake_mode())
    checkpoint, first = Checkpoint(folder, twin, *contents(folder, config)), first_names(twin)
    return {name: checkpoint.weight(first[name]).load() for name in twin.state_dict()}


def same_as_transformers(folder: Path, kind: type) -> bool:
    expected = kind.from_pretrained(folder).state_dict()  # type: ignore[attr-defined]
    found = read(folder)
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore::graftwork.ir.support.errors.GraftworkWarning")
@pytest.mark.parametrize(("name", "said"), one_in(5, product([*TIED, *T5], [True, False])))
def test_what_the_file_holds_counts(name: str, said: bool, tmp_path: Path) -> None:
    """Whichever of tied names a file holds, and whatever the configuration says of them."""
    model = tied(name)
    model.save_pretrained(tmp_path)
    pairs = model.all_tied_weights_keys
    names = list(dict.fromkeys([*pairs.values(), *pairs]))
    held = stored(tmp_path, tie_word_embeddings=said)
    (table,) = [held.pop(n) for n in names if n in held]
    if not said and name not in T5:  # then each needs its own
        files = [{n: table + place for place, n in enumerate(names)}]
    else:
        single = [{n: table} for n in names]
        apart = {n: table + place for place, n in enumerate(names)}
        files = [*single, {n: table.clone() for n in names}, apart]
        files.append({n: apart[n] for n in names[1:]})
    for holds in files:
        save_file({**held, **holds}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert same_as_transformers(tmp_path, type(model)), holds.keys()


def test_what_is_stored_apart_is_told_and_used(tmp_path: Path) -> None:
    """Of a head of its own beside tie_word_embeddings=true, there is a warning."""
    model = tied("llama")
    model.save_pretrained(tmp_path)
    held = stored(tmp_path)
    held["lm_head.weight"] = torch.randn(128, 32)
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(3, 128, (1, 9))
    expected = type(model).from_pretrained(tmp_path).eval()(ids).logits
    with pytest.warns(GraftworkWarning, match="ties lm_head.weight and model.embed_tokens.weight"):
        fast = gw.optimize(str(tmp_path), target="eager:cpu:float32")
    assert torch.allclose(fast(ids), expected, atol=1e-4)


@pytest.mark.parametrize("missing", one_in(2, ["shared.weight", "decoder.embed_tokens.weight"]))
def test_a_t5_with_a_head_of_its_own(missing: str, tmp_path: Path) -> None:
    """T5 1.1, with its table under either name: tie_word_embeddings=false means the head alone."""
    model = made("t5")
    model.save_pretrained(tmp_path)
    held = stored(tmp_path, tie_word_embeddings=False)
    table = held.pop("shared.weight")
    names = {"shared.weight", "decoder.embed_tokens.weight"} - {missing}
    held |= {**dict.fromkeys(names, table), "lm_head.weight": torch.randn_like(table)}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = type(model).from_pretrained(tmp_path).eval()
    ids = torch.randint(2, 97, (1, 9))
    expected = reference.generate(ids, max_new_tokens=10, do_sample=False)
    with pytest.warns(GraftworkWarning, match="ties lm_head.weight"):
        fast = gw.optimize(str(tmp_path), target="eager:cpu:float32")
    assert torch.equal(fast.generate(ids, max_new_tokens=10), expected)


def test_what_save_pretrained_leaves_out_is_computed(tmp_path: Path) -> None:
    """Marian's positions, which are a parameter, and its bias of zeros, which is a buffer."""
    model = shrunk("marian")
    model.save_pretrained(tmp_path)
    held = stored(tmp_path)
    assert not any("embed_positions" in name for name in held)
    held.pop("final_logits_bias")
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert same_as_transformers(tmp_path, type(model))


def test_what_would_be_random_is_missing(tmp_path: Path) -> None:
    """transformers may expect a parameter to be missing; values for it must still be known."""
    model = made("bart", **{k: CONFIGS["bart"][k] for k in ("pad_token_id",)})
    model.save_pretrained(tmp_path)
    held = stored(tmp_path)
    held.pop("model.encoder.embed_positions.weight")
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = read_config(tmp_path)
    twin = instantiate(config, torch.float32, fake_mode())
    twin._keys_to_ignore_on_load_missing.add("embed_positions")
    with pytest.raises(InputError, match=r"lacks 1 .*model\.encoder\.embed_positions\.weight"):
        Checkpoint(tmp_path, twin, *contents(tmp_path, config))
