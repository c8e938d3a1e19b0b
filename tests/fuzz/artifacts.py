"""Mutated artifacts, loaded and run: refused with a message, or what their text says.

    python tests/fuzz/artifacts.py --mutations 10000 --seed 0

Saved artifacts of several recipes are changed in their text, weights or manifest, most of them with
the hashes put right again. Every one must be refused with graftwork's own error, or generate; if it
is accepted, each function must compute what the reference interpreter makes of its text, on eager
and now and then on onnxruntime. Damage that the hashes see must be refused, and a changed manifest
must change no token. Nothing may be written outside the process's own folder. Mutations are made
in other processes: one that dies or hangs is a fault, and the next mutation goes on.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from mutations import mutate
from tiny import cached_llama, drafting_llama, in_int8, named

from graftwork.artifact import saved as artifact
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.ir import GraftworkError, Program, Sym, Weight, run
from graftwork.ir.execution.executable import Executable
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.runtime.generate import generate

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
NEW = 6
SECONDS = 60
"""How long a mutation may take, on a machine that does other things too."""

MEMORY = 12 * 2**30
"""Bytes of addresses that a process may have."""

BACKENDS = ("eager", "eager", "eager", "onnxruntime")


def programs() -> dict[str, Program]:
    """Programs of several recipes, small enough to be run thousands of times."""
    plain = cached_llama()
    made = {
        "plain": plain,
        "suffix": drafting_llama(named("draft_suffix", tokens=4, shortest=1)),
        "medusa": drafting_llama(DraftMedusa(heads=2)),
        "hydra": drafting_llama(DraftHydra(heads=2)),
        "eagle": drafting_llama(DraftEagle(levels=2)),
        "int8": in_int8().run(plain).program,
        "int4": QuantizeWeights(group=16, embedding=8).run(plain).program,
    }
    assets = {"tokenizer.json": demo_folder() / "tokenizer.json"}
    return {name: program.replace(assets=assets) for name, program in made.items()}


# -- what became of it


def verdict(folder: Path, state: str, backend: str, expected: list[int]) -> str:
    """ "refused", "accepted", or what is wrong."""
    try:
        program = artifact.load(folder).program
        if state == "damaged":
            return "fault: damage was accepted"
        executable = compile(program, Target.parse(backend))
        generated = generate(executable, PROMPT, max_new_tokens=NEW, eos_token_id=[])
    except GraftworkError as error:
        return "refused" if len(str(error)) < 20_000 else "fault: an endless message"
    found = generated[0].tolist()
    if state == "same":
        return "accepted" if found == expected else f"fault: other tokens {found}"
    if not all(0 <= token < program.info.vocab_size for token in found):
        return f"fault: tokens outside the vocabulary {found}"
    return differing(program, executable) or "accepted"


def differing(program: Program, executable: Executable) -> str | None:
    """A function that computes something else than the interpreter makes of its text."""
    for function in program.functions:
        inputs = feeds(program, function)
        if inputs is None:
            continue
        given = {k: v for k, v in inputs.items() if k not in program.states}
        try:
            meant = run(program, function, inputs)
            nudged = run(nearly(program), function, inputs)
        except Exception:  # the meaning refuses what generate did not ask for
            continue
        fetch = tuple(name for name in meant if name not in program.states)
        try:
            executable.begin(1, 16)
            got = executable.run(function, given, fetch)
        except GraftworkError as error:
            return f"fault: {function} has a meaning and is refused: {str(error)[:200]}"
        for name in fetch:
            if not agrees(got[name], meant[name], nudged[name]):
                return f"fault: {function} returns another {name} than its text says"
    return None


def feeds(program: Program, function: str) -> dict[str, torch.Tensor] | None:
    """Inputs of a first step of three tokens; None for a function that wants others."""
    sizes = {"B": 1, "T": 3, "S": 3, "C": 16, "M": 3}
    generator, made = torch.Generator().manual_seed(0), {}
    for node in program.function(function).inputs:
        kind, key = node.meta["type"], str(node.target)
        if any(isinstance(d, Sym) and not d.symbols <= set(sizes) for d in kind.dims):
            return None
        shape = kind.bind(sizes).shape
        if key in ("positions", "select"):
            made[key] = torch.arange(3)[None]
        elif key == "ancestors":
            made[key] = torch.ones(shape, dtype=torch.bool).tril()
        elif kind.dtype.is_floating_point and key not in program.states:
            made[key] = torch.randn(shape, generator=generator).to(kind.dtype)
        elif key == "tokens":
            made[key] = torch.randint(program.info.vocab_size, shape, generator=generator)
        else:
            made[key] = torch.zeros(shape, dtype=kind.dtype)
    return made


def nearly(program: Program) -> Program:
    """The program with weights that float error could have made."""
    weights = []
    for weight in program.weights.values():
        if weight.type.dtype.is_floating_point:
            weights.append(Weight.of(weight.name, weight.load() * (1 + 2e-7)))
    return program.replace(weights=program.weights.replacing(*weights))


def agrees(got: torch.Tensor, meant: torch.Tensor, nudged: torch.Tensor) -> bool:
    """Whether a result is the meaning's, as far as float error lets it be told."""
    if got.shape != meant.shape or got.dtype != meant.dtype:
        return False
    if not meant.dtype.is_floating_point:
        return True  # ids that follow from what is compared
    got, meant, nudged = got.double(), meant.double(), nudged.double()
    if not (meant.isfinite().all() and nudged.isfinite().all()):
        return True
    scale = max(float(meant.abs().max()), 1e-30) if meant.numel() else 1.0
    if float((meant - nudged).abs().max()) > 1e-5 * scale if meant.numel() else False:
        return True  # chaotic: what float error does to it cannot be told from a mistake
    return bool(((got - meant).abs() <= 1e-3 * scale).all())


