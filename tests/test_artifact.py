"""Saved programs: what comes back, what is refused, and what an interruption leaves behind."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import cached_llama

from graftwork.artifact import saved as artifact
from graftwork.artifact.saved import is_artifact, is_saved, load, save
from graftwork.artifact.shards import plan_shards
from graftwork.backends.target import Target
from graftwork.ir import InputError, Program, TensorType, Weight, WeightStore
from graftwork.ir.support import scratch
from graftwork.ir.support.files import read_bytes
from graftwork.ir.weights import Call
from graftwork.passes.engine.validate import reference_logits

RECIPE = {"name": "test", "contract": "exact", "passes": []}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    source = tmp_path / "model"
    source.mkdir()
    (source / "tokenizer.json").write_text('{"model": {}}')
    return cached_llama().replace(assets={"tokenizer.json": source / "tokenizer.json"})


def keep(program: Program, folder: Path, **options: Any) -> Path:
    return save(program, folder, target=Target(), recipe=RECIPE, **options)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same_weights(a: Program, b: Program) -> bool:
    return all(torch.equal(a.weights[n].load(), b.weights[n].load()) for n in a.weights)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


def reseal(folder: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed."""
    data = (folder / name).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    change_manifest(folder, lambda m: m["files"][name].update(bytes=len(data), sha256=digest))


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        load(folder)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_comes_back_equal(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "deep" / "out")
    assert entries(folder) == [
        "manifest.json",
        "program.gw",
        "tokenizer.json",
        "weights.safetensors",
    ]
    saved = load(folder)
    assert str(saved.program) == str(program)
    assert saved.program.provenance == program.provenance
    assert list(saved.program.weights) == list(program.weights)
    assert same_weights(program, saved.program)
    assert saved.program.assets == {"tokenizer.json": folder / "tokenizer.json"}
    assert (saved.manifest.target, saved.manifest.recipe) == ("onnxruntime:cpu:float32", RECIPE)
    assert saved.manifest.tools["torch"] == version("torch")
    tokens = torch.arange(10).reshape(2, 5)
    assert torch.equal(reference_logits(saved.program, tokens), reference_logits(program, tokens))


def test_saving_twice_gives_the_same_files(program: Program, tmp_path: Path) -> None:
    one, two = keep(program, tmp_path / "one"), keep(program, tmp_path / "two")
    for name in entries(one):
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize(
    "dtype", ["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool"]
)
def test_every_dtype_and_shape(dtype: str, tmp_path: Path) -> None:
    kind = TensorType.parse(f"{dtype}[3]").dtype
    tensors = {
        "odd": torch.arange(7).to(kind),
        "scalar": torch.tensor(1).to(kind),
        "empty": torch.zeros(0, 4).to(kind),
        "turned": torch.arange(6).reshape(2, 3).to(kind).T,
    }
    weights = [Weight.of(name, tensor) for name, tensor in tensors.items()]
    weights.append(Weight.of("other", torch.ones(3, dtype=torch.int8)))
    (done,) = artifact.write_weights(tmp_path, weights)
    assert done.name == "weights.safetensors"
    data = (tmp_path / done.name).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (done.bytes, done.sha256)
    read = load_file(tmp_path / done.name)
    for name, tensor in tensors.items():
        assert read[name].dtype == kind and torch.equal(read[name], tensor)


