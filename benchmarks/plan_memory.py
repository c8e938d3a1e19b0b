"""Memory of a plan folder's sessions over its one file of weights (Linux).

    graftwork export MODEL --recipe medusa --format onnx-plan --out DIR
    python benchmarks/plan_memory.py DIR --ids 1,2,3 [--tokens 16]

Generates with run.py, with each session's own packed copies of the weights and, `share`, without,
each in a process of its own, and prints the proportional set size that came on top of what the
libraries take, in MB and over the file's.
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
    states = sum(array.nbytes for array, _, _ in runner.states.values())
    taken, weights = proportional() - before - states, (folder / "weights.data").stat().st_size
    row = {
        "share": bool(share),
        "sessions": len(runner.sessions),
        "mb": round(taken / 1e6, 1),
        "over_weights": round(taken / weights, 3),
    }
    print(json.dumps(row))


def proportional() -> int:
    """This process's proportional set size, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


if __name__ == "__main__":
    main()
