"""Mutants of files and folders: made, tried and counted in other processes.

A script that makes mutants starts itself in such processes (`tried`), where it calls `work`. They
may write into their own folder only. One that dies, hangs or writes elsewhere is a fault, and the
next mutant goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

SECONDS = 60
"""How long a mutation may take, on a machine that does other things too."""

MEMORY = 12 * 2**30
"""Bytes of addresses that a process may have."""

Make = Callable[[random.Random, int, Path], tuple[str, Callable[[], str]]]
"""Makes a mutant, at a path that is free, with a random state and its number. Returns what it is,
by its base ("llama: a byte"), and what judges it: "refused", "accepted" or a fault."""


def arguments(doc: str, mutations: int) -> argparse.ArgumentParser:
    """What the command line of every script takes."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=mutations)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bases", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser


def confined(memory: int = MEMORY) -> None:
    """Bound the memory of this process (0: not) and its threads."""
    import resource

    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def work(make: Make, seed: int, first: int, last: int, watched: bool = True) -> None:
    """Make and try mutants; a line before each and a line after it. What `make` needs is to be
    loaded before, when nothing is watched yet."""
    jail = Path(os.getcwd())
    target = jail / "deep" / "er" / "mutant"
    if watched:
        watch(jail)
    for index in range(first, last):
        shutil.rmtree(jail / "deep", ignore_errors=True)
        what, judge = make(random.Random(seed * 1_000_003 + index), index, target)
        print(f"call {index} {what.encode('ascii', 'replace').decode()}", flush=True)
        outside = entries(jail, target)
        try:
            said = judge()
        except BaseException as error:  # what nobody was to raise
            said = f"fault: {type(error).__name__}: {str(error)[:300]!r}"
        if strange := entries(jail, target) - outside:
            said = f"fault: wrote {sorted(strange)[:3]}"
        print(f"done {said}", flush=True)


def watch(allowed: Path) -> None:
    """End the process when Python writes a file outside of `allowed`, or starts a program."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
            print(f"done fault: {event} {arguments}", flush=True)
            os._exit(70)
        if event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        path, mode, flags = os.fsdecode(arguments[0]), arguments[1] or "", arguments[2] or 0
        writing = bool(set(mode) & set("wax+") or flags & writes) and not path.startswith("/dev/")
        if writing and not Path(os.path.realpath(path)).is_relative_to(allowed):
            print(f"done fault: wrote {path}", flush=True)
            os._exit(70)

    sys.addaudithook(hook)


def entries(jail: Path, mutant: Path) -> set[str]:
    """Everything in the process's folder but the mutant itself and temporary files."""
    found = {str(path.relative_to(jail)) for path in jail.rglob("*")}
    return {p for p in found if not p.startswith(("tmp", str(mutant.relative_to(jail))))}


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Lines as they come; ends with the process, which is killed when it says nothing for long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if not selector.select(SECONDS * 2 if not rest else SECONDS):
                process.kill()
                yield f"done fault: no answer within {SECONDS} s"
                return
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return
            *whole, rest = (rest + piece).split(b"\n")
            yield from (text.decode(errors="replace") for text in whole)


def tried(
    folder: Path, seed: int, first: int, last: int, script: str, *more: str
) -> list[tuple[str, str]]:
    """(mutation, verdict) of every mutation; a process that dies is a verdict. script: what makes
    them; more: what it is told besides."""
    results: list[tuple[str, str]] = []
    while first < last:
        jail = Path(tempfile.mkdtemp(dir=folder))
        (jail / "tmp").mkdir()
        command = [sys.executable, script, "--seed", str(seed), "--bases", str(folder), *more]
        command += ["--work", str(first), str(last)]
        said = {"TMPDIR": str(jail / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", "RUST_BACKTRACE": "0"}
        with (jail / "errors").open("wb") as errors:
            process = subprocess.Popen(
                command, cwd=jail, env={**os.environ, **said}, stdout=subprocess.PIPE, stderr=errors
            )
            call, before = "", first
            for text in lines_of(process):
                kind, _, rest = text.partition(" ")
                if kind == "call":
                    call, first = rest, int(rest.partition(" ")[0]) + 1
                elif kind == "done" and call:
                    results.append((call, rest))
                    call = ""
            code = process.wait()
        if call:
            results.append((call, f"fault: died with {code}"))
        elif code and first == before:
            text = (jail / "errors").read_text(errors="replace")[-500:]
            results.append(("nothing", f"fault: died with {code}: {text}"))
            return results
        shutil.rmtree(jail, ignore_errors=True)
    return results


def spread(
    folder: Path, seed: int, mutations: int, processes: int, script: str, *more: str
) -> list[tuple[str, str]]:
    """See `tried`; in several processes at a time."""
    size = min(500, -(-mutations // processes))
    pieces = [(at, min(at + size, mutations)) for at in range(0, mutations, size)]
    with ThreadPoolExecutor(processes) as pool:
        results = pool.map(lambda piece: tried(folder, seed, *piece, script, *more), pieces)
        return [result for part in results for result in part]


def counted(everything: list[tuple[str, str]]) -> tuple[Counter[str], list[str]]:
    """How many mutants ended how, in all and by base ("llama refused"), and the faulty ones."""
    counts: Counter[str] = Counter(mutations=len(everything))
    faults = []
    for call, said in everything:
        ended = said if said in ("refused", "accepted") else "faults"
        base = call.split()[1].rstrip(":") if call != "nothing" else "none"
        counts.update([ended, f"{base} {ended}"])
        if ended == "faults":
            faults.append(f"{call}: {said}")
    return counts, faults
