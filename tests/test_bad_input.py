"""Bad input on the command line: one message that says what is wrong, and nothing half-written.

What the Python interface refuses is tested where it lives; here is what only whole commands show.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from archs import REFUSED, build
from messages import error_message
from tiny import cached_llama, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers

from graftwork.backends.target import Target
from graftwork.cli import main
from graftwork.ir import Program, Weight, WeightStore
from graftwork.model import Model
from graftwork.tracing import traced

CPU = "eager:cpu:float32"
PLAIN = {"name": "test", "contract": "exact"}


def refused(capfd: pytest.CaptureFixture[str], *args: object) -> str:
    """The message of a command that fails; it prints nothing else but stages that take long."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    out, err = capfd.readouterr()
    assert caught.value.code == 2 and out == "", (out, err)
    return " ".join(error_message(err).split())


def poisoned(program: Program) -> Program:
    """With a NaN in its head."""
    head = program.weights["head"].load().clone()
    head[0, 0] = float("nan")
    return program.replace(
        weights=WeightStore({**program.weights, "head": Weight.of("head", head)})
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An artifact whose tokenizer makes a token of every ``a``; its context is 128."""
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 99}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    program = cached_llama().replace(assets={"tokenizer.json": tmp_path / "tokenizer.json"})
    return Model(program, Target("eager", "cpu"), PLAIN).save(tmp_path / "saved")


@pytest.mark.parametrize("command", ["generate", "inspect", "export", "optimize"])
@pytest.mark.parametrize("name", ["manifest.json", "program.gw", "weights.safetensors"])
def test_damaged_artifacts(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    options = {
        "generate": ("--prompt", "a"),
        "inspect": (),
        "export": ("--format", "onnx", "--out", tmp_path / "out"),
        "optimize": ("--out", tmp_path / "out"),
    }[command]
    wanted = ["a saved artifact"] if command == "optimize" else [name, "copy the artifact again"]
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: len(data) // 2])
    truncated = refused(capfd, command, saved, *options)
    assert all(part in truncated for part in wanted), truncated
    (saved / name).unlink()
    assert wanted[0] in refused(capfd, command, saved, *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a " * 500, ["500 tokens", "context 128", "shorten the prompt"]),
        ("b", ["token id 99", "expected 0 to 31"]),
        ("", ["--prompt: expected some text"]),
        (" ", ["--prompt: expected some text"]),
    ],
)
def test_prompts(
    saved: Path, capfd: pytest.CaptureFixture[str], prompt: str, parts: list[str]
) -> None:
    message = refused(capfd, "generate", saved, "--prompt", prompt)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("passes: [pick_logit]", ["r.yaml:1", "did you mean 'pick_logits'"]),
        ("passes: [pick_logits]", ["'pick_logits' requires 'cached'", "add insert_kv_cache"]),
        ("passes: [fold_constants]", ["'fold_constants' matched nothing"]),
        ("passes: [{draft_suffix: {tokens: -1}}]", ["r.yaml:1", "tokens", "got -1"]),
    ],
)
def test_recipes(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    parts: list[str],
) -> None:
    monkeypatch.setattr(traced, "import_model", lambda model, dtype, **_: tiny_llama())
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    options = ("--recipe", recipe, "--target", CPU, "--out", tmp_path / "out")
    message = refused(capfd, "optimize", "anything", *options)
    assert all(part in message for part in parts), message
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize("command", ["optimize", "onnx", "genai"])
def test_weights_with_nan(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr(traced, "import_model", lambda model, dtype, **_: poisoned(tiny_llama()))
    args = [command, "anything"] if command == "optimize" else ["export", "anything", "--format"]
    args += [] if command == "optimize" else [command]
    message = refused(capfd, *args, "--out", tmp_path / "out")
    assert "weight head" in message and "1 NaN values" in message
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_traced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message names module and line; torch's own printouts are not let through."""
    arch, reason = REFUSED["doge"]
    build(arch).save_pretrained(tmp_path / "model")
    message = refused(capfd, "optimize", tmp_path / "model", "--out", tmp_path / "out")
    assert re.search(reason, message) and "modeling_doge.py:" in message
    assert len(message) < 800
    assert not (tmp_path / "out").exists()
