"""Adapters: they change nothing at first, are what is trained, and are merged when saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from test_heal import FEW, ONE
from test_train_exits import TEXT
from transformers import AutoModelForCausalLM

import graftwork as gw
from graftwork.data.corpus import Windows, split
from graftwork.ir import InputError
from graftwork.optimizing import trace
from graftwork.training.early_exit import MEASURED
from graftwork.training.heal import HealTrainer, kept_layers
from graftwork.training.net import Net
from graftwork.training.teacher_cache import Lessons, Teacher

CPU = torch.device("cpu")


def held(student: Any, model: Any, folder: Path, window: int) -> list[float]:
    """What `gw.heal` would measure of a student of the model."""
    program, whole = trace(student, target="eager"), trace(model, target="eager")
    kept, _, _ = kept_layers(student, ONE, program)
    teacher = Lessons(folder, Teacher(Net(whole, [], CPU)))
    trainer = HealTrainer(program, kept, {"lm_head.weight"}, CPU, teacher.logits)
    return trainer.losses(Windows(split(TEXT)[1], window + 1, 0)(0, MEASURED))


def test_adapters_alone_are_trained_and_what_is_saved_has_them_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = build(ARCHS["llama"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = gw.heal(model, ONE, TEXT, out=tmp_path / "m", **{**FEW, "steps": 60}, lora=4)
    assert made.after.divergence < 0.8 * made.before.divergence
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    after = dict(read.named_parameters())
    assert after.keys() == before.keys()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    # Of the layer that is left: the other's have no part in anything.
    assert changed == {n for n in before if "layers.0." in n and n.endswith("proj.weight")}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], tol=1e-5) <= 4
    found = held(read, model, tmp_path / "said", FEW["window"])
    assert found == pytest.approx([*made.after], rel=1e-4)
    untouched = held(model, model, tmp_path / "said", FEW["window"])
    assert untouched == pytest.approx([*made.before], rel=1e-4)


@pytest.mark.long
def test_an_interrupted_run_goes_on_with_its_rank(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    short = {**FEW, "steps": 6, "save_every": 3, "lora": 2}
    whole = gw.heal(build(ARCHS["llama"]), ONE, TEXT, out=tmp_path / "whole", **short)

    class Stopped(Exception):
        pass

    def stop(state: Any) -> None:
        if state.step == 4:
            raise Stopped

    with pytest.raises(Stopped):
        gw.heal(build(ARCHS["llama"]), ONE, TEXT, out=tmp_path / "m", progress=stop, **short)
    with pytest.raises(InputError, match="belongs to another model or objective"):
        more = {**short, "lora": 3, "resume": True}
        gw.heal(build(ARCHS["llama"]), ONE, TEXT, out=tmp_path / "m", **more)
    again = gw.heal(build(ARCHS["llama"]), ONE, TEXT, out=tmp_path / "m", resume=True, **short)
    assert (again.before, again.after) == (whole.before, whole.after)


def test_early_exits_take_adapters_too(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = build(ARCHS["llama"])
    made = gw.train_exits(model, TEXT, out=tmp_path / "m", **FEW, lora=2)
    assert made.after[-1] < made.before[-1]
    gw.optimize(tmp_path / "m", "baseline", target="eager")
    assert not [name for name, _ in model.named_parameters() if "lora" in name]


@pytest.mark.parametrize("rank", [-1, True, 2.5])
def test_ranks_that_are_none_are_refused(rank: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a rank, such as 16"):
        gw.heal("nowhere", ONE, TEXT, out=tmp_path / "m", steps=1, lora=rank)


def test_without_peft_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"needs the package peft.*pip install"):
        gw.heal("nowhere", ONE, TEXT, out=tmp_path / "m", steps=1, lora=4)
