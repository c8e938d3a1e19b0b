"""Shards answered by this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .job import Job, Shard
from .worker import Done, Work, open_worker


def map_here(
    job: Job, shards: Sequence[Shard], work: Work, show: Callable[[str], None]
) -> Iterator[Done]:
    """Shards as they are done. show: is told what takes long before the first."""
    worker = open_worker(work, show)
    for shard in shards:
        yield worker.answer(job.prompts, shard, job.path(shard.number))
