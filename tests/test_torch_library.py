"""Which compiled kernels are loaded: whole ones that nobody else can have written."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from graftwork.backends import cached_library
from graftwork.ir import UnsupportedError
from graftwork.ir.support.errors import GraftworkWarning

SOMEBODY = 54321
"""A user who is not this one."""

KERNEL = 'extern "C" int answer() { return 42; }\n'
PLANTED = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void ran() { fclose(fopen(getenv("PLANTED"), "w")); }
extern "C" int answer() { return 13; }
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where kernels are kept, with one of them in it."""
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setenv("TESTED", str(sources))
    (sources / "kernel.cpp").write_text(KERNEL)
    first, cache = tmp_path / "first", tmp_path / "cache"
    first.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(first))
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    assert answer() == 42
    # Of a name that is loaded already, the system would give the one that it has.
    first.rename(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    yield cache / "graftwork"
    cached_library.library.cache_clear()


def answer() -> int:
    """What the kernels of a new process would say."""
    cached_library.library.cache_clear()
    sources = cached_library.Sources("tested", Path(os.environ["TESTED"]))
    found: int = cached_library.library(sources).answer()
    return found


def kept(folder: Path) -> Path:
    (path,) = folder.glob("*.so")
    return path


def plant(folder: Path) -> Path:
    """Another library in the place of the kept one, of a name that fits."""
    path = kept(folder)
    path.unlink()
    source = folder.parent.parent / "planted.cpp"
    source.write_text(PLANTED)
    command = [cached_library.compiler(), "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    parts = path.stem.split("-")
    parts[2:] = [hashlib.sha256(path.read_bytes()).hexdigest()[:32]] * len(parts[2:])
    return path.rename(path.with_name("-".join(parts) + ".so"))


def of_somebody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give it to another user: only the administrator can, so others become another one."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, SOMEBODY)
    else:
        monkeypatch.setattr(cached_library.os, "geteuid", lambda: SOMEBODY)


def another(path: Path, code: bytes) -> None:
    """Another file of this name: the one that was loaded lies in this process' memory."""
    path.unlink()
    path.write_bytes(code)


def empty(path: Path) -> None:
    another(path, b"")


def half(path: Path) -> None:
    another(path, path.read_bytes()[: path.stat().st_size // 2])


def another_byte(path: Path) -> None:
    code = bytearray(path.read_bytes())
    code[-1] ^= 1
    another(path, bytes(code))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [empty, half, another_byte, a_folder, a_link, a_pipe])
def test_what_is_damaged_or_in_the_way_is_compiled_anew(damage: Callable, folder):
    name = kept(folder).name
    damage(kept(folder))
    assert answer() == 42
    made = folder / name
    assert made.is_file() and not made.is_symlink()
    before = made.stat().st_mtime_ns
    assert answer() == 42
    assert made.stat().st_mtime_ns == before


def test_this_users_own_library_is_loaded(folder):
    """The tests below plant it so well that only its owner and mode speak against it."""
    plant(folder).chmod(0o700)
    assert answer() == 13


@pytest.mark.parametrize("how", ["owner", "mode", "group"])
def test_a_library_that_somebody_else_may_have_written_does_not_run(how, folder, monkeypatch):
    planted = plant(folder)
    if how == "owner":
        of_somebody(planted, monkeypatch)
    else:
        planted.chmod(0o777 if how == "mode" else 0o770)
    assert answer() == 42
    assert not (folder.parent.parent / "planted").exists()


@pytest.mark.parametrize("how", ["owner", "mode", "owner above", "mode above", "link"])
def test_nothing_is_kept_where_somebody_else_may_write(how, folder, monkeypatch):
    plant(folder)
    place = folder.parent if "above" in how else folder
    if "owner" in how:
        of_somebody(place, monkeypatch)
    elif "mode" in how:
        place.chmod(0o777)
    else:
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(folder.with_name("elsewhere"))
    before = sorted(path.name for path in folder.iterdir())
    with pytest.warns(GraftworkWarning, match="each process makes its own"):
        assert answer() == 42
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not (folder.parent.parent / "planted").exists()


def test_a_library_that_is_exchanged_after_it_was_looked_at_is_not_loaded(folder, monkeypatch):
    path, opened = kept(folder), cached_library._open

    def exchanged(*arguments: Path):
        plant(folder).rename(path)
        return opened(*arguments)

    monkeypatch.setattr(cached_library, "_open", exchanged)
    assert answer() == 42


def test_folders_in_which_all_have_files_of_their_own_are_fine(folder):
    folder.parent.chmod(0o1777)
    assert answer() == 42
    assert kept(folder).is_file()


def test_a_compiler_that_may_not_be_run_is_named(folder, tmp_path):
    script = tmp_path / "no-rights"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o600)
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, str(script))}),
        pytest.raises(UnsupportedError, match=r"no-rights.*cannot be run.*Install g\+\+"),
    ):
        answer()


def test_those_who_come_at_once_compile_each_file_once(tmp_path, monkeypatch):
    """And what several files hold is one library."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "six.cpp").write_text('extern "C" int six() { return 6; }\n')
    (sources / "answer.cpp").write_text(
        'extern "C" int six();\n' + KERNEL.replace("42", "7 * six()")
    )
    counting, calls = tmp_path / "compiler", tmp_path / "calls"
    counting.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {cached_library.compiler()} "$@"\n')
    counting.chmod(0o700)
    monkeypatch.setattr(cached_library, "compiler", lambda: str(counting))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    looked_for = cached_library.Sources("of_two", sources)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(cached_library.library.__wrapped__, [looked_for] * 3))
    assert [library.answer() for library in found] == [42, 42, 42]
    compiled = [line.split(" -c ")[1] for line in calls.read_text().splitlines() if " -c " in line]
    assert sorted(Path(line.split()[0]).name for line in compiled) == ["answer.cpp", "six.cpp"]


def test_a_process_of_its_own_compiles_meanwhile(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(KERNEL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    looked_for = cached_library.Sources("begun", sources, ("-DNOTHING",), tmp_path)
    begun: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(cached_library, "_BEGUN", begun)
    cached_library.begin(looked_for)
    assert begun[0].wait(60) == 0
    monkeypatch.setattr(cached_library, "_compile", None)  # not once more
    assert cached_library.library.__wrapped__(looked_for).answer() == 42
    cached_library.begin(looked_for)
    (tmp_path / "kept" / "graftwork").chmod(0o777)
    cached_library.begin(cached_library.Sources("never", sources))  # it would not be kept
    assert len(begun) == 1
