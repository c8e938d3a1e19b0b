"""What answers shards: a model with its options, in this process or in one of many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from ..artifact.saved import is_saved
from ..chat.conversation import ends_of_turn
from ..chat.files import template_of
from ..ir import GraftworkError, InputError
from ..ir.support.scratch import write_text
from ..ir.support.tokenizer import decode, encode
from ..model import Model, load
from ..optimizing import optimize
from ..recipe import Recipe
from .job import Line, Shard, lines_of


class Done(NamedTuple):
    """A shard that is written. prompts, failed: lines; new: tokens."""

    number: int
    prompts: int
    failed: int
    new: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """What a worker needs to begin: plain values, which go from process to process.

    model, recipe, settings, target: of `open_model`. batch: prompts at once. options: of
    `generate`. template: a chat template instead of the checkpoint's.
    """

    model: str
    recipe: str | None = None
    settings: Sequence[str] = ()
    target: str | None = None
    batch: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None


class Worker:
    """A model that answers shards of a file into a folder."""

    def __init__(self, model: Model, work: Work) -> None:
        self.model, self.work = model, work

    def answer(self, prompts: Path, shard: Shard, path: Path) -> Done:
        """Answer a shard's lines and write them to `path`, whole or not at all.

        A line that cannot be answered, such as a prompt beyond the context, gets its error instead
        of a text. Batches are of lines of one kind, in their order: seeded answers do not depend on
        who answers, or on what was done before.
        """
        begun = perf_counter()
        lines, found = lines_of(prompts, shard), dict[int, dict[str, Any]]()
        for kind in sorted({line.kind for line in lines}):
            same = [line for line in lines if line.kind == kind]
            for start in range(0, len(same), self.work.batch):
                found |= self._batch(same[start : start + self.work.batch])
        rows = [{"line": line.number, **found[line.number]} for line in lines]
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        failed = sum("error" in row for row in rows)
        new = sum(row.get("new_tokens", 0) for row in rows)
        return Done(shard.number, len(rows), failed, new, perf_counter() - begun)

    def _batch(self, lines: Sequence[Line]) -> dict[int, dict[str, Any]]:
        """Answers of lines of one kind, by their numbers; if a batch fails, one by one."""
        found, ready = dict[int, dict[str, Any]](), dict[int, list[int]]()
        for line in lines:
            try:
                ready[line.number] = self._ids(line)
            except GraftworkError as error:
                found[line.number] = {"error": str(error)}
        if not ready:
            return found
        ends = self._ends(lines[0].kind)
        try:
            return found | dict(self._answers(ready, ends, lines[0].number))
        except GraftworkError:
            pass
        for number, ids in ready.items():
            try:
                found |= dict(self._answers({number: ids}, ends, number))
            except GraftworkError as error:
                found[number] = {"error": str(error)}
        return found

    def _answers(
        self, prompts: Mapping[int, list[int]], ends: Sequence[int] | None, first: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        options = dict(self.work.options)
        if "seed" in options:
            options["seed"] += first
        if ends is not None:
            options["eos_token_id"] = list(ends)
        width = max(map(len, prompts.values()))
        result = self.model.generate(list(prompts.values()), **options)
        stop = set(ends if ends is not None else self.model.program.info.eos)
        for (number, ids), row in zip(prompts.items(), result[:, width:].tolist(), strict=True):
            end = next((n for n, token in enumerate(row) if token in stop), None)
            new = row if end is None else row[:end]
            yield (
                number,
                {
                    "text": decode(self.model.tokenizer.backend_tokenizer, new),
                    "finish_reason": "length" if end is None else "stop",
                    "prompt_tokens": len(ids),
                    "new_tokens": len(row) if end is None else end + 1,
                },
            )

    def _ids(self, line: Line) -> list[int]:
        """A line's prompt. Errors: `InputError` for one that is none."""
        if line.kind == "text":
            ids = encode(self.model.tokenizer.backend_tokenizer, line.value)
        elif line.kind == "messages":
            made = self.model.apply_chat_template(line.value, chat_template=self.work.template)
            assert isinstance(made, list)
            ids = made
        else:
            ids = line.value
            if not all(type(id) is int for id in ids):
                raise InputError("ids: expected token ids")
        if not ids:
            raise InputError("expected some text; it has no tokens")
        return ids

    def _ends(self, kind: str) -> tuple[int, ...] | None:
        """Ids that end an answer; None: as the checkpoint says."""
        if kind != "messages":
            return None
        return ends_of_turn(self.model, template_of(self.model.program, given=self.work.template))


def open_worker(work: Work, show: Callable[[str], None] = lambda what: None) -> Worker:
    """A worker with a model of its own. show: is told what takes long. Errors: as `optimize` and
    `load`."""
    if is_saved(Path(work.model)):
        show("check and read")
        return Worker(load(work.model, target=work.target), work)
    recipe = Recipe.load(work.recipe or "baseline").with_options(work.settings)
    return Worker(optimize(work.model, recipe, target=work.target, progress=show), work)
