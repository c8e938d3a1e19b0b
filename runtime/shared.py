"""Beginnings that several sequences of a call share: they are fed once.

A request of its own feeds them; the call's sequences then go on from it, as prompts go on from the
texts of earlier calls (`cache/conversations.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ..ir import Program
from .asking.request import Request, read_request
from .cache.conversations import common
from .rounds.base import Decoding

LEAST = 32
"""Tokens that are worth a run of their own."""


def shared_request(decoding: Decoding) -> Request | None:
    """What feeds the beginnings that some of a call's texts share; None if that saves nothing.

    Texts that occur more than once, or, where all differ, what all of them begin with. The call has
    not begun. Not of programs and drafters that must see each text from its start.
    """
    texts = [text.tokens for text in decoding.texts]
    kept, program = decoding.kept, decoding.program
    if len(texts) < 2 or kept is None or program.recurrent or decoding.drafter.reads:
        return None
    times = Counter(tuple(text) for text in texts)
    often = [list(text) for text, count in times.items() if count > 1]
    # Of a whole text all but the last token: something must be fed to say what follows.
    first, last = min(texts), max(texts)
    alike = first[: common(first, last, len(first))]
    # Where rows are held once for all, what only some texts share is each one's own.
    together = decoding.cache.shares and len(alike) > LEAST
    pieces = [text[:-1] for text in often if not together] or [alike[: len(first) - 1]]
    starts = kept.find(decoding.feeder.executable, decoding)
    known = [0 if start is None else start.count for start in starts]
    wanted = []
    for piece in (_left_off(decoding, piece) for piece in pieces):
        begun = [n for n, text in zip(known, texts, strict=True) if text[: len(piece)] == piece]
        if len(piece) >= LEAST and sum(len(piece) - n >= LEAST for n in begun) > 1:
            wanted.append(piece)
    return asking(wanted, program) if wanted else None


def _left_off(decoding: Decoding, piece: list[int]) -> list[int]:
    """A beginning that ends where texts can go on: not where rows are moved."""
    while piece and decoding.cache.back_to(len(piece), len(piece)) < len(piece):
        piece = piece[:-1]
    return piece


def asking(pieces: Sequence[list[int]], program: Program) -> Request:
    """A request that feeds texts: greedy, one token each, which is not fed."""
    width = max(map(len, pieces))
    ids = torch.zeros(len(pieces), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, piece in enumerate(pieces):
        ids[row, width - len(piece) :] = torch.tensor(piece)
        mask[row, width - len(piece) :] = 1
    asked = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    return read_request(ids, {**asked, "attention_mask": mask}, program)
