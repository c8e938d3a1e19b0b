"""`graftwork bench`: contestants, measurement, table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from ..artifact.saved import tool_versions
from ..backends.target import Target
from ..data.calibration import check_text, evidence_for
from ..data.prompts import Prompts, check_file, check_seed, read_prompts
from ..hub.download import local
from ..ir import InputError
from ..ir.execution.executable import Executable
from ..ir.support.scratch import Scratch
from ..optimizing import optimize, transform
from ..recipe import Recipe
from ..tracing.draft_models import check_paths
from ..tracing.traced import Traced
from .agreement import is_approximate, keeps_step
from .bench import Bench, Contestant, Genai, Optimized, Transformers, as_json
from .tables import bench_table

AGAINST = ("transformers", "onnxruntime-genai")
RANDOM_PROMPT_TOKENS = 64


def compare(
    model: str | Path,
    recipes: Sequence[str],
    against: Sequence[str] | None = None,
    *,
    settings: Sequence[str] = (),
    targets: Sequence[str] = (),
    skip: Collection[tuple[str, str]] = (),
    data: Prompts | None = None,
    text: Prompts | None = None,
    prompts: int = 8,
    tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[RenderableType, dict[str, Any]]:
    """Measure recipes on a checkpoint folder. Returns the table, and the figures as plain data.

    against: other systems; the first is the reference (without any, the first recipe is). None:
    transformers, if it reads the model. settings: ``pass.option=value``, for every recipe with the
    pass. skip: (recipe, target) pairs to leave out. data: prompts; default: the folder's
    prompts.jsonl, else random tokens. text: calibration text, as `data` of `optimize`.
    Errors: `InputError` for an unknown recipe, system or target, before anything runs.
    """
    model = local(model)
    against = _against(against, Path(model))
    check_seed(seed)
    chosen = recipes_with(recipes, settings)
    wheres = [Target.parse(target) for target in targets] or [Target.default()]
    for where in wheres:
        where.require_device()
    for recipe in chosen:
        check_paths(recipe)
    check_text(chosen, text)
    if data is not None:
        check_file(data)
    with closing(Scratch()) as scratch:
        optimized = _optimized(model, chosen, wheres, skip, text, progress)
        others = [_other(name, Path(model), wheres[0], scratch.path, progress) for name in against]
        texts, source = _prompts(model, optimized[0], data, prompts, seed)
        bench = Bench(texts, tokens, repeats, progress)
        rows = bench.run([*others, *optimized])
    title = (
        f"{model}: {len(texts)} prompts ({source}), {tokens} new tokens, batch 1, "
        f"median of {repeats}, {torch.get_num_threads()} threads"
    ) + "".join(f", {setting}" for setting in settings)
    head = {"model": str(model), "source": source, "settings": list(settings)}
    figures = {**head, **as_json(rows, bench, tool_versions())}
    return bench_table(rows, title), figures


def _against(names: Sequence[str] | None, model: Path) -> Sequence[str]:
    """Other systems by name. Errors: `InputError` for an unknown one, or one that cannot read the
    model."""
    # Weights too: ONNX exports also have a config.json.
    reads = (model / "config.json").is_file() and any(model.glob("*.safetensors"))
    if names is None:
        return AGAINST[:1] if reads else ()
    unknown = [name for name in names if name not in AGAINST]
    if unknown:
        raise InputError(f"--against {unknown[0]}: expected some of {', '.join(AGAINST)}")
    if "transformers" in names and not reads:
        raise InputError(
            f"--against transformers: it reads folders with a config.json and safetensors, and "
            f"{model} is none; leave --against out: the first recipe is then the reference"
        )
    return names


def recipes_with(names: Sequence[str | Recipe], settings: Sequence[str]) -> list[Recipe]:
    """Recipes with settings, each applied where the recipe has the pass. Errors: `InputError` for a
    setting that applies nowhere."""
    chosen = [Recipe.load(name) for name in names]
    if not chosen:
        raise InputError("--recipes: expected at least one recipe")
    for setting in settings:
        name = setting.partition(".")[0]
        having = [any(use.name == name for use in recipe.passes) for recipe in chosen]
        if not any(having):
            chosen[0].with_options([setting])  # raises the error
        pairs = zip(chosen, having, strict=True)
        chosen = [recipe.with_options([setting]) if has else recipe for recipe, has in pairs]
    return chosen


def _optimized(
    model: str | Path,
    recipes: Sequence[Recipe],
    targets: Sequence[Target],
    skip: Collection[tuple[str, str]],
    text: Prompts | None,
    progress: Callable[[str], None],
) -> list[Optimized]:
    traced: dict[torch.dtype, Traced] = {}
    pool: dict[object, Executable] = {}
    made = []
    for target in targets:
        if target.dtype not in traced:
            progress("tracing")
            traced[target.dtype] = Traced.of(model, target.dtype)
        program = traced[target.dtype].program
        evidence = evidence_for(recipes, program, text, progress=progress)
        for recipe in recipes:
            if (recipe.name, str(target)) in skip:
                continue
            progress(f"optimizing with {recipe.name} for {target}")
            result = transform(traced[target.dtype], recipe, target, evidence=evidence)
            own = None
            if is_approximate(result.program) and not keeps_step(result.program):
                own = transform(traced[target.dtype], Recipe.load("baseline"), target)
            made.append(Optimized(recipe.name, result, pool, own))
    return made


def _other(
    name: str, model: Path, target: Target, scratch: Path, progress: Callable[[str], None]
) -> Contestant:
    progress(f"preparing {name}")
    if name == "transformers":
        return Transformers(model, target.dtype, target.device)
    exported = optimize(model, "baseline", target=Target("onnxruntime", "cpu"))
    return Genai(exported.export_genai(scratch / "genai"))


def _prompts(
    model: str | Path, optimized: Optimized, data: Prompts | None, count: int, seed: int
) -> tuple[list[list[int]], str]:
    program = optimized.model.program
    bundled = Path(model) / "prompts.jsonl"
    if data is not None or bundled.is_file():
        chosen = bundled if data is None else data
        source = str(chosen) if isinstance(chosen, (str, Path)) else "given"
        return read_prompts(chosen, program)[:count], source
    generator = torch.Generator().manual_seed(seed)
    width = min(RANDOM_PROMPT_TOKENS, program.info.context // 2)
    ids = torch.randint(program.info.vocab_size, (count, width), generator=generator)
    return [[int(token) for token in row] for row in ids], "random tokens"
