"""What `graftwork optimize` costs: wall time, peak anonymous memory, and pass time by depth.

    python benchmarks/random_llama.py --preset 3b --dtype bfloat16 --out /tmp/llama3b
    python benchmarks/compile_cost.py checkpoint /tmp/llama3b --target torch:cpu:bfloat16
    python benchmarks/compile_cost.py depth --layers 8 16 32 64

`checkpoint` runs the command line in a process of its own and samples RssAnon, which leaves out the
pages of memory-mapped files. `depth` runs a recipe's passes on random models of growing depth and
prints milliseconds a layer, which stay level if pass time is linear.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from random_llama import Shape, write


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process now, in bytes; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return int(sizes[0]) * 1024 if sizes else 0


def checkpoint(model: Path, recipe: str, target: str) -> dict[str, object]:
    """Run ``graftwork optimize`` on a checkpoint; wall seconds, peak RssAnon, bytes in and out."""
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        out = Path(folder) / "artifact"
        command = [sys.executable, "-m", "graftwork", "optimize", str(model)]
        command += ["--recipe", recipe, "--target", target, "--out", str(out)]
        start, peak = time.perf_counter(), 0
        process = subprocess.Popen(command)
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(f"graftwork optimize failed with exit code {process.returncode}")
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    source = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return {
        "model": model.name,
        "recipe": recipe,
        "target": target,
        "seconds": round(seconds, 1),
        "peak_anonymous_gb": round(peak / 1e9, 3),
        "checkpoint_gb": round(source / 1e9, 2),
        "artifact_gb": round(size / 1e9, 2),
    }


def depth(layers: list[int], recipe: str, repeats: int) -> list[dict[str, object]]:
    """Median pass times of a recipe on random llamas of these depths, in ms a layer."""
    import graftwork as gw

    rows: list[dict[str, object]] = []
    for count in layers:
        folder = Path(tempfile.mkdtemp())
        shape = Shape(hidden=64, layers=count, heads=4, groups=2, inner=128, vocab=256, context=256)
        write(shape, "float32", folder)
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            start = time.perf_counter()
            program = gw.optimize(folder, recipe, target="eager").program
            times["whole optimize"].append(time.perf_counter() - start)
            for record in program.provenance:
                times[record.name].append(record.seconds)
            times["all passes"].append(sum(r.seconds for r in program.provenance))
        shutil.rmtree(folder)
        per_layer = {n: round(1e3 * statistics.median(t) / count, 2) for n, t in times.items()}
        rows.append({"layers": count, "ms_per_layer": per_layer})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("checkpoint", help="time and memory of one conversion")
    one.add_argument("model", type=Path)
    one.add_argument("--recipe", default="baseline")
    one.add_argument("--target", default="torch:cpu:bfloat16")
    many = modes.add_parser("depth", help="pass time against the number of layers")
    many.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    many.add_argument("--recipe", default="baseline")
    many.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.mode == "checkpoint":
        print(json.dumps(checkpoint(args.model, args.recipe, args.target), indent=1))
        return
    for row in depth(args.layers, args.recipe, args.repeats):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
