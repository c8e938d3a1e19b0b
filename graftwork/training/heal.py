"""Training of a target that runs fewer layers to say what all of them said (`heal`).

The whole model is the teacher. The student is the same model with each token running through the
layers that the recipe gives it: a set (skip_layers), or ever fewer along the text (depth_linear,
depth_decay). What a token leaves out changes its residual stream by nothing, as in decoding:

    x[l+1] = x[l] + kept[t, l] f[l](x[l])        loss = mean over t of KL(teacher[t] || student[t])

Where prompts run through all layers, a random part of each window does, 1 to half of its tokens,
and the loss is that of the others. What the teacher's logits follow from is computed once for each
window, whichever layers are left out. Papers fine-tune on text instead: Liu et al., "Accelerating
Inference in Large Language Models with a Unified Layer Skipping Strategy" (2024), a model for each
speed-up; Del Corro et al., "SkipDecode" (2023).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from ..data.corpus import Tiles, read_corpus, split
from ..data.prompts import Prompts
from ..ir import InputError, Program
from ..ir.execution.analysis import blocks_of
from ..ir.plan import Prefilled
from ..ir.support.files import plain_path
from ..optimizing import trace
from ..passes.depth.budget import DecayBudget, LinearBudget, chosen
from ..recipe import Recipe
from .adapters import check_weights
from .early_exit import ExitOptions, Training
from .fit import FitState, Report
from .layerskip import ExitTrainer, LayerSkip, Losses
from .net import Net
from .teacher_cache import FOLDER, Lessons, Teacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEALED = ("skip_layers", "depth_linear", "depth_decay")
"""Passes whose recipes leave out layers that the text does not choose."""


class Held(NamedTuple):
    """On held-out windows: mean KL(whole || shortened) in nats a token, and the shortened model's
    perplexity over the whole one's."""

    divergence: float
    ratio: float


@dataclass(frozen=True)
class Healed:
    """Result of `heal`. folder: the checkpoint. before, after: of the shortened model; the whole
    one is that before training. recipe: with its options set, for that folder."""

    folder: Path
    steps: int
    before: Held
    after: Held
    recipe: Recipe


@dataclass(frozen=True)
class Kept:
    """The layers that tokens run through. at: of L layers and a place behind the prompt, the
    numbers of those that stay. whole: prompts run through all."""

    at: Callable[[int], frozenset[int]]
    whole: bool

    def mask(self, width: int, prompt: int, layers: int) -> torch.Tensor:
        """f32[width,layers], 1 where a token runs through a layer. prompt: tokens of it."""
        made = torch.zeros(width, layers)
        every = frozenset(range(layers))
        for place in range(width):
            through = every if self.whole and place < prompt else self.at(max(place - prompt, 0))
            made[place, sorted(through)] = 1.0
        return made


def heals(recipe: Recipe) -> bool:
    """Whether `heal` trains for a recipe."""
    return any(use.name in HEALED for use in recipe.passes)


def heal(
    model: PreTrainedModel | str | Path,
    recipe: str | Path | Recipe,
    data: Prompts | torch.Tensor,
    *,
    out: str | Path,
    resume: bool = False,
    lessons: str | Path | None = None,
    progress: Report = lambda state: None,
    **options: Any,
) -> Healed:
    """Train a model's weights to write with a recipe's layers what it writes with all of them, and
    write a checkpoint folder.

    model: a transformers model, or its folder, whose tokenizer is copied. recipe: that leaves
    layers out (skip_layers, unified_skipping, skipdecode, d3), as its options say; the folder is
    good for those options alone. data: see `read_corpus`; every tenth document is held out.
    resume: continue from the state in `out`. lessons: a folder where what the whole model said is
    kept for other runs on these texts; None: for this run, in `out`. options: `ExitOptions`;
    lora=16 trains adapters of that rank and merges them. The folder is complete after every
    checkpoint, and a model in memory stays as it is.

    Errors: `InputError` for a recipe that leaves out no layer or that a text decides, weights of
    few bits, bad options or data, a folder with other contents, and a loss that is not finite (the
    last checkpoint is kept).
    """
    wanted = replace(Recipe.load(recipe), knob=None)
    if not heals(wanted):
        raise InputError(
            f"recipe {wanted.name!r} leaves out no layers that training could make up for; "
            f"expected one with {', '.join(HEALED)}"
        )
    chosen_options = ExitOptions(**options)
    place = plain_path("out", out)
    kept_in = None if lessons is None else plain_path("lessons", lessons)
    check_weights(plain_path("model", model) if isinstance(model, (str, Path)) else model)
    progress(FitState("trace", 0.0))
    whole = trace(model, target="eager")
    texts = read_corpus(data, whole)
    _check_length(texts, chosen_options.window, whole.info.context)
    kept, said, wanted = kept_layers(model, wanted, whole)

    def make(
        program: Program, whole: Program, names: set[str], device: torch.device
    ) -> HealTrainer:
        teacher = Teacher(Net(whole, [], device))
        learnt = Lessons(kept_in or place / FOLDER, teacher, [chosen_options.half])
        return HealTrainer(program, kept, names, device, learnt.logits)

    if not isinstance(model, (str, Path)):
        model = copy.deepcopy(model)  # the teacher's weights are its own
    run = Training(model, texts, place, chosen_options, make, {"heals": said}, Tiles)
    before, after, steps = run.run(resume, progress)
    if kept_in is None:
        shutil.rmtree(place / FOLDER, ignore_errors=True)
    return Healed(run.out, steps, Held(*before), Held(*after), wanted)


