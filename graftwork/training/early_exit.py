"""Training of a target for early exit (`layerskip`).

Unlike `fit`, this changes the target's weights. The result is a new checkpoint folder, and the
held-out loss at every depth before and after.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
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
from .budget import Budget, check_loss, rate_factor
from .fit import FitState, Report
from .layerskip import ExitTrainer, LayerSkip

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE = "training"
"""Folder of the training state, inside the checkpoint's."""

MEASURED = 16
"""Held-out windows for losses."""

WARM_UP = 50
"""Steps of learning rate warm-up."""


@dataclass(frozen=True)
class ExitOptions(Budget):
    """Options of `train_exits`, besides the budget.

    batch: windows per step. window: tokens per window. rate: peak learning rate of AdamW, after a
    warm-up, then along a cosine. decay: weight decay of matrices. clip: maximum norm of gradients.
    save_every: steps between checkpoints. half: matrix products in bfloat16; weights stay float32.
    device: cpu or cuda.
    """

    batch: int = 4
    window: int = 256
    rate: float = 1e-4
    decay: float = 0.0
    clip: float = 1.0
    save_every: int = 100
    half: bool = False
    device: str = "cpu"
    positive = ("batch", "window", "rate", "clip", "save_every")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay < 0:
            raise InputError(f"decay={self.decay}: expected at least 0")
        if self.device != "cpu" and not (self.device == "cuda" and torch.cuda.is_available()):
            raise InputError(f"device={self.device}: expected cpu, or cuda where there is a GPU")


@dataclass(frozen=True)
class ExitsTrained:
    """Result of `train_exits`. folder: the checkpoint. before, after: held-out loss in nats per
    token after 1, 2, ... layers; the last is the model's."""

    folder: Path
    steps: int
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def rise(self) -> float:
        """Increase of the whole model's held-out loss, in nats per token."""
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
    """Train all weights of a model with LayerSkip's objective and write a checkpoint folder.

    model: a transformers model, or its folder, whose tokenizer is copied. data: see `read_corpus`;
    every tenth document is held out. objective: default `LayerSkip()`. resume: continue from the
    state in `out`. options: `ExitOptions`. The folder is complete after every checkpoint.

    Errors: `InputError` for bad options or data, a folder with other contents, and a loss that is
    not finite (the last checkpoint is kept).
    """
    chosen, wanted = ExitOptions(**options), objective or LayerSkip()

    def make(program: Program, names: set[str], device: torch.device) -> ExitTrainer:
        return ExitTrainer(program, wanted, names, device)

    run = Training(model, data, plain_path("out", out), chosen, make, asdict(wanted))
    before, after, steps = run.run(resume, progress)
    return ExitsTrained(run.out, steps, before, after)


def check_folder(model: Path) -> None:
    """Errors: `InputError` for a file, whose weights cannot be trained."""
    if not model.is_dir():
        raise InputError(
            f"{model}: expected a checkpoint folder as transformers writes it; weights of few "
            f"bits, such as a .gguf's, cannot take small steps"
        )


class Training:
    """A run that trains a transformers model's weights. make: the trainer of its program and the
    names of its parameters. mark: what a resumed run must agree on."""

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        data: Prompts | torch.Tensor,
        out: Path,
        options: ExitOptions,
        make: Callable[[Program, set[str], torch.device], ExitTrainer],
        mark: Mapping[str, Any],
    ) -> None:
        self.out, self.options = out, options
        self.source: Path | None = None
        if isinstance(model, (str, Path)):
            self.source = plain_path("model", model)
            check_folder(self.source)
            model = load_model(self.source)
        self.model: PreTrainedModel = model
        # The folder's program has its tokenizer.
        program = import_model(self.source or self.model, dtype=torch.float32)
        names = {name for name, _ in self.model.named_parameters()}
        self.trainer = make(program, names, torch.device(options.device))
        if not self.trainer.net.trained:
            raise InputError(f"{program.name}: none of its weights are floats that can be trained")
        self.mark = {**mark, "layers": self.trainer.layers, "program": program.name}
        train, kept = split(read_corpus(data, program))
        width = min(options.window, program.info.context - 1) + 1
        self.windows = Windows(train, width, options.seed)
        self.kept = Windows(kept, width, options.seed)(0, MEASURED)

    def run(self, resume: bool, progress: Report) -> tuple[list[float], list[float], int]:
        """Train, save and measure: the trainer's losses before and after, and the steps."""
        if not resume and self.out.exists() and any(self.out.iterdir()):
            raise InputError(f"{self.out} is not empty: choose another folder, or resume")
        optimizer = self._optimizer()
        state = self._restored(optimizer) if resume else checkpoint.Progress()
        state.options = {**asdict(self.options), **self.mark}
        before = self.trainer.losses(self.kept) if not resume else list(state.hits)
        state.hits = before  # kept for resumed runs
        start = time.perf_counter() - state.seconds
        while (share := self.options.used(state.step, time.perf_counter() - start)) < 1.0:
            loss = self._step(optimizer, state.step, share)
            state.step += 1
            state.seconds = time.perf_counter() - start
            progress(FitState("training", share, state.step, loss))
            if state.step % self.options.save_every == 0:
                self._save(optimizer, state)
        self._save(optimizer, state)
        return before, self.trainer.losses(self.kept), state.step

    def _optimizer(self) -> torch.optim.Optimizer:
        tensors = self.trainer.net.parameters
        groups = [
            {"params": [p for p in tensors if p.dim() > 1], "weight_decay": self.options.decay},
            {"params": [p for p in tensors if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.options.rate, betas=(0.9, 0.95), fused=True)

    def _step(self, optimizer: torch.optim.Optimizer, step: int, share: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = self.options.rate * rate_factor(share, step, WARM_UP, 0.02)
        windows = self.windows(step, self.options.batch)
        with torch.autocast(self.trainer.device.type, torch.bfloat16, enabled=self.options.half):
            loss = self.trainer.loss(windows, step, share, self.options.seed).total
        value = float(loss.detach())
        check_loss(value, step, self.out, self.options.rate)
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
        checkpoint.restore(optimizer, net.trained, net.parameters, weights, moments)
        return state

    def _save(self, optimizer: torch.optim.Optimizer, state: checkpoint.Progress) -> None:
        """Write the checkpoint folder and the training state, file by file atomically."""
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
        """Copy the trained weights into the model."""
        held = dict(self.model.named_parameters())
        for name, tensor in self.trainer.weights().items():
            held[name].copy_(tensor)
