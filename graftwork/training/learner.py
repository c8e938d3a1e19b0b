"""Drafts that go on learning from the texts of those who use the model.

Source: Liu et al., "Online Speculative Decoding" (2023). What the target corrected while it
verified drafts goes to a buffer; once enough texts are there, the drafter is distilled on these
places alone, the buffer is emptied, and later texts are drafted with the new weights. As drafts of
lossless recipes never decide on a text, nothing but its speed depends on when that was.

What differs: any drafter with trained weights learns, by its own objective, and not draft models
alone. Tokens that were not drafted count as corrected. The buffer holds texts, and the target's
distributions are made anew when the drafter learns.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..data.prompts import refuse_sources
from ..ir import InputError, Program
from ..ir.plan import NotedLength, Record, untrained
from ..ir.support.files import plain_path
from ..passes.drafting.trained import trained_on
from ..runtime.asking.request import read_request
from ..runtime.speculate.lengths.noted import foreseen_by
from . import checkpoint
from .losses import total_loss
from .net import Net, check_students, chosen, refuse_tuning, trainable, trained_parts
from .teacher_cache import CachedWindows, Teacher

if TYPE_CHECKING:
    from ..model import Model


BEHIND = 10
"""By how much an update beside generation stands behind it, as nice values go."""


WAITING = 4
"""Times `every` texts that wait for an update at most: where more come than can be learned from,
the oldest are forgotten."""


@dataclass(frozen=True)
class LearnerOptions:
    """Options of `Learner`.

    every: texts from one update to the next. passes: uses of a text in an update. batch: texts, or
    pieces of at most `window` tokens, per optimizer step. rate: of AdamW, always the same, as there
    is no end to prepare for. clip: maximum norm of gradients.
    """

    every: int = 16
    passes: int = 2
    batch: int = 4
    window: int = 512
    rate: float = 3e-4
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"{name}={value}: expected a positive number")


class Lesson(NamedTuple):
    """A text: prompt and what followed. taught: after which of its tokens the next one is new and
    no draft had it."""

    tokens: list[int]
    taught: list[bool]

    @classmethod
    def of(cls, tokens: Sequence[int], prompt: int, foreseen: Collection[int]) -> Lesson:
        """Of a text whose first `prompt` tokens were given. foreseen: see `foreseen_by`."""
        known = {prompt - 1 + place for place in foreseen}
        places = range(len(tokens) - 1)
        taught = [place >= prompt - 1 and place not in known for place in places]
        return cls(list(tokens), [*taught, False])


class _Stopped(Exception):
    """An update is to end."""


class _Piece(NamedTuple):
    """Of a text. windows: one, with what the target makes of it. taught: bool[1,T]."""

    windows: CachedWindows
    taught: torch.Tensor


class Update(NamedTuple):
    """An update of a drafter. texts, tokens: that it learned from; taught: the share of these
    tokens that no draft had foreseen. losses: by optimizer step. seconds: it took."""

    texts: int
    tokens: int
    taught: float
    losses: list[float]
    seconds: float


@dataclass
class _Made:
    """What a thread of its own hands over: the model with new weights, or what went wrong."""

    model: Model | None = None
    error: Exception | None = None


@dataclass
class _Student:
    """What is trained, from one update to the next."""

    net: Net
    teacher: Teacher
    optimizer: torch.optim.Optimizer
    progress: checkpoint.Progress = field(default_factory=checkpoint.Progress)


class Learner:
    """Generates as its model does, and teaches the model's drafter meanwhile.

    model: with a drafter that was trained before (`fit`); see the module docstring. out: a folder
    for heads.safetensors, which draft passes take as `weights`, renewed by every update.
    background: updates run in a thread beside generation, which takes the new weights from its next
    call on; else `generate` returns when the update that is due is over. renewed: makes the model
    that serves of this folder, where it is another than the one that learns, such as one over int8
    weights; the first is made at once. ready: called by an update's thread, at its end, with the
    model that serves from then on. options: `LearnerOptions`.

    Texts are held in memory until they are learned from, and nowhere else. One thread may use it at
    a time. Errors: `InputError` for options out of range, a folder that is not empty, and a model
    whose drafter is untrained; `UnsupportedError` where nothing can be trained.
    """

    def __init__(
        self,
        model: Model,
        out: str | Path,
        *,
        background: bool = False,
        renewed: Callable[[Path], Model] | None = None,
        ready: Callable[[Model], None] | None = None,
        **options: Any,
    ) -> None:
        self.options, self.out = LearnerOptions(**options), plain_path("out", out)
        self.drafts = _students(model.program)
        if (self.out / checkpoint.STATE).exists():
            raise InputError(f"{self.out} holds a checkpoint already: choose another folder")
        self.background, self.renewed, self.ready = background, renewed, ready
        self.updates: list[Update] = []
        self.lessons: list[Lesson] = []
        self.learning = model
        self._student: _Student | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._made = _Made()
        if renewed is not None:
            self._save(self._taught())
        self._serve(model if renewed is None else renewed(self.out))

    @property
    def model(self) -> Model:
        """The model that serves now."""
        return self._serving

    def generate(self, input_ids: Any = None, /, **options: Any) -> Any:
        """See `Model.generate`. Errors: also those of an update, in the call behind it."""
        self._take()
        asked = dict(options)
        ids = self._noting._prompts(input_ids, asked)
        foreseen_by(self._noting.executable)  # of a call that failed
        found = self._noting.generate(ids, **asked)
        self._note(ids, asked, found if isinstance(found, torch.Tensor) else found.sequences)
        if self._is_due():
            self.learn(wait=False)
            if self._thread is not None and not self.background:
                self._thread.join()
                if self._made.error is None:  # else the next call says so: this text is good
                    self._take()
        return found

    def hear(self, tokens: Sequence[int], prompt: int, foreseen: Collection[int]) -> None:
        """A text that another one decoded, such as a server, with the model that serves. An update
        that is due begins in a thread. tokens: prompt and new ones; prompt: how many of these it
        is; foreseen: the new tokens that were drafted and accepted, counted from 0. Errors: those
        of the update before."""
        self._take()
        self._add(Lesson.of(tokens, prompt, foreseen))
        if self._is_due():
            self.learn(wait=False)

    def stop(self) -> None:
        """End an update that runs, without anything of it, and begin no more. The end of the
        process does so, too: a thread that computes then would bring it down."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _is_due(self) -> bool:
        """Whether an update is to begin."""
        due = len(self.lessons) >= self.options.every
        return due and self._thread is None and not self._stopped

    def learn(self, *, wait: bool = True) -> None:
        """Learn from all texts since the last update. wait: until the new weights serve; else a
        thread does it, whose weights the next call of `generate` after its end takes."""
        self.finish()
        lessons, self.lessons = self.lessons, []
        if not any(any(lesson.taught) for lesson in lessons):
            return
        self._thread = threading.Thread(
            target=self._learn, args=(lessons,), name="graftwork-learner", daemon=True
        )
        _LEARNERS.add(self)
        self._thread.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for an update that runs, and serve its weights."""
        if self._thread is not None:
            self._thread.join()
            self._take()

    def _serve(self, model: Model) -> None:
        plan = model.program.plan
        self._serving = model
        self._noting = model.replanned(replace(plan, length=NotedLength(of=plan.length)))

    def _take(self) -> None:
        """Serve the weights of an update that is over."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread, made, self._made = None, self._made, _Made()
        if made.error is not None:
            raise made.error
        if made.model is not None:
            self._serve(made.model)

    def _note(self, ids: torch.Tensor, asked: dict[str, Any], sequences: torch.Tensor) -> None:
        """Keep a call's texts and what was foreseen of them: none of beams, which draft nothing, or
        behind prompts of pictures or rows, which the teacher does not read."""
        request = read_request(ids, asked, self._noting.program)
        rows = sequences[:, ids.shape[1] :].tolist()
        foreseen = foreseen_by(self._noting.executable)
        if request.pictures or request.embeds:
            return
        for text, row, known in zip(request.own, rows, foreseen, strict=False):
            ends = [place + 1 for place, one in enumerate(row) if one in request.stopping.eos]
            new, prompt = row[: min([*ends, len(row)])], text.tokens
            while not ends and new and new[-1] == request.pad:  # it was stopped before others
                new.pop()
            self._add(Lesson.of([*prompt, *new], len(prompt), known))

    def _add(self, lesson: Lesson) -> None:
        self.lessons.append(lesson)
        del self.lessons[: -WAITING * self.options.every]

    # -- updates

    @torch.enable_grad()
    def _learn(self, lessons: Sequence[Lesson]) -> None:
        """Teach the drafter; what comes of it goes to `_made`."""
        if self.background:
            with contextlib.suppress(OSError, AttributeError):  # where threads have no priorities
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND)
        try:
            begun, student = time.perf_counter(), self._taught()
            pieces = [piece for lesson in lessons for piece in self._pieces(student, lesson)]
            losses = []
            for _ in range(self.options.passes):
                generator = torch.Generator().manual_seed(student.progress.step)
                order = torch.randperm(len(pieces), generator=generator).tolist()
                for first in range(0, len(order), self.options.batch):
                    some = [pieces[place] for place in order[first : first + self.options.batch]]
                    losses.append(self._step(student, some))
            self._save(student)
            program = student.net.trained_program(self.drafts)
            self.learning = replace(self.learning, program=program)
            made = self.learning if self.renewed is None else self.renewed(self.out)
            _ = made.executable  # here, and not in the next call
            taught = [one for lesson in lessons for one in lesson.taught]
            seconds = time.perf_counter() - begun
            share = sum(taught) / len(taught)
            self.updates.append(Update(len(lessons), len(taught), share, losses, seconds))
            self._made.model = made
            if self.ready is not None:
                self.ready(made)
        except _Stopped:
            self._student = None
        except Exception as error:
            self._made.error, self._student = error, None  # whose weights may be spoilt

    def _go_on(self) -> None:
        if self._stopped:
            raise _Stopped

    def _pieces(self, student: _Student, lesson: Lesson) -> list[_Piece]:
        """A text in windows; those that teach nothing are left out."""
        self._go_on()
        width = min(self.options.window, self.learning.program.info.context)
        device, found = student.net.device, []
        for first in range(0, len(lesson.tokens), width):
            taught = lesson.taught[first : first + width]
            if any(taught):
                tokens = torch.tensor([lesson.tokens[first : first + width]])
                made = student.teacher.states(tokens)
                states = {name: value.to(device) for name, value in made.items()}
                start = torch.zeros(1, dtype=torch.int64)
                windows = CachedWindows(tokens.to(device), start, states)
                found.append(_Piece(windows, torch.tensor([taught], device=device)))
        return found

    def _step(self, student: _Student, pieces: Sequence[_Piece]) -> float:
        """One optimizer step; the loss before it."""
        self._go_on()
        net, optimizer, total = student.net, student.optimizer, 0.0
        optimizer.zero_grad(set_to_none=True)
        plan = self.learning.program.plan
        for windows, taught in pieces:
            loss = total_loss(net, student.teacher, self.drafts, plan, windows, taught)
            (loss.total / len(pieces)).backward()
            total += float(loss.total.detach()) / len(pieces)
        net.collect()
        if not math.isfinite(total):
            raise InputError(
                f"the loss became {total} at step {student.progress.step}: drafts stay as they "
                f"were, and these texts are not learned from; take a lower rate than "
                f"{self.options.rate}"
            )
        torch.nn.utils.clip_grad_norm_(net.parameters, self.options.clip)
        optimizer.step()
        net.renew()
        student.progress.step += 1
        student.progress.losses.append(total)
        return total

    def _taught(self) -> _Student:
        """What learns: made once."""
        if self._student is None:
            program = self.learning.program
            names = [name for draft in self.drafts for name in trainable(program, draft)]
            device = torch.device(self.learning.target.device)
            net = Net(program, list(dict.fromkeys(names)), device)
            optimizer = torch.optim.AdamW(
                net.parameters, lr=self.options.rate, betas=(0.9, 0.95), weight_decay=0.0
            )
            progress = checkpoint.Progress(options=vars(self.options), target=trained_on(program))
            self._student = _Student(net, Teacher(net), optimizer, progress)
        return self._student

    def _save(self, student: _Student) -> None:
        net, program = student.net, self.learning.program
        names = [*net.trained, *(n for draft in self.drafts for n in chosen(program, draft))]
        heads = {name: net.tensors[name].detach() for name in names}
        moments = checkpoint.moments(student.optimizer, net.trained, net.parameters)
        checkpoint.write(self.out, student.progress, heads, moments)


_LEARNERS: weakref.WeakSet[Learner] = weakref.WeakSet()
"""Those that have begun an update."""


@atexit.register
def _stop_all() -> None:
    for learner in list(_LEARNERS):
        learner.stop()


def _students(program: Program) -> list[Record]:
    """The records of a program that learn. Errors: see `Learner`."""
    refuse_tuning(program)
    refuse_sources(program)
    drafts = [part for part in trained_parts(program.plan) if trainable(program, part)]
    check_students(program, drafts)
    if untrained(drafts):
        raise InputError(
            f"draft={program.plan.draft.brief} is untrained, and texts of others are a slow way to "
            f"begin: train it first (graftwork train, or graftwork.fit)"
        )
    return drafts
