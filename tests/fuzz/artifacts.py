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
import hashlib
import json
import os
import random
import re
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tiny import cached_llama, drafting_llama

from graftwork import artifact
from graftwork.artifact import MANIFEST, PROGRAM
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.demo import demo_folder
from graftwork.ir import GraftworkError, Program, Sym, Weight, run
from graftwork.ir.executable import Executable
from graftwork.passes.draft_eagle import DraftEagle
from graftwork.passes.draft_hydra import DraftHydra
from graftwork.passes.draft_medusa import DraftMedusa
from graftwork.passes.draft_suffix import DraftSuffix
from graftwork.passes.quantize_int8 import QuantizeInt8
from graftwork.runtime.generate import generate

WEIGHTS = "weights.safetensors"
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
NEW = 6
SECONDS = 60
"""How long a mutation may take, on a machine that does other things too."""

MEMORY = 12 * 2**30
"""Bytes of addresses that a process may have."""

BACKENDS = ("eager", "eager", "eager", "onnxruntime")
NUMBERS = (
    "0",
    "1",
    "2",
    "-1",
    "3",
    "7",
    "31",
    "33",
    "4096",
    "9" * 11,
    "2**63",
    "0.5",
    "1e308",
)
NAMES = ('"../../x"', "None", '"a b"', "self", "logits", "step", '"\\ud800"', "tokens", "kv.0.key")
OPS = (
    "aten.mul.Tensor",
    "aten.sub.Tensor",
    "aten.linear",
    "aten.silu",
    "aten.embedding",
    "aten.transpose.int",
    "aten.view",
    "aten.cumsum",
    "aten.argmax",
    "aten.empty.memory_format",
    "aten.native_dropout",
    "aten.max_pool2d_with_indices_backward",
    "graftwork.rms_norm",
    "graftwork.attend",
    "graftwork.glu",
)
JUNK = (None, -1, 0, 2**70, "", "x" * 1000, [], {}, True, 1e400, "../x", "\ud800")


def programs() -> dict[str, Program]:
    """Programs of several recipes, small enough to be run thousands of times."""
    plain = cached_llama()
    made = {
        "plain": plain,
        "suffix": drafting_llama(DraftSuffix(tokens=4, shortest=1)),
        "medusa": drafting_llama(DraftMedusa(heads=2)),
        "hydra": drafting_llama(DraftHydra(heads=2)),
        "eagle": drafting_llama(DraftEagle(levels=2)),
        "int8": QuantizeInt8().run(plain).program,
    }
    assets = {"tokenizer.json": demo_folder() / "tokenizer.json"}
    return {name: program.replace(assets=assets) for name, program in made.items()}


# -- mutations: a folder is changed in place; the text says what was done


