"""Shards answered by actors of a Ray cluster, each with a model of its own (extra `ray`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..ir.support.packages import require
from .job import Job, Shard
from .worker import Done, Work, Worker, open_worker


class Actor:
    """What Ray Data keeps alive and gives rows of shards: a worker."""

    def __init__(self, work: Mapping[str, Any]) -> None:
        self.worker: Worker = open_worker(Work(**work))

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[Any]]:
        """rows: columns of one shard; columns of `Done`."""
        found = []
        for prompts, path, *shard in zip(*(rows[name] for name in COLUMNS), strict=True):
            one = Shard(*map(int, shard))
            found.append(self.worker.answer(Path(str(prompts)), one, Path(str(path))))
        return {name: [getattr(done, name) for done in found] for name in Done._fields}


COLUMNS = ("prompts", "path", *Shard._fields)


def map_on_ray(
    job: Job, shards: Sequence[Shard], work: Work, *, workers: int, cpus: int, address: str | None
) -> Iterator[Done]:
    """Shards as they are done. workers: actors. cpus: of each, which Ray makes its threads.
    address: of a cluster; None: one of this machine, for this call. All see the files by the same
    paths. Errors: `InputError` where Ray is missing; its own errors of actors that fail."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    require("ray", "--on ray", "ray")
    require("pyarrow", "--on ray", "ray")
    import ray

    ours = not ray.is_initialized()
    if ours:
        own: dict[str, Any] = {"include_dashboard": False, "num_cpus": workers * cpus + 1}
        given = {"address": address} if address else own
        ray.init(logging_level=logging.WARNING, log_to_driver=False, **given)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        rows = [
            {"prompts": str(job.prompts.absolute()), "path": str(job.path(s.number).absolute())}
            | s._asdict()
            for s in shards
        ]
        answered = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Actor,
            fn_constructor_args=(asdict(work),),
            batch_size=1,
            num_cpus=cpus,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows))),
        )
        for row in answered.iter_rows():
            yield Done(**{name: row[name] for name in Done._fields})
    finally:
        if ours:
            ray.shutdown()
