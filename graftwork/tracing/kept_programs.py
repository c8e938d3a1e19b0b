"""Disk cache of optimized programs: a hit needs no trace, no passes and no transformers.

An entry is text: the program, derivations of weights down to tensors of the checkpoint's files, and
the report. The key covers files, passes with options, dtype and source code. Not cached: recipes
that read texts, other models or heads; programs with a weight without a text form, or for which a
warning was issued; anything after transformers was imported, whose classes may have been patched.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import backends
from ..backends.target import Target
from ..frontends import kept_assets
from ..frontends.generation import Known
from ..ir import (
    GraftworkError,
    GraftworkWarning,
    ModelInfo,
    Program,
    Weight,
    WeightStore,
    parse_program,
    program_text,
)
from ..ir.ops.parallel import started
from ..ir.support.discovery import sources_of, versions_of
from ..ir.support.files import stamp_of
from ..ir.text.kept_files import Kept, kept_file, read_kept, write_kept
from ..ir.text.weights_text import parse_weights, weights_text
from ..recipe import Recipe
from ..report import Choice, Report
from .source_files import files_of

PACKAGES = ("torch", "transformers", "safetensors", "pydantic", "gguf")
CHOICES = "choices"
"""Folder of what knobs were turned to."""
CHOICE, MEASURED = "choice", "measured"
MOST_TENSORS = 2**24
"""Maximum bytes of tensors that are in no file, such as position tables; larger programs are not
cached."""


def program_key(
    model: object, recipe: Recipe, dtype: torch.dtype, *, beside: bool = False
) -> str | None:
    """The cache key of the program of a checkpoint folder or .gguf file; None: not cacheable.
    dtype: of weights. beside: the recipe may read other models, whose files the key covers."""
    passes = [step.pass_ for step in recipe.steps]
    own = all(type(p).__module__.startswith("graftwork.") for p in passes)
    if not isinstance(model, (str, Path)) or not own or brings(recipe, beside) or _is_patched():
        return None
    source = Path(model).absolute()
    guests = [Path(guest).absolute() for p in passes for guest in p.models if guest]
    try:
        files = [
            (str(one), sorted((path.name, stamp_of(path.stat())) for path in files_of(one)))
            for one in (source, *guests)
        ]
    except OSError:
        return None
    if not all(found for _, found in files):
        return None
    used = [
        (p.name, repr(sorted(p.model_dump().items())), step.optional)
        for p, step in zip(passes, recipe.steps, strict=True)
    ]
    rooms = ("ir", "frontends", "passes", "runtime")
    code = [Path(sys.modules[f"graftwork.{room}"].__file__ or "").parent for room in rooms]
    code.append(Path(__file__).parents[1])
    tools = sys.version_info[:3], versions_of(*PACKAGES), started()
    text = Path(__file__).parents[1] / "data" / "sample.txt"
    sample = stamp_of(text.stat()) if recipe.reads_bundled else None
    known = (files, used, str(dtype), sources_of(*code), tools, sample)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def choice_key(model: object, recipe: Recipe, target: Target, tolerance: float) -> str | None:
    """The cache key of what a recipe's knob was turned to; None: not cacheable."""
    knob = recipe.knob
    return None if knob is None else measured_key(model, recipe, target, knob, tolerance)


def measured_key(model: object, recipe: Recipe, target: Target, *about: object) -> str | None:
    """The cache key of what was measured of a recipe's model; None: not cacheable. about: what else
    it depends on."""
    key = program_key(model, recipe, target.dtype, beside=True)
    if key is None:
        return None
    # What time decides on depends on the kernels.
    kernels = sources_of(Path(backends.__file__).parent, suffixes=(".py", ".cpp", ".h"))
    known = (key, *about, str(target), target.threads, kernels)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def read_measured(key: str) -> float | None:
    """A number that was measured; None if it is not cached."""
    with kept_file(CHOICES, key) as path:
        kept = read_kept(path)
    try:
        found = float(kept.texts[MEASURED]) if kept is not None else math.nan
    except (KeyError, ValueError):
        return None
    return found if math.isfinite(found) else None


def write_measured(key: str, value: float) -> None:
    """Cache a number that was measured, if possible."""
    with contextlib.suppress(GraftworkError, OSError), kept_file(CHOICES, key) as path:
        write_kept(path, Kept({MEASURED: repr(value)}, {}))


