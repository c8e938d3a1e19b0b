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

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mutants
import torch
from mutants import counted, spread
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
from graftwork.runtime.generation import generate

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
NEW = 6
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


def work(folder: Path, seed: int, first: int, last: int) -> None:
    """Make and try mutants."""
    mutants.confined()
    bases, expected = sorted((folder / "bases").iterdir()), {}
    for base in bases:  # before anything is watched: caches fill, libraries load
        model = compile(artifact.load(base).program, Target.parse("eager"))
        found = generate(model, PROMPT, max_new_tokens=NEW, eos_token_id=[])
        expected[base.name] = found[0].tolist()
        generate(compile(artifact.load(base).program, Target()), PROMPT, max_new_tokens=2)

    def make(rng: random.Random, index: int, target: Path) -> tuple[str, Callable[[], str]]:
        base, backend = rng.choice(bases), rng.choice(BACKENDS)
        shutil.copytree(base, target)
        done, state = mutate(rng, target)
        what = f"{base.name} on {backend}: {done}"
        return what, lambda: verdict(target, state, backend, expected[base.name])

    mutants.work(make, seed, first, last)


def summary(seed: int, mutations: int, processes: int = 2) -> tuple[Counter[str], list[str]]:
    """How many mutations ended how, and the faulty ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, program in programs().items():
            artifact.save(program, folder / "bases" / kind, target=Target(), recipe={"name": kind})
        return counted(spread(folder, seed, mutations, processes, __file__))


def main() -> int:
    """The command line; 1 if there was a fault."""
    given = mutants.arguments(__doc__, 10_000).parse_args()
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
