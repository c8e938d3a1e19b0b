"""Masked (absorbing-state) discrete diffusion drafts several tokens in a few denoising steps.

Sources: Christopher et al., "Speculative Diffusion Decoding: Accelerating Language Generation
through Diffusion" (2024); the schedule and the ancestral sampler: Sahoo et al., "Simple and
Effective Masked Diffusion Language Models" (MDLM, 2024); unmasking by confidence: Nie et al.,
"Large Language Diffusion Models" (LLaDA, 2025).

A draft of N tokens begins as N masks. Each of T steps predicts all of them at once and replaces
some masks by tokens, which the next step sees; the last replaces what is left. With MDLM's
log-linear schedule alpha_t = 1 - t and steps at t = T/T .. 1/T a mask becomes a token with
probability (alpha_s - alpha_t) / (1 - alpha_t) = 1 / (steps left).

What a token was drawn from, q, is what its place was predicted to hold in the step in which it
became a token. Tokens may become known before others that precede them, and these look at them.
So, given the text up to its place, such a token no longer has the distribution q, and verifying it
with min(1, p / q) would not be lossless: of two places that p gives a or b alike, if the second is
drawn evenly and the first then copies it, the text is "aa" with 3/8, where p says 1/4. Where
sampled drafts are drawn by the noise that draws the text (`Lossless`), the text does not depend on
them. Where they are verified by rejection, the tree draws the tokens that are verified anew, each
from its q and independently of each other given all of the q; that is lossless, and those that the
denoising drew stay its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from pydantic import Field

from ....ir import UnsupportedError
from ....ir.plan import record
from ....ir.plan.bounds import MOST_NODES, Filled, Levels
from ....ir.support.errors import InputError
from ....runtime.speculate.committed import CommittedRows
from ....runtime.speculate.draft_cache import Flags
from ....runtime.speculate.level import Ids, Level, Scores
from ....runtime.speculate.noise import DraftNoise
from ....runtime.speculate.proposers.base import PROPOSERS, ByDepth
from ....runtime.speculate.proposers.hidden import level_of
from ....runtime.speculate.setting import Setting
from ....runtime.speculate.trees.base import chances_of
from ..parallel import OneCallDraft, OneCallProposer

Order: TypeAlias = Literal["confidence", "ancestral"]
"""Which masks a step replaces: those whose best token is likeliest, equally many a step; or each
with the schedule's probability."""

PIECE = 32
"""Columns by which calls with a window of the text grow."""


@record
@dataclass(frozen=True)
class DiffusionDraft(OneCallDraft):
    """A masked diffusion model that denoises `levels` tokens in `steps` calls (SpecDiff).

    The function is fed the id `token` for each place that is not known yet, behind the text; these
    places see each other. window: the last tokens of the text that are fed with them each time, and
    that see all of it, too, as models need that read both ways; 0: the text's rows are cached, and
    each sees those before it. early: whether what a place holds is predicted one place before it.
    order: which masks a step replaces: "confidence", those whose best token is likeliest, equally
    many a step; "ancestral", each with the schedule's probability.
    """

    levels: Levels = 8
    steps: Levels = 2
    order: Order = "confidence"
    window: Filled[Annotated[int, Field(ge=0, le=MOST_NODES)]] = 0
    early: Filled[bool] = False
    kind: ClassVar[str] = "diffusion"

    def check(self) -> None:
        super().check()
        if self.steps > self.levels:
            raise InputError(
                f"draft={self.kind}: steps={self.steps} is more than levels={self.levels}: each "
                f"step makes a token known at least; give as many steps as tokens at most"
            )
        if 0 < self.window < self.levels:
            raise InputError(
                f"draft={self.kind}: window={self.window} is shorter than the levels={self.levels} "
                f"that are drafted behind it; give a longer window, or draft less"
            )

    @property
    def mutual(self) -> tuple[str, ...]:
        return (self.function,)


class RecentText(CommittedRows):
    """Texts of which no rows are kept: the last tokens are fed each time."""

    def _pending(self, least: int) -> bool:
        return False


