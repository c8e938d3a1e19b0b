"""Train a model of the user's own so that its first layers can speak for it (`layerskip`).

Everywhere else graftwork leaves the target as it is; here it is the target that learns, so what
comes out is another model: a checkpoint folder, beside the loss on text kept apart at every depth,
before and after.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data.corpus import Windows, read_corpus, split
from ..data.prompts import Prompts
from ..frontends import import_model
from ..frontends.huggingface.model import load_model
from ..ir import InputError, Program
from ..ir.support.files import plain_path, writing
from . import checkpoint
from .fit import FitState, Report, check_budget
from .layerskip import ExitTrainer, LayerSkip

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE = "training"
"""The folder, inside the checkpoint's, that says where training stands."""

MEASURED = 16
"""Windows of text kept apart that losses are measured on."""

WARM_UP = 50
"""Steps over which the rate rises."""


@dataclass(frozen=True)
class ExitOptions:
    """How to train.

    minutes: wall time of the steps. steps: optimizer steps. At least one of the two; training ends
    with the first that is used up. batch: windows a step. window: tokens each. rate: peak learning
    rate of AdamW, after a warm-up and then along a cosine; decay: its weight decay, of matrices.
    save_every: steps between checkpoints. seed: decides every window and every dropped layer. half:
    products in bfloat16, where the processor is faster with it; weights stay in float32. device:
    cpu, or cuda where there is a GPU.
    """

    minutes: float | None = None
    steps: int | None = None
    batch: int = 4
    window: int = 256
    rate: float = 1e-4
    decay: float = 0.0
    clip: float = 1.0
    save_every: int = 100
    seed: int = 0
    half: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_budget(self, ("batch", "window", "rate", "clip", "save_every"))
        if self.decay < 0:
            raise InputError(f"decay={self.decay}: expected at least 0")
        if self.device != "cpu" and not (self.device == "cuda" and torch.cuda.is_available()):
            raise InputError(f"device={self.device}: expected cpu, or cuda where there is a GPU")


@dataclass(frozen=True)
class ExitsTrained:
    """What training made. folder: the checkpoint. steps: taken. before, after: held-out loss in
    nats a token through the head after 1, 2, ... layers; the last is the model's own."""

    folder: Path
    steps: int
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def rise(self) -> float:
        """By how much the model's own held-out loss is higher than it was, nats a token."""
        return self.after[-1] - self.before[-1]


def train_exits(
    model: PreTrainedModel | str | Path,
    data: Prompts | torch.Tensor,
    *,
    out: str | Path,
    objective: LayerSkip | None = None,
    resume: bool = False,
    progress: Report = lambda state: None,
    **options: Any,
) -> ExitsTrained:
    """Train all weights of a model with LayerSkip's objective, and write it to a checkpoint folder.

    model: of transformers, or its folder, whose tokenizer goes along. data: see `read_corpus`;
    every tenth document is kept apart. objective: `LayerSkip()` unless said. resume: go on from the
    state in `out`. options: `ExitOptions`. The folder is whole after every checkpoint, so that it
    can be used while training goes on.

    Errors: `InputError` for bad options or data, a folder that holds something else, and a loss
    that is not finite (the last checkpoint stays).
    """
    chosen = ExitOptions(**options)
    return _Training(model, data, plain_path("out", out), objective or LayerSkip(), chosen).run(
        resume, progress
    )


