"""Mutated sources: .gguf, .onnx and tokenizer.json files, and prompts in .jsonl.

    python tests/fuzz/sources.py --mutations 1200 --seed 0

Every mutation must be refused with graftwork's own error, or mean what others read in the file: the
package gguf and transformers in a .gguf, ONNX Runtime in an .onnx, transformers in a tokenizer,
Python's json in prompts. Mutations are made in other processes, which may write
into their own folder only: one that dies, hangs or says something else is a fault, and the next
mutation goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from artifacts import entries, lines_of, watch
from source_mutations import MUTATIONS
from source_readers import READERS, base_files

from graftwork.ir import GraftworkError

MEMORY = 12 * 2**30
"""Bytes of addresses that a process may have."""


def verdict(kind: str, path: Path, base: Path | None) -> str:
    """ "refused", "accepted", or what is wrong. base: the file without its mutation, which is what
    one must mean that others refuse; None: it is that file."""
    ours, theirs = READERS[kind]
    try:
        found = ours(path)
    except GraftworkError as error:
        if base is None:
            return f"fault: the file itself is refused: {str(error)[:200]}"
        return "refused" if len(str(error)) < 20_000 else "fault: an endless message"
    try:
        wanted = theirs(path)
    except BaseException as error:  # whatever the others raise of what we accept
        if base is not None and agrees(found, ours(base)):
            return "accepted"
        return f"fault: accepted, and refused elsewhere: {type(error).__name__}: {str(error)[:200]}"
    return "accepted" if agrees(found, wanted) else f"fault: {shown(found)} for {shown(wanted)}"


def agrees(found: Any, wanted: Any) -> bool:
    """Whether two results are the same, logits up to float error."""
    if not isinstance(found, torch.Tensor):
        return bool(found == wanted)
    if found.shape != wanted.shape:
        return False
    if not (wanted.isfinite().all() and found.isfinite().all()):
        return True  # what overflows may do so here or there
    scale = max(float(wanted.abs().max()), 1e-30)
    return float((found - wanted).abs().max()) <= 2e-3 * scale


def shown(result: Any) -> str:
    """A result for a message."""
    flat = result.flatten()[:4].tolist() if isinstance(result, torch.Tensor) else result
    return ascii(flat)[:120]


def work(folder: Path, kinds: list[str], seed: int, first: int, last: int) -> None:
    """Make and try mutations; a line before each and a line after it."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    jail = Path(os.getcwd())
    for kind in kinds:  # before anything is watched: caches fill, libraries load
        base = folder / "bases" / kind
        said = verdict(kind, next(base.glob("main.*")), None)
        assert said == "accepted", f"{kind}: {said}"
    watch(jail)
    for index in range(first, last):
        rng = random.Random(seed * 1_000_003 + index)
        kind = kinds[index % len(kinds)]
        target = jail / "deep" / "er" / "source"
        shutil.rmtree(jail / "deep", ignore_errors=True)
        shutil.copytree(folder / "bases" / kind, target)
        path = next(target.glob("main.*"))
        before = path.read_bytes()
        done = rng.choice(MUTATIONS[kind])(rng, path)
        print(f"call {index} {kind}: {done}", flush=True)
        outside = entries(jail, target)
        try:
            source = folder / "bases" / kind / path.name
            said = verdict(kind, path, source if path.read_bytes() != before else None)
        except BaseException as error:  # what nobody was to raise
            said = f"fault: {type(error).__name__}: {str(error)[:300]!r}"
        if strange := entries(jail, target) - outside:
            said = f"fault: wrote {sorted(strange)[:3]}"
        print(f"done {said}", flush=True)


def tried(folder: Path, kinds: list[str], seed: int, first: int, last: int) -> list[Any]:
    """(mutation, verdict) of every mutation; a process that dies is a verdict."""
    results: list[tuple[str, str]] = []
    while first < last:
        jail = Path(tempfile.mkdtemp(dir=folder))
        (jail / "tmp").mkdir()
        command = [sys.executable, __file__, "--seed", str(seed), "--bases", str(folder)]
        command += ["--kinds", ",".join(kinds), "--work", str(first), str(last)]
        more = {"TMPDIR": str(jail / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", "RUST_BACKTRACE": "0"}
        with (jail / "errors").open("wb") as errors:
            process = subprocess.Popen(
                command, cwd=jail, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=errors
            )
            call, before = "", first
            for text in lines_of(process):
                word, _, rest = text.partition(" ")
                if word == "call":
                    call, first = rest, int(rest.partition(" ")[0]) + 1
                elif word == "done" and call:
                    results.append((call, rest))
                    call = ""
            code = process.wait()
        if call:
            results.append((call, f"fault: died with {code}"))
        elif code and first == before:
            said = (jail / "errors").read_text(errors="replace")[-500:]
            results.append(("nothing", f"fault: died with {code}: {said}"))
            return results
        shutil.rmtree(jail, ignore_errors=True)
    return results


def summary(
    seed: int, mutations: int, kinds: list[str], processes: int = 2
) -> tuple[Counter[str], list[str]]:
    """How many mutations ended how, by kind, and the faulty ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in kinds:
            base_files(kind, folder / "bases" / kind)
        size = min(300, -(-mutations // processes))
        pieces = [(at, min(at + size, mutations)) for at in range(0, mutations, size)]
        with ThreadPoolExecutor(processes) as pool:
            parts = pool.map(lambda piece: tried(folder, kinds, seed, *piece), pieces)
            everything = [result for part in parts for result in part]
    counts: Counter[str] = Counter(mutations=len(everything))
    faults = []
    for call, said in everything:
        kind = call.split()[1].rstrip(":") if call != "nothing" else "none"
        ended = said if said in ("refused", "accepted") else "faults"
        counts.update([ended, f"{kind} {ended}"])
        if ended == "faults":
            faults.append(f"{call}: {said}")
    return counts, faults


def main() -> int:
    """The command line; 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(MUTATIONS))
    parser.add_argument("--bases", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if given.work:
        work(given.bases, kinds, given.seed, *given.work)
        return 0
    counts, faults = summary(given.seed, given.mutations, kinds, given.processes)
    for fault in faults[:60]:
        print(fault)
    print(json.dumps(dict(sorted(counts.items()))))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
