"""ONNX Runtime's CUDA provider on a machine without a GPU: over a runtime that does nothing.

The provider is the real one: it opens sessions, says which of its kernels takes which node, copies
weights to "the device" (this machine's memory), and records and launches graphs. Kernels are not
there, so that no number means anything. Its library wants those of CUDA; here they are made of what
it asks of them by name, in a folder that a process of its own is started with.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCE = HERE / "hollow_cuda.cpp"
RUNTIME = "libcudart.so.13"
OTHERS = {"curand": "libcurand.so.10", "cuTensor": "libcuda.so.1"}
"""Libraries whose symbols have no versions, by how these begin."""


def provider() -> Path:
    """The provider's library."""
    import onnxruntime

    return Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"


def skip_without() -> None:
    """Skip the test where the provider cannot be had."""
    tools = [tool for tool in ("g++", "objdump") if shutil.which(tool) is None]
    if platform.system() != "Linux" or platform.machine() != "x86_64" or tools:
        pytest.skip(f"needs Linux on x86-64 with g++ and objdump (missing: {tools})")
    if not provider().exists() or RUNTIME not in _said("-p"):
        pytest.skip("needs an onnxruntime with a provider for CUDA 13")


def _said(option: str) -> str:
    return subprocess.run(
        ["objdump", option, str(provider())], capture_output=True, text=True, check=True
    ).stdout


def _wanted() -> dict[str, set[str]]:
    """By library of CUDA, the functions that the provider asks for."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for line in _said("-T").splitlines():
        found = re.search(r"\*UND\*\s+\w+\s+(?:\((\S+)\)|Base)?\s*(\w+)$", line)
        if found and (library := found[1] or _unversioned(found[2])):
            wanted[library].add(found[2])
    return {library: names for library, names in wanted.items() if library.startswith("libcu")}


def _unversioned(name: str) -> str | None:
    return next((library for start, library in OTHERS.items() if name.startswith(start)), None)


def build(folder: Path) -> None:
    """Put libraries into a folder that serve the provider as CUDA's."""
    known = SOURCE.read_text()
    for library, names in {**{name: set[str]() for name in OTHERS.values()}, **_wanted()}.items():
        runtime = library == RUNTIME
        rest = [name for name in sorted(names) if not runtime or f" {name}(" not in known]
        code, versions = folder / f"{library}.cpp", folder / f"{library}.map"
        code.write_text('extern "C" {\n' + "\n".join(map(_nothing, rest)) + "\n}\n")
        versions.write_text(f"{library} {{ global: *; }};\n")
        named = [] if library in OTHERS.values() else [f"-Wl,--version-script={versions}"]
        sources = [str(code), *([str(SOURCE)] if runtime else [])]
        how = ["-w", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library}", *named]
        subprocess.run(["g++", *how, *sources, "-o", str(folder / library)], check=True)


def _nothing(name: str) -> str:
    """A function that succeeds; if it makes something, what it made is nothing in particular."""
    if re.search(r"(Status|Error)(Name|String)$", name):
        return f'const char* {name}(...) {{ return ""; }}'
    if "Create" in name:
        return f"int {name}(void** made, ...) {{ static char it[64]; *made = it; return 0; }}"
    return f"long {name}(...) {{ return 0; }}"


SERVER = """
import os, sys
import {module} as t
for call in sys.stdin:
    if not os.fork():
        status = 1
        try:
            eval("t." + call)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    print("ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


class Hollow:
    """A process over the libraries of a folder that has imported a test module, and forks for each
    call of it."""

    def __init__(self, folder: Path, module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER.format(module=module)],
            cwd=HERE,
            env={**os.environ, "LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, call: str) -> list[str]:
        """The lines that a call prints."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{call}\n")
        self.process.stdin.flush()
        lines: list[str] = []
        for line in self.process.stdout:
            if line.startswith("ended with "):
                assert line == "ended with 0\n", f"{call} {line}"
                return lines
            lines.append(line.rstrip("\n"))
        raise AssertionError(f"{call}: its process is gone")

    def close(self) -> None:
        self.process.communicate()


def count(what: str) -> int:
    """In such a process: bytes that are `held`, kernels `launched`, graphs `captured` and
    `replayed`."""
    asked: Any = getattr(ctypes.CDLL(RUNTIME), f"hollow_{what}")
    asked.restype = ctypes.c_long
    return int(asked())
