"""What weights are made of has a text form, which is read back to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from archs import ARCHS, build
from safetensors.torch import save_file

import graftwork as gw
from graftwork.ir import InputError, ParseError, TensorType, Weight, derive, from_safetensors
from graftwork.ir.text.weights_text import parse_weights, weights_text
from graftwork.ir.weights import Call, piece

SMALL = 4096
"""Bytes of all tensors that lie beside a text: tables of positions, no weights."""

INT4 = {"extends": "int4", "passes": [{"quantize_weights": {"group": 16}}]}
RECIPES: dict[str, tuple[Any, ...]] = {
    "llama": ("baseline", "int8", INT4, "medusa"),
    "mixtral": ("int8",),
}


def none_given(key: str) -> Weight:
    raise AssertionError(f"{key} is asked for")


def check_round_trip(weights: gw.ir.WeightStore) -> str:
    """Weights as text, read, and as text again."""
    text, tensors = weights_text(weights, {})
    assert sum(tensor.nbytes for tensor in tensors.values()) <= SMALL, list(tensors)
    again = parse_weights(text, tensors, none_given)
    assert list(again) == list(weights) and weights_text(again, {})[0] == text
    for name, weight in weights.items():
        assert torch.equal(again[name].load(), weight.load()), name
    return text


def test_programs_after_recipes_are_text(tmp_path: Path) -> None:
    for arch, recipes in RECIPES.items():
        folder = tmp_path / arch
        build(ARCHS[arch]).save_pretrained(folder)
        for recipe in recipes:
            program = gw.optimize(folder, recipe, target="eager:cpu:float32").program
            assert "SafetensorsFile(path=" in check_round_trip(program.weights), recipe


def test_blocks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    gguf_files.write(path, {"": "Q4_0", "embed_tokens.weight": "F32"}, **sizes)
    program = gw.optimize(path, "baseline", target="eager:cpu:float32").program
    assert "GgufFile(path=" in check_round_trip(program.weights)


def test_artifacts_tell_what_weights_were_made_of(tmp_path: Path) -> None:
    build(ARCHS["llama"]).save_pretrained(tmp_path / "model")
    made = gw.optimize(tmp_path / "model", "int8", target="eager:cpu:float32")
    text = (made.save(tmp_path / "saved") / "program.gw").read_text()
    q, k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    assert f"# quantized(joined({q}, {k}, {v}))\n" in text
    assert str(gw.load(tmp_path / "saved").program) == str(made.program)


def test_weights_that_a_reader_has() -> None:
    """`given` stands for them, whatever they are made of."""
    mine = Weight.of("w", torch.arange(6.0))
    part = derive("p", TensorType.parse("f32[2]"), piece, mine, axis=0, start=2, end=4)
    text, tensors = weights_text({"p": part}, {"w": "model.w"})
    assert not tensors and 'given("model.w")' in text
    found = parse_weights(text, {}, lambda key: Weight.of("w", torch.ones(6)))
    assert found["p"].load().tolist() == [1, 1]
    with pytest.raises(ParseError, match=r"expected v f32\[6\], which was given"):
        parse_weights(text, {}, lambda key: Weight.of("v", torch.ones(6)))


def test_what_has_no_text_and_what_is_no_text(tmp_path: Path) -> None:
    own = Weight("w", TensorType.parse("f32[1]"), Call(lambda: torch.ones(1)))
    with pytest.raises(gw.GraftworkError, match=r"weight w: .* has no text form"):
        weights_text({"w": own}, {})
    wrong = {
        '%0 "w": f32[1] = os.system("true")\nreturn %0\n': "an op or a function that derives",
        '%0 "w": f32[1] = piece(%1, axis=0)\nreturn %0\n': "a weight defined above",
        '%0 "w": f32[1] = stored_tensor(file=Path(name="w"))\nreturn %0\n': "one of Entry|one of",
        "return %0\n": "a weight defined above",
    }
    for text, why in wrong.items():
        with pytest.raises(ParseError, match=why):
            parse_weights(text, {}, none_given)
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(4)}, path)
    text, _ = weights_text({"w": from_safetensors(path, "w")}, {})
    assert parse_weights(text, {}, none_given)["w"].load().tolist() == [1, 1, 1, 1]
    save_file({"w": torch.zeros(4)}, path)
    with pytest.raises(InputError, match="has changed"):
        parse_weights(text, {}, none_given)
