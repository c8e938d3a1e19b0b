"""Layers that are alike are traced three times, and the program is the one of the whole trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from recurrent_archs import RECURRENT
from selection import mostly_long
from torch import nn

from graftwork.frontends import import_model
from graftwork.frontends.huggingface import tracing
from graftwork.frontends.layers import Kinds
from graftwork.ir import Program, program_text

ALL = {**ARCHS, **RECURRENT}
LAYERS = 8
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_OTHERS = {"gpt_neo"}
"""Whose configuration says for each layer what it is in a form of its own."""


def deeper(name: str, layers: int = LAYERS) -> Any:
    """A tiny model with more layers; lists with an entry for each go on in the same way."""
    config = dict(ALL[name].config)
    count = next(key for key in _COUNTS if key in config)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == config[count]:
            config[key] = (value * layers)[:layers]
    return build(replace(ALL[name], config={**config, count: layers}))


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Kinds]:
    """The kinds that are looked for; nothing is kept on disk."""
    found: list[Kinds] = []

    def kinds(model: nn.Module) -> Kinds:
        found.append(Kinds(model))
        return found[-1]

    monkeypatch.setattr(tracing, "Kinds", kinds)
    monkeypatch.setattr(tracing, "trace_key", lambda *given: None)
    return found


def whole(model: Any, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program of a trace of all layers."""
    with monkeypatch.context() as patched:
        patched.setenv(tracing.WHOLE, "1")
        return import_model(model)


def check(model: Any, monkeypatch: pytest.MonkeyPatch, name: str = "") -> None:
    found, wanted = import_model(model), whole(model, monkeypatch)
    assert program_text(found) == program_text(wanted), name
    assert list(found.weights) == list(wanted.weights), name
    for key, weight in found.weights.items():
        assert torch.equal(weight.load(), wanted.weights[key].load()), f"{name} {key}"


@pytest.mark.parametrize(
    "name",
    mostly_long([n for n in ALL if n not in _OTHERS and "num_hidden_layers" in ALL[n].config]
                + ["gpt2", "mpt", "bloom"], keep=("llama",)),
)  # fmt: skip
def test_the_program_is_that_of_the_whole_trace(
    name: str, seen: list[Kinds], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(deeper(name), monkeypatch, name)
    if name in ("llama", "gpt2", "qwen3_moe"):
        assert seen[0].skipped >= LAYERS - 4 and not seen[0].number_used


def test_layers_of_two_kinds(seen: list[Kinds], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windowed layers and others: three of each are traced."""
    check(deeper("gemma2", 10), monkeypatch)
    assert 2 <= seen[0].skipped <= 4


@pytest.mark.long
def test_one_layer_that_is_not_like_the_others(
    seen: list[Kinds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an attribute, a module, or a parameter's size: it is traced."""
    model = deeper("llama")
    model.model.layers[5].self_attn.scaling *= 2
    model.model.layers[6].mlp.act_fn = nn.Tanh()
    check(model, monkeypatch)
    assert 0 < seen[0].skipped <= LAYERS - 5


@pytest.mark.long
def test_a_layer_whose_number_counts_is_traced_whole(
    seen: list[Kinds], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deeper("llama")
    kind = type(model.model.layers[0].self_attn)
    forward = kind.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, *rest = forward(self, *args, **kwargs)
        return out * (self.layer_idx + 1.5), *rest

    monkeypatch.setattr(kind, "forward", scaled)
    check(model, monkeypatch)
    assert seen[0].number_used
    assert all(f", {n}.5)" in program_text(import_model(model)) for n in range(1, LAYERS + 1))


@pytest.mark.long
def test_layers_that_look_alike_and_are_not(
    seen: list[Kinds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count outside of the modules makes each call another: second and third differ, and so all
    are traced."""
    model = deeper("llama")
    kind = type(model.model.layers[0].mlp)
    forward, calls = kind.forward, []

    def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        result: torch.Tensor = forward(self, x) * float(1 + len(calls) % LAYERS)
        return result

    monkeypatch.setattr(kind, "forward", counting)
    found = program_text(import_model(model))
    assert seen[0].skipped > 0, "layers were skipped at first"
    calls.clear()
    assert found.count("aten.mul") == program_text(whole(model, monkeypatch)).count("aten.mul")
    scales = {f"{n}.0" for n in range(1, LAYERS + 1)}
    assert sum(f", {scale})" in found for scale in scales) >= LAYERS - 1


def test_classes_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deeper("llama")
    layer = model.model.layers[3]
    before, number = type(layer).forward, layer.self_attn.layer_idx
    import_model(model)
    assert type(layer).forward is before and layer.self_attn.layer_idx is number
    with pytest.raises(KeyError), Kinds(model).watched():
        raise KeyError
    assert type(layer).forward is before and layer.self_attn.layer_idx is number
