"""`graftwork train`: train draft heads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import err, out
from .options import TO_WRITE, ModelArg, RecipeOption, SetOption, TargetOption, require

# Late imports: torch takes seconds, which `--help` does not need.

if TYPE_CHECKING:
    from ..backends import Target
    from ..model import Model
    from ..recipe import Recipe
    from ..training import Fitted


def train(
    model: ModelArg,
    folder: Annotated[
        Path, typer.Option("--out", **TO_WRITE, help="For checkpoints and the trained heads.")
    ],
    recipe: RecipeOption = "medusa",
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: TargetOption = None,
    data: Annotated[
        Path | None, typer.Option(help="Text file, folder of them, .jsonl or .npy of token ids.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Training time, without preparation.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.")] = None,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = 4,
    window: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    passes: Annotated[int, typer.Option(help="Uses of a window, if --steps is given.")] = 4,
    rate: Annotated[
        float | None, typer.Option(help="Peak learning rate (default: 1e-3, of whole layers 1e-4).")
    ] = None,
    own: Annotated[float, typer.Option(help="Share of windows that the model continues.")] = 0.75,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    half: Annotated[bool, typer.Option(help="Matrix products in bfloat16.")] = False,
    lora: Annotated[
        int,
        typer.Option(
            help="Of layers: the rank of adapters that are trained instead, and merged.",
            metavar="RANK",
        ),
    ] = 0,
    tune: Annotated[
        bool, typer.Option(help="Of recipes with tune_target: change the target's weights, too.")
    ] = False,
    lessons: Annotated[
        Path | None,
        typer.Option(
            **TO_WRITE, help="Keep texts and what the model says of them, for other runs."
        ),
    ] = None,
    writer: Annotated[
        str,
        typer.Option(help="Of heads, on onnxruntime:cpu: what writes and reads text ('': itself)."),
    ] = "int8",
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint in --out.")] = False,
) -> None:
    """Train a recipe's draft heads on what the model itself predicts; with --tune, the target with
    them; or, for one that leaves layers out, the layers that are left, and write a checkpoint."""
    from ..artifact.destinations import check_above
    from ..data.calibration import check_documents
    from ..model import as_target
    from ..optimizing import optimize
    from ..training import FitState, fit, train_target
    from ..training.heal import heals
    from ..training.net import tunes
    from .open_model import with_settings
    from .progress import training_progress

    chosen = with_settings(recipe, set_)
    as_target(target).require_device()
    check_above(folder / "heads")
    if data is not None:
        check_documents(data)
    chosen = replace(chosen, knob=None)
    rates = {} if rate is None else {"rate": rate}
    options: dict[str, Any]
    if heals(chosen):
        require(data is not None, "healing layers takes --data: texts like those to be written")
        options = {"minutes": minutes, "steps": steps, "batch": batch}
        options |= {**rates, "window": window, "seed": seed, "lora": lora, "lessons": lessons}
        options["half"] = half
        _heal(model, chosen, data, folder, resume, options)
        return
    require(not lora, f"--lora is for recipes that leave layers out, and {chosen.name} does not")
    tuned = tunes(chosen)
    require(
        tuned or not tune,
        f"--tune is for recipes with the pass tune_target, such as medusa2, and {chosen.name} has "
        f"none",
    )
    require(
        tune or not tuned,
        f"{chosen.name} changes the target's weights in training: ask for that with --tune, or "
        f"train a recipe without tune_target",
    )
    with training_progress(err) as update, _interruptible(folder):
        made = optimize(
            model,
            chosen,
            target=target,
            data=data if chosen.reads_text else None,
            progress=lambda what: update(FitState(what, 0.0)),
        )
        faster, reader = _faster(model, writer, chosen, made.target, update)
        options = {"out": folder, "resume": resume, "writer": faster, "lessons": lessons}
        options |= {"progress": update, "minutes": minutes, "steps": steps, "batch": batch}
        options |= {"window": window, "passes": passes, "own": own, "seed": seed, "half": half}
        options |= rates
        if tuned:
            fitted: Fitted = train_target(made, data, **options)
        else:
            fitted = fit(made, data, reader=reader, **options)
    out.print(_summary(fitted, folder), markup=False, soft_wrap=True)


def _faster(
    model: str, form: str, drafts: Recipe, target: Target, update: Any
) -> tuple[Model | None, Model | None]:
    """The model in a form that writes faster, and with drafts in it, for what they read; None:
    there is none for the target, or for the recipe."""
    from ..choosing import joined
    from ..optimizing import optimize
    from ..recipe import Recipe
    from ..training import FitState

    if not form or (target.backend, target.device) != ("onnxruntime", "cpu"):
        return None, None

    def built(recipe: Recipe) -> Model:
        return optimize(
            model,
            recipe,
            target=target,
            progress=lambda what: update(FitState(f"writer: {what}", 0.0)),
        )

    faster = Recipe.load(form)
    exact = drafts.contract == "lossless"
    return built(faster), built(joined(drafts, faster)) if exact else None


def _heal(
    model: str, recipe: Recipe, data: Path | None, folder: Path, resume: bool, options: Any
) -> None:
    """Train the layers that a recipe leaves, and say what that brought."""
    from ..training.heal import HEALED, heal
    from .progress import training_progress

    assert data is not None
    with training_progress(err) as update, _interruptible(folder):
        made = heal(model, recipe, data, out=folder, resume=resume, progress=update, **options)
    settings = " ".join(
        f"--set {use.name}.{option}={json.dumps(value)}"
        for use in made.recipe.passes
        if use.name in HEALED
        for option, value in use.options.items()
    )
    (kl, ratio), (before, worse) = made.after, made.before
    out.print(
        f"{made.steps} steps; on held-out text KL {before:.3f} -> {kl:.3f} nats a token, "
        f"perplexity {worse:.3f} -> {ratio:.3f} of the whole model's\n"
        f"checkpoint in {folder}: use it with --recipe {recipe.name} {settings}",
        markup=False,
        soft_wrap=True,
    )


def _summary(fitted: Fitted, folder: Path) -> str:
    """The result, and the settings by which recipes load the weights."""
    from ..passes.engine.base import all_passes

    known = all_passes()
    names = [record.name for record in fitted.model.program.provenance]
    names = [name for name in names if "weights" in known[name].model_fields]
    settings = " ".join(f"--set {name}.weights={folder}" for name in names)
    hits = ", ".join(f"{hit:.2f}" for hit in fitted.hits)
    change = getattr(fitted, "change", None)
    changed = "" if change is None else f"the target changed: {change}\n"
    kept = "" if fitted.own_text is None else f", {fitted.own_text}"
    return (
        f"{fitted.steps} steps, loss {fitted.loss:.3f}, accuracy by depth {hits}; "
        f"{fitted.accepted_per_step:.2f} tokens a step on held-out text{kept}\n"
        f"{changed}weights in {folder}: use them with {settings}"
    )


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Exit on Ctrl-C with a message that says whether training can be resumed."""
    from ..training.checkpoint import STATE

    try:
        yield
    except KeyboardInterrupt:
        text = f"interrupted before the first checkpoint; {folder} holds no weights yet"
        if (folder / STATE).is_file():
            text = f"interrupted; {folder} holds a checkpoint: continue from it with --resume"
        err.print(text, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
