"""Ready steps: the second run of a command starts from what the first one kept, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from archs import ARCHS, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import graftwork as gw
from graftwork.cli import main
from graftwork.ready import entries
from graftwork.ready import start as starting
from graftwork.ready.key import ready_key
from graftwork.recipe import Recipe
from graftwork.tracing.kept_programs import brings

PROMPT = "abcabcabcab"
TARGET = "onnxruntime:cpu:float32"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from graftwork.cli import main; main()"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a tokenizer of bytes, and a cache of its own."""
    monkeypatch.setenv("GRAFTWORK_CACHE", str(tmp_path / "cache"))
    shutil.copytree(checkpoint(tmp_path), tmp_path / "model")
    kernels = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "graftwork"
    (tmp_path / "cache").mkdir(mode=0o700)
    for library in kernels.glob("shared-*.so"):  # compiled once for all tests
        shutil.copy(library, tmp_path / "cache")
    return tmp_path / "model"


@cache
def _made(place: Path) -> Path:
    torch.manual_seed(0)
    model = build(ARCHS["llama"])
    model.save_pretrained(place)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: model.config.vocab_size]
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def checkpoint(tmp_path: Path) -> Path:
    return _made(tmp_path.parent / "checkpoint for ready")


def generate(capsys: pytest.CaptureFixture[str], model: Path, *args: str) -> tuple[str, str]:
    """What a command prints on both outputs."""
    with pytest.raises(SystemExit) as caught:
        main(["generate", str(model), "--prompt", PROMPT, "--max-new-tokens", "24", *args])
    shown = capsys.readouterr()
    assert not caught.value.code, shown.err
    (counts,) = (line for line in shown.err.splitlines() if "tokens/s" in line)
    return shown.out, counts.partition(",")[0]


def kept(model: Path) -> list[Path]:
    return sorted(model.parent.glob("cache/ready/*"))


def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("graftwork.cli.open_model.open_model", refuse)


@pytest.mark.parametrize("recipe", ["baseline", "copyspec", "int8", "int8_copyspec"])
def test_the_second_run_says_the_same_and_opens_no_model(
    recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--recipe", recipe, "--target", TARGET)
    first = generate(capsys, folder, *args)
    assert len(kept(folder)) == 1
    no_model(monkeypatch)
    assert generate(capsys, folder, *args) == first  # as many tokens in as many steps


def test_an_artifact_starts_without_torch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gw.optimize(folder, "copyspec", target=TARGET).save(folder.parent / "out")
    first, _ = generate(capsys, folder.parent / "out")
    command = [sys.executable, "-c", WITHOUT_TORCH, "generate", str(folder.parent / "out")]
    command += ["--prompt", PROMPT, "--max-new-tokens", "24"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(gw.__file__).parents[1])
    assert (ran.returncode, ran.stdout) == (0, first), ran.stderr


def test_what_decides_a_text_decides_the_key(folder: Path, tmp_path: Path) -> None:
    asked = [(str(folder), None, (), None), (str(folder), "int8", (), None)]
    asked += [(str(folder), None, (), TARGET), (str(folder), "int8", ("a.b=1",), None)]
    keys = {ready_key(*given) for given in asked}
    assert len(keys) == len(asked) and None not in keys
    assert ready_key(*asked[0]) in keys
    (folder / "config.json").touch()
    assert ready_key(*asked[0]) not in keys
    (tmp_path / "own.yaml").write_text("extends: baseline\n")
    assert ready_key(str(folder), str(tmp_path / "own.yaml"), (), None) is None
    assert ready_key(str(tmp_path / "nothing"), None, (), None) is None


@pytest.mark.parametrize("damaged", ["weights.data", "plan.json", "ready.json", "tokenizer.json"])
def test_what_is_damaged_counts_as_not_kept(
    damaged: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = generate(capsys, folder, "--target", TARGET)
    path = kept(folder)[0] / damaged
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    key = ready_key(str(folder), None, (), TARGET)
    assert key is not None and starting.ready(key) is None
    assert generate(capsys, folder, "--target", TARGET) == first
    assert starting.ready(key) is not None  # kept anew


def test_what_the_runner_cannot_do_is_not_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (("--recipe", "recycling", "--target", TARGET), ("--target", "eager:cpu:float32")):
        generate(capsys, folder, *args)
        assert kept(folder) == []
    settings = {"do_sample": False, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    generate(capsys, folder, "--target", TARGET)
    assert kept(folder) == []


def test_what_a_recipe_reads_beside_the_model_is_read_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads or a draft model may be another at the same path; no key covers them."""
    other = Recipe.load("draft_model").with_options([f"draft_model.model={folder}"])
    assert brings(other) and not brings(Recipe.load("copyspec"))
    monkeypatch.setattr("graftwork.ready.keep.brings", lambda recipe: True)
    generate(capsys, folder, "--target", TARGET)
    assert kept(folder) == []
    gw.optimize(folder, target=TARGET).save(folder.parent / "out")
    generate(capsys, folder.parent / "out")  # an artifact holds what its recipe read
    assert len(kept(folder)) == 1


def test_what_needs_the_model_goes_to_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(capsys, folder, "--target", TARGET)
    key = ready_key(str(folder), None, (), TARGET)
    there = starting.ready(key or "")
    assert there is not None
    assert there.fits(PROMPT, 4, None)[1] == 4
    for text, count, greedy in ((PROMPT, 4, False), (PROMPT, 10**6, None), ("", 4, None)):
        assert there.fits(text, count, greedy)[1] == 0
    there.runner.rules["do_sample"] = True
    assert there.fits(PROMPT, 4, None)[1] == 0 and there.fits(PROMPT, 4, True)[1] == 4


def test_entries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MOST", 3000)

    def fill(new: Path) -> None:
        (new / "a").write_bytes(bytes(1000))

    for place in range(4):
        entries.write(tmp_path / str(place), 1000, fill, {"n": place})
        os.utime(tmp_path / str(place), (place, place))
    assert [entries.read(tmp_path / str(n)) for n in range(4)][1:] == [None, {"n": 2}, {"n": 3}]
    entries.write(tmp_path / "large", 4000, fill, {})
    assert not (tmp_path / "large").exists()