def _check_length(texts: Sequence[list[int]], window: int, context: int) -> None:
    """Errors: `InputError` for texts that do not fill a window."""
    train, _ = split(texts)
    tokens, width = sum(map(len, train)), min(window, context - 1) + 1
    if tokens < width:
        raise InputError(
            f"data: {tokens} tokens are left to train on, a tenth being held out, and a window "
            f"takes {width}: give more text, or a window of less (window={window})"
        )


def kept_layers(model: Any, recipe: Recipe, program: Program) -> tuple[Kept, str, Recipe]:
    """The layers that stay, in words, too; and the recipe, in which those that a text chose are
    named: the healed model would miss others. program: the model's, as traced. Errors: `InputError`
    if all stay, or one in part."""
    whole = sorted(blocks_of(program.step))
    short = trace(model, recipe, target="eager")
    plan = short.plan
    if isinstance(plan.depth, (LinearBudget, DecayBudget)):
        record, (*parts, _) = plan.depth, plan.step.parts
        sizes = [len(blocks_of(short.function(part))) for part in parts]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]

        def at(place: int) -> frozenset[int]:
            run = chosen(sizes, record.layers(place, len(whole)))
            return frozenset(starts[i] + n for i in run for n in range(sizes[i]))

        return Kept(at, whole=True), record.brief, recipe
    stay = sorted(blocks_of(short.step))
    parted = any(use.options.get(name) for use in recipe.passes for name in ("attention", "mlp"))
    if stay == whole or parted:
        raise InputError(
            f"recipe {recipe.name!r} leaves out no whole layer of {len(whole)}: set "
            f"skip_layers.layers, count or speedup"
        )
    if any(use.options.get("count") for use in recipe.passes if use.name == "skip_layers"):
        gone = [layer for layer in whole if layer not in stay]
        recipe = recipe.with_options([f"skip_layers.layers={gone}", "skip_layers.count=0"])
    kept = frozenset(whole.index(layer) for layer in stay)
    return Kept(lambda place: kept, isinstance(plan.step, Prefilled)), f"layers {stay}", recipe


class HealTrainer(ExitTrainer):
    """See the module. parameters: names of trained weights. teacher: logits f[N,T,V] of tokens
    i64[N,T]."""

    def __init__(
        self,
        program: Program,
        kept: Kept,
        parameters: set[str],
        device: torch.device,
        teacher: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(program, LayerSkip(), parameters, device)
        self.kept, self.teacher = kept, teacher

    def loss(self, tokens: torch.Tensor, step: int, share: float, seed: int) -> Losses:
        """The loss on windows of text i64[N,T]."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        most = max(tokens.shape[1] // 2, 1)
        prompt = int(torch.randint(1, most + 1, (), generator=generator)) if self.kept.whole else 0
        said, wanted = self._both(tokens[:, :-1], prompt)
        divergence = F.kl_div(said, wanted, reduction="sum", log_target=True)
        return Losses(divergence / said.shape[:2].numel(), {})

    @torch.no_grad()
    def losses(self, tokens: torch.Tensor) -> list[float]:
        """`Held` of windows i64[N,T], each read behind a prompt of one token."""
        divergence, worse = 0.0, 0.0
        prompt = int(self.kept.whole)
        for window in tokens.split(1):
            said, wanted = self._both(window[:, :-1], prompt)
            divergence += float(F.kl_div(said, wanted, reduction="sum", log_target=True))
            next_ = window[:, 1 + max(prompt - 1, 0) :, None].to(self.device)
            worse += float((wanted.gather(2, next_) - said.gather(2, next_)).sum())
        count = len(tokens) * said.shape[1]
        return [divergence / count, float(torch.tensor(worse / count).exp())]

    def _both(self, tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities of the shortened and of the whole model, from the prompt's last token
        on."""
        mask = self.kept.mask(tokens.shape[1], prompt, self.layers)
        last = self.layers - 1
        state = self._states(tokens, mask[None].expand(len(tokens), -1, -1), (last,))[last]
        behind = slice(max(prompt - 1, 0), None)
        made = self.net.outputs(self.head, ("logits",), {"hidden": state[:, behind]})["logits"]
        with torch.no_grad():
            wanted = self.teacher(tokens)[:, behind]
        return made.float().log_softmax(-1), wanted.float().log_softmax(-1)
