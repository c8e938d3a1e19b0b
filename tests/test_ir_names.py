"""Names: what functions, states, inputs, outputs and programs may be called."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import cached_llama, drafting_llama, tiny_llama

from graftwork.artifact import saved as artifact
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import (
    Function,
    GraftworkError,
    InputError,
    ParseError,
    Program,
    State,
    TensorType,
    VerifyError,
    WeightStore,
    parse_program,
    program_text,
    verify,
)
from graftwork.ir.support.names import is_name
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.runtime.generation import generate

WRONG = [
    "../../x",
    "/etc/x",
    "None",
    "True",
    "a b",
    "",
    "a/b",
    "a.",
    "1",
    "é",
    "a\ud800",
    "x" * 999,
]
RIGHT = ["step", "eagle.kv.2.key", "hidden.normed", "hidden.1.2.normed", "_x", "C.1"]


@pytest.mark.parametrize("name", RIGHT)
def test_names(name: str) -> None:
    assert is_name(name)
    assert Function(name).name == name


@pytest.mark.parametrize("name", WRONG)
def test_wrong_names_are_refused_where_they_are_given(name: str) -> None:
    fn, float_type = Function("step"), TensorType.parse("f32[B]")
    with pytest.raises(InputError, match="cannot be called"):
        Function(name)
    with pytest.raises(InputError, match="step: an input cannot be called"):
        fn.add_input(name, float_type)
    with pytest.raises(InputError, match="step: an output cannot be called"):
        fn.set_outputs({name: fn.add_input("x", float_type)})
    with pytest.raises(InputError, match="a state cannot be called"):
        State(name, float_type, 0, "key")
    with pytest.raises(InputError, match="a state's part cannot be called"):
        State("kv", float_type, 0, name)
    if name not in ("None", "True", "1"):  # kinds of models are called all sorts of words
        with pytest.raises(InputError, match="a program cannot be called"):
            tiny_llama().replace(name=name)


WORDS = {"part=": '"key"', "logits f32": "logits", "positions: i64": "positions"}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(
    "place", ["func medusa", "state kv.0.key", "positions: i64", "logits f32", "part="]
)
def test_wrong_names_in_a_text_are_refused_with_their_line(name: str, place: str) -> None:
    text = program_text(drafting_llama(DraftMedusa()))
    word = WORDS.get(place, place.split()[-1])
    at = text.index(word, text.index(place))
    quoted = json.dumps(name)
    with pytest.raises(
        ParseError, match=r"^line \d+, column \d+: .*(cannot be called|expected|not a valid)"
    ):
        parse_program(text[:at] + quoted + text[at + len(word) :])


def test_a_renamed_function_is_found_by_the_verifier() -> None:
    program = cached_llama()
    fn = program.function("step").copy()
    fn.name = "../x"
    with pytest.raises(VerifyError, match=r"a function cannot be called '../x'"):
        verify(program.replace(functions={**program.functions, "../x": fn}))


def hostile(tmp_path: Path, old: str, new: str) -> Path:
    """An artifact with a name replaced in its text, hashes and all."""
    program = drafting_llama(DraftMedusa())
    folder = artifact.save(program, tmp_path / "a" / "b" / "out", target=Target(), recipe={})
    text = (folder / "program.gw").read_text()
    assert old in text
    changed = text.replace(old, new).encode()
    (folder / "program.gw").write_bytes(changed)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["program.gw"] |= {
        "bytes": len(changed),
        "sha256": hashlib.sha256(changed).hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("func medusa(", 'func "../../../medusa"('),
        ("kv.0.key", '"None"'),
        ("kv.0.key", '"../kv"'),
        ('part="key"', 'part="../key"'),
    ],
)
def test_an_artifact_with_such_names_is_refused(tmp_path: Path, old: str, new: str) -> None:
    folder = hostile(tmp_path, old, new)
    with pytest.raises(InputError, match="valid program"):
        artifact.load(folder)
    assert not list(tmp_path.rglob("*.onnx"))


def test_the_backend_writes_in_its_own_folder_whatever_a_function_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line of defence: names that somehow got through."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    program = cached_llama()
    fn = program.function("step")
    monkeypatch.setattr("graftwork.ir.function.check_name", lambda what, name: None)
    fn.name = "../../escaped"
    made = compile(program.replace(functions={**program.functions, fn.name: fn}), Target())
    one = torch.ones(1, 1, dtype=torch.int64)
    feeds = {"tokens": one, "positions": one * 0, "past": one[0] * 0, "select": one * 0}
    made.begin(1, 4)
    made.run(fn.name, feeds, ("logits",))
    assert {path.parent.parent.name for path in tmp_path.rglob("*.onnx")} == {"tmp"}


@pytest.mark.parametrize("target", ["eager", "onnxruntime"])
@pytest.mark.parametrize("name", ["self", "torch", "inf", "device", "len", "fx_pytree", "input_1"])
def test_legal_names_that_mean_something_in_generated_code(name: str, target: str) -> None:
    program = renamed(cached_llama(), "kv.0.key", name)
    prompt = torch.tensor([[3, 1, 4]])
    plain = generate(compile(cached_llama(), Target.parse(target)), prompt, max_new_tokens=5)
    made = generate(compile(program, Target.parse(target)), prompt, max_new_tokens=5)
    assert made.tolist() == plain.tolist()


def renamed(program: Program, old: str, new: str) -> Program:
    """The program with a state under another name."""
    text = program_text(program).replace(old, new)
    made = parse_program(text, WeightStore(program.weights))
    verify(made)
    return made


def test_errors_about_hostile_names_are_short_and_plain() -> None:
    with pytest.raises(GraftworkError) as caught:
        replace(cached_llama(), name="\x1b[31m" + "x" * 10_000)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()
