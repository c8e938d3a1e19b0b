"""Keeping the files that a model ran with; see `start` for what is made of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from ..backends.onnxruntime.executable import OnnxExecutable, Written
from ..backends.onnxruntime.own_ops import declarations
from ..exporting.folder import write_json
from ..exporting.plan import PLAN, WEIGHTS, described, function_entry, plan_of, seal, tables_of
from ..ir import GraftworkError, Program
from ..ir.support.files import LARGE, read_bytes
from ..model import Model
from ..recipe import Recipe
from ..tracing.kept_programs import brings
from . import entries
from .start import TOKENIZER, runner_module

SETTINGS = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "max_new_tokens"),
        *("temperature", "top_k", "top_p", "suppress_tokens", "begin_suppress_tokens"),
        *("forced_bos_token_id", "forced_eos_token_id"),
    }
)
"""Generation settings that the runner follows, or that concern sampling alone."""

PIECE = 512
"""Tokens of a prompt that are fed at once."""


def keep(key: str, model: Model, recipe: Recipe | None) -> None:
    """Keep what a model ran with under a key, if the plan runner can run it. recipe: what a
    checkpoint was optimized by; None: the model is an artifact, which holds all that its recipe
    read. A full disk, or a folder that cannot be written, keeps nothing."""
    made = model.compiled
    if recipe is not None and brings(recipe):
        return
    if not isinstance(made, OnnxExecutable) or not _fits(made, model):
        return
    written, program = made.written(), made.program
    functions = {name: _entry(written, program, name) for name in _called(program)}
    if not all(functions.values()):
        return
    plan = plan_of(program, functions, tables_of(program, written.weights))
    step = plan.step.model_copy(update={"chunk": min(plan.step.chunk, PIECE)})
    about = {"ops": declarations(), "loss": getattr(program.plan.length, "loss", None)}
    files = [*written.weights.path.parent.glob("*.onnx"), written.weights.path]

    def fill(new: Path) -> None:
        (new / TOKENIZER).write_bytes(read_bytes(program.assets[TOKENIZER], LARGE))
        for path in files:
            _link(path, new / (WEIGHTS if path == written.weights.path else path.name))
        write_json(new / PLAN, plan.model_copy(update={"step": step}).model_dump(mode="json"))
        seal(new / PLAN)
        runner_module("plan_functions").read_plan(new / PLAN)

    size = sum(path.stat().st_size for path in files)
    with contextlib.suppress(OSError, GraftworkError, SystemExit), entries.entry(key) as folder:
        entries.write(folder, size, fill, about)


def _fits(made: OnnxExecutable, model: Model) -> bool:
    """Whether the runner would do what the decode loop does, as fast."""
    program, target = made.program, made.target
    plain = target.device == "cpu" and target.threads is None and target.columns is None
    # Of drafts that may be given up the runner has chains that lie ready.
    known_lengths = {"fixed", "goodput"} if program.plan.draft.kind == "suffix" else {"fixed"}
    fixed = not program.plan.speculates or program.plan.length.kind in known_lengths
    defaults = program.info.defaults
    known = SETTINGS.issuperset(defaults.supported) and not defaults.unsupported
    alone = program.plan.source.encoder is None and program.plan.source.kind == "none"
    return plain and fixed and known and alone and TOKENIZER in program.assets


def _called(program: Program) -> list[str]:
    """The functions that the runner calls."""
    plan = program.plan
    whole = [plan.step.fed(argmax=True)[0], plan.step.read(argmax=True)[0]]
    parts = [*plan.step.parts] or whole
    drafts = getattr(plan.draft, "function", None)
    return list(dict.fromkeys([*parts, *([drafts] if drafts else [])]))


def _entry(written: Written, program: Program, name: str) -> dict[str, Any] | None:
    """A function's entry in plan.json; None if it was not called, or not as the runner would."""
    router, sessions = written.routers[name], written.sessions[name]
    variant = next(iter(sessions), None) if len(sessions) == 1 else None
    if variant != ("own" if router.cached else "chain"):
        return None
    path, step = sessions[variant]
    taken = [value.name for value in step.session.get_inputs()]
    # One variant takes every step: it stands for all of them.
    variants = {"chain": described(path.name, step.function, taken)}
    return function_entry(program.function(name), router, variants)


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path, place)
    except OSError:  # another disk, or a system without links
        shutil.copyfile(path, place)
