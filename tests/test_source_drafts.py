"""Models that write from a source, drafted for by others of their kind and by their own layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import build
from shrunk import shrunk
from source_models import TOKENS, TYPES, copying, made, model, sources, written

import graftwork as gw
from graftwork.ir import GraftworkError

SHALLOW = {"bart": "decoder_layers", "t5": "num_decoder_layers", "whisper": "decoder_layers"}


def drafting(folder: Path, recipe: str = "draft_model") -> gw.Recipe:
    """The recipe with the model of a folder."""
    name = "depth_entropy" if recipe == "entropy_adaptive" else "draft_model"
    return gw.Recipe.load(recipe).with_options([f"{name}.model={folder}"])


@lru_cache(maxsize=8)
def small(name: str, kept: bool) -> Any:
    """The first layer of `model` with its encoder; not kept: all numbers are a tenth larger."""
    draft = made(name, **{SHALLOW[name]: 1})
    held = draft.state_dict()
    with torch.no_grad():
        for path, tensor in model(name).state_dict().items():
            if path in held:
                own = tensor if kept or "norm" in path else tensor * 1.1
                held[path].copy_(own)
    return draft


def combinations() -> Iterator[Any]:
    """Types on targets, the encoder kept or not: the first that show it, and the rest."""
    for name in TYPES:
        for target in ("eager", "onnxruntime", "torch"):
            for kept in (True, False):
                quick = (name, target) == ("bart", "eager") and kept
                seldom = target == "torch" and name != "t5"
                mark = pytest.mark.sweep if seldom else pytest.mark.long
                yield pytest.param(name, target, kept, marks=[] if quick else [mark])


@pytest.mark.parametrize(("name", "target", "kept"), combinations())
def test_the_text_is_the_targets_own(name: str, target: str, kept: bool, tmp_path: Path) -> None:
    """Alone, and in a batch of sources of several lengths. An encoder that the small model has kept
    runs once for both; one of its own runs beside."""
    small(name, kept).save_pretrained(tmp_path)
    fast = gw.optimize(model(name), drafting(tmp_path), target=target)
    drafted = 0
    for count in (1, 3):
        given = sources(name, count)
        out = fast.generate(**given, max_new_tokens=20, return_dict_in_generate=True)
        assert torch.equal(out.sequences, written(model(name), given, max_new_tokens=20))
        drafted += out.stats.draft_tokens
    assert drafted
    plain = gw.optimize(model(name), "baseline", target="eager")
    apart = gw.optimize(small(name, kept), "baseline", target="eager")
    both = _products(plain) if kept else _products(plain) + _products(apart)
    assert _products(fast) == both
    assert {"cross.2.key", "cross.2.value"} <= set(fast.program.states)


def _products(fast: Any) -> int:
    """Weights that an encoder multiplies by."""
    encode = fast.program.function("encode")
    return len({node.args[1] for node in encode.calls(torch.ops.aten.linear.default)})


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_draft_sees_the_source(own: bool, tmp_path: Path) -> None:
    """A model that copies its source drafts for itself: whatever it drafts is right, whether the
    encoder is the target's to the bit or not."""
    copier, draft = copying(), copying()
    if own:
        draft.model.encoder.embed_positions.weight.data *= 1.001
    draft.save_pretrained(tmp_path)
    ids = torch.randint(3, TOKENS, (3, 20), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 2
    given = {"input_ids": ids}
    want = written(copier, given, max_new_tokens=20)
    fast = gw.optimize(copier, drafting(tmp_path), target="eager")
    out = fast.generate(**given, max_new_tokens=20, return_dict_in_generate=True)
    assert torch.equal(out.sequences, want)
    # The first token, and then five drafted and one of the target's own at a time.
    assert out.stats.steps == 4
    assert out.stats.accepted_tokens == out.stats.draft_tokens


def test_two_models_write_from_one_source(tmp_path: Path) -> None:
    """Where the small model is sure it writes itself (entropy-adaptive decoding): the same source
    serves both, and a small model that is the large one writes its text."""
    model("bart").save_pretrained(tmp_path)
    fast = gw.optimize(model("bart"), drafting(tmp_path, "entropy_adaptive"), target="eager")
    given = sources("bart", 3)
    want = written(model("bart"), given, max_new_tokens=16)
    assert torch.equal(fast.generate(**given, max_new_tokens=16), want)


@pytest.mark.parametrize("name", ["bart", pytest.param("whisper", marks=pytest.mark.long)])
def test_first_layers_draft(name: str) -> None:
    """Layers of the decoder draft for all of them, as in models without a source."""
    deep = made(name, **{SHALLOW[name]: 4})
    options = ["draft_exit.exit=2", "cut_depth.exits=[2]", "draft_exit.own_head=false"]
    recipe = gw.Recipe.load("layerskip").with_options(options)
    always = tuple(use for use in recipe.passes if use.name != "length_goodput")
    fast = gw.optimize(deep, replace(recipe, passes=always), target="eager")
    given = sources(name, 3)
    out = fast.generate(**given, max_new_tokens=16, return_dict_in_generate=True)
    assert torch.equal(out.sequences, written(deep, given, max_new_tokens=16))
    assert out.stats.draft_tokens


@pytest.mark.parametrize(
    "name", ["t5", *(pytest.param(name, marks=pytest.mark.long) for name in ("bart", "whisper"))]
)
def test_texts_leave_early(name: str) -> None:
    """Exits in the decoder (CALM's own setting is T5): no threshold is met and a text is the whole
    model's; all are, and each token takes the layers before the first exit."""
    # transformers has caches for as many layers of a T5 decoder as its encoder has.
    deep = model("t5") if name == "t5" else made(name, **{SHALLOW[name]: 4})
    given = sources(name, 2)
    for threshold, layers in ((1.0, None), (0.0, 1.0)):
        recipe = gw.Recipe.load("calm").with_options(
            [
                *("cut_depth.every=0", "cut_depth.exits=[1]", "depth_confident.measure=margin"),
                f"depth_confident.threshold={threshold}",
            ]
        )
        fast = gw.optimize(deep, recipe, target="eager")
        out = fast.generate(**given, max_new_tokens=12, return_dict_in_generate=True)
        if layers is None:
            assert torch.equal(out.sequences, written(deep, given, max_new_tokens=12))
        else:
            assert out.stats.layers == layers


@pytest.mark.long
def test_a_source_that_does_not_serve_both(tmp_path: Path) -> None:
    """A draft of another kind of source, or one where the model has none: said at `optimize`."""
    model("whisper").save_pretrained(tmp_path / "whisper")
    with pytest.raises(GraftworkError, match=r"reads features f32\[B,8,60\].*texts of a vocab"):
        gw.optimize(model("bart"), drafting(tmp_path / "whisper"), target="eager")
    model("bart").save_pretrained(tmp_path / "bart")
    alone = build(shrunk("bart"))
    with pytest.raises(GraftworkError, match="choose a decoder-only model"):
        gw.optimize(alone, drafting(tmp_path / "bart"), target="eager")
    made("bart", max_position_embeddings=64).save_pretrained(tmp_path / "short")
    fast = gw.optimize(model("bart"), drafting(tmp_path / "short"), target="eager")
    with pytest.raises(GraftworkError, match="the model reads 64 at most"):
        fast.generate(input_ids=torch.ones(1, 65).long())
