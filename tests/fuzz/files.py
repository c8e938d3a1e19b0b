"""Mutated files of other kinds: prefixes, heads, recipes, plans, prompts, token ids, training
states, manifests.

    python tests/fuzz/files.py --mutations 1000 --seed 0 [--only prefix ...]

What is changed must be refused with graftwork's own error, or mean what it says: a prefix, a plan,
a manifest or a state of training says what it said or is refused, heads change no token, and what a
recipe, prompts or ids are made of is theirs. Runners of plans may end with a line of their own.
Processes, watching and counting are those of `mutants.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mutants
import numpy as np
import torch
from mutants import SECONDS, counted, tried
from mutations import JUNK, character, in_manifest, token
from safetensors.torch import save_file
from tiny import drafting_llama, named, tiny_llama

from graftwork.artifact import saved as artifact
from graftwork.backends.target import Target
from graftwork.data.corpus import read_corpus
from graftwork.data.prompts import read_prompts
from graftwork.exporting.plan import export_onnx_plan, seal
from graftwork.ir import GraftworkError, Program, program_text
from graftwork.model import Model
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.trained import trained_on
from graftwork.passes.engine.corpus_files import read_tokens
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe
from graftwork.training import checkpoint

TEXT = torch.randint(1, 12, (1, 24), generator=torch.Generator().manual_seed(0))
EAGER = Target("eager", threads=1)
NEW = 6


@cache
def plain() -> Program:
    """What files are read for."""
    return drafting_llama(named("draft_suffix", tokens=4, shortest=1))


def texts_of(model: Model) -> list[int]:
    """What it makes of a text."""
    ids: list[int] = model.generate(TEXT, max_new_tokens=NEW, eos_token_id=[])[0].tolist()
    return ids


# -- ways to damage a file


def in_bytes(rng: random.Random, path: Path) -> str:
    """A bit, some bytes, or all behind a place; a header that says another length."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(("bit", "bit", "bytes", "cut", "length", "more"))
    if kind == "bit":
        near = min(len(data), 512)  # the header is short, and most of what can go wrong is there
        data[rng.randrange(rng.choice((near, len(data))))] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        for _ in range(rng.choice((2, 16))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "length":
        data[:8] = rng.choice((0, 7, 2**40, 2**64 - 1)).to_bytes(8, "little")
    else:
        data += rng.randbytes(rng.choice((1, 100)))
    path.write_bytes(data)
    return kind


def in_json(rng: random.Random, path: Path, where: Callable[[Any], Any] = lambda said: said) -> str:
    """A value of a JSON file becomes another one or goes, or a character of it does."""
    text = path.read_text()
    if rng.random() < 0.2:
        path.write_bytes(character(rng, text).encode("utf-8", "surrogatepass"))
        return "character"
    if rng.random() < 0.05:
        path.write_text("[" * 100_000)
        return "depth"
    said = json.loads(text)
    at = where(said)
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not at[key] or not isinstance(at[key], (dict, list)) or rng.random() < 0.2:
            break
        at = at[key]
    if rng.random() < 0.2:
        del at[key]
    elif isinstance(at[key], int) and rng.random() < 0.5:
        at[key] += rng.choice((-1, 1, 7, 2**40))
    else:
        at[key] = rng.choice(JUNK)
    path.write_text(json.dumps(said, indent=2))
    return str(key)[:40]


TAGS = ("int", "float", "bool", "null", "timestamp", "binary", "set", "omap", "map", "python/name")
VALUES = ("9" * 5000, "0x" + "f" * 5000, "9" * 300, "-1", "1e999", ".nan", "~", "[]", "{}", "''")
VALUES += ("1:60:60", "<<: {a: 1}", "&a x", "*a", "? x", "\0", "[" * 300, "true", "'\ud800'")


def in_yaml(rng: random.Random, path: Path) -> str:
    """A word becomes a strange value, or gets a tag; or a character changes."""
    text, tag = path.read_text(), f"!!{rng.choice(TAGS)} "
    kind = rng.choice(("tag", "value", "both", "character"))
    if kind == "character":
        text = character(rng, text)
    else:
        makers = {"tag": lambda old: tag + old, "value": lambda old: rng.choice(VALUES)}
        makers["both"] = lambda old: tag + rng.choice(VALUES)
        text = token(rng, text, r"[\w.]+", makers[kind])
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return kind


# -- surfaces


@dataclass(frozen=True)
class Surface:
    """A kind of file. make: writes what is damaged. damage: does it, and says what. said: what is
    read of it; may raise. same: whether that must be what it was, where it is not refused."""

    make: Callable[[Path], object]
    damage: Callable[[random.Random, Path], str]
    said: Callable[[Path], Any]
    same: bool = True
    watched: bool = True


@cache
def holder() -> Model:
    return Model(plain(), EAGER, {"name": "fuzz"})


def prefix_said(folder: Path) -> Any:
    """The text, and what goes on from it."""
    model = holder()
    model.forget()
    text = model.load_prefix(folder / "a.prefix")
    more = torch.cat([text, torch.tensor([[3, 4]])], 1)
    return text.tolist(), model.generate(more, max_new_tokens=NEW, eos_token_id=[]).tolist()


def make_heads(folder: Path) -> None:
    program = DraftMedusa(heads=2).run(tiny_llama()).program
    tensors = {n: w.load() for n, w in program.weights.items() if n.startswith("medusa")}
    mark = {"format": "graftwork-heads-1", "target": trained_on(program)}
    save_file(tensors, folder / "heads.safetensors", metadata=mark)


def heads_said(folder: Path) -> Any:
    return texts_of(Model(drafting_llama(DraftMedusa(heads=2, weights=str(folder))), EAGER, {}))


RECIPES = ("copyspec", "medusa", "int4", "snapkv", "skipdecode", "eagle2", "kv_int8", "calm")


def recipe_damage(rng: random.Random, folder: Path) -> str:
    """One of several recipes, which then lies there alone."""
    name = rng.choice(RECIPES)
    for other in folder.iterdir():
        if other.stem != name:
            other.unlink()
    return f"{name} {in_yaml(rng, folder / f'{name}.yaml')}"


def recipe_said(folder: Path) -> Any:
    (path,) = folder.iterdir()
    program, _ = run_passes(tiny_llama(), Recipe.load(path).steps)
    return program.name


def plan_damage(rng: random.Random, folder: Path) -> str:
    """Of its plan; every third then carries the hash that belongs to it."""
    path = folder / "plan.json"
    done = in_json(rng, path)
    if rng.random() < 0.35:
        with contextlib.suppress(Exception):  # one that no hash can be put into stays as it is
            seal(path)
            (folder / "sealed").touch()
    return done


def plan_said(folder: Path) -> Any:
    """What run.py prints, run as its users do."""
    before, out = (sys.argv, sys.path[:]), io.StringIO()
    sys.argv = ["run.py", str(folder), "1,2,3,1,2", str(NEW)]
    sys.modules.pop("plan_functions", None)
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(folder / "run.py"), run_name="__main__")
    except SystemExit as ended:
        raise _refused(str(ended.code)) from ended
    finally:
        sys.argv, sys.path[:] = before
    return None if (folder / "sealed").exists() else out.getvalue()


