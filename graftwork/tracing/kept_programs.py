"""Programs after a recipe's passes, kept on disk: what was optimized before is read, without a
trace, without passes, and without importing transformers.

What is kept is text: the program, what its weights are made of down to the tensors of the
checkpoint's files, and the report. A key says all that the program depends on: the files, the
passes with their options, the dtype, and the code at work. There is none for recipes that read
texts, other models or heads, and none where transformers has been imported already: its classes
may have been changed. A program with a weight that no text can say is not kept, and neither is one
that the user is warned of.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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
from ..ir.text.kept_files import Kept, kept_file, read_kept, write_kept
from ..ir.text.weights_text import parse_weights, weights_text
from ..ir.weights import stamp_of
from ..recipe import Recipe
from ..report import Report

PACKAGES = ("torch", "transformers", "safetensors", "pydantic")
MOST_TENSORS = 2**24
"""Bytes of a program's tensors that lie in no file, such as tables of positions: of more, the
program is not kept."""


def program_key(model: object, recipe: Recipe, dtype: torch.dtype) -> str | None:
    """The key of a checkpoint folder's program, None if it has none. dtype: of the weights."""
    passes = [step.pass_ for step in recipe.steps]
    own = all(type(p).__module__.startswith("graftwork.") for p in passes)
    brings = any(p.models or p.files or p.parts or p.text for p in passes)
    if not isinstance(model, (str, Path)) or not Path(model).is_dir() or not own or brings:
        return None
    if _others_have_a_say():
        return None
    folder = Path(model).absolute()
    try:
        files = sorted((path.name, stamp_of(path.stat())) for path in folder.iterdir())
    except OSError:
        return None
    asked = [
        (p.name, repr(sorted(p.model_dump().items())), step.optional)
        for p, step in zip(passes, recipe.steps, strict=True)
    ]
    rooms = ("ir", "frontends", "passes", "runtime")
    code = [Path(sys.modules[f"graftwork.{room}"].__file__ or "").parent for room in rooms]
    code.append(Path(__file__).parents[1])
    tools = sys.version_info[:3], versions_of(*PACKAGES), started()
    known = (str(folder), files, asked, str(dtype), sources_of(*code), tools)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _others_have_a_say() -> bool:
    """Whether transformers may have been changed, or packages bring passes or frontends."""
    groups = metadata.entry_points().groups
    return "transformers" in sys.modules or any(g.startswith("graftwork.") for g in groups)


@dataclass
class Making:
    """What is heard while a program is made. told: of the model, before it was traced."""

    warned: int = field(default_factory=lambda: GraftworkWarning.count)
    told: ModelInfo | None = None

    def telling(self, known: Known) -> Known:
        """The same, heard."""

        def tell(info: ModelInfo, assets: Mapping[str, Path]) -> None:
            self.told = info
            known(info, assets)

        return tell


def read_program(key: str, folder: object, known: Known) -> tuple[Program, Report] | None:
    """The program of a key and its report, whose seconds of tracing are those of reading; None if
    there is none. folder: the checkpoint's. known: as of `optimize`."""
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
        told = parse_program(kept.texts["told"]).info if "told" in kept.texts else None
        report = Report.model_validate_json(kept.texts["report"])
    except (GraftworkError, ValueError, KeyError, TypeError, ImportError):
        return None
    assets = {name: Path(str(folder)) / name for name in about["assets"]}
    if told is not None:
        known(told, assets)
    seconds = time.perf_counter() - start
    return program.replace(assets=assets), report.model_copy(update={"trace_seconds": seconds})


def write_program(
    key: str, folder: object, program: Program, report: Report, making: Making
) -> None:
    """Keep a program, if text can say it."""
    assets = list(program.assets)
    if GraftworkWarning.count > making.warned:
        return
    if [Path(str(folder)) / name for name in assets] != list(program.assets.values()):
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
        if making.told is not None:
            texts["told"] = program_text(Program("told", {}, WeightStore(), making.told))
        write_kept(path, Kept(texts, tensors))


def _modules(weights: Any) -> Iterator[str]:
    """Modules of this package that have the functions which derive weights."""
    for weight in weights:
        root, _, module = weight.made.target.__module__.partition(".")
        if root == "graftwork":
            yield module
        yield from _modules(weight.inputs)


def _none(key: str) -> Weight:
    raise ValueError(f"a kept program has no weight {key} from elsewhere")
