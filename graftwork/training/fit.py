"""Fit what was grafted onto a program: the target stays as it is and teaches.

Self-distillation: the target says what it makes of windows of text, and steps move the inserted
weights towards it. The text is the user's, continued by the target itself, or the target's own
altogether, because drafts are judged on text that the target writes. Each window is used a few
times, and the target's side of it is worked out once (`teacher_cache`).
"""

from __future__ import annotations

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
from ..data.prompts import Prompts, check_seed, refuse_sources
from ..ir import InputError
from ..ir.execution.executable import Planned
from ..ir.plan import Chain, FixedLength, NoDraft
from ..ir.support.files import plain_path
from ..measuring.agreement import OwnText, is_approximate
from ..measuring.agreement import own_text as own_text_kept
from ..passes.drafting.trained import trained_on
from ..runtime.asking.options import BEST
from ..runtime.generate import Generated, generate
from . import checkpoint
from .net import Net, check_chains, chosen, trainable, trained_parts
from .objectives.base import Batch, Loss, objective_of
from .processes import Processes
from .teacher_cache import CachedWindows, Teacher, TeacherCache

if TYPE_CHECKING:
    from ..model import Model

TEACHER_BYTES = 256 << 20
"""Teacher logits held at once: a batch is taken in pieces that need no more."""

MOST_SEED = 2**32 - 1
"""Windows and samples are numbered from it."""

SAMPLED = 16
"""Windows that the target is asked about, and continues, at once."""

PREPARING = 0.5
"""Time for preparing windows, as a share of the training's; each is then used about five times
where the inserted weights cost as much as half of the target."""


@dataclass(frozen=True)
class FitOptions:
    """How to train.

    minutes: wall time of the steps; preparing windows for them comes before, and takes half as long
    at most, but for the first sixteen windows. steps: optimizer steps. At least one of the two;
    training ends with the first that is used up. batch: windows a step. window: tokens each.
    passes: how often a window is used where steps are given. own: share of the windows that the
    target continues itself; temperature: at which (0: its best tokens). rate: peak learning rate of
    AdamW, after a warm-up of ten steps and then along a cosine. save_every: steps between
    checkpoints. seed: decides every window, sample and order.
    """

    minutes: float | None = None
    steps: int | None = None
    batch: int = 4
    window: int = 512
    passes: int = 4
    own: float = 0.75
    temperature: float = 0.0
    rate: float = 1e-3
    clip: float = 1.0
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_budget(self, ("batch", "window", "passes", "rate", "clip", "save_every"))
        if not 0 <= self.own <= 1 or self.temperature < 0:
            raise InputError(
                f"own={self.own}, temperature={self.temperature}: expected own in 0..1 and a "
                f"temperature of at least 0"
            )


def check_budget(options: Any, positive: tuple[str, ...]) -> None:
    """That options say how long to train, in positive numbers. Errors: `InputError`."""
    if options.minutes is None and options.steps is None:
        raise InputError("say how long to train: minutes=, steps=, or both")
    for name in ("minutes", "steps", *positive):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"{name}={value}: expected a positive number")
    check_seed(options.seed, MOST_SEED)


@dataclass(frozen=True)
class FitState:
    """What progress reports show. share: of the time or steps, 0..1. hits: accuracy by level."""

    phase: str
    share: float
    step: int = 0
    loss: float = math.nan
    hits: tuple[float, ...] = ()


Report = Callable[[FitState], None]


@dataclass(frozen=True)
class Fitted:
    """What training made. model: with the trained weights. steps, loss: the last step's number and
    loss. hits: accuracy of each level's best candidate. accepted_per_step: tokens a step yields on
    held-out text, greedy, the bonus token included. own_text: of an approximate model, how much of
    the target's own continuations of that text it keeps."""

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
    progress: Report = lambda state: None,
    **options: Any,
) -> Fitted:
    """Train the inserted weights of a model's drafters, and measure them on text kept apart.

    data: see `read_corpus`; None: text that the model makes from its first token. out: folder for
    checkpoints; its heads.safetensors is what draft passes take as `weights`. resume: go on from
    the checkpoint there. options: `FitOptions`. Runs on all processes under torchrun (gloo on CPU,
    NCCL on GPU): each takes its own windows, gradients are averaged, the first one saves.

    Errors: `InputError` for bad options or data, a checkpoint of another model, or a loss that is
    not finite (the last good checkpoint stays); `UnsupportedError` if nothing can be trained.
    """
    return _Fit(model, data, plain_path("out", out), FitOptions(**options), progress).run(resume)


