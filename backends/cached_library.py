"""Native kernels as libraries, compiled once for a processor and kept.

Whoever loads a library runs what is in it, so a kept one is loaded only if nobody but this user
and the system's administrator can have written it: the file and the folder are theirs, no one else
may write either, and no folder above lets others put another one in the place. Its name holds a
hash of its bytes, so what was cut short or damaged is compiled anew.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ir.support.cache_folder import OTHERS, cache_folder, is_ours, kept_folder
from ..ir.support.errors import UnsupportedError
from ..ir.support.files import open_regular
from ..ir.support.scratch import lock_open

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC")

INSTEAD = "take a target that can do without: eager, onnxruntime"


def compiler() -> str:
    """The C++ compiler that inductor uses. Inductor's settings are read where it is loaded, and not
    loaded to be read: they take 45 MB."""
    settings: Any = sys.modules.get("torch._inductor.config")
    usual = "clang++" if sys.platform == "darwin" else "g++"
    named = settings.cpp.cxx if settings else (os.environ.get("CXX"),)
    return next(filter(None, named), usual)


@dataclass(frozen=True)
class Sources:
    """What a library is made of.

    name: of the library, a word. folder: its C++ files and headers. flags: for the compiler, on top
    of `FLAGS`. shared: a folder whose headers they include.
    """

    name: str
    folder: Path
    flags: tuple[str, ...] = ()
    shared: Path | None = None

    @property
    def command(self) -> list[str]:
        """What compiles them, but for where they are."""
        return [compiler(), *FLAGS, *self.flags]

    @property
    def files(self) -> list[Path]:
        """All that is read, in order."""
        own = [path for path in self.folder.iterdir() if path.suffix in (".cpp", ".h")]
        return sorted([*own, *(self.shared.glob("*.h") if self.shared else ())])


SHARED = Sources(
    "shared",
    Path(__file__).with_name("kernels"),
    # The same bits on every processor: a multiply-add is fused where the kernels say so.
    ("-ffp-contract=off",),
)
"""The kernels that both backends run."""


def begin(sources: Sources) -> None:
    """Have a process of its own compile the library if it is not kept, while this one does
    something else: `library` waits for it, and says what is wrong if it fails."""
    with suppress(OSError, UnsupportedError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `library` says it
        with kept_folder("compiled kernels") as kept:
            lost = kept != cache_folder().resolve()  # with the process
            if lost or any(kept.glob(f"{_name(sources)}-*.so")):
                return
        paths = (sources.folder, *filter(None, [sources.shared]))
        told = {"path": sys.path, "name": sources.name, "flags": sources.flags}
        _BEGUN.append(
            subprocess.Popen(
                [sys.executable, "-c", _BEGIN, __name__, json.dumps(told), *map(str, paths)],
                env={**os.environ, "CXX": compiler()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )


_BEGIN = """
import importlib, json, pathlib, sys
name, told, folder, *shared = sys.argv[1:]
told = json.loads(told)
sys.path[:] = told["path"]
made = importlib.import_module(name)
shared = [pathlib.Path(path) for path in shared]
made.library(made.Sources(told["name"], pathlib.Path(folder), tuple(told["flags"]), *shared))
"""

_BEGUN: list[subprocess.Popen[bytes]] = []
"""Processes that compile."""


def _name(sources: Sources) -> str:
    """What the library is kept as, but for the hash of its bytes: another name for another
    processor, compiler or source. Errors: as `library`."""
    described = _output([*sources.command, "-x", "c++", "-dM", "-E", os.devnull])
    texts = [path.read_bytes() for path in sources.files]
    key = hashlib.sha256(b"\0".join([*texts, " ".join(sources.command).encode(), described]))
    return f"{sources.name}-{key.hexdigest()[:32]}"


@functools.cache
def library(sources: Sources) -> ctypes.CDLL:
    """The library, compiled if this processor, compiler and source are new.

    Its `_name` is what other loaders may open to get the same one: the file as it was looked at.
    Errors: `UnsupportedError` if it cannot be compiled or loaded.
    """
    name = _name(sources)
    with kept_folder("compiled kernels") as kept:
        made = _found(kept, name)
        if made is None:
            with _alone(kept):
                made = _found(kept, name) or _loaded(_built(kept, name, sources))
    if made is None:
        raise UnsupportedError(
            f"the compiled kernels in {kept} changed before they were loaded; "
            "something else writes there: set GRAFTWORK_CACHE to a folder of your own"
        )
    return made


def _found(kept: Path, name: str) -> ctypes.CDLL | None:
    """A library that was kept before, if one is whole and ours."""
    return next(filter(None, map(_loaded, sorted(kept.glob(f"{name}-*.so")))), None)


@contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """One process at a time in a folder: others wait, and find what the first has made."""
    handle = os.open(kept, os.O_RDONLY)
    try:
        lock_open(handle)
        yield
    finally:
        os.close(handle)


def _built(kept: Path, name: str, sources: Sources) -> Path:
    """A new library, whole from the first moment that it has its name."""
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        made = Path(folder) / "kernels.so"
        _compile(sources, Path(folder), made)
        made.chmod(0o700)
        path = kept / f"{name}-{_hash(made.read_bytes())}.so"
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        made.replace(path)
    return path


def _compile(sources: Sources, folder: Path, made: Path) -> None:
    """Compile each file on a processor of its own, the longest first, and link them."""
    include = [] if sources.shared is None else ["-I", str(sources.shared)]
    files = [path for path in sources.files if path.suffix == ".cpp"]
    objects = [folder / f"{path.stem}.o" for path in files]

    def compile_one(pair: tuple[Path, Path]) -> None:
        _output([*sources.command, *include, "-c", str(pair[0]), "-o", str(pair[1])])

    longest = sorted(zip(files, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, longest))
    _output([*sources.command, "-shared", *map(str, objects), "-o", str(made)])


def _hash(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:32]


def _loaded(path: Path) -> ctypes.CDLL | None:
    """A kept library; None if it is not what its name says, or may be somebody else's.

    What is looked at is what is loaded: where the system names open files (Linux), the library is
    loaded through the one that was hashed, and so another one that takes its name meanwhile is not
    run. Elsewhere it is loaded by its name, in a folder in which only this user can rename.
    """
    try:
        file = open_regular(path, follow=False)
    except OSError:
        return None
    facts = os.fstat(file.fileno())
    if not is_ours(facts) or facts.st_mode & OTHERS or not path.stem.endswith(_hash(file.read())):
        file.close()
        return None
    opened = Path(f"/proc/self/fd/{file.fileno()}")
    if not opened.exists():
        file.close()
        return _open(path, path)
    # It stays open: the system remembers libraries by name, and would take the next file of this
    # number for this one.
    _OPEN.append(file.detach())
    return _open(opened, path)


_OPEN: list[object] = []


def _open(path: Path, shown: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(
            f"the compiled kernels {shown} cannot be loaded: {error}. Set GRAFTWORK_CACHE to a "
            f"folder from which programs may run, or {INSTEAD}"
        ) from error


def _output(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        found = "it is not installed"
    except OSError as error:
        found = f"it cannot be run ({error.strerror})"
    except subprocess.CalledProcessError as error:
        found = error.stderr.decode(errors="replace").strip()
    raise UnsupportedError(
        f"native kernels need a C++ compiler with OpenMP, but {' '.join(command)} failed: {found}. "
        f"Install g++, name a compiler with CXX, or {INSTEAD}"
    )
