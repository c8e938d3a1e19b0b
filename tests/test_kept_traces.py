"""Kept traces: the program of a trace anew, and a trace anew wherever it could differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import source_models
import torch
from archs import ARCHS, Arch, build
from recurrent_archs import RECURRENT
from selection import mostly_long
from torch import nn

from graftwork.frontends import import_model, kept_traces
from graftwork.frontends.huggingface import tracing
from graftwork.frontends.huggingface.model import Traced
from graftwork.frontends.trace_key import trace_key
from graftwork.ir import Program, TensorType, Weight
from graftwork.ir.text import kept_files

ONE = Arch("llama", {**ARCHS["llama"].config, "num_hidden_layers": 1})
FEW = ("llama", "falcon", "gpt_oss", "t5")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where traces are kept, empty."""
    monkeypatch.setenv("GRAFTWORK_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "traces"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts of models that were traced, one after the other."""
    made: list[str] = []
    export = tracing.export

    def counted(wrapper: Any, *args: Any) -> Any:
        made.append(type(wrapper).__name__)
        return export(wrapper, *args)

    monkeypatch.setattr(tracing, "export", counted)
    return made


def made(name: str) -> Any:
    if name in source_models.CONFIGS:
        return source_models.made(name)
    return build({**ARCHS, **RECURRENT}[name])


def assert_same(one: Program, other: Program) -> None:
    assert str(one) == str(other)
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight.load(), other.weights[name].load(), rtol=0, atol=0)


def check_kept(name: str, traces: list[str]) -> Program:
    """Traced, then read: one program."""
    model = made(name)
    first = import_model(model)
    count = len(traces)
    assert count
    assert_same(import_model(model), first)
    assert len(traces) == count, f"{name} was traced again"
    return first


@pytest.mark.parametrize("name", mostly_long(FEW, keep=["t5"]))
def test_a_kept_trace_gives_the_program_of_the_trace(
    name: str, folder: Path, traces: list[str]
) -> None:
    check_kept(name, traces)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*ARCHS, *RECURRENT, *source_models.CONFIGS])
def test_of_every_architecture(name: str, folder: Path, traces: list[str]) -> None:
    first = check_kept(name, traces)
    for path in folder.iterdir():
        path.unlink()
    traces.clear()
    assert_same(import_model(made(name)), first)
    assert traces


def test_weights_are_those_of_the_model_at_hand(folder: Path, traces: list[str]) -> None:
    """Values of parameters are no part of a trace."""
    import_model(build(ONE, seed=0))
    traces.clear()
    other = build(ONE, seed=1)
    program = import_model(other)
    assert not traces
    held = dict(other.named_parameters())
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        torch.testing.assert_close(program.weights[name].load(), held[name], rtol=0, atol=0)


def key_of(change: Callable[[Any], object] = lambda model: None) -> str | None:
    model = build(ARCHS["llama"])
    change(model)
    return trace_key(Traced(model), 64)


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number of a module": lambda m: setattr(attention(m), "scaling", 0.5),
    "a configuration": lambda m: setattr(m.config, "rms_norm_eps", 1e-3),
    "a part's configuration": lambda m: setattr(attention(m), "config", m.config.__class__()),
    "a buffer": lambda m: m.model.rotary_emb.inv_freq.mul_(2),
    "a buffer's dtype": lambda m: m.model.rotary_emb.double(),
    "layers": lambda m: m.model.layers.pop(1),
    "a shape": lambda m: setattr(m, "lm_head", nn.Linear(32, 100, bias=False)),
    "a bias": lambda m: setattr(m, "lm_head", nn.Linear(32, 128, bias=True)),
    "a tie": lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
    "an activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "training": lambda m: m.train(),
}


def test_what_changes_a_trace_changes_its_key() -> None:
    plain = key_of()
    assert plain is not None and plain == key_of()
    keys = {what: key_of(change) for what, change in CHANGES.items()}
    assert None not in keys.values(), keys
    assert len({plain, *keys.values()}) == len(CHANGES) + 1, keys


def _own_forward(x: torch.Tensor) -> torch.Tensor:
    return x


class _Own(nn.Linear):
    pass


def test_folders_of_one_configuration_are_traced_once(
    folder: Path, traces: list[str], tmp_path: Path
) -> None:
    for name in ("one", "other"):
        build(ONE).save_pretrained(tmp_path / name)
        import_model(tmp_path / name)
    assert len(traces) == 1


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "a hook": lambda m: attention(m).register_forward_hook(lambda *_: None),
    "a patched method": lambda m: setattr(attention(m), "forward", _own_forward),
    "a class of somebody's": lambda m: setattr(m, "lm_head", _Own(32, 128)),
    "an object of somebody's": lambda m: setattr(m, "note", CHANGES["layers"]),
}


def test_what_cannot_be_told_by_value_has_no_key() -> None:
    keys = {what: key_of(change) for what, change in UNKNOWN.items()}
    assert set(keys.values()) == {None}, keys


def test_functions_that_others_have_put_into_transformers_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama import modeling_llama

    assert key_of() is not None
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama, "apply_rotary_pos_emb", _own_forward)
        assert key_of() is None
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama.LlamaMLP, "forward", _own_forward)
        assert key_of() is None
    assert key_of() is not None


def weights_of(model: Any) -> Callable[[str], Weight]:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda name: Weight.of(name, held[name].detach())


def test_a_damaged_file_counts_as_none(folder: Path, traces: list[str]) -> None:
    model = build(ONE)
    first = import_model(model)
    (path,) = folder.iterdir()
    whole, held = path.read_bytes(), weights_of(model)
    assert kept_traces._read(path, held) is not None
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(len(whole), (40,), generator=generator).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert kept_traces._read(path, held) is None, f"byte {place} changed unnoticed"
    path.write_bytes(whole[:1000])
    traces.clear()
    assert_same(import_model(model), first)
    assert traces and kept_traces._read(path, held) is not None


def test_a_file_of_other_weights_counts_as_none(folder: Path) -> None:
    model = build(ONE)
    import_model(model)
    (path,) = folder.iterdir()

    def longer(name: str) -> Weight:
        weight = weights_of(model)(name)
        return replace(weight, type=TensorType(weight.type.dtype, (999, *weight.type.dims[1:])))

    def missing(name: str) -> Weight:
        raise KeyError(name)

    assert kept_traces._read(path, longer) is None
    assert kept_traces._read(path, missing) is None


def test_the_folder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not used for longest goes."""
    monkeypatch.setattr(kept_files, "MOST", 250)
    for age, name in enumerate(("new", "used", "old", "older")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    kept_files.make_room(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "used"}


def test_where_nothing_can_be_kept_models_are_traced(
    folder: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.write_text("in the way")
    model = build(ONE)
    assert_same(import_model(model), import_model(model))
    assert len(traces) == 2
