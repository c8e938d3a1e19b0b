"""`optimize`: trace a model, run a recipe's passes, and measure what that costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .backends import check_columns, check_kernels
from .backends.target import Target
from .choosing import AUTO, choose, limits
from .data.calibration import (
    bundled_evidence,
    calibrates,
    check_data,
    check_documents,
    evidence_for,
    evidence_of,
)
from .data.corpus import read_corpus
from .data.cost import cost_of, tokens_of, why_not
from .data.draft_cost import draft_cost, why_not_timed
from .data.knob import TOLERANCE, NoValueServes, check_pace, check_tolerance, turned
from .data.prompts import Prompts, check_seed, sample_prompts, validation_batch
from .draft_option import with_draft
from .frontends.generation import Known, nobody
from .hub.download import local
from .ir import GraftworkWarning, InputError, Program
from .ir.plan.contract import changes
from .ir.support.cache_folder import cache_folder
from .ir.support.files import plain_path
from .model import Model, as_target
from .passes.engine.evidence import Evidence, WorkFolder
from .passes.engine.manager import arrange, facts_of, run_passes
from .passes.engine.validate import Validator
from .recipe import Recipe
from .report import Report, pass_lines, weight_bytes
from .runtime.asking.options import check_defaults
from .tracing.draft_models import check_paths, with_draft_models
from .tracing.kept_programs import (
    CHOICES,
    Making,
    choice_key,
    measured_key,
    program_key,
    read_choice,
    read_measured,
    read_program,
    write_choice,
    write_measured,
    write_program,
)
from .tracing.traced import Source, Traced

MEASURED_BEFORE = "That was measured before and is kept; to measure it again, delete {folder}"
"""What a refusal adds that was read from the cache."""


def transform(
    traced: Traced,
    recipe: Recipe,
    target: Target,
    *,
    prompts: torch.Tensor | None = None,
    evidence: Evidence | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Model:
    """Run a recipe's passes over a traced model. prompts: i64[B,T], to check contracts on.
    evidence: calibration text."""
    validator = None if prompts is None else Validator(prompts)
    program = traced.program
    check_defaults(program.info)
    start = with_draft_models(program, recipe, target.dtype, progress, traced.model)
    result, reports = run_passes(
        start, recipe.steps, validator=validator, progress=progress, evidence=evidence
    )
    report = Report(
        source=traced.source,
        model_type=program.info.model_type,
        recipe=recipe.name,
        contract=recipe.contract,
        target=str(target),
        trace_seconds=traced.seconds,
        weight_bytes_before=weight_bytes(program),
        weight_bytes_after=weight_bytes(result),
        passes=pass_lines(reports),
        generates=str(program.info.defaults),
    )
    return _runnable(result, target, recipe, report)


def _runnable(program: Program, target: Target, recipe: Recipe, report: Report) -> Model:
    """A model of a program. Errors: for calls that the target does not support."""
    check_kernels(program, target)
    check_columns(program, target)
    return Model(program, target, recipe.as_dict(), report)


def optimize(
    model: Source,
    recipe: str | Path | Mapping[str, Any] | Recipe = "baseline",
    *,
    target: Target | str | None = None,
    data: Prompts | None = None,
    draft: str | Path | None = None,
    validate: bool = False,
    seed: int = 0,
    work: str | Path | None = None,
    cost: bool | Prompts = False,
    tolerance: float | None = None,
    minutes: float | None = None,
    strict: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
    known: Known = nobody,
    revision: str | None = None,
) -> Model:
    """Trace a model, run a recipe's passes, and return a `Model`, which compiles on first use.

    model: a folder, a .gguf or .onnx file, a model in memory, or an id of the Hub, ``org/name``
    (``org/name@revision``), whose safetensors are fetched if they are not here; revision: a branch,
    tag or commit of it. recipe: a name (`recipes()` lists them), a .yaml path, a dict or a
    `Recipe`. target: ``backend[:device[:dtype]]``; default: torch:cuda:bfloat16 with a GPU, else
    onnxruntime:cpu:float32. data: prompts for validation (texts, lists of token ids, or a .txt or
    .jsonl path), or calibration text (also a folder, see `data.corpus.read_corpus`). draft: a
    smaller model, a folder or .gguf file, for recipes that take one; it drafts for a recipe that
    does not draft itself, as "first:6", the model's own first six layers, see `draft_option`.
    validate: run the program before and after every pass on prompts and check its contract. seed:
    of random prompts, if there is no data. work: folder of intermediate results of calibration,
    from which a killed run continues; delete it afterwards. cost: of an approximate recipe, report
    how far its predictions are from the model's (see `report.Cost`), on a bundled text (True) or on
    texts as in data; this runs the model itself, too. tolerance: of a recipe with a knob (such as
    calm or unified_skipping), by which share perplexity may rise on data or the bundled text;
    default: 0.05. The recipe ``auto`` is what is fastest within that share: weights and drafts are
    measured on data (texts like those to be written, or the bundled one), and none is begun after
    `minutes` (default: 3); see `choosing`. strict: refuse a recipe that decodes more slowly than
    the model, which runs both. known: called with facts and files of a checkpoint before tracing;
    its exceptions are passed on.

    Errors: `GraftworkError` naming the model, recipe, pass or option at fault and a remedy.
    """
    where = as_target(target)
    if recipe == AUTO:
        given = {"validate": validate, "work": work is not None, "strict": strict, "cost": cost}
        given["draft"] = draft is not None
        asked = ", ".join(name for name, value in given.items() if value is not False)
        if asked:
            raise InputError(
                f"recipe {AUTO!r} measures speed and quality itself, and reports both: leave out "
                f"{asked}"
            )
        limits(tolerance, minutes)  # before the slow part
        model = local(model, revision)
        plain = optimize(model, target=where, progress=progress, known=known)
        make = partial(optimize, model, target=where, progress=progress, known=known)
        how: dict[str, Any] = {"tolerance": tolerance, "minutes": minutes, "progress": progress}
        return choose(plain, make, data, **how)
    if minutes is not None:
        raise InputError(f"minutes is given, and only the recipe {AUTO!r} takes it: leave it out")
    chosen = Recipe.load(recipe)
    if draft is not None:
        chosen = with_draft(chosen, draft)
    check_data(chosen, data, validate)
    check_seed(seed)
    check_paths(chosen)
    learns = data is not None and calibrates(chosen, validate)
    if work is not None and not learns:
        raise InputError(
            f"work= is given, but recipe {chosen.name!r} calibrates on no text; leave it out"
        )
    if work is not None:
        WorkFolder(plain_path("work", work))
    if not isinstance(cost, bool):
        check_documents(cost)
    check_tolerance(chosen, tolerance)
    _remark(where)
    model = local(model, revision)
    text = data if learns else None
    prompts = (lambda program: _validation_prompts(program, data, seed)) if validate else None

    def made_by(recipe: Recipe) -> Model:
        return _made(model, recipe, where, text, work, prompts, progress, known)

    if chosen.knob is not None:
        made = _turned(model, chosen, where, text, tolerance, made_by, progress)
    else:
        made = made_by(chosen)
    plan = made.program.plan
    if plan.length.unmeasured and plan.speculates and not plan.untaught:
        key = None if text is not None else measured_key(model, chosen, where)
        made = _weighed(made, key, progress)
    measured = cost is not False and changes(chosen.contract)
    weighed = None if isinstance(cost, bool) else cost
    if measured:
        tokens_of(weighed, made)  # before what takes time
    if measured or strict:
        plain = optimize(model, target=where, progress=progress)
        speed = check_pace(made, plain, strict=strict)
        if measured:
            found = cost_of(made, plain, weighed, progress)
            made.tell(found.model_copy(update={"speed": speed}))
    return made


def _turned(
    model: Source,
    recipe: Recipe,
    target: Target,
    text: Prompts | None,
    tolerance: float | None,
    make: Callable[[Recipe], Model],
    progress: Callable[[str], None],
) -> Model:
    """A model of a recipe whose knob stands where the text allows; see `data.knob.turned`. Where
    there is no text to measure on, it stands as the recipe has it, and the report says so."""
    assert recipe.knob is not None
    # What maps were learned from would speak too well of them.
    judged = None if recipe.reads_text else text
    given = TOLERANCE if tolerance is None else tolerance
    key = None if text is not None else choice_key(model, recipe, target, given)
    kept = None if key is None else read_choice(key)
    if isinstance(kept, str):
        raise NoValueServes(f"{kept}. {MEASURED_BEFORE.format(folder=cache_folder() / CHOICES)}")
    if kept is not None:
        made = make(recipe.turned(kept.value))
        made.tell(kept.cost, kept.note)
        return made
    plain = optimize(model, target=target, progress=progress)
    if judged is None and (reason := why_not(plain)):
        made = make(replace(recipe, knob=None))
        made.tell(note=f"{recipe.knob.option} was not measured: {reason}")
        return made
    try:
        made, choice = turned(recipe, make, plain, judged, given, progress)
    except NoValueServes as refused:
        if key is not None:
            write_choice(key, str(refused))
        raise
    made.tell(choice.cost, choice.note)
    if key is not None:
        write_choice(key, choice)
    return made


def _weighed(made: Model, key: str | None, progress: Callable[[str], None]) -> Model:
    """A model whose length policy knows what drafts cost, which its report says, too; one whose
    drafts cannot be timed here, as it is. key: of the cache."""
    program, name = made.program, f"length={made.program.plan.length.kind}"
    found = None if key is None else read_measured(key)
    if found is None:
        if reason := why_not_timed(program, made.target):
            made.tell(note=f"{name}: what drafts cost was not measured: {reason}")
            return made
        progress("time drafts")
        found = draft_cost(made.executable)
        if found is None:
            made.tell(note=f"{name}: what drafts cost was not measured: too few steps were made")
            return made
        if key is not None:
            write_measured(key, found)
    length = program.plan.length.measured(found)
    made = made.replanned(replace(program.plan, length=length))
    made.tell(
        note=f"length={length.brief}: a step with a draft takes {found:.2f} times one without"
    )
    return made


def _made(
    model: Source,
    chosen: Recipe,
    where: Target,
    text: Prompts | None,
    work: str | Path | None,
    prompts: Callable[[Program], torch.Tensor] | None,
    progress: Callable[[str], None],
    known: Known,
) -> Model:
    """See `optimize`. text: to learn from. prompts: to check contracts on."""
    progress("trace")
    key = None if prompts or text is not None else program_key(model, chosen, where.dtype)
    if key is not None and (kept := read_program(key, model, known)) is not None:
        program, report = kept
        changed = {"source": str(model), "recipe": chosen.name, "target": str(where)}
        return _runnable(program, where, chosen, report.model_copy(update=changed))
    making = Making()
    traced = Traced.of(model, where.dtype, making.watching(known))
    if text is None:
        evidence = bundled_evidence(chosen, traced.program, progress)
    else:
        evidence = evidence_of(read_corpus(text, traced.program), work, progress)
    tried = prompts and prompts(traced.program)
    made = transform(traced, chosen, where, prompts=tried, evidence=evidence, progress=progress)
    if key is not None and made.report is not None:
        write_program(key, model, made.program, made.report, making)
    return made


def trace(
    model: Source,
    recipe: Recipe | None = None,
    *,
    target: Target | str | None = None,
    after: str | None = None,
    data: Prompts | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    watch: Callable[[Program], None] = lambda program: None,
) -> Program:
    """The program of a model as traced, or after a recipe's passes up to `after`. data: as in
    `optimize`. watch: as in `run_passes`. Errors: as `optimize`, and `InputError` if the recipe
    has no pass `after`."""
    progress("trace")
    dtype = as_target(target).dtype
    program = Traced.of(model, dtype).program
    if recipe is None:
        if data is not None:
            raise InputError("data= is given, but no recipe that could calibrate on it")
        return program
    check_paths(recipe)
    program = with_draft_models(program, recipe, dtype, progress, model)
    names = [step.pass_.name for step in arrange(recipe.steps, facts_of(program))]
    if after is not None and after not in names:
        raise InputError(
            f"recipe {recipe.name!r} has no pass {after!r}; in order, it has {', '.join(names)}"
        )
    if data is None:
        evidence = bundled_evidence(recipe, program, progress)
    else:
        evidence = evidence_for([recipe], program, data, progress=progress)
    return run_passes(
        program, recipe.steps, progress=progress, after=after, evidence=evidence, watch=watch
    )[0]


def _remark(target: Target) -> None:
    """Warn if the device is missing; the model may be for another machine."""
    try:
        target.require_device()
    except InputError as error:
        warnings.warn(
            f"{error}; or save the model, to run it where there is one",
            GraftworkWarning,
            stacklevel=3,
        )


def _validation_prompts(program: Program, data: Prompts | None, seed: int) -> torch.Tensor:
    if data is None:
        return sample_prompts(program.info, seed)
    return validation_batch(data, program)


__all__ = ["optimize", "trace", "transform"]
