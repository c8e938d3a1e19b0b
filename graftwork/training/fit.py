"""Training of a program's inserted weights by self-distillation; the target is frozen.

The target's outputs on windows of text are the teacher. Windows are the user's text, partly
continued by the target (`texts`), or the target's own text. A window is used several times; its
teacher activations are cached (`teacher_cache`). Drafters with a vocabulary of their own know the
tokens that are most frequent in these windows.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..data.corpus import Windows, own_text, read_corpus, split
from ..data.prompts import Prompts, refuse_sources
from ..ir import InputError, Program, Weight
from ..ir.execution.executable import Planned
from ..ir.plan import Record
from ..ir.support.files import plain_path
from ..measuring.agreement import OwnText, continued, is_approximate
from ..measuring.agreement import own_text as own_text_kept
from ..passes.drafting.draft_vocabulary import chosen_by
from ..passes.drafting.trained import trained_on
from . import checkpoint
from .budget import Budget, check_loss, rate_factor
from .losses import total_loss
from .net import Net, check_students, chosen, refuse_tuning, trainable, trained_parts
from .objectives.base import Loss, objective_of
from .processes import Processes
from .teacher_cache import FOLDER, CachedWindows, Kept, Teacher, TeacherCache
from .texts import Author, undrafted

if TYPE_CHECKING:
    from ..model import Model

TEACHER_BYTES = 256 << 20
"""Maximum bytes of teacher logits; larger batches are split."""

SAMPLED = 16
"""Windows per batch of preparation, and as many times `LARGER` where there are minutes for it:
tokens of many rows cost little more than of few."""

LARGER, LONG = 4, 4.0
"""See `SAMPLED`; from how many minutes of training on."""

HELD = 4
"""Windows that are held out where there are many, to measure acceptance while training."""

SECONDS = "seconds"
"""Name in a file of text of the time that writing it took."""

MEASURED = 30.0
"""Seconds between measurements on these windows."""

WRITING = 0.6
"""The share of the time of preparation that writing takes at most; the rest is the teacher's."""

PREPARING = 0.5
"""Maximum time of preparation, as a share of training time. Windows are then used about five times
if the inserted weights cost half as much as the target."""


@dataclass(frozen=True)
class FitOptions(Budget):
    """Options of `fit`, besides the budget. Preparing windows takes up to half of `minutes` more.

    batch: windows per step. window: tokens per window. passes: uses of a window, if steps are
    given. own: share of windows that the target continues; temperature: of these (0: greedy). rate:
    peak learning rate of AdamW, after ten steps of warm-up, then along a cosine. clip: maximum norm
    of gradients. save_every: steps between checkpoints. half: matrix products in bfloat16, which
    processors with instructions for it do in half the time.
    """

    batch: int = 4
    window: int = 512
    passes: int = 4
    own: float = 0.75
    temperature: float = 0.0
    rate: float = 1e-3
    clip: float = 1.0
    save_every: int = 50
    half: bool = False
    positive = ("batch", "window", "passes", "rate", "clip", "save_every")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.own <= 1 or self.temperature < 0:
            raise InputError(
                f"own={self.own}, temperature={self.temperature}: expected own in 0..1 and a "
                f"temperature of at least 0"
            )


@dataclass(frozen=True)
class FitState:
    """A progress report. share: of the budget, 0..1. hits: accuracy by level. rate: steps a second.
    accepted: tokens a step that accuracy on held-out windows promises a chain; nan: not measured.
    """

    phase: str
    share: float
    step: int = 0
    loss: float = math.nan
    hits: tuple[float, ...] = ()
    rate: float = math.nan
    accepted: float = math.nan


Report = Callable[[FitState], None]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Fitted:
    """Result of `fit`. model: with the trained weights. steps, loss: of the last step. hits:
    accuracy of the best candidate by level. accepted_per_step: tokens per step of greedy decoding
    on held-out text, with the verifier's. own_text: of an approximate model, agreement with the
    target's continuations."""

    model: Model
    steps: int
    loss: float
    hits: tuple[float, ...]
    accepted_per_step: float
    own_text: OwnText | None = None


def fit(
    model: Model,
    data: Prompts | torch.Tensor | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    writer: Model | None = None,
    reader: Model | None = None,
    lessons: str | Path | None = None,
    progress: Report = lambda state: None,
    **options: Any,
) -> Fitted:
    """Train the inserted weights of a model's drafters and measure them on held-out text.

    data: see `read_corpus`; None: text generated by the model. out: folder of checkpoints; draft
    passes take its heads.safetensors as `weights`. resume: continue from the checkpoint there.
    writer: the model without drafts in another form, such as int8, which writes text faster.
    reader: with drafts in that form; its activations are what the drafters are taught on, in a
    third of the time. lessons: a folder that keeps texts and activations for runs of other
    drafters; default: in `out`, and deleted at the end.
    options: `FitOptions`. Under torchrun (gloo on CPU, NCCL on GPU) each process has its own
    windows, gradients are averaged, and the first process saves.

    Errors: `InputError` for bad options or data, a checkpoint of another model, or a loss that is
    not finite (the last checkpoint is kept); `UnsupportedError` if nothing can be trained.
    """
    kept = None if lessons is None else plain_path("lessons", lessons)
    chosen = FitOptions(**options)
    refuse_tuning(model.program)
    fitting = Fit(model, data, plain_path("out", out), chosen, progress, writer, reader, kept)
    return fitting.run(resume)