def node_said(folder: Path) -> Any:
    command = ["node", str(folder / "run.js"), str(folder), "1,2,3,1,2", str(NEW)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if ran.returncode == 1 and len(ran.stderr.strip().splitlines()) == 1:
        raise _refused(ran.stderr)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-300:])
    return None if (folder / "sealed").exists() else ran.stdout


def _refused(message: str) -> GraftworkError:
    if message.count("\n") > 1 or "Traceback" in message:
        raise RuntimeError(message[-300:])
    return GraftworkError(message)


def make_prompts(folder: Path) -> None:
    lines = [{"ids": [1, 2, 3]}, {"ids": [4, 5]}, {"text": "ab", "ids": [7]}]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "a.json").write_text(json.dumps([[1, 2, 3], [4, 5]]))


def prompts_damage(rng: random.Random, folder: Path) -> str:
    """A line of the prompts, or the token ids of a corpus."""
    (folder / "line").write_text(json.dumps({"ids": [1, 2, [3], 4.5]}))
    path = folder / rng.choice(("a.json", "line"))
    done = in_json(rng, path) if rng.random() < 0.8 else in_bytes(rng, path)
    if path.name == "line":
        with (folder / "a.jsonl").open("ab") as file:
            file.write(b"\n" + path.read_bytes().replace(b"\n", b" "))
    return done


def prompts_said(folder: Path) -> Any:
    read_prompts(folder / "a.jsonl", plain())
    return read_tokens("fuzz", folder / "a.json", plain().info.vocab_size)


