"""Folders that killed processes leave behind, and folders that take another's place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from tiny import cached_llama

from graftwork.artifact import saved as artifact
from graftwork.backends.target import Target
from graftwork.ir.support import scratch
from graftwork.ir.support.scratch import Scratch, exchange, replacing, sweep

HOLD = """
import os, sys, time
from pathlib import Path
from graftwork.ir.support.scratch import Scratch, replacing
kept = Scratch(Path(sys.argv[1]))
(kept.path / "weights.data").write_text("x")
with replacing(Path(sys.argv[1]) / "out") as new:
    (new / "half").write_text("x")
    print("ready", flush=True)
    time.sleep(600)
"""


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def filled(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "file").write_text(text)
    return folder


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that works in folders here."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.long
def test_folders_of_a_living_process_stay_and_those_of_a_killed_one_go(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    before = entries(tmp_path)
    assert len(before) == 2
    sweep(tmp_path)
    assert entries(tmp_path) == before
    holder.kill()
    holder.wait()
    assert entries(tmp_path) == before
    mine = Scratch(tmp_path)
    assert entries(tmp_path) == [mine.path.name]
    mine.close()
    assert entries(tmp_path) == []


@pytest.mark.long
def test_weights_of_a_killed_process_go_with_the_next_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user meets it: a killed process that ran a model, and the next one."""
    target = Target.parse("onnxruntime:cpu:float32")
    saved = artifact.save(cached_llama(), tmp_path / "out", target=target, recipe={})
    code = (
        "import os, signal, sys, graftwork as gw\n"
        "model = gw.load(sys.argv[1])\n"
        "model.generate([[1, 2]], max_new_tokens=2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    ran = subprocess.run([sys.executable, "-c", code, str(saved)], env=environment, check=False)
    assert ran.returncode == -9
    (left,) = temporary.glob("graftwork-*")
    assert (left / "weights.data").stat().st_size > 0
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    from graftwork import load

    load(saved).generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    assert not left.exists()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    kept = [
        "graftwork-data",
        "graftwork-0123456789abcdef",
        ".out.partial",
        ".out.0123.partial",
        "out.0123456789abcdef.partial",
    ]
    for name in kept:
        filled(tmp_path / name, "mine")
    target = filled(tmp_path / "precious", "mine")
    (tmp_path / "graftwork-0123456789abcdef.scratch").symlink_to(target)
    (tmp_path / ".out.0123456789abcdef.partial").write_text("a file, not a folder")
    sweep(tmp_path)
    assert set(kept) < set(entries(tmp_path)) and len(entries(tmp_path)) == len(kept) + 3
    assert (target / "file").read_text() == "mine"


def test_links_in_a_leftover_are_not_followed(tmp_path: Path) -> None:
    target = filled(tmp_path / "precious", "mine")
    left = filled(tmp_path / "graftwork-0123456789abcdef.scratch", "x")
    (left / "link").symlink_to(target)
    sweep(tmp_path)
    assert not left.exists() and (target / "file").read_text() == "mine"


def test_folders_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = filled(tmp_path / "graftwork-0123456789abcdef.scratch", "x")
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    sweep(tmp_path)
    assert left.exists()


@pytest.mark.long
def test_a_forked_process_leaves_the_folder_to_its_maker(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from graftwork.ir.support.scratch import Scratch\n"
        "kept = Scratch(Path(sys.argv[1]))\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "os.wait()\nassert kept.path.is_dir()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert entries(tmp_path) == []


def test_names_are_exchanged_in_one_step_here(tmp_path: Path) -> None:
    one, other = filled(tmp_path / "one", "1"), filled(tmp_path / "other", "2")
    done = exchange(one, other)
    assert done == sys.platform.startswith("linux")
    if done:
        assert (one / "file").read_text() == "2" and (other / "file").read_text() == "1"
        with pytest.raises(OSError):
            exchange(one, tmp_path / "nowhere")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no exchange of names here")
def test_a_folder_is_there_at_every_moment_while_it_is_replaced(tmp_path: Path) -> None:
    folder = filled(tmp_path / "out", "0")
    missing, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            missing.append(not os.path.lexists(folder / "file"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(300):
        with replacing(folder) as new:
            (new / "file").write_text(str(number))
    done.set()
    watcher.join()
    assert len(missing) > 300 and not any(missing)
    assert (folder / "file").read_text() == "299" and entries(tmp_path) == ["out"]


def test_without_exchange_two_renames_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "exchange", lambda one, other: False)
    folder = filled(tmp_path / "out", "old")
    with replacing(folder) as new:
        (new / "file").write_text("new")
    assert (folder / "file").read_text() == "new" and entries(tmp_path) == ["out"]


def test_an_old_folder_whose_place_is_empty_comes_back(tmp_path: Path) -> None:
    """Two renames that were cut short between them."""
    filled(tmp_path / ".out.0123456789abcdef.old", "old")
    filled(tmp_path / ".out.0123456789abcdef.partial", "new")
    sweep(tmp_path)
    assert entries(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "old"


def test_a_replaced_folder_has_the_usual_permissions(tmp_path: Path) -> None:
    with replacing(tmp_path / "out") as new:
        (new / "file").write_text("x")
    filled(tmp_path / "plain", "x")
    modes = [(tmp_path / name).stat().st_mode for name in ("out", "plain")]
    assert modes[0] == modes[1]
    kept = Scratch(tmp_path)
    assert kept.path.stat().st_mode & 0o077 == 0
    shutil.rmtree(kept.path)
