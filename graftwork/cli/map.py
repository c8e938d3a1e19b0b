"""`graftwork map`: answer a file of prompts, resumably, here or on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import err, progress
from .options import (
    TO_WRITE,
    AnyModel,
    MaybeRecipe,
    SetOption,
    TargetOption,
    TemplateOption,
    decoding,
    require,
    template_text,
)

# Late imports: torch takes seconds, and the extra `ray` may not be installed.

if TYPE_CHECKING:
    from ..mapping.job import Job, Shard
    from ..mapping.worker import Done


class Where(StrEnum):
    """Where prompts are answered."""

    LOCAL = "local"
    RAY = "ray"


def map_(
    model: AnyModel,
    prompts: Annotated[
        Path,
        typer.Argument(metavar="PROMPTS", help="A .jsonl file (text, ids or messages a line)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the answers.", **TO_WRITE)],
    on: Annotated[Where, typer.Option("--on", help="This process, or a Ray cluster.")] = (
        Where.LOCAL
    ),
    workers: Annotated[int, typer.Option(min=1, help="Of Ray: models at work.")] = 1,
    cpus: Annotated[int, typer.Option(min=1, help="Of Ray: of each worker.")] = 1,
    address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster (default: one on this machine, for this run)."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that are answered at once.")] = 8,
    shard: Annotated[int, typer.Option(min=1, help="Prompts of a file of answers.")] = 64,
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: TargetOption = None,
    template: TemplateOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy; above: sampling (default: the checkpoint's).")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of sampling.")] = None,
) -> None:
    """Answer a file of prompts. What is done already is not done again."""
    if on is Where.RAY:
        require(find_spec("ray") is not None, "--on ray needs ray: pip install 'graftwork[ray]'")
    else:
        own = workers == 1 and cpus == 1 and address is None
        require(own, "--workers, --cpus and --address need --on ray")
    chats = template_text(template)
    with progress() as show:
        show("load torch")
        from ..ir.support.errors import InputError
        from ..mapping.job import begin
        from ..mapping.local import map_here
        from ..mapping.worker import Work
        from ..runtime.asking.options import check_keywords

        asked = {"top_k": top_k, "top_p": top_p, "seed": seed, "max_new_tokens": max_new_tokens}
        options = {n: value for n, value in asked.items() if value is not None}
        options |= decoding(temperature)
        check_keywords(options)
        where = str(Path(model).absolute())
        work = Work(where, recipe, tuple(set_), target, batch, options, chats)
        job = begin(prompts, out, shard, asdict(work))
        missing = job.missing
        done = len(job.shards) - len(missing)
        if done:
            err.print(f"{done} of {len(job.shards)} shards are done already")
        answers: Iterator[Done] = iter(())
        if missing and on is Where.LOCAL:
            answers = map_here(job, missing, work, show)
        elif missing:
            from ..mapping.cluster import map_on_ray

            show("start the workers")
            answers = map_on_ray(job, missing, work, workers=workers, cpus=cpus, address=address)
        failed = sum(done.failed for done in _told(job, missing, answers, show))
    err.print(f"{job.lines} prompts answered in {job.out}", markup=False, soft_wrap=True)
    if failed:
        raise InputError(f"{failed} prompts could not be answered; their lines have the error")


def _told(job: Job, missing: list[Shard], answers: Iterator[Done], show: Any) -> Iterator[Done]:
    """The same; what is done and how long the rest takes is shown."""
    begun, new, prompts = time.monotonic(), 0, 0
    for count, done in enumerate(answers, 1):
        new, prompts = new + done.new, prompts + done.prompts
        seconds = time.monotonic() - begun
        left = seconds / count * (len(missing) - count)
        show(
            f"shard {len(job.shards) - len(missing) + count} of {len(job.shards)}, {prompts} "
            f"prompts, {new / max(seconds, 1e-9):.0f} tokens/s, about {left:.0f} s left"
        )
        yield done