def make_state(folder: Path) -> None:
    progress = checkpoint.Progress(3, 1.5, [2.0, 1.0], [0.5], {"steps": 3, "own": 0.5}, "mark")
    checkpoint.write(folder, progress, {"w": torch.ones(3)}, {"w/step": torch.ones(1)})


SURFACES = {
    "prefix": Surface(
        lambda folder: holder().save_prefix(TEXT, folder / "a.prefix"),
        lambda rng, folder: in_bytes(rng, folder / "a.prefix"),
        prefix_said,
    ),
    "heads": Surface(
        make_heads, lambda rng, folder: in_bytes(rng, folder / "heads.safetensors"), heads_said
    ),
    "recipe": Surface(
        lambda folder: [
            shutil.copy(Path(__file__).parents[2] / "recipes" / f"{name}.yaml", folder)
            for name in RECIPES
        ],
        recipe_damage,
        recipe_said,
        same=False,
    ),
    "plan": Surface(lambda folder: export_onnx_plan(plain(), folder), plan_damage, plan_said),
    "node": Surface(
        lambda folder: export_onnx_plan(plain(), folder), plan_damage, node_said, watched=False
    ),
    "prompts": Surface(make_prompts, prompts_damage, prompts_said, same=False),
    "npy": Surface(
        lambda folder: np.save(folder / "a.npy", np.arange(20).reshape(2, 10)),
        lambda rng, folder: in_bytes(rng, folder / "a.npy"),
        lambda folder: read_corpus(folder / "a.npy", plain()),
        same=False,
    ),
    "state": Surface(
        make_state,
        lambda rng, folder: in_json(rng, folder / checkpoint.STATE),
        lambda folder: checkpoint.read(folder)[0],
    ),
    "manifest": Surface(
        lambda folder: artifact.save(plain(), folder, target=Target(), recipe={"name": "fuzz"}),
        in_manifest,
        lambda folder: program_text(artifact.load(folder).program),
    ),
}


def verdict(surface: Surface, folder: Path, expected: Any) -> str:
    """ "refused", "accepted", or what is wrong."""
    try:
        found = surface.said(folder)
    except GraftworkError as error:
        return "refused" if len(str(error)) < 20_000 else "fault: an endless message"
    if surface.same and found is not None and found != expected:
        return f"fault: it says something else: {str(found)[:200]}"
    return "accepted"


def work(bases: Path, name: str, seed: int, first: int, last: int) -> None:
    """Make and try mutants of a surface."""
    mutants.confined(0 if name == "node" else mutants.MEMORY)
    surface, base = SURFACES[name], bases / "bases" / name
    expected = None if name == "recipe" else surface.said(base)  # and caches fill, libraries load

    def make(rng: random.Random, index: int, target: Path) -> tuple[str, Callable[[], str]]:
        shutil.copytree(base, target)
        return f"{name}: {surface.damage(rng, target)!r}", lambda: verdict(
            surface, target, expected
        )

    mutants.work(make, seed, first, last, surface.watched)


def has_node() -> bool:
    """Whether node finds onnxruntime-node."""
    command = ["node", "-e", "require('onnxruntime-node')"]
    return (
        shutil.which("node") is not None
        and not subprocess.run(command, capture_output=True).returncode
    )


def summary(
    seed: int, mutations: int, processes: int = 2, only: list[str] | None = None
) -> tuple[Counter[str], list[str]]:
    """How many mutations ended how, by surface, and the faulty ones."""
    names = only or [name for name in SURFACES if name != "node" or has_node()]
    each = -(-mutations // len(names))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in names:
            base = folder / "bases" / name
            if name not in ("plan", "node", "manifest"):
                base.mkdir(parents=True)
            SURFACES[name].make(base)
        with ThreadPoolExecutor(processes) as pool:
            results = pool.map(
                lambda name: tried(folder, seed, 0, each, __file__, "--only", name), names
            )
            return counted([result for found in results for result in found])


def main() -> int:
    """The command line; 1 if there was a fault."""
    parser = mutants.arguments(__doc__, 1000)
    parser.add_argument("--only", nargs="+", choices=SURFACES)
    given = parser.parse_args()
    if given.work:
        work(given.bases, given.only[0], given.seed, *given.work)
        return 0
    counts, faults = summary(given.seed, given.mutations, given.processes, given.only)
    print(*faults[:40], sep="\n")
    print(json.dumps(dict(sorted(counts.items()))))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
