"""Pipes, devices, links and files without end, wherever files of others are read."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from selection import one_in
from tiny import cached_llama

import graftwork as gw
from graftwork.artifact import saved as artifact
from graftwork.artifact.saved import is_artifact, is_saved
from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.ir import GraftworkError, InputError
from graftwork.ir.support.files import (
    LARGE,
    open_regular,
    plain_path,
    read_bytes,
    read_json,
    read_text,
)
from graftwork.optimizing import transform
from graftwork.tracing.traced import Traced

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


STRANGE = [pipe, endless]


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("follow", [True, False])
def test_only_regular_files_are_opened(
    tmp_path: Path, make: Callable[[Path], None], follow: bool
) -> None:
    make(tmp_path / "strange")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "strange", follow=follow)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path)


def test_links_are_followed_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"[1]\r\n")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link") == [1] and read_text(tmp_path / "link") == "[1]\n"
    with pytest.raises(OSError, match="links are not followed"):
        read_bytes(tmp_path / "link", follow=False)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "nothing")


def test_reading_ends_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(path, 4)
    os.truncate(path, 2**40)  # sparse
    with pytest.raises(OSError, match="more than"):
        read_json(path, 1000)


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    tracemalloc.start()
    assert read_bytes(path, LARGE) == b"12345"
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 * 2**20


def test_json_that_nests_without_end_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nests deeper"):
        read_json(tmp_path / "file")


@pytest.mark.parametrize("text", ["a\ud800b", "a\0b"])
def test_paths_that_the_system_cannot_spell(text: str) -> None:
    with pytest.raises(InputError, match="no path"):
        plain_path("load", text)
    with pytest.raises(InputError, match="no path"):
        gw.load(text)


# -- artifacts


@pytest.mark.parametrize("make", STRANGE)
def test_a_manifest_is_a_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    make(folder / "manifest.json")
    assert not is_artifact(folder) and not is_saved(folder)
    with pytest.raises(InputError, match=r"manifest\.json.*not a regular file"):
        gw.load(folder)
    with pytest.raises(InputError, match="choose another place"):
        artifact.save(cached_llama(), folder, target=Target(), recipe={})
    with pytest.raises(GraftworkError):
        gw.optimize(folder)


def test_a_manifest_is_no_link(tmp_path: Path) -> None:
    whole = artifact.save(cached_llama(), tmp_path / "whole", target=Target(), recipe={})
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "manifest.json").symlink_to(whole / "manifest.json")
    assert not is_artifact(folder)
    with pytest.raises(InputError, match="links are not followed"):
        gw.load(folder)


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["program.gw", "weights.safetensors"])
def test_files_of_an_artifact_are_regular(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    folder = artifact.save(cached_llama(), tmp_path / "out", target=Target(), recipe={})
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(InputError, match="not a regular file"):
        gw.load(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name]["bytes"] = 0
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="not a regular file"):
        gw.load(folder)


# -- checkpoint folders, recipes, prompts


@cache
def demo() -> Traced:
    """The bundled model: traced once, for options that are read after it."""
    return Traced.of(demo_folder(), torch.float32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint, of links into it as caches of downloads have them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in demo_folder().glob("*.*"):
        (folder / file.name).symlink_to(file)
    return folder


@pytest.mark.long
def test_a_checkpoint_may_be_of_links(checkpoint: Path) -> None:
    program = gw.optimize(checkpoint).program
    assert program.assets["config.json"].is_symlink()
    saved = artifact.save(program, checkpoint.parent / "out", target=Target(), recipe={})
    assert not (saved / "config.json").is_symlink()


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_files_of_a_checkpoint_are_regular(
    checkpoint: Path, name: str, make: Callable[[Path], None]
) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    make(checkpoint / name)
    with pytest.raises(GraftworkError, match="not a regular file"):
        gw.optimize(checkpoint)


@pytest.mark.parametrize("make", STRANGE)
def test_recipes_and_prompts_are_regular(
    checkpoint: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    recipe, prompts, link = tmp_path / "r.yaml", tmp_path / "p.jsonl", tmp_path / "l.yaml"
    make(recipe)
    make(prompts)
    with pytest.raises(InputError, match="not a regular file"):
        gw.optimize(checkpoint, recipe)
    with pytest.raises(InputError, match="not a regular file"):
        gw.optimize(checkpoint, data=prompts, validate=True)
    (tmp_path / "real.yaml").write_text("title: Mine\nextends: baseline\npasses: []\n")
    link.symlink_to(tmp_path / "real.yaml")
    assert gw.Recipe.load(link).title == "Mine"


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("option", one_in(2, ["draft_corpus.path", "draft_medusa.weights"]))
def test_files_that_options_name_are_regular(
    tmp_path: Path, make: Callable[[Path], None], option: str
) -> None:
    for name in ("text.txt", "tokens.json", "heads.safetensors"):
        make(tmp_path / name)
        recipe = gw.Recipe.load("corpus" if "corpus" in option else "medusa")
        with pytest.raises(GraftworkError, match="not a regular file"):
            transform(demo(), recipe.with_options([f"{option}={tmp_path / name}"]), Target())


def test_paths_that_cannot_be_spelled_are_refused_everywhere(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="no path"):
        gw.optimize("a\ud800b")
    with pytest.raises(InputError, match="no path"):
        gw.optimize(checkpoint, "a\ud800/b.yaml")
    model = gw.optimize(checkpoint)
    for write in (model.save, model.export_onnx, model.export_genai):
        with pytest.raises(InputError, match="no path"):
            write("a\ud800b")