def read_choice(key: str) -> Choice | str | None:
    """What a knob was turned to, or why no value serves; None if it is not cached."""
    with kept_file(CHOICES, key) as path:
        kept = read_kept(path)
    if kept is None:
        return None
    if "refusal" in kept.texts:
        return kept.texts["refusal"]
    try:
        return Choice.model_validate_json(kept.texts[CHOICE])
    except (KeyError, ValueError):
        return None


def write_choice(key: str, choice: Choice | str) -> None:
    """Cache what a knob was turned to, or why no value serves, if possible."""
    texts = {"refusal": choice} if isinstance(choice, str) else {CHOICE: choice.model_dump_json()}
    with contextlib.suppress(GraftworkError, OSError), kept_file(CHOICES, key) as path:
        write_kept(path, Kept(texts, {}))


def brings(recipe: Recipe, beside: bool = False) -> bool:
    """Whether a recipe reads texts, other models (unless `beside`), heads or files, whose contents
    no key covers."""
    passes = [step.pass_ for step in recipe.steps]
    others = any(p.models for p in passes) and not beside
    return others or any(p.files or p.parts or (p.text and not p.bundled) for p in passes)


def _is_patched() -> bool:
    """Whether transformers is imported, or installed packages add passes or frontends."""
    groups = metadata.entry_points().groups
    return "transformers" in sys.modules or any(g.startswith("graftwork.") for g in groups)


@dataclass
class Making:
    """Observes an optimization. warned: number of warnings before it. info: the argument of the
    callback `known`, if it was called."""

    warned: int = field(default_factory=lambda: GraftworkWarning.count)
    info: ModelInfo | None = None

    def watching(self, known: Known) -> Known:
        """The callback, with its argument recorded."""

        def observed(info: ModelInfo, assets: Mapping[str, Path]) -> None:
            self.info = info
            known(info, assets)

        return observed


def read_program(key: str, source: object, known: Known) -> tuple[Program, Report] | None:
    """The program of a key and its report, with the time of reading as that of tracing; None if it
    is not cached. source: the folder or file. known: as in `optimize`."""
    start = time.perf_counter()
    with kept_file("programs", key) as path:
        kept = read_kept(path)
    if kept is None:
        return None
    try:
        about = json.loads(kept.texts["about"])
        for module in about["modules"]:
            importlib.import_module(f"graftwork.{module}")
        weights = parse_weights(kept.texts["weights"], kept.tensors, _none)
        program = parse_program(kept.texts["program"], WeightStore(weights))
        info = parse_program(kept.texts["told"]).info if "told" in kept.texts else None
        report = Report.model_validate_json(kept.texts["report"])
    except (GraftworkError, ValueError, KeyError, TypeError, ImportError):
        return None
    assets = _assets(Path(str(source)), about["assets"])
    if assets is None:
        return None
    if info is not None:
        known(info, assets)
    seconds = time.perf_counter() - start
    return program.replace(assets=assets), report.model_copy(update={"trace_seconds": seconds})


def write_program(
    key: str, source: object, program: Program, report: Report, making: Making
) -> None:
    """Cache a program if possible."""
    assets = list(program.assets)
    if GraftworkWarning.count > making.warned:
        return
    if _assets(Path(str(source)), assets) != program.assets:
        return
    with contextlib.suppress(GraftworkError, OSError), kept_file("programs", key) as path:
        weights, tensors = weights_text(program.weights, {})
        if sum(tensor.nbytes for tensor in tensors.values()) > MOST_TENSORS:
            return
        about = {"assets": assets, "modules": sorted(set(_modules(program.weights.values())))}
        texts = {
            "about": json.dumps(about),
            "weights": weights,
            "program": program_text(program),
            "report": report.model_dump_json(),
        }
        if making.info is not None:
            texts["told"] = program_text(Program("told", {}, WeightStore(), making.info))
        write_kept(path, Kept(texts, tensors))


def _assets(source: Path, names: list[str]) -> dict[str, Path] | None:
    """The files of these names that belong to a source; None if they are not all there."""
    if source.is_dir():
        return {name: source / name for name in names}
    found = kept_assets(source)
    return None if found is None else {name: found[name] for name in names if name in found}


def _modules(weights: Any) -> Iterator[str]:
    """Modules of this package that define derivations of the weights."""
    for weight in weights:
        root, _, module = weight.made.target.__module__.partition(".")
        if root == "graftwork":
            yield module
        yield from _modules(weight.inputs)


def _none(key: str) -> Weight:
    raise ValueError(f"a cached program has no external weight {key}")