class _Fit:
    def __init__(
        self,
        model: Model,
        data: Prompts | torch.Tensor | None,
        out: Path,
        options: FitOptions,
        progress: Report,
    ) -> None:
        self.model, self.out, self.options, self.progress = model, out, options, progress
        refuse_sources(model.program)
        parts = trained_parts(model.program.plan)
        self.drafts = [part for part in parts if trainable(model.program, part)]
        if not self.drafts:
            objective_of(model.program.plan.draft)  # which says what can be trained
            raise InputError(f"{model.program.name} has no inserted weights to train")
        check_chains(model.program)
        self.chosen = [name for draft in self.drafts for name in chosen(model.program, draft)]
        self.objectives = [objective_of(draft) for draft in self.drafts]
        self.processes = Processes.join(model.target.device)
        documents = self._documents(data)
        self.train, self.held_out = split(documents)
        width = min(options.window, model.program.info.context)
        self.windows = Windows(self.train, width, options.seed)

    def run(self, resume: bool) -> Fitted:
        """Prepare windows, train, measure."""
        program = self.model.program
        device = torch.device(self.model.target.device)
        names = [name for draft in self.drafts for name in trainable(program, draft)]
        net = Net(program, list(dict.fromkeys(names)), device)
        optimizer = torch.optim.AdamW(
            net.parameters, lr=self.options.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        state = self._restored(net, optimizer) if resume else self._fresh()
        pool = self._prepared(net, state)
        self.started = time.perf_counter()
        while not self._used_up(state):
            self._step(net, optimizer, pool, state)
        if not state.step:
            self._leave_nothing(pool)
        self._save(net, optimizer, state)
        pool.remove()
        trained = replace(self.model, program=net.trained_program(self.drafts))
        self.progress(FitState("measuring", 1.0, state.step))
        accepted = accepted_per_step(trained, self.held_out)
        last = state.losses[-1] if state.losses else math.nan
        own = None
        if is_approximate(program):
            prompts = held_out_prompts(trained, self.held_out)
            own = own_text_kept(trained.executable, prompts, _room(trained, prompts[0]))
        return Fitted(trained, state.step, last, tuple(state.hits), accepted, own)

    def _leave_nothing(self, pool: TeacherCache) -> NoReturn:
        """Nothing was trained: weights that know nothing are not written."""
        pool.remove()
        with suppress(OSError):  # others' files, or no folder
            self.out.rmdir()
        raise InputError(
            f"no step was made in minutes={self.options.minutes}, steps={self.options.steps}: "
            f"nothing is written; give it more"
        )

    # -- data

    def _documents(self, data: Prompts | torch.Tensor | None) -> list[list[int]]:
        if data is not None:
            return read_corpus(data, self.model.program)
        info = self.model.program.info
        first = info.bos if info.bos is not None else 0
        starts = torch.full((16, 1), first)
        made = own_text(self._generate, starts, min(256, info.context), 1.0, self.options.seed)
        return made.tolist()

    def _generate(self, prompts: torch.Tensor, **options: Any) -> Any:
        """The target alone, without drafts."""
        plan = replace(self.model.program.plan, draft=NoDraft(), tree=Chain(), length=FixedLength())
        return generate(Planned(self.model.executable, plan), prompts, **options)

    def _prepared(self, net: Net, state: checkpoint.Progress) -> TeacherCache:
        """Windows and what the target makes of them, within their share of the budget."""
        options = self.options
        decisive = {name: getattr(options, name) for name in ("window", "own", "temperature")}
        mark = {**decisive, "target": state.target}
        pool = TeacherCache(self.out, Teacher(net), mark, options.seed)
        wanted, limit = math.inf, math.inf
        if options.steps is not None:
            wanted = math.ceil(options.steps * options.batch / (options.passes * SAMPLED))
        if options.minutes is not None:
            limit = PREPARING * 60 * options.minutes
        count, start = 0, time.perf_counter()
        while count < wanted:
            number = count * self.processes.count + self.processes.rank
            spent = time.perf_counter() - start
            if count and spent > limit and not pool.has(number):
                break
            pool.add(number, partial(self._windows, number))
            count += 1
            self.progress(FitState("preparing", max(count / wanted, min(1.0, spent / limit))))
        return pool

    def _windows(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows i64[16,T], of which the target continues its share, and where it begins to."""
        windows, options = self.windows(number, SAMPLED), self.options
        firsts = torch.zeros(len(windows), dtype=torch.int64)
        own = round(SAMPLED * options.own)
        if not own:
            return windows, firsts
        # Prompts of many lengths: heads meet every position.
        width = windows.shape[1]
        prompts = windows[:own, : max(1, width // 8 * (2 + number % 4))]
        seed = options.seed + number
        continued = own_text(self._generate, prompts, width, options.temperature, seed)
        firsts[:own] = prompts.shape[1] - 1
        return torch.cat([continued, windows[own:]]), firsts

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
        rate = self.options.rate * self._schedule(state)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        piece = self._piece(tokens)
        loss, hits = 0.0, [0.0]
        for first in range(0, len(tokens), piece):
            part = slice(first, first + piece)
            share = len(tokens[part]) / len(tokens)
            states = {name: value[part].to(net.device) for name, value in windows.states.items()}
            given = CachedWindows(tokens[part].to(net.device), windows.firsts[part], states)
            result = self._loss(net, pool.teacher, given)
            (result.total * share).backward()
            loss += float(result.total.detach()) * share
            hits = result.hits
        self.processes.average(net.parameters)
        if not math.isfinite(loss):
            raise InputError(
                f"the loss became {loss} at step {state.step}; the last checkpoint in {self.out} "
                f"is good: resume from it with a lower rate than {self.options.rate}"
            )
        torch.nn.utils.clip_grad_norm_(net.parameters, self.options.clip)
        optimizer.step()
        state.step += 1
        state.seconds += time.perf_counter() - start
        state.losses.append(loss)
        state.hits = hits
        self.progress(FitState("training", self._share(state), state.step, loss, tuple(hits)))
        if state.step % self.options.save_every == 0:
            self._save(net, optimizer, state)

    def _piece(self, tokens: torch.Tensor) -> int:
        logits = tokens.shape[1] * self.model.program.info.vocab_size * 4
        return max(1, min(len(tokens), TEACHER_BYTES // logits))

    def _loss(self, net: Net, teacher: Teacher, windows: CachedWindows) -> Loss:
        """All drafters' losses on some windows, whose states at the target are known."""
        taps = {name: windows.states[name] for name in teacher.taps}
        logits, plan = teacher.logits(windows.states), self.model.program.plan
        firsts, parts = windows.firsts.tolist(), plan.step.parts
        batch = Batch(windows.tokens, taps, logits, plan.draft, firsts, parts)
        losses = [
            objective(draft, net.run, batch)
            for draft, objective in zip(self.drafts, self.objectives, strict=True)
        ]
        total = torch.stack([loss.total for loss in losses]).sum()
        return Loss(total, [hit for loss in losses for hit in loss.hits])

    def _share(self, state: checkpoint.Progress) -> float:
        """How much of the budget is used."""
        shares = [0.0]
        if self.options.steps is not None:
            shares.append(state.step / self.options.steps)
        if self.options.minutes is not None:
            shares.append((time.perf_counter() - self.started) / (60 * self.options.minutes))
        return max(shares)

    def _used_up(self, state: checkpoint.Progress) -> bool:
        """Whether to stop; all processes stop at the same step."""
        return self.processes.any(self._share(state) >= 1.0)

    def _schedule(self, state: checkpoint.Progress) -> float:
        share = min(self._share(state), 1.0)
        warm = min(1.0, (state.step + 1) / 10)
        return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))

    # -- checkpoints

    def _fresh(self) -> checkpoint.Progress:
        if (self.out / checkpoint.STATE).exists():
            raise InputError(
                f"{self.out} holds a checkpoint already: resume from it, or choose another folder"
            )
        return checkpoint.Progress(
            options=asdict(self.options), target=trained_on(self.model.program)
        )

    def _restored(self, net: Net, optimizer: torch.optim.Optimizer) -> checkpoint.Progress:
        state, heads, moments = checkpoint.read(self.out)
        if state.target != trained_on(self.model.program):
            raise InputError(f"{self.out} belongs to another model than {self.model.program.name}")
        if missing := sorted({*net.trained, *self.chosen} ^ set(heads)):
            raise InputError(
                f"{self.out} belongs to another recipe: {missing[0]} is in one of them only"
            )
        with torch.no_grad():
            for name in net.trained:
                net.tensors[name].copy_(heads[name])
        checkpoint.restore_moments(optimizer, net.trained, net.parameters, moments)
        return state

    def _save(self, net: Net, optimizer: torch.optim.Optimizer, state: checkpoint.Progress) -> None:
        if self.processes.rank:
            return
        moments = checkpoint.moments(optimizer, net.trained, net.parameters)
        names = [*net.trained, *self.chosen]
        heads = {name: net.tensors[name].detach() for name in names}
        checkpoint.write(self.out, state, heads, moments)


def accepted_per_step(model: Model, documents: list[list[int]], count: int = 8) -> float:
    """Tokens a step on continuations of held-out text, 64 tokens each, greedy."""
    steps = decoded = 0
    for tokens in held_out_prompts(model, documents, count):
        ids = torch.tensor([tokens])
        result = generate(
            model.executable,
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_room(model, tokens),
            eos_token_id=[],
            return_dict_in_generate=True,
            **BEST,
        )
        assert isinstance(result, Generated)
        steps += result.stats.sequence_steps
        decoded += result.stats.decoded_tokens
    return decoded / max(steps, 1)


def held_out_prompts(model: Model, documents: list[list[int]], count: int = 8) -> list[list[int]]:
    """What of held-out text is continued to measure a model."""
    width = min(128, model.program.info.context // 2)
    stream = [token for document in documents for token in document]
    starts = range(0, max(1, min(len(stream) - width, count * width)), width)
    return [stream[start : start + width] for start in starts]


def _room(model: Model, prompt: list[int]) -> int:
    """Tokens that a prompt is continued by."""
    return min(64, model.program.info.context - len(prompt))
