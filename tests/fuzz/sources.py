"""Mutated sources: .gguf, .onnx and tokenizer.json files, and prompts in .jsonl.

    python tests/fuzz/sources.py --mutations 1200 --seed 0

Every mutation must be refused with graftwork's own error, or mean what others read in the file: the
package gguf and transformers in a .gguf, ONNX Runtime in an .onnx, transformers in a tokenizer,
Python's json in prompts. Mutations are made in other processes, which may write
into their own folder only: one that dies, hangs or says something else is a fault, and the next
mutation goes on.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mutants
import torch
from mutants import counted, spread
from source_mutations import MUTATIONS
from source_readers import READERS, base_files

from graftwork.ir import GraftworkError


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
    """Make and try mutants."""
    mutants.confined()
    bases = {kind: next((folder / "bases" / kind).glob("main.*")) for kind in kinds}
    for kind, base in bases.items():  # before anything is watched: caches fill, libraries load
        said = verdict(kind, base, None)
        assert said == "accepted", f"{kind}: {said}"

    def make(rng: random.Random, index: int, target: Path) -> tuple[str, Callable[[], str]]:
        kind = kinds[index % len(kinds)]
        base = bases[kind]
        shutil.copytree(base.parent, target)
        path = target / base.name
        done = rng.choice(MUTATIONS[kind])(rng, path)
        changed = path.read_bytes() != base.read_bytes()
        return f"{kind}: {done}", lambda: verdict(kind, path, base if changed else None)

    mutants.work(make, seed, first, last)


def summary(
    seed: int, mutations: int, kinds: list[str], processes: int = 2
) -> tuple[Counter[str], list[str]]:
    """How many mutations ended how, by kind, and the faulty ones."""
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            base_files(kind, Path(name) / "bases" / kind)
        more = __file__, "--kinds", ",".join(kinds)
        return counted(spread(Path(name), seed, mutations, processes, *more))


def main() -> int:
    """The command line; 1 if there was a fault."""
    parser = mutants.arguments(__doc__, 1200)
    parser.add_argument("--kinds", default=",".join(MUTATIONS))
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