@PROPOSERS.register(DiffusionDraft)
class DiffusionProposer(OneCallProposer):
    """Denoises a block a draft, and tells by depth what its tokens were drawn from. See the module
    docstring.

    window: tokens of the text that are fed. random: what the draft is denoised by where no noise of
    the text's is; the text does not depend on it.
    """

    record: DiffusionDraft
    mutual = True
    window = 0

    def __init__(self, record: DiffusionDraft, setting: Setting) -> None:
        self.ahead = record.levels
        super().__init__(record, setting)
        if record.window:
            limit = self.committed.limit
            self.committed = self.follower = RecentText(
                self.executable, self.function, None, limit=limit, ahead=self.ahead
            )
            self.window = self._fitting(record.window)
        noise, texts = setting.noise, setting.texts
        self.noise = None if noise is None else DraftNoise(noise, texts)
        self.random = np.random.default_rng(0)

    def _fitting(self, window: int) -> int:
        """The window, or as much of it as one call takes beside a block. Errors:
        `UnsupportedError` where that is nothing."""
        widths = self.committed.cache.widths
        most = window if widths.more else min(window, widths.each[-1] - self.record.levels)
        if most < 1:
            raise UnsupportedError(
                f"draft={self.record.brief}: calls take {widths.each[-1]} tokens at most, and the "
                f"block has {self.record.levels}: draft less, or allow wider steps"
            )
        return most

    def root(self, count: int) -> Level:
        block = self.riders()
        masked = np.ones(block.shape, dtype=np.bool_)
        said = self._first(block)
        for left in range(self.record.steps, 1, -1):
            known = unmasked(self.record.order, masked, said.scores[:, :, 0], left, self.random)
            if not known.any():
                continue  # nothing has changed that a step would see
            block = np.where(known, self._drawn(said, known), block)
            masked &= ~known
            if not masked.any():
                break
            said = replaced(said, self._again(block), masked)
        self.said = said
        self.said.tokens[self.committed.lacking] = -1
        return ByDepth.root(self, count)

    def riders(self) -> Ids:
        """All masks."""
        shape = len(self.committed.texts), self.record.levels
        return np.full(shape, self.record.token, dtype=np.int64)

    def _first(self, block: Ids) -> Level:
        """What is said of each place of the first block, after the text was brought up."""
        if self.record.window:
            return self._again(block)
        return _said(self.committed.catch_up(block), 1)

    def _again(self, block: Ids) -> Level:
        """What is said of each place of a block i64[B,N], behind the text as it is."""
        if self.record.window:
            return self._beside(block)
        committed, (batch, size) = self.committed, block.shape
        past = [
            rows if alive else 0
            for rows, alive in zip(committed.rows, committed.alive, strict=True)
        ]
        columns = np.broadcast_to(np.arange(size), (batch, size))
        positions = np.minimum(np.array(past)[:, None] + columns, committed.limit - 1)
        seen = np.ones((batch, size, size), dtype=np.bool_)
        return _said(committed.cache.run(block, positions, past, columns, None, seen))

    def _beside(self, block: Ids) -> Level:
        """The same, with the text's last tokens in one call, in which all see all."""
        batch, size = block.shape
        texts = [text[-self.window :] for text in self.committed.texts]
        tokens, seen, ends = beside(texts, block, self._columns(max(map(len, texts)) + size))
        columns = np.arange(tokens.shape[1])
        # What is behind a block has no place: a model has no more positions than the window needs.
        positions = np.where(columns < ends[:, None] + size, columns, 0)
        select = ends[:, None] + np.arange(size) - int(self.record.early)
        past = [0] * batch
        self.committed.fresh = ends > 0
        run = self.committed.cache.run
        return _said(run(tokens, positions, past, select.clip(min=0), None, seen))

    def _columns(self, count: int) -> int:
        """Columns of a call for so many tokens: few numbers, because what a call of a new one needs
        is made and kept."""
        widths, rounded = self.committed.cache.widths, -(-count // PIECE) * PIECE
        return rounded if widths.more else min(rounded, widths.each[-1])

    def _drawn(self, said: Level, known: Flags) -> Ids:
        """A token i64[B,N] for each known place; elsewhere the likeliest."""
        tokens = said.tokens[:, :, 0].copy()
        if not self.options.do_sample:
            return tokens
        for place in np.flatnonzero(known.any(0)).tolist():
            rows = np.flatnonzero(known[:, place])
            chances = chances_of(said, (rows, place), self.options)
            if self.noise is not None:
                drawn = self.noise.best(chances, rows.tolist(), place + 1, 1)[:, 0]
            else:
                points = self.random.random(len(rows)).tolist()
                drawn = np.array([chances.token(row, at) for row, at in enumerate(points)])
            tokens[rows, place] = np.where(drawn < 0, tokens[rows, place], drawn)
        return tokens


def unmasked(
    order: Order, masked: Flags, confidence: Scores, left: int, random: np.random.Generator
) -> Flags:
    """bool[B,N], which masks become tokens in a step. masked: bool[B,N]. confidence: f[B,N], of the
    best token. left: steps, this one included: the last replaces all.

    >>> masked, sure = np.array([[True, True, False, True]]), np.array([[0.2, 0.9, 1.0, 0.5]])
    >>> unmasked("confidence", masked, sure, 2, np.random.default_rng(0)).tolist()
    [[False, True, False, True]]
    """
    if order == "ancestral":
        return masked & (random.random(masked.shape) * left < 1)
    counts = -(-masked.sum(1) // left)
    # Of equals the first: a draft is right from its beginning on.
    ranked = np.argsort(np.where(masked, -confidence, np.inf), axis=1, kind="stable")
    found = np.zeros(masked.shape, dtype=np.bool_)
    np.put_along_axis(found, ranked, np.arange(masked.shape[1]) < counts[:, None], 1)
    return found & masked


def beside(texts: Sequence[Sequence[int]], block: Ids, width: int) -> tuple[Ids, Flags, Ids]:
    """Texts with a block i64[B,N] behind each: tokens i64[B,W], W = width, what each column sees
    bool[B,W,W], and where the blocks begin i64[B]. What is behind a block sees itself alone."""
    ends = np.array([len(text) for text in texts], dtype=np.int64)
    size = block.shape[1]
    tokens = np.zeros((len(texts), width), dtype=np.int64)
    seen = np.broadcast_to(np.eye(width, dtype=np.bool_), (len(texts), width, width)).copy()
    for index, (text, end) in enumerate(zip(texts, ends.tolist(), strict=True)):
        tokens[index, :end], tokens[index, end : end + size] = text, block[index]
        seen[index, : end + size, : end + size] = True
    return tokens, seen, ends


def replaced(old: Level, new: Level, masked: Flags) -> Level:
    """What was said of known places, and what is said now of those that are still masked."""
    assert old.logits is not None and new.logits is not None
    chosen = masked[:, :, None]
    return Level(
        np.where(chosen, new.tokens, old.tokens),
        np.where(chosen, new.scores, old.scores),
        np.where(chosen, new.logits, old.logits),
    )


def _said(outputs: dict[str, torch.Tensor], first: int = 0) -> Level:
    """What is said of each place of a block, whose columns begin at `first`."""
    said = level_of(outputs, outputs["draft_tokens"].shape[-1])
    assert said.logits is not None
    # A copy: outputs live until the next run.
    return Level(said.tokens[:, first:], said.scores[:, first:], said.logits[:, first:].copy())