class _Training:
    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        data: Prompts | torch.Tensor,
        out: Path,
        objective: LayerSkip,
        options: ExitOptions,
    ) -> None:
        self.out, self.options = out, options
        self.source: Path | None = None
        if isinstance(model, (str, Path)):
            self.source = plain_path("model", model)
            model = _opened(self.source)
        self.model: PreTrainedModel = model
        # Of a folder the program has the tokenizer, too.
        program = _traced(self.source or self.model)
        names = {name for name, _ in self.model.named_parameters()}
        self.trainer = ExitTrainer(program, objective, names, torch.device(options.device))
        self.mark = {**asdict(objective), "layers": self.trainer.layers, "program": program.name}
        train, kept = split(read_corpus(data, program))
        width = min(options.window, program.info.context - 1) + 1
        self.windows = Windows(train, width, options.seed)
        self.kept = Windows(kept, width, options.seed)(0, MEASURED)

    def run(self, resume: bool, progress: Report) -> ExitsTrained:
        """Train, saving on the way, and measure."""
        if not resume and self.out.exists() and any(self.out.iterdir()):
            raise InputError(f"{self.out} is not empty: choose another folder, or resume")
        optimizer = self._optimizer()
        state = self._restored(optimizer) if resume else checkpoint.Progress()
        state.options = {**asdict(self.options), **self.mark}
        before = self.trainer.losses(self.kept) if not resume else list(state.hits)
        state.hits = before  # what was measured first is kept for whoever goes on
        start = time.perf_counter() - state.seconds
        while (share := self._share(state.step, time.perf_counter() - start)) < 1.0:
            loss = self._step(optimizer, state.step, share)
            state.step += 1
            state.seconds = time.perf_counter() - start
            progress(FitState("training", share, state.step, loss))
            if state.step % self.options.save_every == 0:
                self._save(optimizer, state)
        self._save(optimizer, state)
        return ExitsTrained(self.out, state.step, before, self.trainer.losses(self.kept))

    def _share(self, step: int, seconds: float) -> float:
        """How much of the budget is used."""
        of_steps = 0.0 if self.options.steps is None else step / self.options.steps
        of_time = 0.0 if self.options.minutes is None else seconds / (60 * self.options.minutes)
        return max(of_steps, of_time)

    def _optimizer(self) -> torch.optim.Optimizer:
        tensors = self.trainer.net.parameters
        groups = [
            {"params": [p for p in tensors if p.dim() > 1], "weight_decay": self.options.decay},
            {"params": [p for p in tensors if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.options.rate, betas=(0.9, 0.95), fused=True)

    def _step(self, optimizer: torch.optim.Optimizer, step: int, share: float) -> float:
        rising = min(1.0, (step + 1) / WARM_UP)
        falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = self.options.rate * rising * falling
        windows = self.windows(step, self.options.batch)
        with torch.autocast(self.trainer.device.type, torch.bfloat16, enabled=self.options.half):
            loss = self.trainer.loss(windows, step, share, self.options.seed).total
        value = float(loss.detach())
        if not math.isfinite(value):
            raise InputError(
                f"the loss became {value} at step {step}; the last checkpoint in {self.out} is "
                f"good: go on from it with a lower rate than {self.options.rate}"
            )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.trainer.net.parameters, self.options.clip)
        optimizer.step()
        return value

    # -- checkpoints

    def _restored(self, optimizer: torch.optim.Optimizer) -> checkpoint.Progress:
        state, weights, moments = checkpoint.read(self.out / STATE)
        net = self.trainer.net
        if {name: state.options.get(name) for name in self.mark} != self.mark:
            raise InputError(
                f"{self.out / STATE} belongs to another model or objective: {state.options}; "
                f"expected {self.mark}"
            )
        with torch.no_grad():
            for name, parameter in zip(net.trained, net.parameters, strict=True):
                parameter.copy_(weights[name])
        checkpoint.restore_moments(optimizer, net.trained, net.parameters, moments)
        return state

    def _save(self, optimizer: torch.optim.Optimizer, state: checkpoint.Progress) -> None:
        """Write the checkpoint folder and the state, each file as a whole."""
        self._put_back()
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.out, prefix=".part") as part:
                self.model.save_pretrained(part)
                for path in sorted(self.source.glob("tokenizer*")) if self.source else ():
                    shutil.copyfile(path, Path(part) / path.name)
                for path in sorted(Path(part).iterdir()):
                    os.replace(path, self.out / path.name)
        net = self.trainer.net
        moments = checkpoint.moments(optimizer, net.trained, net.parameters)
        checkpoint.write(self.out / STATE, state, self.trainer.weights(), moments)

    @torch.no_grad()
    def _put_back(self) -> None:
        """The weights as they are now, into the model."""
        held = dict(self.model.named_parameters())
        for name, tensor in self.trainer.weights().items():
            held[name].copy_(tensor)


def _traced(model: PreTrainedModel | Path) -> Program:
    return import_model(model, dtype=torch.float32)


def _opened(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = load_model(folder)
    return model
