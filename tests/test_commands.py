"""Every command line in README and docs runs, on a folder, a .gguf and a .onnx file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import typer
from test_front_door import ROOT, run

import graftwork as gw
from graftwork.cli.commands import app

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
SOURCES = ("MODEL", "MODEL_OR_DIR", "model.gguf", "model.onnx", "SMOLLM2", "SmolLM2-135M-Instruct")
GIVEN = {"TEXT|-": "abab", "A,B": "baseline,copyspec", "R": "baseline", "def main(": "abab"}
LEAST = {
    "generate": "--max-new-tokens 4",
    "map": "--max-new-tokens 4",
    "train": "--steps 1 --window 32 --batch 1",
    "tune": "--tokens 4 --prompts 1",
    "bench": "--tokens 4 --prompts 1 --repeats 1",
    "calibrate": "--tokens 2",
}
"""The smallest settings of what takes long."""
QUANTIZED = "--recipe int4 --set quantize_weights.symmetric=true"
FORMATS = {"compressed-tensors": QUANTIZED, "genai": "", "onnx": "", "onnx-loop": ""}
FORMATS |= {"onnx-plan": "", "vllm-medusa": "--recipe medusa", "speculators": "--recipe eagle3"}
UNTRAINED = ("vllm-medusa", "speculators")
"""Formats of heads, which somebody must train first: that is what is said."""


def written() -> Iterator[str]:
    """Command lines of the pages, each in one line, without remarks."""
    for page in PAGES:
        text = page.read_text()
        yield from re.findall(r"`graftwork ([a-z]+ [^`]+)`", text)
        for found in re.finditer(r"^    graftwork ((?:.*\\\n|.*\n {10,})*.*)", text, re.M):
            line = " ".join(found[1].replace("\\\n", " ").split())
            yield re.split(r"\s#|\s\(", line)[0]


def forms(line: str) -> Iterator[str]:
    """A line without what is optional, for each format it names."""
    plain = re.sub(r"\[--[^\]]*\]", "", line)
    choices = re.search(r"--format ((?:[\w-]+\| ?)*[\w-]+)", plain)
    if choices is None or "|" not in choices[1]:
        yield plain
        return
    for choice in choices[1].replace(" ", "").split("|"):
        yield plain.replace(choices[0], f"--format {choice} {FORMATS[choice]}")


LINES = list(dict.fromkeys(written()))
FORMS = list(dict.fromkeys(" ".join(form.split()) for line in LINES for form in forms(line)))


def cases() -> Iterator[Any]:
    """Each form on what it may be given; the most used ones every day."""
    seen: set[tuple[str, str, str]] = set()
    for form in FORMS:
        command, *rest = form.split()
        if command in ("demo", "chat", "serve"):
            continue  # `tests/test_demo.py`, `tests/test_chat.py`, `tests/test_serve.py`
        kinds = ["folder"]
        if {"MODEL", "MODEL_OR_DIR"} & set(rest):
            kinds = ["folder", "gguf", "onnx"]
        for kind in [k for k in ("gguf", "onnx") if f"model.{k}" in rest] or kinds:
            what = re.search(r"--format \S+", form)
            if kind == "onnx" and ("compressed-tensors" in form or "--format gguf" in form):
                continue  # its weights have no names of a checkpoint
            new = (command, kind, what[0] if what else "")
            if new in seen and kind != "folder":
                continue  # the model is read in the same way, whatever is made of it
            often = new not in seen and (kind == "folder" or command == "bench")
            seen.add(new)
            mark = () if often else pytest.mark.long
            yield pytest.param(form, kind, marks=mark, id=f"{form} on {kind}")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of four layers in each form."""
    folder = tmp_path_factory.mktemp("models")
    file = folder / "model.gguf"
    sizes = {"num_hidden_layers": 4, "intermediate_size": 64, "max_position_embeddings": 128}
    model = gguf_files.write(file, {"": "F32"}, **sizes)
    model.save_pretrained(folder / "checkpoint")
    read = gw.optimize(file, target="eager")
    tokenizer = read.program.assets["tokenizer.json"].read_bytes()
    (folder / "checkpoint" / "tokenizer.json").write_bytes(tokenizer)
    exported = gw.optimize(folder / "checkpoint").export_onnx(folder / "exported")
    return {"folder": folder / "checkpoint", "gguf": file, "onnx": exported / "model.onnx"}


def filled(form: str, source: Path, folder: Path) -> list[str]:
    """The line's arguments; results go below `folder`."""
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("abcdabba" * 400)
    (folder / "prompts.txt").write_text("".join(f"abcd{i}\n" for i in range(40)))
    places = {"TEXTS": folder / "texts", "PROMPTS": folder / "prompts.txt", "NAME": "copyspec"}
    places |= dict.fromkeys(("TEXT.jsonl", "PROSE"), folder / "texts")
    places |= dict.fromkeys(SOURCES, source)
    command, *rest = shlex.split(form.replace("TEXT|-", "'TEXT|-'"))
    if command == "tune":
        places["TEXTS"] = folder / "prompts.txt"
    given = [str(places.get(word, GIVEN.get(word, word))) for word in rest]
    for index, word in enumerate(given):
        if word in ("--out", "--svg", "--html"):
            given[index + 1] = str(folder / given[index + 1])
    if command == "train":
        given = [*(["medusa" if word == "copyspec" else word for word in given])]
        given += [] if "--out" in given else ["--out", str(folder / "heads")]
        given = [w for i, w in enumerate(given) if "--minutes" not in given[max(i - 1, 0) : i + 1]]
    return [command, *(w for w in given if w != "[NAME]"), *LEAST.get(command, "").split()]


@pytest.mark.parametrize(("form", "kind"), cases())
@pytest.mark.filterwarnings("ignore:.*untrained")
def test_every_command_line_of_the_docs_runs(
    form: str,
    kind: str,
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(*filled(form, sources[kind], tmp_path))
    errors = capsys.readouterr().err
    if any(f"--format {name}" in form for name in UNTRAINED):
        told = "there is no HEADS" if "HEADS" in form else "(graftwork train)"
        assert code == 2 and told in errors, errors
        return
    assert code == 0, errors
    if "--out" in form:
        assert any(path.name not in ("texts", "prompts.txt") for path in tmp_path.iterdir())


@pytest.mark.parametrize("line", LINES)
def test_options_that_the_docs_name_are_there(line: str) -> None:
    command = COMMANDS[line.split()[0]]
    there = {o for option in command.params for o in (*option.opts, *option.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line))
    assert named <= there, named - there


def test_lines_are_found() -> None:
    assert {line.split()[0] for line in LINES} == set(COMMANDS)


@pytest.mark.filterwarnings("ignore:.*untrained")
def test_what_errors_and_results_advise_to_generate_works(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads by the options that training names, and text for a recipe that calibrates."""
    model, asked = sources["folder"], ("--prompt", "abab", "--max-new-tokens", "4")
    assert run("train", model, "--out", tmp_path / "heads", *LEAST["train"].split()) == 0
    advised = " ".join(capsys.readouterr().out.split()).split("use them with ")[1].split()
    assert advised[0] == "--set"
    assert run("generate", model, *asked, "--recipe", "medusa", *advised) == 0
    capsys.readouterr()
    assert run("generate", model, *asked, "--recipe", "gptq") == 2
    assert "(--data: texts" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("abcdabba" * 400)
    few = ("--set", "quantize_weights.windows=2", "--set", "quantize_weights.length=32")
    data = ("--data", tmp_path / "a.txt", *few)
    code = run("generate", model, *asked, "--recipe", "gptq", *data)
    assert code == 0, capsys.readouterr().err
