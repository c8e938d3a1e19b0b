"""Memory of a plan folder's sessions over its one file of weights (Linux).

    graftwork export MODEL --recipe medusa --format onnx-plan --out DIR
    python benchmarks/plan_memory.py DIR --ids 1,2,3 [--tokens 16]

Generates with run.py, with each session's own packed copies of the weights and, `share`, without,
each in a process of its own, and prints the proportional set size that came on top of what was
there before, in MB and over the file's: mapped weights and private memory. Code of the libraries
that was read in meanwhile, once however many sessions there are, is counted apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of --format onnx-plan")
    parser.add_argument("--ids", default="1,2,3", help="the prompt's token ids")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        measure(args.folder, [int(token) for token in args.ids.split(",")], args.tokens, args.share)
        return
    for share in (0, 1):
        subprocess.run([sys.executable, *sys.argv, "--share", str(share)], check=True)


def measure(folder: Path, ids: list[int], tokens: int, share: int) -> None:
    """Generate once and print a line."""
    spec = importlib.util.spec_from_file_location("run", folder / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = proportional()
    runner = module.Runner(folder, share=bool(share))
    runner.generate(ids, tokens, eos=[])
    states = sum(array.nbytes for kept in runner.functions.states.values() for array, _ in kept)
    (taken, code), weights = proportional(), (folder / "weights.data").stat().st_size
    taken -= before[0] + states
    row = {
        "share": bool(share),
        "sessions": len(runner.functions.sessions),
        "mb": round(taken / 1e6, 1),
        "over_weights": round(taken / weights, 3),
        "code_mb": round((code - before[1]) / 1e6, 1),
    }
    print(json.dumps(row))


def proportional() -> tuple[int, int]:
    """This process's proportional set size in bytes: without the code of libraries, and of it."""
    sizes, library = [0, 0], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "Pss:":
            sizes[library] += int(rest[0]) << 10
        elif not first.endswith(":"):  # a mapping: addresses, mode, ..., the file
            library = ".so" in line.rpartition("/")[2]
    return sizes[0], sizes[1]


if __name__ == "__main__":
    main()