class Fit:
    """A run of `fit`: see there."""

    def __init__(
        self,
        model: Model,
        data: Prompts | torch.Tensor | None,
        out: Path,
        options: FitOptions,
        progress: Report,
        writer: Model | None,
        reader: Model | None,
        lessons: Path | None,
    ) -> None:
        self.model, self.out, self.options, self.progress = model, out, options, progress
        self.writer, self.reader, self.lessons = writer or model, reader, lessons
        refuse_sources(model.program)
        self.drafts = self._learning(trained_parts(model.program.plan))
        check_students(model.program, self.drafts)
        if reader is not None and reader.program.info != model.program.info:
            raise InputError(
                f"reader: expected {model.program.name} in another form, got another model, "
                f"{reader.program.name}"
            )
        self.chosen = [name for draft in self.drafts for name in chosen(model.program, draft)]
        self.objectives = [objective_of(draft) for draft in self.drafts]
        self.processes = Processes.join(model.target.device)
        documents = self._documents(data)
        self.train, self.held_out = split(documents)
        width = min(options.window, model.program.info.context)
        self.windows = Windows(self.train, width, options.seed)
        self.measured, self.accepted = 0.0, math.nan

    def run(self, resume: bool) -> Fitted:
        """Prepare windows, train, measure."""
        device = torch.device(self.model.target.device)
        names = [name for draft in self.drafts for name in trainable(self.model.program, draft)]
        state, heads, moments = self._restored(names) if resume else (self._fresh(), {}, {})
        start = time.perf_counter()
        numbers, kept = self._written()
        del self.writer  # which may be large
        self.model = replace(self.model, program=self._with_words(numbers, kept, heads))
        net = self._net(list(dict.fromkeys(names)), device)
        optimizer = torch.optim.AdamW(
            self._groups(net), lr=self.options.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        if resume:
            checkpoint.restore(optimizer, net.trained, net.parameters, heads, moments)
            net.renew()
        pool = self._taught(self._teaching(net), numbers, kept, start)
        self.reader = pool.teacher.reader = None  # which may be large, too
        self.progress(FitState("first step", 0.0))  # which may take minutes
        self.started = time.perf_counter()
        while not self._used_up(state):
            self._step(net, optimizer, pool, state)
        if not state.step:
            self._leave_nothing(pool)
        self._save(net, optimizer, state)
        pool.remove()
        trained = replace(self.model, program=net.trained_program(self.drafts))
        accepted = accepted_per_step(trained, self.held_out, told=self.progress)
        last = state.losses[-1] if state.losses else math.nan
        own = self._own_text(trained) if is_approximate(trained.program) else None
        return Fitted(trained, state.step, last, tuple(state.hits), accepted, own)

    def _own_text(self, trained: Model) -> OwnText:
        """How much of the target's own text is kept."""
        prompts = held_out_prompts(trained, self.held_out)
        return own_text_kept(trained.executable, prompts, room(trained, prompts[0]))

    def _learning(self, parts: list[Record]) -> list[Record]:
        """Those of a plan's records that learn."""
        return [part for part in parts if trainable(self.model.program, part)]

    def _net(self, names: list[str], device: torch.device) -> Net:
        """What is trained. names: weights that were inserted."""
        return Net(self.model.program, names, device)

    def _teaching(self, net: Net) -> Net:
        """What teaches: the target, which stays as it is."""
        return net

    def _groups(self, net: Net) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters; `slower`: by how much than the rate."""
        return [{"params": net.parameters}]

    def _leave_nothing(self, pool: TeacherCache) -> NoReturn:
        """Refuse to write untrained weights."""
        pool.remove()
        with suppress(OSError):  # not empty, or missing
            self.out.rmdir()
        raise InputError(
            f"no step was made in minutes={self.options.minutes}, steps={self.options.steps}: "
            f"nothing is written; give it more"
        )

    # -- data

    def _documents(self, data: Prompts | torch.Tensor | None) -> list[list[int]]:
        if data is not None:
            return read_corpus(data, self.model.program)
        info = self.writer.program.info
        starts = torch.full((16, 1), info.bos if info.bos is not None else 0)
        write = partial(undrafted, self.writer)
        made = own_text(write, starts, min(256, info.context), 1.0, self.options.seed)
        return made.tolist()

    def _written(self) -> tuple[list[int], Kept]:
        """Numbers of files of windows, and the files, written within their share of the budget."""
        options, rows = self.options, self._rows
        author = Author(self.writer, self.windows, options.own, options.temperature, options.seed)
        made: dict[str, Any] = {"window": self.windows.width, "own": options.own, "rows": rows}
        made |= {"temperature": options.temperature, "seed": options.seed}
        made |= {"target": trained_on(self.model.program), "writer": self.writer.recipe}
        digest = hashlib.sha256(self.windows.stream.numpy().tobytes()).hexdigest()
        folder = (self.lessons or self.out) / FOLDER
        kept = Kept(folder, sorted(made.items(), key=str), digest, shared=bool(self.lessons))
        wanted, limit = math.inf, math.inf
        if options.steps is not None:
            wanted = math.ceil(options.steps * options.batch / (options.passes * rows))
        if options.minutes is not None:
            limit = WRITING * PREPARING * 60 * options.minutes
        numbers: list[int] = []
        spent = 0.0  # also what others spent on files that are there
        self.progress(FitState("writing text", 0.0))
        while len(numbers) < wanted and spent < limit:
            number = len(numbers) * self.processes.count + self.processes.rank
            if not kept.valid(_name(number)):
                start = time.perf_counter()
                tokens, firsts = author.write(number, rows)
                took = torch.tensor([time.perf_counter() - start])
                kept.write(_name(number), {"tokens": tokens, "firsts": firsts, SECONDS: took})
            spent += float(kept.read(_name(number))[SECONDS])
            numbers.append(number)
            share = max(len(numbers) / wanted, min(1, spent / limit))
            self.progress(FitState("writing text", share))
        return numbers, kept

    @property
    def _rows(self) -> int:
        """Windows per file."""
        minutes = self.options.minutes
        return SAMPLED * LARGER if minutes is not None and minutes >= LONG else SAMPLED

    def _with_words(self, numbers: list[int], kept: Kept, heads: Tensors) -> Program:
        """The program with draft vocabularies: those of a checkpoint, or the tokens that are most
        frequent in the user's text and in what was written."""
        program = self.model.program
        if heads:
            old = [Weight.of(name, heads[name]) for name in self.chosen]
            return program.replace(weights=program.weights.replacing(*old))
        if not self.chosen:
            return program
        # Several processes write texts of their own, and all must choose the same tokens.
        mine = numbers if self.processes.count == 1 else []
        written = [kept.read(_name(number))["tokens"].flatten() for number in mine]
        text = torch.cat([self.windows.stream, *written])
        return chosen_by(program, torch.bincount(text, minlength=program.info.vocab_size))

    def _taught(self, net: Net, numbers: list[int], kept: Kept, start: float) -> TeacherCache:
        """The windows with the teacher's activations, as many as there is time for."""
        minutes = self.options.minutes
        limit = math.inf if minutes is None else PREPARING * 60 * minutes
        reader, shared = self.reader, self.lessons is not None
        form = None if reader is None else reader.recipe
        teacher = Teacher(net, None if reader is None else (reader.program, reader.target))
        folder, seed = self.lessons or self.out, self.options.seed
        pool = TeacherCache(folder, teacher, kept.mark, form, seed=seed, shared=shared)
        for count, number in enumerate(numbers):
            spent = time.perf_counter() - start
            if count and spent > limit and not pool.has(number):
                break

            def windows(name: str = _name(number)) -> tuple[torch.Tensor, torch.Tensor]:
                read = kept.read(name)
                return read["tokens"], read["firsts"]

            self.progress(FitState("preparing", count / len(numbers)))
            pool.add(number, windows)
        pool.held = HELD if pool.count >= 2 * SAMPLED * LARGER else 0
        return pool

    # -- steps

    def _step(
        self,
        net: Net,
        optimizer: torch.optim.Optimizer,
        pool: TeacherCache,
        state: checkpoint.Progress,
    ) -> None:
        start = time.perf_counter()
        windows = pool.batch(state.step, self.options.batch)
        tokens = windows.tokens
        factor = rate_factor(self._share(state), state.step, 10, 0.05)
        for group in optimizer.param_groups:
            group["lr"] = self.options.rate * factor / group.get("slower", 1.0)
        optimizer.zero_grad(set_to_none=True)
        piece = self._piece(tokens)
        loss, hits = 0.0, [0.0]
        for first in range(0, len(tokens), piece):
            part = slice(first, first + piece)
            share = len(tokens[part]) / len(tokens)
            states = {name: value[part].to(net.device) for name, value in windows.states.items()}
            given = CachedWindows(tokens[part].to(net.device), windows.firsts[part], states)
            with torch.autocast(net.device.type, torch.bfloat16, enabled=self.options.half):
                result = self._loss(net, pool.teacher, given)
            (result.total * share).backward()
            loss += float(result.total.detach()) * share
            hits = result.hits
        net.collect()
        self.processes.average(net.parameters)
        check_loss(loss, state.step, self.out, self.options.rate)
        torch.nn.utils.clip_grad_norm_(net.parameters, self.options.clip)
        optimizer.step()
        net.renew()
        state.step += 1
        state.seconds += time.perf_counter() - start
        state.losses.append(loss)
        state.hits = hits
        self._measure(net, pool)
        told = self._share(state), state.step, loss, tuple(hits)
        rate = state.step / state.seconds if state.seconds else math.nan
        self.progress(FitState("training", *told, rate, self.accepted))
        if state.step % self.options.save_every == 0:
            self._save(net, optimizer, state)

    def _measure(self, net: Net, pool: TeacherCache) -> None:
        """What held-out windows promise, now and then."""
        now = time.perf_counter()
        if not pool.held or now < self.measured + MEASURED:
            return
        with torch.no_grad():
            hits = self._loss(net, pool.teacher, pool.held_out()).hits
        self.accepted = 1 + sum(math.prod(hits[: depth + 1]) for depth in range(len(hits)))
        self.measured = time.perf_counter()

    def _piece(self, tokens: torch.Tensor) -> int:
        known = [self.model.program.weights[name].type.dims[0] for name in self.chosen]
        words = max(map(int, map(str, known))) if known else self.model.program.info.vocab_size
        return max(1, min(len(tokens), TEACHER_BYTES // (tokens.shape[1] * words * 4)))

    def _loss(self, net: Net, teacher: Teacher, windows: CachedWindows) -> Loss:
        """See `total_loss`."""
        return total_loss(net, teacher, self.drafts, self.model.program.plan, windows)

    def _share(self, state: checkpoint.Progress) -> float:
        return self.options.used(state.step, time.perf_counter() - self.started)

    def _used_up(self, state: checkpoint.Progress) -> bool:
        """Whether to stop; the same in all processes."""
        return self.processes.any(self._share(state) >= 1.0)

    # -- checkpoints

    def _fresh(self) -> checkpoint.Progress:
        if (self.out / checkpoint.STATE).exists():
            raise InputError(
                f"{self.out} holds a checkpoint already: resume from it, or choose another folder"
            )
        return checkpoint.Progress(
            options=asdict(self.options), target=trained_on(self.model.program)
        )

    def _restored(self, names: list[str]) -> tuple[checkpoint.Progress, Tensors, Tensors]:
        """A checkpoint's progress, weights and optimizer state. names: of what is trained."""
        state, heads, moments = checkpoint.read(self.out)
        if state.target != trained_on(self.model.program):
            raise InputError(f"{self.out} belongs to another model than {self.model.program.name}")
        if missing := sorted({*names, *self.chosen} ^ set(heads)):
            raise InputError(
                f"{self.out} belongs to another recipe: {missing[0]} is in one of them only"
            )
        return state, heads, moments

    def _save(self, net: Net, optimizer: torch.optim.Optimizer, state: checkpoint.Progress) -> None:
        if self.processes.rank:
            return
        moments = checkpoint.moments(optimizer, net.trained, net.parameters)
        names = [*net.trained, *self.chosen]
        heads = {name: net.tensors[name].detach() for name in names}
        checkpoint.write(self.out, state, heads, moments)


def _name(number: int) -> str:
    return f"text.{number:06d}"


def accepted_per_step(
    model: Model,
    documents: list[list[int]],
    count: int = 8,
    told: Report = lambda state: None,
) -> float:
    """Tokens per step of greedy continuations of held-out text, 64 tokens each, of whole drafts:
    whether they pay is another question. told: is called as this goes on."""
    told(FitState("opening the trained model", 0.0))
    prompts, plan = held_out_prompts(model, documents, count), model.program.plan
    whole = Planned(model.executable, replace(plan, length=plan.length.steady))
    tokens, steps = 0, 0
    for number, prompt in enumerate(prompts):
        told(FitState("measuring", number / len(prompts)))
        stats = continued(whole, prompt, room(model, prompt)).stats
        tokens, steps = tokens + stats.decoded_tokens, steps + stats.sequence_steps
    return tokens / max(steps, 1)


def held_out_prompts(model: Model, documents: list[list[int]], count: int = 8) -> list[list[int]]:
    """Prompts from held-out text."""
    width = min(128, model.program.info.context // 2)
    stream = [token for document in documents for token in document]
    starts = range(0, max(1, min(len(stream) - width, count * width)), width)
    return [stream[start : start + width] for start in starts]


def room(model: Model, prompt: list[int]) -> int:
    """Number of new tokens for a prompt."""
    return min(64, model.program.info.context - len(prompt))