def in_text(rng: random.Random, folder: Path) -> str:
    """One to three edits of the program's text."""
    path = folder / PROGRAM
    text = path.read_text()
    edits = [rng.choice(EDITS) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    for edit in edits:
        text = edit(rng, text)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return "+".join(edit.__name__ for edit in edits)


def token(rng: random.Random, text: str, pattern: str, others: Callable[[str], Any]) -> str:
    """One match of a pattern exchanged for another text."""
    found = list(re.finditer(pattern, text))
    if not found:
        return text
    match = rng.choice(found)
    new = others(match.group())
    return text[: match.start()] + str(new) + text[match.end() :]


def number(rng: random.Random, text: str) -> str:
    """A number becomes another one."""
    close = rng.random() < 0.4

    def other(old: str) -> str:
        return str(int(old) + rng.choice((-1, 1, 2))) if close else rng.choice(NUMBERS)

    return token(rng, text, r"(?<![\w.])\d+(?![\w.])", other)


def swapped(pattern: str, name: str) -> Callable[[random.Random, str], str]:
    """One match becomes another match."""

    def edit(rng: random.Random, text: str) -> str:
        known = re.findall(pattern, text)
        return token(rng, text, pattern, lambda old: rng.choice(known)) if known else text

    edit.__name__ = name
    return edit


def op(rng: random.Random, text: str) -> str:
    """An op becomes another one."""
    return token(rng, text, r"(?:aten|graftwork)\.[\w.]+", lambda old: rng.choice(OPS))


def name(rng: random.Random, text: str) -> str:
    """A word becomes a strange name."""
    return token(rng, text, r"\b[a-z][\w.]*\b", lambda old: rng.choice(NAMES))


def plan(rng: random.Random, text: str) -> str:
    """A number of the plan or of the facts."""
    begin = text.rfind("decode {") if rng.random() < 0.7 else text.find("info(")
    end = text.find("}", begin) if begin == text.rfind("decode {") else text.find("\n", begin)
    return text[:begin] + number(rng, text[begin:end]) + text[end:]


def line(rng: random.Random, text: str) -> str:
    """A line dropped, doubled or moved."""
    lines = text.split("\n")
    place, where = rng.randrange(len(lines)), rng.randrange(len(lines))
    moved = lines.pop(place)
    if kind := rng.randrange(3):
        lines.insert(where if kind == 1 else place, moved)
        if kind == 2:
            lines.insert(place, moved)
    return "\n".join(lines)


def character(rng: random.Random, text: str) -> str:
    """A character dropped, put in or exchanged."""
    place, new = rng.randrange(len(text)), rng.choice('()[]{}",=%@.-#\n\0 aé0\u202e')
    kept = rng.randrange(2)
    return text[:place] + rng.choice((new, "")) + text[place + kept :]


EDITS: tuple[Callable[[random.Random, str], str], ...] = (
    number,
    plan,
    swapped(r"%[\w.]+", "value"),
    swapped(r"@[\w.]+", "weight"),
    swapped(r"\b(?:f32|f16|i64|i32|i8|bool|bf16)\b", "dtype"),
    swapped(r"\[[\w,]*\]", "sizes"),
    swapped(r"\b[a-z_]+=", "keyword"),
    op,
    name,
    line,
    character,
)


def in_weights(rng: random.Random, folder: Path) -> str:
    """Bytes of the weights, or what their header says."""
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    kind = rng.choice(("bytes", "values", "header", "length", "cut"))
    if kind == "bytes":
        for _ in range(rng.choice((1, 8, 64))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "values":
        place = 8 + size + 4 * rng.randrange((len(data) - 8 - size) // 4)
        data[place : place + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4))
    elif kind == "header":
        text = rng.choice(EDITS)(rng, data[8 : 8 + size].decode())
        header = text.encode("utf-8", "surrogatepass")
        data[: 8 + size] = len(header).to_bytes(8, "little") + header
    elif kind == "length":
        data[:8] = rng.choice((0, size - 1, size + 8, 2**40, 2**64 - 1)).to_bytes(8, "little")
    else:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(data)
    return f"weights {kind}"


def in_manifest(rng: random.Random, folder: Path) -> str:
    """A field of the manifest, or its bytes."""
    path = folder / MANIFEST
    if rng.random() < 0.3:
        text = character(rng, path.read_text())
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return "manifest bytes"
    manifest = json.loads(path.read_text())
    at: Any = manifest
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not at[key] or not isinstance(at[key], (dict, list)) or rng.random() < 0.3:
            break
        at = at[key]
    if rng.random() < 0.3:
        del at[key]
    else:
        at[key] = rng.choice(JUNK)
    path.write_text(json.dumps(manifest))
    return f"manifest {key}"


def reseal(folder: Path) -> None:
    """Sizes and hashes of the manifest put right."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for file, entry in manifest["files"].items():
        data = (folder / file).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


# -- what became of it


def mutate(rng: random.Random, folder: Path) -> tuple[str, str]:
    """(what was done, what must hold: "sealed", "damaged" or "same")."""
    kind = rng.choice(("text",) * 7 + ("weights",) * 2 + ("manifest",))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    makers = {"text": in_text, "weights": in_weights, "manifest": in_manifest}
    done = makers[kind](rng, folder)
    changed = any(before[path.name] != path.read_bytes() for path in folder.iterdir())
    if kind == "manifest" or not changed:
        return done, "same"
    if rng.random() < 0.15:
        return f"{done}, unsealed", "damaged"
    reseal(folder)
    return done, "sealed"


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
    compile(artifact.load(bases[0]).program, Target()).begin(1, 4)
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


def tried(folder: Path, seed: int, first: int, last: int) -> list[tuple[str, str]]:
    """(mutation, verdict) of every mutation; a process that dies is a verdict."""
    results: list[tuple[str, str]] = []
    while first < last:
        jail = Path(tempfile.mkdtemp(dir=folder))
        (jail / "tmp").mkdir()
        command = [sys.executable, __file__, "--seed", str(seed), "--bases", str(folder)]
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
        size = min(500, -(-mutations // processes))
        pieces = [(at, min(at + size, mutations)) for at in range(0, mutations, size)]
        with ThreadPoolExecutor(processes) as pool:
            results = pool.map(lambda piece: tried(folder, seed, *piece), pieces)
            everything = [result for part in results for result in part]
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
