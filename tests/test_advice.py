"""Errors come before a model is traced where they need none, and their advice works."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_front_door import run

import graftwork as gw
from graftwork.artifact.destinations import check_file
from graftwork.frontends.huggingface import model as huggingface
from graftwork.ir import GraftworkWarning, InputError

DEMO = Path(gw.__file__).parent / "demo_model"
CPU = "eager:cpu:float32"


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever traces a model fails."""

    def traced(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(huggingface, "import_tensors", traced)


PROMPT = ("--prompt", "def")
OUT = ("--out", "{file}/below")
DATA = ("--data", "{folder}/none")
CUDA = ("--target", "torch:cuda")
LATE: dict[str, tuple[tuple[str, ...], str]] = {
    "optimize --out": (("optimize", *OUT), "file is not a folder"),
    "optimize --out of others": (("optimize", "--out", "{folder}"), "is not a graftwork artifact"),
    "optimize --data": (("optimize", "--dry-run", "--recipe", "gptq", *DATA), "there is no"),
    "optimize --work": (
        ("optimize", "--dry-run", "--recipe", "gptq", "--data", "{file}", "--work", "{file}"),
        "as a folder",
    ),
    "optimize --set": (
        ("optimize", "--dry-run", "--recipe", "medusa", "--set", "draft_medusa.weights=/none"),
        "draft_medusa: there is no /none",
    ),
    "optimize another model": (
        ("optimize", "--dry-run", "--recipe", "draft_model", "--set", "draft_model.model=/none"),
        "draft_model: there is no /none",
    ),
    "optimize a corpus": (
        ("optimize", "--dry-run", "--recipe", "corpus"),
        "draft_corpus.path=FILE",
    ),
    "generate --max-new-tokens": (("generate", *PROMPT, "--max-new-tokens", "99999"), "at most"),
    "generate --file": (("generate", "--file", "{long}"), "and the model's context"),
    "generate --top-k": (("generate", *PROMPT, "--top-k", "5"), "need --temperature"),
    "generate --data": (("generate", *PROMPT, "--recipe", "gptq"), "--data"),
    "generate --target": (("generate", *PROMPT, *CUDA), "no CUDA device"),
    "bench --target": (("bench", "--recipes", "baseline", *CUDA), "no CUDA device"),
    "bench --data": (("bench", "--recipes", "baseline", *DATA), "cannot read"),
    "bench --text": (("bench", "--recipes", "gptq"), "give text= (--text"),
    "bench --json": (("bench", "--recipes", "baseline", "--json", "{folder}/no/x"), "no folder"),
    "bench --recipes": (("bench", "--recipes", "draft_model"), "draft_model.model=PATH"),
    "train --data": (("train", "--out", "{folder}/out", *DATA), "there is no"),
    "train --out": (("train", *OUT), "is not a folder"),
    "train --target": (("train", "--out", "{folder}/out", *CUDA), "no CUDA device"),
    "tune --data": (("tune", "--recipe", "medusa", *DATA), "cannot read"),
    "tune --out": (("tune", "--recipe", "medusa", "--data", "{file}", *OUT), "is not a folder"),
    "tune --target": (("tune", "--recipe", "medusa", "--data", "{file}", *CUDA), "no CUDA device"),
    "calibrate --data": (("calibrate", *DATA), "cannot read"),
    "calibrate --text": (("calibrate", "--data", "{file}", "--recipe", "gptq"), "--text"),
    "calibrate --out": (("calibrate", "--data", "{long}", "--out", "{folder}"), "is a folder"),
    "calibrate --target": (("calibrate", "--data", "{long}", *CUDA), "no CUDA device"),
    "export --out": (("export", "--format", "onnx", "--out", "{folder}"), "something else"),
    "export below a file": (("export", "--format", "onnx-plan", *OUT), "is not a folder"),
    "export --opset": (
        ("export", "--format", "onnx", "--out", "{folder}/new", "--opset", "5"),
        "opset: expected",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_needs_no_model_is_refused_before_one_is_traced(
    name: str, tmp_path: Path, untraced: None, capsys: pytest.CaptureFixture[str]
) -> None:
    if "torch:cuda" in LATE[name][0] and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    (tmp_path / "file").write_text("def main():\n")
    (tmp_path / "long").write_text("def main():\n" * 2000)
    (tmp_path / "thesis.tex").write_text("years of work")
    places = {"file": tmp_path / "file", "long": tmp_path / "long", "folder": tmp_path}
    (command, *options), message = LATE[name]
    given = [option.format(**places) for option in options]
    assert run(command, DEMO, *given) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert message in errors and "Traceback" not in errors, errors


def test_a_device_that_is_not_here_is_told_before_a_model_is_made(untraced: None) -> None:
    """One may be made for another machine."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    told = pytest.warns(GraftworkWarning, match="no CUDA device is usable.*or save the model")
    with told, pytest.raises(AssertionError, match="traced"):
        gw.optimize(DEMO, target="torch:cuda")


@pytest.mark.long
def test_exports_refuse_a_place_before_they_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gw.optimize(DEMO, target=CPU)
    (tmp_path / "thesis.tex").write_text("years of work")
    names = {name for name in dir(model) if name.startswith("export_")} - {"export_gguf"}  # a file
    for module in ("onnx_folder", "plan", "loop", "heads", "speculators", "compressed"):
        found = importlib.import_module(f"{gw.__name__}.exporting.{module}")
        for name in names & vars(found).keys():
            monkeypatch.setattr(found, name, lambda *args, **more: pytest.fail("converted"))
    assert len(names) == 7
    for name in names:
        with pytest.raises(InputError, match="not an empty folder"):
            getattr(model, name)(tmp_path)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    check_file(tmp_path / "new", "--out")
    check_file(None, "--out")
    for file in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(InputError, match=f"--out {file}"):
            check_file(file, "--out")


def test_a_prompt_may_come_from_standard_input_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids(*args: object, code: int = 0) -> Any:
        asked = ("--max-new-tokens", 4, "--target", CPU, "--json")
        assert run("generate", saved, *args, *asked) == code
        said = capsys.readouterr()
        return json.loads(said.out)["ids"] if code == 0 else said.err

    saved = gw.optimize(DEMO, target=CPU).save(tmp_path / "saved")
    text, file = "def größe(x):\n    return", tmp_path / "prompt.txt"
    wanted = ids("--prompt", text)
    for ending in ("", "\n"):  # an editor ends files so
        file.write_text(text + ending)
        assert ids("--file", file) == wanted
        piped = io.TextIOWrapper(io.BytesIO((text + ending).encode()))
        monkeypatch.setattr(sys, "stdin", piped)
        assert ids("--prompt", "-") == wanted
    assert ids("--prompt", str(file)) != wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert "--prompt -: cannot read text in UTF-8" in ids("--prompt", "-", code=2)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert "there is none" in ids("--prompt", "-", code=2)
    assert "either --prompt TEXT or --file FILE" in ids(code=2).replace("\n", " ")
    assert "--file" in ids("--file", tmp_path / "none", code=2)
