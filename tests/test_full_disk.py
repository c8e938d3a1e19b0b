"""A disk that is full while something is written: an error that names the path, and what was there
before is there still."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from test_training import FEW, TEXT, drafted

import graftwork as gw
from graftwork.cli import main
from graftwork.ir import InputError
from graftwork.ir.support.scratch import write_text
from graftwork.model import Model
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.recipe import Recipe
from graftwork.training import fit
from graftwork.training.checkpoint import HEADS

Write = Callable[[Path], object]
IDS = torch.tensor(TEXT[:1])
EXITS: dict[str, Any] = {"batch": 2, "window": 16}


@contextmanager
def full(most: int = 512) -> Iterator[None]:
    """No file may grow beyond `most` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def model() -> Model:
    return drafted(DraftMedusa(heads=2, own_head=True))


def plain(model: Model, name: str, **options: Any) -> Write:
    return lambda path: getattr(model, name)(path, **options)


def refilled(path: Path, write: Callable[[bool], object]) -> object:
    return write((path / "state.json").exists() or (path / "training").exists())


WRITES: dict[str, Callable[[Model], Write]] = {
    "save": lambda m: plain(m, "save"),
    "export_onnx": lambda m: plain(m, "export_onnx", plain=True),
    "export_onnx_loop": lambda m: plain(m, "export_onnx_loop", plain=True),
    "export_onnx_plan": lambda m: plain(m, "export_onnx_plan"),
    "export_genai": lambda m: plain(m, "export_genai", plain=True),
    "save_prefix": lambda m: lambda path: m.save_prefix(IDS, path),
    "recipe": lambda m: Recipe.load("medusa").save,
    "figures": lambda m: lambda path: write_text(path, "1" * 600),
    "fit": lambda m: (
        lambda path: refilled(
            path, lambda old: fit(m, TEXT, out=path, resume=old, **{**FEW, "steps": 2 + 2 * old})
        )
    ),
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize("what", WRITES)
def test_a_full_disk_is_an_error_that_names_the_path(
    what: str, model: Model, tmp_path: Path
) -> None:
    write, path = WRITES[what](model), tmp_path / "out.yaml"
    write(path)
    before = files(tmp_path)
    assert before
    with full(), pytest.raises(InputError, match=f"cannot write {path}"):
        write(path)
    assert files(tmp_path) == before
    with full(), pytest.raises(InputError, match=r"cannot write .*other"):
        write(tmp_path / "other")
    assert files(tmp_path) == before


def test_training_a_model_on_a_full_disk(tmp_path: Path) -> None:
    model, out = build(ARCHS["llama"]), tmp_path / "tuned"
    gw.train_exits(model, TEXT, out=out, steps=1, **EXITS)
    before = files(tmp_path)
    with full(), pytest.raises(InputError, match=f"cannot write {out}"):
        gw.train_exits(model, TEXT, out=out, steps=2, resume=True, **EXITS)
    assert files(tmp_path) == before


@pytest.mark.filterwarnings("ignore:.*untrained")
def test_heads_and_checkpoints_for_others_on_a_full_disk(model: Model, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    trained = fit(model, TEXT, out=heads, **FEW).model
    assert (heads / HEADS).is_file()
    with full(), pytest.raises(InputError, match=r"cannot write .*vllm"):
        trained.export_vllm_medusa(tmp_path / "vllm")
    assert not (tmp_path / "vllm").exists()


@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize("what", [*sorted(WRITES.keys() - {"figures"}), "train_exits"])
def test_no_path_is_not_the_working_folder(
    what: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writes: dict[str, Callable[[Any], object]] = {n: make(model) for n, make in WRITES.items()}
    writes["fit"] = lambda path: fit(model, TEXT, out=path, **FEW)
    writes["train_exits"] = lambda path: gw.train_exits("model", TEXT, out=path, steps=1)
    with pytest.raises(InputError, match="expected a path, got an empty one"):
        writes[what]("")
    assert not files(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ["optimize", "model", "--recipe", "baseline", "--out", ""],
        ["train", "model", "--recipe", "medusa", "--out="],
        ["export", "model", "--format", "onnx", "--out", ""],
        ["tune", "model", "--recipe", "medusa", "--data", "texts", "--out", ""],
        ["calibrate", "model", "--recipe", "calm", "--data", "texts", "--out", ""],
        ["bench", "model", "--recipes", "baseline", "--json", ""],
        ["demo", "--json="],
    ],
    ids=lambda command: command[0],
)
def test_no_path_on_the_command_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2 and "expected a path, got an empty one" in capfd.readouterr().err
    assert not files(tmp_path)
