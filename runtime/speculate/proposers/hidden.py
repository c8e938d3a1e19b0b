"""Proposers that start from the target's hidden state after a sequence's last committed token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....ir.execution.executable import HeldCall
from ...feeding.draft import VerifiedStep
from ...feeding.step_inputs import strange_ids
from ..last_state import LastState
from ..level import Ids, Level
from ..setting import Setting
from .base import Proposer


class HiddenProposer(Proposer):
    """Starts from `last`: each text's last token, and the hidden state it was chosen from."""

    wants = ("hidden",)

    def __init__(self, record: Any, setting: Setting) -> None:
        super().__init__(record, setting)
        self.last = LastState("hidden", 0)
        self._held: dict[str, HeldCall] = {}

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.last = LastState("hidden", len(prompts))
        self._held.clear()

    def root(self, count: int) -> Level:
        return self.start(*self.last.get(), count)

    @abstractmethod
    def start(self, tokens: torch.Tensor, states: torch.Tensor, count: int) -> Level:
        """What may follow tokens i64[B,M] that were chosen from states [B,M,H]: a new draft. With
        `DraftRecord.whole_path` i64[B,M,S] and [B,M,S,H], step by step."""

    def observe(self, taken: VerifiedStep) -> None:
        super().observe(taken)
        self.last.observe(taken)

    def run(self, function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """All outputs of a function of the program."""
        fetch = tuple(self.executable.program.function(function).outputs)
        if not all(map(self.last.owns, inputs.values())):
            return self.executable.run(function, inputs, fetch)
        # The same tensors come with every draft.
        call = self._held.get(function)
        if call is None:
            call = self._held[function] = self.executable.hold(function, inputs, fetch)
        return call()


def level_of(outputs: Mapping[str, torch.Tensor], count: int, place: int | None = None) -> Level:
    """The candidates in a draft function's outputs; place: of a head, in dim 2. Errors:
    `InputError` for ids outside the vocabulary."""
    named = [outputs[name] for name in ("draft_tokens", "draft_scores", "draft_logits")]
    tokens, scores, logits = named if place is None else [value[:, :, place] for value in named]
    # Copies: outputs live until the next run.
    ids, vocabulary = tokens[..., :count].cpu().numpy().copy(), logits.shape[-1]
    if ids.size and int(ids.view(np.uint64).max()) >= vocabulary:
        raise strange_ids(ids.reshape(-1).tolist(), vocabulary)
    odds = outputs.get("draft_odds")
    return Level(
        ids,
        scores[..., :count].float().cpu().numpy().copy(),
        logits.float().cpu().numpy(),
        None if odds is None else odds.float().cpu().numpy().copy(),
    )


def best_of(logits: torch.Tensor, count: int) -> Level:
    """The candidates of logits f32[B,M,V], which nothing may write to any more."""
    best = logits.log_softmax(-1).topk(count)
    return Level(best.indices.numpy(), best.values.numpy(), logits.numpy())


def taken_at(level: Level, places: Ids) -> Level:
    """The candidates at places i64[B,N] of a level."""
    index = places[..., None]
    tokens = np.take_along_axis(level.tokens, index, 1)
    scores = np.take_along_axis(level.scores, index, 1)
    logits = None if level.logits is None else np.take_along_axis(level.logits, index, 1)
    return Level(tokens, scores, logits)
