"""Programs after their passes are kept: read, they are what was made, and nothing is traced."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build

import graftwork as gw
from graftwork import optimizing as model
from graftwork.ir import GraftworkWarning
from graftwork.recipe import Recipe
from graftwork.tracing import kept_programs
from graftwork.tracing.kept_programs import program_key

TARGET = "eager:cpu:float32"
INT4 = {"extends": "int4", "passes": [{"quantize_weights": {"group": 16}}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and a cache of its own; as in a process that has not imported transformers."""
    monkeypatch.setenv("GRAFTWORK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_programs, "_is_patched", lambda: False)
    build(ARCHS["llama"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def kept(folder: Path) -> list[Path]:
    """The programs that are kept."""
    return sorted(folder.parent.glob("cache/programs/*"))


def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(model.Traced, "of", refuse)


def test_a_kept_program_is_the_one_that_was_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[Any]] = [[], []]
    recipes = ("baseline", "int8_copyspec", INT4)
    told = [lambda *told, to=to: to.append(told) for to in heard]
    made = [gw.optimize(folder, name, target=TARGET, known=told[0]) for name in recipes]
    assert len(kept(folder)) == len(recipes)
    untraced(monkeypatch)
    read = [gw.optimize(folder, name, target=TARGET, known=told[1]) for name in recipes]
    assert heard[0] == heard[1] != []
    for one, other in zip(made, read, strict=True):
        assert str(one.program) == str(other.program)
        assert one.program.assets == other.program.assets and one.recipe == other.recipe
        assert one.report is not None and other.report is not None
        seconds = {"trace_seconds": one.report.trace_seconds}
        assert other.report.model_copy(update=seconds) == one.report
        for name, weight in one.program.weights.items():
            assert torch.equal(weight.load(), other.program.weights[name].load()), name
        tokens = [m.generate([[5, 6, 7, 8]], max_new_tokens=8) for m in (one, other)]
        assert torch.equal(*tokens)


def test_reading_imports_no_transformers(folder: Path) -> None:
    gw.optimize(folder, "int8", target=TARGET)
    code = (
        "import sys, graftwork as gw\n"
        f"gw.optimize({str(folder)!r}, 'int8', target={TARGET!r})\n"
        "print('transformers' in sys.modules)"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_a_key_says_all_that_a_program_depends_on(folder: Path) -> None:
    def key(recipe: str | dict[str, Any] = "int8", dtype: torch.dtype = torch.float32) -> str:
        found = program_key(folder, Recipe.load(recipe), dtype)
        assert found is not None
        return found

    keys = [key(), key(), key("int4"), key(INT4), key(dtype=torch.bfloat16)]
    config = folder / "config.json"
    os.utime(config, (1, 1))
    keys.append(key())
    (folder / "tokenizer.json").write_text("{}")
    keys.append(key())
    assert keys[0] == keys[1] and len(set(keys)) == len(keys) - 1


def test_what_has_no_key(folder: Path) -> None:
    llama = build(ARCHS["llama"])
    assert program_key(llama, Recipe.load("baseline"), torch.float32) is None
    assert program_key(folder / "config.json", Recipe.load("baseline"), torch.float32) is None
    for recipe in ("gptq", "draft_model"):
        assert program_key(folder, Recipe.load(recipe), torch.float32) is None, recipe


def test_damage_changes_and_warnings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file counts as none; a program that the user is warned of is made each time."""
    gw.optimize(folder, target=TARGET)
    (path,) = kept(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="traced again"):
        untraced(patched)
        gw.optimize(folder, target=TARGET)
    path.unlink()
    traced = model.Traced.of

    def warning(*args: Any) -> Any:
        warnings.warn("careful", GraftworkWarning, stacklevel=2)
        return traced(*args)

    monkeypatch.setattr(model.Traced, "of", warning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gw.optimize(folder, target=TARGET)
    assert not kept(folder)


@pytest.mark.long
def test_programs_of_gguf_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read with the tokenizer that came in the file, whose every change counts."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    import gguf_archs

    from graftwork.frontends.gguf import assets

    path = folder.parent / "tiny.gguf"
    gguf_archs.write(path, "gemma3", "Q4_0")
    made = gw.optimize(path, "copyspec", target=TARGET)
    assert len(kept(folder)) == 1 and "tokenizer.json" in made.program.assets
    held = {name: file.read_bytes() for name, file in made.program.assets.items()}
    assets._read.clear()
    with monkeypatch.context() as patched:
        untraced(patched)
        read = gw.optimize(path, "copyspec", target=TARGET)
    assert str(made.program) == str(read.program) and made.program.info == read.program.info
    assert held == {name: file.read_bytes() for name, file in read.program.assets.items()}
    tokens = [m.generate([[5, 6, 7, 8]], max_new_tokens=8) for m in (made, read)]
    assert torch.equal(*tokens)
    for lost in folder.parent.glob("cache/tokenizers/*"):
        lost.unlink()
    assets._read.clear()
    os.utime(path, (1, 1))
    gw.optimize(path, "copyspec", target=TARGET)
    assert len(kept(folder)) == 2


def test_a_gguf_file_drafts(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    import gguf_files

    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, {"": "F32"})
    named = gw.Recipe.load("draft_model").with_options([f"draft_model.model={path}"])
    plain, drafted = (gw.optimize(path, recipe, target="eager") for recipe in ("baseline", named))
    asked = {"max_new_tokens": 20, "return_dict_in_generate": True, "eos_token_id": []}
    wanted, found = (model.generate([[5, 6, 7, 8]], **asked) for model in (plain, drafted))
    assert torch.equal(wanted.sequences, found.sequences)
    assert found.stats.accepted_per_step > 2


def test_programs_of_several_gguf_files(folder: Path) -> None:
    parts = [folder.parent / f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    keys = [program_key(parts[0], Recipe.load("int8"), torch.float32)]
    os.utime(parts[1], (1, 1))
    keys.append(program_key(parts[0], Recipe.load("int8"), torch.float32))
    assert None not in keys and keys[0] != keys[1]
