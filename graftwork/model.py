"""The main interface: `optimize` with a recipe, or `load` a saved model; both return a `Model`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .artifact import saved
from .artifact.shards import checked
from .backends import check_columns, check_kernels
from .backends import compile as compile_for
from .backends.target import Target
from .data.calibration import (
    calibrates,
    check_data,
    check_documents,
    evidence_for,
    evidence_of,
)
from .data.corpus import SAMPLE, read_corpus
from .data.cost import cost_of, why_not
from .data.knob import TOLERANCE, check_pace, check_tolerance, turned
from .data.prompts import Prompts, as_ids, check_seed, sample_prompts, validation_batch
from .exporting.exports import Exports
from .frontends.generation import Known, nobody
from .ir import GraftworkError, GraftworkWarning, InputError, Program
from .ir.execution.executable import Executable
from .ir.plan.contract import Contract
from .ir.support.files import plain_path
from .ir.support.threads import traces
from .ir.support.tokenizer import read_tokenizer
from .passes.engine.evidence import Evidence, WorkFolder
from .passes.engine.manager import arrange, facts_of, run_passes
from .passes.engine.validate import Validator
from .recipe import Recipe
from .report import Cost, Report, megabytes, pass_lines, weight_bytes
from .runtime.asking.input_ids import check_ids
from .runtime.asking.options import check_defaults
from .runtime.asking.sources import FEATURES, TOKENS, takes_features
from .runtime.cache.conversations import Conversations
from .runtime.generation import check_request, forget, generate
from .runtime.prefix import load_prefix, save_prefix
from .runtime.scoring import score
from .tracing.draft_models import check_paths, with_draft_models
from .tracing.kept_programs import (
    Making,
    choice_key,
    program_key,
    read_choice,
    read_program,
    write_choice,
    write_program,
)
from .tracing.traced import Source, Traced

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COMPILED = "compiled"


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
    validate: bool = False,
    seed: int = 0,
    work: str | Path | None = None,
    cost: bool | Prompts = False,
    tolerance: float | None = None,
    strict: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
    known: Known = nobody,
) -> Model:
    """Trace a model, run a recipe's passes, and return a `Model`, which compiles on first use.

    recipe: a name (`recipes()` lists them), a .yaml path, a dict or a `Recipe`. target:
    ``backend[:device[:dtype]]``; default: torch:cuda:bfloat16 with a GPU, else
    onnxruntime:cpu:float32. data: prompts for validation (texts, lists of token ids, or a .txt or
    .jsonl path), or calibration text (also a folder, see `data.corpus.read_corpus`). validate: run
    the program before and after every pass on prompts and check its contract. seed: of random
    prompts, if there is no data. work: folder of intermediate results of calibration, from which a
    killed run continues; delete it afterwards. cost: of an approximate recipe, report how far its
    predictions are from the model's (see `report.Cost`), on a bundled text (True) or on texts as in
    data; this runs the model itself, too. tolerance: of a recipe with a knob (such as calm or
    unified_skipping), by which share perplexity may rise on data or the bundled text; default:
    0.05. strict: refuse a recipe that decodes more slowly than the model, which runs both. known:
    called with facts and files of a checkpoint before tracing; its exceptions are passed on.

    Errors: `GraftworkError` naming the model, recipe, pass or option at fault and a remedy.
    """
    chosen, where = Recipe.load(recipe), as_target(target)
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
    text = data if learns else None
    prompts = (lambda program: _validation_prompts(program, data, seed)) if validate else None

    def made_by(recipe: Recipe) -> Model:
        return _made(model, recipe, where, text, work, prompts, progress, known)

    if chosen.knob is not None:
        made = _turned(model, chosen, where, text, tolerance, made_by, progress)
    else:
        made = made_by(chosen)
    measured = cost is not False and chosen.contract == Contract.APPROXIMATE.value
    if measured or strict:
        plain = optimize(model, target=where, progress=progress)
        speed = check_pace(made, plain, strict=strict)
        if measured:
            found = cost_of(made, plain, None if isinstance(cost, bool) else cost, progress)
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
    given = TOLERANCE if tolerance is None else tolerance
    key = None if text is not None else choice_key(model, recipe, target, given)
    if key is not None and (kept := read_choice(key)) is not None:
        made = make(recipe.turned(kept.value))
        made.tell(kept.cost, kept.note)
        return made
    plain = optimize(model, target=target, progress=progress)
    if text is None and (reason := why_not(plain)):
        made = make(replace(recipe, knob=None))
        made.tell(note=f"{recipe.knob.option} was not measured: {reason}")
        return made
    made, choice = turned(recipe, make, plain, text, given, progress)
    made.tell(choice.cost, choice.note)
    if key is not None:
        write_choice(key, choice)
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
    if text is None and chosen.reads_bundled:
        text = SAMPLE
    making = Making()
    traced = Traced.of(model, where.dtype, making.watching(known))
    evidence = None
    if text is not None:
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
) -> Program:
    """The program of a model as traced, or after a recipe's passes up to `after`. data: as in
    `optimize`. Errors: as `optimize`, and `InputError` if the recipe has no pass `after`."""
    progress("trace")
    dtype = as_target(target).dtype
    program = Traced.of(model, dtype).program
    if recipe is None:
        if data is not None:
            raise InputError("data= is given, but no recipe that could calibrate on it")
        return program
    check_paths(recipe)
    program = with_draft_models(program, recipe, dtype, progress, model)
    if data is None and recipe.reads_bundled:
        data = SAMPLE
    names = [step.pass_.name for step in arrange(recipe.steps, facts_of(program))]
    if after is not None and after not in names:
        raise InputError(
            f"recipe {recipe.name!r} has no pass {after!r}; in order, it has {', '.join(names)}"
        )
    evidence = None if data is None else evidence_for([recipe], program, data, progress=progress)
    return run_passes(program, recipe.steps, progress=progress, after=after, evidence=evidence)[0]


def load(
    folder: str | Path, *, target: Target | str | None = None, bits: int | None = None
) -> Model:
    """Load a model that `Model.save` wrote; needs neither transformers nor the original model.

    target: default: the saved one; its dtype cannot change. bits: reduce weights of more bits to 2,
    3, 4 or 6 by a shift (pass `shift_weights`). Errors: `InputError` naming a missing or damaged
    file, or another dtype; `PassError` if no weight has more bits.
    """
    found = saved.load(folder)
    check_defaults(found.program.info)
    made_for = Target.parse(found.manifest.target)
    where = made_for if target is None else as_target(target, made_for.dtype)
    if where.dtype != made_for.dtype:
        raise InputError(
            f"{folder} was made for {made_for}; its dtype cannot become {where}. "
            f"Optimize the model again for that target"
        )
    made = Model(found.program, where, found.manifest.recipe, found.manifest.report)
    return made if bits is None else _shifted(made, bits)


def _shifted(model: Model, bits: int) -> Model:
    """The model with weights shifted to fewer bits."""
    shift = {"pass": "shift_weights", "options": {"bits": bits}}
    (step,) = Recipe.load({"name": "load", "passes": [shift]}).steps
    program, _ = run_passes(model.program, [step])
    recipe = {**model.recipe, "passes": [*model.recipe["passes"], {**shift, "optional": False}]}
    return Model(program, model.target, recipe, model.report)


@dataclass(frozen=True)
class Model(Exports):
    """A transformed model for a target. program: prints as text. recipe: as plain data. report: of
    the passes; None if it was not made by `optimize`."""

    program: Program
    target: Target
    recipe: Mapping[str, Any]
    report: Report | None = None

    def __post_init__(self) -> None:
        if self.report is not None:
            # A weak reference: a cycle would keep the weights until garbage collection.
            object.__setattr__(self, "report", self.report.of(weakref.ref(self)))

    def tell(self, cost: Cost | None = None, note: str = "") -> None:
        """Put into the report what the recipe costs, or a note."""
        if self.report is not None:
            notes = (*self.report.notes, note) if note else self.report.notes
            report = self.report.model_copy(
                update={"cost": cost or self.report.cost, "notes": notes}
            )
            object.__setattr__(self, "report", report.of(weakref.ref(self)))

    @property
    def compiled(self) -> Executable | None:
        """The executable if it is compiled."""
        return self.__dict__.get(_COMPILED)

    @property
    def executable(self) -> Executable:
        """The compiled program; compiled on first use, once for all threads.

        Errors: `InputError` if the device is missing or a weight holds NaN; `UnsupportedError`
        naming an op that the backend cannot lower.
        """
        return self.compiled or self._compile()

    @traces
    def _compile(self) -> Executable:
        if _COMPILED not in self.__dict__:
            self.__dict__[_COMPILED] = compile_for(checked(self.program), self.target)
        made: Executable = self.__dict__[_COMPILED]
        return made

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Errors: `InputError` if tokenizer.json is missing or invalid."""
        path = self.program.assets.get("tokenizer.json")
        if path is None:
            raise InputError(
                f"{self.program.name} came without a tokenizer.json; pass token ids instead of text"
            )
        return read_tokenizer(path)

    def generate(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]] | None = None, /, **options: Any
    ) -> Any:
        """Continue token ids i64[B,S] like transformers' ``generate``; returns i64[B,S+N].

        Options have transformers' names (``max_new_tokens``, ``do_sample``, ``temperature``,
        ``top_k``, ``top_p``, ``eos_token_id``, ``attention_mask``, ``streamer``, ``seed``, ...);
        see `graftwork.runtime.generation.generate`, which rejects unsupported ones. Defaults: the
        checkpoint's generation config; ``do_sample=False`` always decodes greedily.

        One generation runs at a time; other threads wait. A streamer or stopping criterion must not
        call this model: it gets an `InputError`, or, from another thread, a deadlock.
        """
        wanted = FEATURES if takes_features(self.program) else TOKENS
        named = options.pop(wanted, None)
        if (input_ids is None) == (named is None):
            got = "both" if named is not None else ", ".join(options) or "nothing"
            what = (
                "the sources' features" if wanted == FEATURES else "the prompts' token ids i64[B,S]"
            )
            raise InputError(
                f"generate: expected {what} as its first argument or as {wanted}=, got {got}"
            )
        given: Any = named if input_ids is None else input_ids
        ids = given if wanted == FEATURES else as_ids(given)
        if self.compiled is None:
            check_request(ids, options, self.program)  # before compiling, which is slow
        return generate(self.executable, ids, **options)

    def __call__(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]], /, *, prompt: int = 1
    ) -> torch.Tensor:
        """Logits f32[B,S,V] of token ids i64[B,S], computed as in decoding, without drafts.

        Cache eviction, sparse reads and depth policies apply as in generation. prompt: number of
        leading tokens that are run as a prompt. Threads take turns. Errors: as
        `graftwork.runtime.scoring.score`.
        """
        ids = as_ids(input_ids)
        check_ids(ids, self.program.info)  # before compiling, which is slow
        return score(self.executable, ids, prompt)

    def cache_bytes(self) -> int:
        """Current bytes of the state buffers; 0 before the first generation."""
        return 0 if self.compiled is None else self.compiled.state_bytes()

    def forget(self, *, learnt: bool = True) -> None:
        """Drop cached texts of earlier calls.

        By default the last call's texts and copies of earlier ones (see `keep`) are cached; a
        prompt that begins with one runs only the rest. learnt: also reset adaptive drafters and
        policies (recycling tables, n-gram searches, thresholds).
        """
        if self.compiled is not None:
            forget(self.compiled, learnt=learnt)

    def keep(self, megabytes: float) -> None:
        """Set the memory for cached texts of earlier calls, besides prefixes of `load_prefix`;
        default: 256. 0: only the last call's texts. Errors: `InputError` for negative numbers."""
        if not 0 <= megabytes < float("inf"):
            raise InputError(f"keep: expected megabytes, 0 or more, got {megabytes!r}")
        executable = self.executable
        with executable.turn:
            Conversations.of(executable).limit(int(megabytes * 2**20))

    def save_prefix(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]], path: str | Path
    ) -> int:
        """Run a text i64[1,S], write its cache rows to a safetensors file and return its length in
        tokens. Errors: as `graftwork.runtime.prefix.save_prefix`."""
        return save_prefix(self.executable, as_ids(input_ids), plain_path("save_prefix", path))

    def load_prefix(self, path: str | Path) -> torch.Tensor:
        """Load a file of `save_prefix` and return its text i64[1,S]. Until `forget`, prompts that
        begin with it run only the rest. Errors: `InputError` for a damaged file, or one of another
        program."""
        return load_prefix(self.executable, plain_path("load_prefix", path))

    def save(
        self, folder: str | Path, *, progress: Callable[[str], None] = lambda name: None
    ) -> Path:
        """Write program, weights and tokenizer to a folder for `load`. An existing artifact is
        replaced atomically. Errors: `InputError` if the folder is not an artifact, or a weight
        holds NaN."""
        return saved.save(
            self.program,
            folder,
            target=self.target,
            recipe=dict(self.recipe),
            report=self.report,
            progress=progress,
        )

    def __str__(self) -> str:
        size = megabytes(weight_bytes(self.program))
        return f"{self.program.name} for {self.target}, recipe {self.recipe.get('name')}, {size}"


def as_target(target: Target | str | None, dtype: torch.dtype | None = None) -> Target:
    """Parse a target. Errors: `InputError`."""
    if isinstance(target, Target):
        return target
    if target is not None and not isinstance(target, str):
        raise InputError(f"target: expected text, such as torch:cpu, or a Target; got {target!r}")
    if target is None:
        return Target.default()
    parsed = Target.parse(target)
    if dtype is not None and target.count(":") < 2:
        return Target(parsed.backend, parsed.device, dtype, parsed.threads)
    return parsed


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


__all__ = ["GraftworkError", "Model", "Source", "load", "optimize"]