def test_big_models_are_split_and_come_back(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out", shard_bytes=4096)
    shards = [name for name in entries(folder) if name.endswith(".safetensors")]
    count = len(shards)
    assert count > 2 and shards[0] == f"weights-00001-of-{count:05}.safetensors"
    largest = max(weight.type.nbytes for weight in program.weights.values())
    sizes = [(folder / name).stat().st_size for name in shards]
    assert max(sizes) < max(4096, largest) + 2048
    assert same_weights(program, load(folder).program)


def test_shards_hold_every_weight_once_in_order() -> None:
    weights = [Weight.of(str(i), torch.zeros(i, dtype=torch.uint8)) for i in (3, 3, 9, 1, 4)]
    names = [[w.type.nbytes for w in shard] for shard in plan_shards(weights, 6)]
    assert names == [[3, 3], [9], [1, 4]]


def test_saving_holds_one_weight_at_a_time(program: Program, tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(weight: Weight) -> Weight:
        def source() -> torch.Tensor:
            nonlocal most
            tensor = weight.load().clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            return tensor

        return Weight(weight.name, weight.type, Call(source))

    lazy = {name: counted(weight) for name, weight in program.weights.items()}
    keep(program.replace(weights=WeightStore(lazy)), tmp_path / "out")
    assert len(alive) == len(program.weights) and most <= 2


def test_loading_reads_no_weight_until_it_is_used(program: Program, tmp_path: Path) -> None:
    saved = load(keep(program, tmp_path / "out"))
    (tmp_path / "out" / "weights.safetensors").unlink()
    assert same_weights(program, saved.program)


def test_saving_over_the_artifact_a_program_came_from(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out")
    saved = load(folder).program
    for _ in range(2):
        assert keep(saved, folder) == folder
        assert same_weights(program, load(folder).program)
    assert same_weights(program, saved)
    assert entries(tmp_path) == ["model", "out"]


@pytest.fixture
def two(tmp_path: Path) -> dict[str, Program]:
    """Programs that differ in every weight, and in their tokenizers."""
    made = {}
    for seed, name in enumerate("ab"):
        tokenizer = tmp_path / name / "tokenizer.json"
        tokenizer.parent.mkdir()
        tokenizer.write_text(f'{{"model": "{name}"}}')
        program = cached_llama(seed=seed).replace(name=name)
        made[name] = program.replace(assets={"tokenizer.json": tokenizer})
    return made


def which(found: Program, two: dict[str, Program]) -> str:
    """The program that all of `found` is of."""
    wanted = two[found.name]
    assert same_weights(found, wanted)
    assert json.loads(read_bytes(found.assets["tokenizer.json"]))["model"] == found.name
    return found.name


@pytest.mark.parametrize(
    ("moment", "becomes"), [("_read_manifest", "b"), ("_opened", "b"), ("_open_weights", "a")]
)
def test_an_artifact_that_is_saved_over_while_it_is_loaded_is_one_or_the_other(
    moment: str,
    becomes: str,
    two: dict[str, Program],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, step, again = keep(two["a"], tmp_path / "out"), getattr(artifact, moment), [True]

    def and_then(*args: Any) -> Any:
        if moment == "_open_weights" and again:
            again.clear()
            keep(two["b"], folder)
        made = step(*args)
        if again:
            again.clear()
            keep(two["b"], folder)
        return made

    monkeypatch.setattr(artifact, moment, and_then)
    found = load(folder).program
    assert found.name == becomes and same_weights(found, two[becomes])


def test_files_that_are_read_later_are_those_that_were_loaded(
    two: dict[str, Program], tmp_path: Path
) -> None:
    found = load(keep(two["a"], tmp_path / "out")).program
    assert which(found, two) == "a"
    keep(two["b"], tmp_path / "out")
    with pytest.raises(OSError, match=r"not what it was when the model was loaded.*load it again"):
        which(found, two)
    with pytest.raises(InputError, match="load it again"):
        keep(found, tmp_path / "other")


@pytest.mark.long
def test_loads_while_another_thread_saves(two: dict[str, Program], tmp_path: Path) -> None:
    folder, ended, seen = keep(two["a"], tmp_path / "out"), threading.Event(), Counter[str]()

    def saving() -> None:
        while not ended.is_set():
            for program in two.values():
                keep(program, folder)

    saver = threading.Thread(target=saving)
    saver.start()
    try:
        for _ in range(300):
            found = load(folder).program
            assert same_weights(found, two[found.name])
            seen[found.name] += 1
    finally:
        ended.set()
        saver.join()
    assert min(seen["a"], seen["b"]) > 10


@pytest.mark.long
def test_loading_needs_no_transformers(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import graftwork as gw; model = gw.load(sys.argv[1]); print(model.program.name)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("tiny\n", 0), ran.stderr


# -- what is in the way is not overwritten, and interruptions leave the old artifact


def test_replaces_artifacts_and_empty_folders_only(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out")
    (folder / "notes.txt").write_text("goes with the old artifact")
    keep(program.replace(name="second"), folder)
    assert load(folder).program.name == "second" and "notes.txt" not in entries(folder)
    (tmp_path / "empty").mkdir()
    assert is_artifact(keep(program, tmp_path / "empty"))

    for name in ("full", "file", "link"):
        path = tmp_path / name
        if name == "full":
            path.mkdir()
            (path / "precious").write_text("mine")
        elif name == "file":
            path.write_text("mine")
        else:
            path.symlink_to(folder)
        with pytest.raises(InputError, match=f"{name}.*choose another place"):
            keep(program, path)
    assert (tmp_path / "full" / "precious").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_weight_with_nan_is_named_and_nothing_is_written(
    program: Program, tmp_path: Path
) -> None:
    broken = program.weights["embed"].load().clone()
    broken[3, 1] = float("nan")
    weights = {**program.weights, "embed": Weight.of("embed", broken)}
    with pytest.raises(InputError, match=r"weight embed .* 1 NaN values"):
        keep(program.replace(weights=WeightStore(weights)), tmp_path / "out")
    assert entries(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save_leaves_the_old_artifact(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    folder = keep(program, tmp_path / "out")

    def interrupted(*args: Any) -> None:
        raise error("no space left")

    monkeypatch.setattr(artifact, "write_weights", interrupted)
    with pytest.raises((error, InputError)):
        keep(program.replace(name="second"), folder)
    assert load(folder).program.name == "tiny"
    assert entries(tmp_path) == ["model", "out"]


@pytest.mark.parametrize("exchanging", [True, False])
def test_a_failed_swap_puts_the_old_artifact_back(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanging: bool
) -> None:
    folder = keep(program, tmp_path / "out")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError("refused")
        return rename(self, target)

    def exchange(one: Path, other: Path) -> bool:
        if exchanging:
            raise OSError("refused")
        return False

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(scratch, "exchange", exchange)
    with pytest.raises(InputError, match="refused"):
        keep(program.replace(name="second"), folder)
    assert load(folder).program.name == "tiny"
    assert entries(tmp_path) == ["model", "out"]


@pytest.mark.long
def test_a_killed_save_leaves_the_old_artifact(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out")
    code = (
        "import os, sys\nfrom dataclasses import replace\nimport graftwork as gw\n"
        "model = gw.load(sys.argv[1])\ncount = 0\n"
        "def stop(name):\n  global count; count += 1\n  if count == 9: os._exit(9)\n"
        "replace(model, program=model.program.replace(name='second'))"
        ".save(sys.argv[1], progress=stop)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 9, ran.stderr
    assert load(folder).program.name == "tiny"


# -- damage


@pytest.mark.parametrize("name", ["program.gw", "weights.safetensors", "tokenizer.json"])
def test_damage_is_named(program: Program, tmp_path: Path, name: str) -> None:
    folder = keep(program, tmp_path / "out")
    path, data = folder / name, (folder / name).read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(folder, name, "damaged", "sha256")
    path.write_bytes(data[:-1])
    refused(folder, name, "damaged", f"{len(data) - 1} bytes")
    path.unlink()
    refused(folder, name, "missing", "copy the artifact again")
    other = tmp_path / "elsewhere"
    other.write_bytes(data)
    path.symlink_to(other)
    refused(folder, name, "links are not followed")
    path.unlink()
    path.mkdir()
    refused(folder, name, "not a regular file")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "sub/file", ".hidden", "..", "", "a\\b", "c:d"]
)
def test_files_outside_the_folder_are_refused(program: Program, tmp_path: Path, name: str) -> None:
    folder = keep(program, tmp_path / "out")
    (tmp_path / "secret").write_text("x")
    entry = {"role": "asset", "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    change_manifest(folder, lambda m: m["files"].update({name: entry}))
    refused(folder, "manifest.json", "not a plain file name")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda m: m.update(version=1), ["format version 1", "reads 2"]),
        (lambda m: m.update(format="other"), ["not a graftwork artifact"]),
        (lambda m: m.update(extra=1), ["extra"]),
        (lambda m: m.pop("target"), ["target"]),
        (lambda m: m["files"]["program.gw"].update(bytes="12"), ["files.program.gw.bytes"]),
        (lambda m: m["files"]["program.gw"].update(sha256="12"), ["files.program.gw.sha256"]),
        (lambda m: m["files"]["program.gw"].update(role="code"), ["files.program.gw.role"]),
        (lambda m: m["files"]["program.gw"].update(role="asset"), ["expected one program"]),
        (lambda m: m["files"].pop("weights.safetensors"), ["program.gw"]),
    ],
)
def test_a_wrong_manifest_is_refused(
    program: Program, tmp_path: Path, change: Callable[[dict[str, Any]], object], parts: list[str]
) -> None:
    folder = keep(program, tmp_path / "out")
    change_manifest(folder, change)
    refused(folder, str(folder), *parts)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00", "[" * 100_000])
def test_a_broken_manifest_is_refused(program: Program, tmp_path: Path, text: str) -> None:
    folder = keep(program, tmp_path / "out")
    (folder / "manifest.json").write_text(text)
    refused(folder, "manifest.json")
    assert not is_artifact(folder) and is_saved(folder)


def test_a_lost_manifest_is_missed(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out")
    (folder / "manifest.json").unlink()
    refused(folder, "no manifest.json", "copy the artifact again")
    assert is_saved(folder)


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    assert not is_saved(tmp_path)
    refused(tmp_path, "not a graftwork artifact", "manifest.json")
    refused(tmp_path / "nowhere", "not a graftwork artifact")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("graftwork.rms_norm", "graftwork.rms_nrom"),
        ("aten.add.Tensor", "aten.mul_.Tensor"),
        ("weight embed: f32[32,32]", "weight embed: f32[16,64]"),
        ("stage=cached", "stage=traced"),
        ("suffix", "suffix"),
    ],
)
def test_a_program_that_was_tampered_with_is_refused(
    program: Program, tmp_path: Path, old: str, new: str
) -> None:
    folder = keep(program, tmp_path / "out")
    text = (folder / "program.gw").read_text()
    changed = text.replace(old, new, 1) if old != new else text + "}\n"
    assert changed != text
    (folder / "program.gw").write_text(changed)
    reseal(folder, "program.gw")
    refused(folder, "program.gw", "valid program")


def test_weights_that_are_not_safetensors_are_refused(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out")
    (folder / "weights.safetensors").write_bytes(b"\x80\x04\x95 pickled?")
    reseal(folder, "weights.safetensors")
    refused(folder, "weights.safetensors")


def test_files_that_are_not_listed_are_not_read(program: Program, tmp_path: Path) -> None:
    folder = keep(program, tmp_path / "out")
    (folder / "tokenizer_config.json").write_text("{}")
    assert list(load(folder).program.assets) == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["manifest.json", "program.gw", "weights.safetensors", "../x"])
def test_model_files_cannot_take_the_artifacts_names(
    program: Program, tmp_path: Path, name: str
) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    with pytest.raises(InputError, match="cannot hold a model file"):
        keep(program.replace(assets={name: source}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
