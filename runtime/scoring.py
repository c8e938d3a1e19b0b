"""The logits of whole texts, by the path that generates.

Nothing is drafted, sampled or kept. The first tokens are read as prompts are; the others run as
decode steps do: as deep as the depth policy says, over caches that lose rows. So the perplexity of
a text is the recipe's, not that of the model it was made from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..ir import InputError, Program, TensorType, UnsupportedError
from ..ir.execution.executable import Executable, fact
from ..ir.plan.inputs import chain_inputs
from .asking.input_ids import check_ids
from .asking.text import Text
from .cache.base import CACHES
from .cache.conversations import Conversations
from .depth.base import StepFeed, policy_of
from .feeding.draft import UnverifiedStep
from .feeding.feed import Feeder

LOGITS = ("logits",)

READ = 2 << 30
"""Bytes that what is as wide as the vocabulary may take while a piece is read."""

COPIES = 4
"""How often the widest of that is there at once: as it was made, and in what is made of it."""


@torch.no_grad()
def score(executable: Executable, input_ids: torch.Tensor, prompt: int = 1) -> torch.Tensor:
    """Logits f32[B,S,V] of what follows each token of texts i64[B,S] of one length.

    prompt: how many first tokens count as the prompt, where the recipe runs prompts otherwise than
    what it generates: through all layers, or, where the first layers predict their rows, without
    logits but the last one's (the others are NaN). What depends on how long a text is to become
    depends on S. Texts whose tokens may leave early run each alone, since a batch leaves together.
    The caches are free afterwards. Of several threads one runs at a time, the others wait. Errors:
    `InputError` for ids of another type or shape or outside the vocabulary, for a prompt that is no
    number in 1..S, and for texts longer than the context; `UnsupportedError` for a program without
    a cache.
    """
    _check(executable, input_ids)
    ids, length = input_ids.cpu(), input_ids.shape[1]
    if isinstance(prompt, bool) or not isinstance(prompt, int) or not 1 <= prompt <= length:
        raise InputError(f"prompt: expected a number of tokens in 1..{length}, got {prompt!r}")
    with executable.turn:
        Conversations.of(executable).clear_buffers(executable)
        alone = ids.split(1) if executable.program.plan.depth.acts else (ids,)
        return torch.cat([_Scoring(executable, some, prompt).logits() for some in alone])


@torch.no_grad()
def read(
    executable: Executable, input_ids: torch.Tensor, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Outputs of the step, each [B,S,...] by name, of every token of texts i64[B,S] of one length,
    which are read as prompts are.

    The rest as in `score`, whose errors these are.
    """
    _check(executable, input_ids)
    with executable.turn:
        Conversations.of(executable).clear_buffers(executable)
        texts = _Scoring(executable, input_ids.cpu(), 1)
        parts = texts.pieces(texts.feeder, 0, texts.length, tuple(names))
    count = len(names)
    return {name: torch.cat(parts[place::count], 1) for place, name in enumerate(names)}


def _check(executable: Executable, input_ids: torch.Tensor) -> None:
    """Errors: those of `score` about texts and programs."""
    program = executable.program
    if program.plan.source.encoder is not None:
        raise UnsupportedError(
            f"{program.name} writes from a source; scores of a text without one mean nothing. Take "
            "generate"
        )
    check_ids(input_ids, program.info)
    length = input_ids.shape[1]
    if length > program.info.context and not program.plan.cache.endless:
        raise InputError(
            f"input_ids: a text of {length} tokens, and the model's context is "
            f"{program.info.context}: score it in windows"
        )


