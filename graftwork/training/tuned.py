"""Training of a target together with its drafters, where that is asked for (`train_target`).

The original model writes the text and is the teacher; the pass `tune_target` has put adapters of
low rank into its weights, W + 2 B A, which are trained with the drafters' own weights:

    loss = toward + drafts * (the drafters' own loss, of the tuned target's states)

toward: mean over positions t of KL(original[t] || tuned[t]), or the cross entropy of the text, or
nothing. In the first part of the budget (`warm`) the drafters are trained alone, since untrained
heads would pull the target anywhere; the adapters' learning rate is lower. Source: Cai et al.,
"Medusa" (2024): joint training (Medusa-2), heads' warm-up, and self-distillation of a target that
is tuned.

Weights that follow from adapters are leaves of the graph that is differentiated, whatever passes
have made of them since (merged projections, other layouts); their gradients are then handed on to
the adapters through the calls that compute them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..data.cost import cost_of
from ..data.prompts import Prompts
from ..ir import InputError, Program, Weight, WeightStore
from ..ir.execution.executable import Planned
from ..ir.plan import Record
from ..ir.support.files import plain_path
from ..ir.support.scratch import write_text
from ..measuring.agreement import OwnText, continued, plain_plan
from ..passes.drafting.target_change import MEASURED, Changed, digest_of, told_of
from ..passes.drafting.trained import ADAPTER, adapters_of
from ..passes.drafting.tune_target import TuneTarget, tuning_of, untuned
from ..passes.engine.evidence import TextSample
from . import checkpoint
from .fit import Fit, FitOptions, FitState, Fitted, Report, held_out_prompts, room
from .losses import joined
from .net import Net
from .objectives.base import Batch, Loss, Run
from .teacher_cache import CachedWindows, Teacher

if TYPE_CHECKING:
    from ..model import Model

LEAST_HELD_OUT = 64
"""Tokens of held-out text without which a change cannot be measured."""

MEASURED_WINDOWS = TextSample(16, 128)
"""Of held-out text, on which the change is measured."""


@dataclass(frozen=True)
class Tuned(Fitted):
    """Result of `train_target`: see `Fitted`. change: of the target, on held-out text."""

    change: Changed | None = None


def train_target(
    model: Model,
    data: Prompts | torch.Tensor | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    writer: Model | None = None,
    lessons: str | Path | None = None,
    progress: Report = lambda state: None,
    **options: Any,
) -> Tuned:
    """Train a model's target and its drafters together, and measure both on held-out text.

    model: of a recipe with the pass `tune_target`, whose options say how. The others are those of
    `fit`; writer: the original model in another form. `out` gets heads.safetensors, with adapters
    and heads, which `tune_target.weights` and the draft passes' `weights` take, and tuned.json,
    which says by how much the target has changed. Errors: as `fit`; `InputError` for a recipe that
    does not tune, a program whose tuned weights are in few bits, and data that does not fill a
    window.
    """
    kept = None if lessons is None else plain_path("lessons", lessons)
    chosen = FitOptions(**options)
    tuning = Tuning(model, data, plain_path("out", out), chosen, progress, writer, None, kept)
    return tuning.run(resume)


class TunedNet(Net):
    """Runs a program whose target is trained through adapters. frozen: the adapters do not learn
    yet."""

    def __init__(self, program: Program, trained: list[str], device: torch.device) -> None:
        self.adapters = list(adapters_of(program))
        # A drafter's copy of a layer is trained itself, and follows the target's no more.
        tuned = (name for name, weight in program.weights.items() if _follows(weight))
        self.made = [name for name in tuned if name not in trained]
        super().__init__(program, [*trained, *self.made], device)
        for name, weight in adapters_of(program).items():
            self.tensors[name] = torch.nn.Parameter(weight.load().to(device, torch.float32))
        self.heads = trained
        self.trained = [*trained, *self.adapters]
        self.fixed: dict[int, torch.Tensor] = {}
        self.frozen = False

    def freeze(self, frozen: bool) -> None:
        """Whether adapters stay as they are."""
        self.frozen = frozen
        for name in self.made:
            self.tensors[name].requires_grad_(not frozen)

    def collect(self) -> None:
        """See `Net.collect`."""
        for name in self.made:
            slope = self.tensors[name].grad
            if slope is not None:
                made = self._computed(self.whole.weights[name])
                torch.autograd.backward(made, slope.to(made.dtype))
                self.tensors[name].grad = None

    @torch.no_grad()
    def renew(self) -> None:
        """See `Net.renew`."""
        if self.frozen:
            return
        for name in self.made:
            self.tensors[name].copy_(self._computed(self.whole.weights[name]))

    def inner(self, weights: WeightStore) -> WeightStore:
        """See `Net.inner`."""
        types = {name: weight.type for name, weight in adapters_of(self.whole).items()}
        given = [
            Weight.of(name, self.tensors[name].detach().to("cpu", type.dtype, copy=True))
            for name, type in types.items()
        ]
        return weights.renewed(*given)

    def trained_program(self, drafts: Any) -> Program:
        """See `Net.trained_program`."""
        held, self.trained = self.trained, self.heads
        try:
            return super().trained_program(drafts)
        finally:
            self.trained = held

    def _computed(self, weight: Weight) -> torch.Tensor:
        """A weight as a differentiable function of the adapters."""
        if weight.name in self.tensors and weight.name.startswith(ADAPTER):
            return self.tensors[weight.name]
        if not _follows(weight):
            # Named weights may be several: a tuned one is computed from one of its own name.
            if id(weight) not in self.fixed:
                self.fixed[id(weight)] = weight.load().to(self.device)
            return self.fixed[id(weight)]
        made: torch.Tensor = weight.made(*map(self._computed, weight.inputs))
        return made


def _check_floats(program: Program) -> None:
    """Errors: `InputError` for a weight that adapters change, and that is stored in few bits."""
    made = (weight for weight in program.weights.values() if _follows(weight))
    few = [weight.name for weight in made if not weight.type.dtype.is_floating_point]
    if few:
        raise InputError(
            f"{program.name}: the recipe stores {few[0]} in few bits, which cannot take small "
            f"steps: tune the recipe without quantization, and quantize with what comes out"
        )


def _follows(weight: Weight) -> bool:
    """Whether a weight is computed from adapters."""
    return any(part.name.startswith(ADAPTER) or _follows(part) for part in weight.inputs)


class Tuning(Fit):
    """A run of `train_target`: see the module."""

    def __init__(self, model: Model, *args: Any) -> None:
        tuning = tuning_of(model.program)
        if tuning is None or not adapters_of(model.program):
            raise InputError(
                f"{model.program.name}: expected a recipe with the pass tune_target, made from "
                f"the model itself, such as medusa2; for others train the heads alone (graftwork "
                f"train, graftwork.fit)"
            )
        if model.target.dtype != torch.float32:
            raise InputError(
                f"tuning on {model.target}: expected a target of float32, whose weights take small "
                f"steps, such as {model.target.backend}:{model.target.device}:float32"
            )
        _check_floats(model.program)
        self.how: TuneTarget = tuning
        if tuning.weights:  # what was tuned before: the original writes and teaches
            data, out, options, progress, writer, reader, kept = args
            writer = writer or replace(model, program=untuned(model.program))
            args = (data, out, options, progress, writer, reader, kept)
        super().__init__(model, *args)
        held = sum(map(len, self.held_out))
        text = sum(map(len, self.train))
        width = min(self.options.window, model.program.info.context)
        if text < width or held < LEAST_HELD_OUT:
            raise InputError(
                f"data: {text} tokens to train on and {held} held out: expected at least a window "
                f"of {width} (window={self.options.window}) and {LEAST_HELD_OUT}, a tenth being "
                f"held out: give more text, or a window of less"
            )

    def run(self, resume: bool) -> Tuned:
        """Train, and measure the change."""
        original = replace(self.model, program=untuned(self.model.program))
        fitted = super().run(resume)
        self.progress(FitState("measuring the change", 0.0))
        cost = cost_of(fitted.model, original, self.held_out, sample=MEASURED_WINDOWS)
        figures = cost.model_dump(include={"tokens", "divergence", "ratio", "error", "agreement"})
        change = Changed(**figures)
        if not self.processes.rank:  # which wrote the weights
            change = Changed(**figures, sha256=digest_of(self.out / checkpoint.HEADS))
            write_text(self.out / MEASURED, change.model_dump_json(indent=1))
        model = _telling(fitted.model, change)
        model.tell(cost)
        return Tuned(**{**vars(fitted), "model": model, "change": change})

    def _own_text(self, trained: Model) -> OwnText:
        """How much of the original's own text is kept."""
        original = replace(trained, program=untuned(trained.program)).executable
        plain = Planned(original, plain_plan(original.program.plan))
        prompts = held_out_prompts(trained, self.held_out)
        pairs = []
        for prompt in prompts:
            made = [
                continued(one, prompt, room(trained, prompt)) for one in (plain, trained.executable)
            ]
            own, got = (each.sequences[0, len(prompt) :].tolist() for each in made)
            pairs.append((own, got))
        return OwnText.of(pairs)

    def _learning(self, parts: list[Record]) -> list[Record]:
        """All: what has no weights of its own is learned by the target."""
        return parts

    def _net(self, names: list[str], device: torch.device) -> Net:
        return TunedNet(self.model.program, names, device)

    def _teaching(self, net: Net) -> Net:
        """The original, whatever the adapters say by now."""
        return Net(untuned(self.model.program), [], net.device)

    def _restored(
        self, names: list[str]
    ) -> tuple[checkpoint.Progress, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return super()._restored([*names, *adapters_of(self.model.program)])

    def _groups(self, net: Net) -> list[dict[str, Any]]:
        assert isinstance(net, TunedNet)
        heads = [net.tensors[name] for name in net.heads]
        adapters = [net.tensors[name] for name in net.adapters]
        groups = [{"params": adapters, "slower": self.how.slower if heads else 1.0}]
        return [{"params": heads}, *groups] if heads else groups

    def _step(self, net: Any, optimizer: Any, pool: Any, state: checkpoint.Progress) -> None:
        net.freeze(bool(net.heads) and self._share(state) < self.how.warm)
        super()._step(net, optimizer, pool, state)

    def _loss(self, net: Net, teacher: Teacher, windows: CachedWindows) -> Loss:
        """See the module. Windows hold what the original says; drafters read the tuned states."""
        assert isinstance(net, TunedNet)
        alone = net.frozen or not torch.is_grad_enabled()
        apart = self.how.toward == "nothing" and not (teacher.taps or teacher.shared)
        with torch.set_grad_enabled(not (alone or apart)):
            live = net.run(None, tokens=windows.tokens)
        drafted = self._drafted(
            net, net.sharing({n: live[n] for n in teacher.shared}), windows, live
        )
        if alone:
            return drafted
        total = drafted.total * (1.0 if self.how.toward == "nothing" else self.how.drafts)
        if self.how.toward == "text":
            said, wanted = live["logits"][:, :-1], windows.tokens[:, 1:]
            total = total + F.cross_entropy(said.flatten(0, 1).float(), wanted.flatten())
        elif self.how.toward == "target":
            total = total + divergence(live["logits"], teacher.logits(windows.states))
        return Loss(total, drafted.hits)

    def _drafted(
        self, net: Net, run: Run, windows: CachedWindows, live: dict[str, torch.Tensor]
    ) -> Loss:
        """The sum of the drafters' losses. What verifies them teaches: the target as it is now."""
        plan, logits = self.model.program.plan, live["logits"].detach()
        taps = {name: value for name, value in live.items() if name.split(".")[0] == "hidden"}
        losses = []
        for draft, objective in zip(self.drafts, self.objectives, strict=True):
            known = net.known_of(draft)
            batch = Batch(
                windows.tokens,
                taps,
                logits if known is None else logits[..., known],
                plan.draft,
                windows.firsts.tolist(),
                plan.step.parts,
                known,
                logits.argmax(-1),
            )
            losses.append(objective(draft, run, batch))
        return joined(losses)


def _telling(model: Model, change: Changed) -> Model:
    """The model with a report that says by how much its target has changed."""
    report = model.report
    if report is None:
        return model
    told = {"remarks": (told_of(change),)}
    lines = [
        line.model_copy(update=told) if line.name == TuneTarget.name else line
        for line in report.passes
    ]
    return replace(model, report=report.model_copy(update={"passes": tuple(lines)}))


def divergence(said: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Mean over positions of KL(original || said), nats a token, of logits f[N,T,V] each.

    >>> import math
    >>> zero, half = torch.zeros(1, 1, 2), torch.tensor([[[0.0, math.log(3)]]])
    >>> round(float(divergence(half, zero)), 4)  # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75)
    0.1438
    """
    told, wanted = said.float().log_softmax(-1), original.float().log_softmax(-1)
    total = F.kl_div(told, wanted, reduction="sum", log_target=True)
    return total / said.shape[:2].numel()