# -- processes


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


def work(folder: Path, seed: int, first: int, last: int) -> None:
    """Make and try mutations; a line before each and a line after it."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    bases, jail = sorted((folder / "bases").iterdir()), Path(os.getcwd())
    expected = {}
    for base in bases:  # before anything is watched: caches fill, libraries load
        model = compile(artifact.load(base).program, Target.parse("eager"))
        expected[base.name] = generate(model, PROMPT, max_new_tokens=NEW, eos_token_id=[])
        generate(compile(artifact.load(base).program, Target()), PROMPT, max_new_tokens=2)
    watch(jail)
    for index in range(first, last):
        rng = random.Random(seed * 1_000_003 + index)
        base, backend = rng.choice(bases), rng.choice(BACKENDS)
        target = jail / "deep" / "er" / "artifact"
        shutil.rmtree(jail / "deep", ignore_errors=True)
        shutil.copytree(base, target)
        done, state = mutate(rng, target)
        print(f"call {index} {base.name} on {backend}: {done}", flush=True)
        outside = entries(jail, target)
        try:
            said = verdict(target, state, backend, expected[base.name][0].tolist())
        except BaseException as error:  # what nobody was to raise
            said = f"fault: {type(error).__name__}: {str(error)[:300]!r}"
        if strange := entries(jail, target) - outside:
            said = f"fault: wrote {sorted(strange)[:3]}"
        print(f"done {said}", flush=True)


def entries(jail: Path, artifact_folder: Path) -> set[str]:
    """Everything in the process's folder but the artifact itself and temporary files."""
    found = {str(path.relative_to(jail)) for path in jail.rglob("*")}
    return {p for p in found if not p.startswith(("tmp", str(artifact_folder.relative_to(jail))))}


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
    folder: Path, seed: int, first: int, last: int, script: str = __file__, *more: str
) -> list[tuple[str, str]]:
    """(mutation, verdict) of every mutation; a process that dies is a verdict. script: what makes
    them; more: what it is told besides."""
    results: list[tuple[str, str]] = []
    while first < last:
        jail = Path(tempfile.mkdtemp(dir=folder))
        (jail / "tmp").mkdir()
        command = [sys.executable, script, "--seed", str(seed), "--bases", str(folder), *more]
        command += ["--work", str(first), str(last)]
        environment = {**os.environ, "TMPDIR": str(jail / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
        with (jail / "errors").open("wb") as errors:
            process = subprocess.Popen(
                command, cwd=jail, env=environment, stdout=subprocess.PIPE, stderr=errors
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


def summary(seed: int, mutations: int, processes: int = 2) -> tuple[Counter[str], list[str]]:
    """How many mutations ended how, and the faulty ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, program in programs().items():
            artifact.save(program, folder / "bases" / kind, target=Target(), recipe={"name": kind})
        everything = spread(folder, seed, mutations, processes)
    return counted(everything)


def spread(
    folder: Path, seed: int, mutations: int, processes: int, script: str = __file__
) -> list[tuple[str, str]]:
    """See `tried`; in several processes at a time."""
    size = min(500, -(-mutations // processes))
    pieces = [(at, min(at + size, mutations)) for at in range(0, mutations, size)]
    with ThreadPoolExecutor(processes) as pool:
        results = pool.map(lambda piece: tried(folder, seed, *piece, script), pieces)
        return [result for part in results for result in part]


def counted(everything: list[tuple[str, str]]) -> tuple[Counter[str], list[str]]:
    """How many mutations ended how, and the faulty ones."""
    counts: Counter[str] = Counter(mutations=len(everything))
    faults = []
    for call, said in everything:
        counts[said if said in ("refused", "accepted") else "faults"] += 1
        if said not in ("refused", "accepted"):
            faults.append(f"{call}: {said}")
    return counts, faults


def main() -> int:
    """The command line; 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bases", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.bases, given.seed, *given.work)
        return 0
    counts, faults = summary(given.seed, given.mutations, given.processes)
    for fault in faults[:40]:
        print(fault)
    print(
        f"{counts['mutations']} mutated artifacts: {counts['refused']} refused, "
        f"{counts['accepted']} accepted and as their text says, {counts['faults']} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
