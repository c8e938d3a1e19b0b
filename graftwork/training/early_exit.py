"""Training of a target for early exit (`layerskip`).

Unlike `fit`, this changes the target's weights, or trains adapters that are merged into them. The
result is a new checkpoint folder, and the held-out loss at every depth before and after.
"""

from __future__ import annotations

import copy
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
from .adapters import Adapters, check_peft, check_weights
from .budget import Budget, check_loss, rate_factor
from .fit import FitState, Report
from .layerskip import ExitTrainer, LayerSkip
from .teacher_cache import FOLDER

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
    warm-up, then along a cosine; None: 1e-4, of adapters 1e-3. decay: weight decay of matrices.
    clip: maximum norm of gradients. save_every: steps between checkpoints. half: matrix products in
    bfloat16; weights stay float32. device: cpu or cuda. lora: the rank of adapters (see `adapters`)
    that are trained in place of all weights, and merged into what is saved; 0: none.
    """

    batch: int = 4
    window: int = 256
    rate: float | None = None
    decay: float = 0.0
    clip: float = 1.0
    save_every: int = 100
    half: bool = False
    device: str = "cpu"
    lora: int = 0
    positive = ("batch", "window", "rate", "clip", "save_every")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay < 0:
            raise InputError(f"decay={self.decay}: expected at least 0")
        if self.device != "cpu" and not (self.device == "cuda" and torch.cuda.is_available()):
            raise InputError(f"device={self.device}: expected cpu, or cuda where there is a GPU")
        if isinstance(self.lora, bool) or not isinstance(self.lora, int) or self.lora < 0:
            raise InputError(f"lora={self.lora!r}: expected a rank, such as 16, or 0 for none")
        if self.lora:
            check_peft()

    @property
    def peak(self) -> float:
        """The learning rate."""
        if self.rate is not None:
            return self.rate
        return 1e-3 if self.lora else 1e-4


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

    def make(
        program: Program, whole: Program, names: set[str], device: torch.device
    ) -> ExitTrainer:
        return ExitTrainer(program, wanted, names, device)

    run = Training(model, data, plain_path("out", out), chosen, make, asdict(wanted))
    before, after, steps = run.run(resume, progress)
    return ExitsTrained(run.out, steps, before, after)


class Training:
    """A run that trains a transformers model's weights, or adapters in it. make: the trainer of the
    program that is trained, beside the model's own, and the names of its parameters. mark: what a
    resumed run must agree on. windows: how text is cut. A model in memory is changed."""

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        data: Prompts | torch.Tensor,
        out: Path,
        options: ExitOptions,
        make: Callable[[Program, Program, set[str], torch.device], ExitTrainer],
        mark: Mapping[str, Any],
        windows: type[Windows] = Windows,
    ) -> None:
        self.out, self.options = out, options
        self.source: Path | None = None
        if isinstance(model, (str, Path)):
            self.source = plain_path("model", model)
            check_weights(self.source)
            model = load_model(self.source)
        check_weights(model)
        self.model: PreTrainedModel = model
        # The folder's program has its tokenizer.
        program = trained = import_model(self.source or self.model, dtype=torch.float32)
        names = {name for name, _ in self.model.named_parameters()}
        self.adapters: Adapters | None = None
        if options.lora:
            # A model in memory does not get any.
            own = self.model if self.source else copy.deepcopy(self.model)
            self.adapters = Adapters(own, options.lora, options.seed)
            trained = import_model(self.adapters.model, dtype=torch.float32)
            names, mark = self.adapters.names, {**mark, "lora": options.lora}
        self.trainer = make(trained, program, names, torch.device(options.device))
        if not self.trainer.net.trained:
            raise InputError(f"{program.name}: none of its weights are floats that can be trained")
        self.mark = {**mark, "layers": self.trainer.layers, "program": program.name}
        train, kept = split(read_corpus(data, program))
        width = min(options.window, program.info.context - 1) + 1
        self.windows = windows(train, width, options.seed)
        self.kept = Windows(kept, width, options.seed)(0, MEASURED)

    def run(self, resume: bool, progress: Report) -> tuple[list[float], list[float], int]:
        """Train, save and measure: the trainer's losses before and after, and the steps."""
        others = (path for path in self._held() if path.name != FOLDER)
        if not resume and any(others):
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

    def _held(self) -> list[Path]:
        """What the folder holds already."""
        return list(self.out.iterdir()) if self.out.exists() else []

    def _optimizer(self) -> torch.optim.Optimizer:
        tensors = self.trainer.net.parameters
        groups = [
            {"params": [p for p in tensors if p.dim() > 1], "weight_decay": self.options.decay},
            {"params": [p for p in tensors if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.options.peak, betas=(0.9, 0.95), fused=True)

    def _step(self, optimizer: torch.optim.Optimizer, step: int, share: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = self.options.peak * rate_factor(share, step, WARM_UP, 0.02)
        windows = self.windows(step, self.options.batch)
        with torch.autocast(self.trainer.device.type, torch.bfloat16, enabled=self.options.half):
            loss = self.trainer.loss(windows, step, share, self.options.seed).total
        value = float(loss.detach())
        check_loss(value, step, self.out, self.options.peak)
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
        model = self._with_weights()
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.out, prefix=".part") as part:
                model.save_pretrained(part)
                for path in sorted(self.source.glob("tokenizer*")) if self.source else ():
                    shutil.copyfile(path, Path(part) / path.name)
                for path in sorted(Path(part).iterdir()):
                    os.replace(path, self.out / path.name)
        net = self.trainer.net
        moments = checkpoint.moments(optimizer, net.trained, net.parameters)
        checkpoint.write(self.out / STATE, state, self.trainer.weights(), moments)

    @torch.no_grad()
    def _with_weights(self) -> PreTrainedModel:
        """The model with the trained weights."""
        if self.adapters is not None:
            merged: PreTrainedModel = self.adapters.merged(self.trainer.weights())
            return merged
        held = dict(self.model.named_parameters())
        for name, tensor in self.trainer.weights().items():
            held[name].copy_(tensor)
        return self.model