class _Scoring:
    """Texts i64[B,S] on their way through the steps that would generate them."""

    def __init__(self, executable: Executable, ids: torch.Tensor, prompt: int) -> None:
        plan, (batch, length) = executable.program.plan, ids.shape
        self.ids, self.prompt, self.length = ids, prompt, length
        first = ids[:, :prompt].tolist()
        self.texts = [Text(tokens, prompt, length) for tokens in first]
        step = executable.program.step.name
        self.feeder = Feeder(executable, batch, step, parts=plan.step.parts)
        read = plan.step.read(argmax=False)[0]
        self.reader = self.feeder if read == step else Feeder(executable, batch, read)
        self.ahead = Feeder(executable, batch, plan.step.ahead) if plan.step.ahead else None
        self.cache = CACHES.find(plan.cache)(plan.cache, executable)
        self.depth = policy_of(executable)
        self.depth.learns = False
        most = self.cache.most
        self.widest = max(READ // (batch * fact(executable, row_bytes)), 1)
        self.feeder.begin(length if most is None else min(length, most), 0)
        for feeder in filter(None, (self.reader, self.ahead)):
            feeder.rows = self.feeder.rows
        self.depth.begin(self.feeder, self.texts)
        self.cache.begin(batch)

    def logits(self) -> torch.Tensor:
        """f32[B,S,V]."""
        if self.ahead is not None:
            self.pieces(self.ahead, 0, self.prompt - 1, ())
        known = 0 if self.ahead is None else self.prompt - 1
        parts = self.pieces(self.reader, known, self.prompt)
        if self.depth.record.acts:
            parts += [self.step(place) for place in range(self.prompt, self.length)]
        else:
            parts += self.pieces(self.feeder, self.prompt, self.length)
        found = torch.cat(parts, 1)
        return torch.nn.functional.pad(found, (0, 0, known, 0), value=math.nan)

    def pieces(
        self, feeder: Feeder, start: int, stop: int, fetch: tuple[str, ...] = LOGITS
    ) -> list[torch.Tensor]:
        """The logits of tokens start..stop, which are fed as many at once as prompts are."""
        found = []
        while start < stop:
            self.cache.settle(self.texts)
            most = self.cache.room([text.rows for text in self.texts])
            most = self.widest if most is None else min(self.widest, most)
            width = feeder.chunk(stop - start, most)
            count = min(width, most, stop - start)
            piece = self.ids[:, start : start + count]
            found += self._piece(feeder, piece, width, fetch)
            if self.depth.reads:
                starts = [start] * len(self.texts)
                self.depth.read(UnverifiedStep(piece.tolist(), starts, {}))
            for text in self.texts:
                text.grow(count)
            start += count
        return found

    def _piece(
        self, feeder: Feeder, piece: torch.Tensor, width: int, fetch: tuple[str, ...]
    ) -> list[torch.Tensor]:
        """Logits of a piece, [] if none are fetched. The step may be wider than the piece."""
        text, count = self.texts[0], piece.shape[1]
        feeder.make_room(text.rows + width)
        padded = torch.nn.functional.pad(piece, (0, width - count))
        given = chain_inputs(padded, text.rows, feeder.mixed)
        positions = given["positions"] + (text.position - text.rows)
        given["positions"] = positions.clamp(max=feeder.context - 1)
        given["certain"] = torch.full_like(given["certain"], count)
        inputs = {name: tensor for name, tensor in given.items() if name in feeder.names}
        outputs = feeder.call(inputs, fetch)
        return [_kept(outputs[name], count) for name in fetch]

    def step(self, place: int) -> torch.Tensor:
        """The logits after token `place`, of a step as deep as the depth policy says."""
        for text, row in zip(self.texts, self.ids.tolist(), strict=True):
            text.tokens.append(row[place])
        self.cache.settle(self.texts)
        past = [text.rows for text in self.texts]
        starts = [text.position for text in self.texts]
        rows = [text.tokens[-1:] for text in self.texts]
        outputs = self.depth.feed(StepFeed(rows, past, starts, LOGITS))
        for text in self.texts:
            text.grow(1)
        return _kept(outputs["logits"], 1)


def row_bytes(program: Program) -> int:
    """Bytes that what is as wide as the vocabulary takes for each token whose logits are read."""
    vocabulary = program.info.vocab_size
    rows = dict.fromkeys("BST", 1)
    types = [node.meta["type"] for node in program.step if node.op == "call_function"]
    wide = [t for t in types if isinstance(t, TensorType) and t.dims[-1:] == (vocabulary,)]
    sizes = [each.bind(rows).nbytes for each in wide]
    return COPIES * max(sizes, default=1)


def _kept(output: torch.Tensor, count: int) -> torch.Tensor:
    """A copy of the first columns, floats in float32: outputs live until the next run."""
    floats = output.float() if output.is_floating_point() else output
    return floats[:, :count].cpu().clone()


__all__ = ["read", "score"]
