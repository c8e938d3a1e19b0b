"""What calibration costs: time beside one forward pass, peak memory, and what a kill takes away.

    python benchmarks/random_llama.py --preset 200m --out /tmp/llama200m
    python benchmarks/calibration_cost.py /tmp/llama200m [--method gptq] [--bits 4] [--group 32]
        [--windows 8] [--length 512] [--kill 0.5] [--work FOLDER] [--json F]

On random tokens. The forward pass is that of the same interpreter over the same windows. `solve` is
the time in the method itself; `over_forward` what is left of calibration's time, over the forward
pass's. Memory is sampled, over what the process held once the program was traced: anonymous pages,
and all (those of mapped weights among them); beside it the bytes of two layers' weights and of one
block's second derivatives. Then a second process is killed at that share of the work, a third goes
on, and both results are compared bit by bit. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from graftwork.frontends import import_model
from graftwork.ir import Program
from graftwork.passes.engine.blocks import blocks_of, weight_of
from graftwork.passes.engine.calibrate import CHUNK_TOKENS, Seen
from graftwork.passes.engine.evidence import Evidence, WorkFolder
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.validate import reference_logits
from graftwork.passes.fusing.products import source_product
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.numerics.solver import WeightSolver
from graftwork.recipe import Recipe


class Memory:
    """The most that this process holds while it is watched, in bytes over what it held before."""

    def __init__(self) -> None:
        self.before = self.now()
        self.most = (0, 0)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    @staticmethod
    def now() -> tuple[int, int]:
        """Anonymous bytes, and all."""
        text = Path("/proc/self/status").read_text()
        found = [re.search(rf"{key}:\s+(\d+) kB", text) for key in ("RssAnon", "VmRSS")]
        anonymous, whole = (int(match[1]) * 1024 if match else 0 for match in found)
        return anonymous, whole

    def watch(self) -> None:
        """Sample until it is over."""
        while not self.over.wait(0.02):
            held = [a - b for a, b in zip(self.now(), self.before, strict=True)]
            self.most = max(self.most[0], held[0]), max(self.most[1], held[1])

    def end(self) -> tuple[int, int]:
        """The most there was."""
        self.over.set()
        self.thread.join()
        return self.most


def traced(folder: Path) -> Program:
    """The model as a recipe has it when weights are quantized."""
    return run_passes(import_model(folder, dtype=torch.float32), Recipe.load("baseline").steps)[0]


def sizes(program: Program) -> tuple[int, int]:
    """Bytes of the two largest layers in a row, and of the largest block's second derivatives."""
    head = source_product(program.step.outputs["logits"])
    calls = program.step.calls(torch.ops.aten.linear.default)
    products = [node for node in calls if node is not head]
    weights, moments = [], []
    for block in blocks_of(program.step, products):
        nodes = [node for nodes in block.products.values() for node in nodes]
        weights.append(sum(program.weights[weight_of(node)].type.nbytes for node in nodes))
        first = [nodes[0] for nodes in block.products.values()]
        moments.append(sum(4 * columns(program, weight_of(node)) ** 2 for node in first))
    return max(a + b for a, b in itertools.pairwise(weights)), max(moments)


def columns(program: Program, name: str) -> int:
    """Of a weight."""
    return int(str(program.weights[name].type.dims[1]))


def timed(seconds: list[float]) -> Callable[[Any, Seen], Any]:
    """`WeightSolver.solve`, which says how long it took."""
    solve = WeightSolver.solve

    def run(self: WeightSolver, seen: Seen) -> Any:
        start = time.perf_counter()
        try:
            return solve(self, seen)
        finally:
            seconds.append(time.perf_counter() - start)

    return run


def one(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate once in this process."""
    torch.set_num_threads(args.threads)
    program = traced(args.model)
    generator = torch.Generator().manual_seed(0)
    count = args.windows * args.length
    ids = torch.randint(program.info.vocab_size, (count,), generator=generator)
    figures: dict[str, Any] = {}
    if args.forward:
        chunks = ids.view(-1, args.length).split(max(1, CHUNK_TOKENS // args.length))
        start = time.perf_counter()
        for chunk in chunks:
            reference_logits(program, chunk)
        figures["forward_seconds"] = time.perf_counter() - start
        figures["two_layers"], figures["derivatives"] = sizes(program)
    solving: list[float] = []

    def progress(what: str, share: float) -> None:
        if args.die and share > args.die:
            os.kill(os.getpid(), signal.SIGKILL)

    pass_ = QuantizeWeights(
        method=args.method, bits=args.bits, group=args.group, windows=args.windows,
        length=args.length,
    )  # fmt: skip
    memory, start = Memory(), time.perf_counter()
    evidence = Evidence(ids, WorkFolder(args.work), progress)
    with mock.patch.object(WeightSolver, "solve", timed(solving)):
        made = run_passes(program, [Step(pass_)], evidence=evidence)[0]
    figures["seconds"] = time.perf_counter() - start
    figures["anonymous"], figures["resident"] = memory.end()
    figures["solve_seconds"] = sum(solving)
    digest = hashlib.sha256()
    for name in sorted(made.weights):
        if ".q" in name:
            digest.update(made.weights[name].load().reshape(-1).view(torch.uint8).numpy().data)
    return {**figures, "sha256": digest.hexdigest()[:16]}


def process(args: argparse.Namespace, work: Path, *more: str) -> dict[str, Any] | None:
    """`one` in a process of its own; None if it was killed."""
    given = [f"--{key}={getattr(args, key)}" for key in PASSED]
    command = [sys.executable, __file__, str(args.model), *given, "--one", f"--work={work}", *more]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode == -signal.SIGKILL:
        return None
    ended.check_returncode()
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


PASSED = ("method", "bits", "group", "windows", "length", "threads")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kill", type=float, default=0.5, help="at this share; 0: never")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--forward", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--die", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args)))
        return
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        whole = process(args, Path(folder) / "whole", "--forward")
        assert whole is not None
        rest = whole["seconds"] - whole["solve_seconds"]
        whole["over_forward"] = rest / whole["forward_seconds"]
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in whole.items()}))
        resumed = None
        if args.kill:
            killed = process(args, Path(folder) / "killed", f"--die={args.kill}")
            assert killed is None, "it was over before it could be killed"
            resumed = process(args, Path(folder) / "killed")
            assert resumed is not None
            same = resumed["sha256"] == whole["sha256"]
            print(f"killed at {args.kill:.0%}: {resumed['seconds']:.1f} s more, same bits: {same}")
    if args.json:
        args.json.write_text(json.dumps({"whole": whole, "resumed": resumed}, indent=1))


if __name__ == "__main__":
    main()
