"""Texts that others are led away from: classifier-free guidance.

Sources: Sanchez et al., "Stay on topic with Classifier-Free Guidance" (2023); Li et al.,
"Contrastive Decoding" (2022), for tokens that stay plausible; Wang et al., "USCD" (2024, arXiv
2409.05923), for guiding where the text's own distribution is uncertain. A guide is a text of
its own, a row of the batch beside those that are returned. It begins with the negative prompt and
grows by the tokens of the text that it guides; it is fed the same drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...ir import InputError, ModelInfo
from .filters import NOTHING
from .input_ids import check_row
from .options import GenerationOptions
from .text import Text

NAME, MASK = "negative_prompt_ids", "negative_prompt_attention_mask"


HOW = ("guidance_plausible", "guidance_uncertain")
"""Options of guidance."""


def guides_for(texts: Sequence[Text], options: GenerationOptions, info: ModelInfo) -> list[Text]:
    """A guide for each text; [] without `guidance_scale`.

    Errors: `InputError` for negative prompts that do not fit the prompts or the vocabulary, or are
    too long, and for any without `guidance_scale`.
    """
    given, mask = options.negative_prompt_ids, options.negative_prompt_attention_mask
    if not options.guided:
        if given is not None or mask is not None:
            raise InputError(f"{NAME} has no effect: give guidance_scale, other than 1")
        for name in HOW:
            if options.asks(name):
                raise InputError(f"{name} has no effect: give guidance_scale, other than 1")
        return []
    prompts = len(texts) // options.copies
    rows = [text.tokens[-1:] for text in texts]
    if given is not None:
        if given.dtype != torch.int64 or given.dim() != 2 or len(given) != prompts:
            raise InputError(
                f"{NAME}: expected i64[{prompts},S], one row a prompt, got {given.dtype} of shape "
                f"{list(given.shape)}"
            )
        kept = torch.ones_like(given) if mask is None else mask
        if kept.shape != given.shape:
            raise InputError(
                f"{MASK}: expected the shape of {NAME} {list(given.shape)}, got {list(kept.shape)}"
            )
        each = range(options.copies)
        rows = [
            row[own].tolist()
            for row, own in zip(given.cpu(), kept.cpu() != 0, strict=True)
            for _ in each
        ]
    elif mask is not None:
        raise InputError(f"{MASK} is given without {NAME}")
    guides = []
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        check_row(f"{NAME}: row {index}", row, info.vocab_size)
        limit = len(row) + text.limit - len(text.tokens)
        if limit > info.context:
            raise InputError(
                f"{NAME}: {len(row)} tokens + {limit - len(row)} new ones exceed the model's "
                f"context of {info.context}: shorten it"
            )
        guides.append(Text(list(row), len(row), limit, done=text.done))
    return guides


def guided(
    logits: torch.Tensor,
    guide: torch.Tensor,
    scale: float,
    plausible: float = 0.0,
    uncertain: float = 0.0,
) -> torch.Tensor:
    """Scores [R,V] behind texts, led away from those behind their guides [R,V] by `scale`.

    plausible: tokens whose probability is less than this share of the likeliest one's cannot come
    up. uncertain: rows whose entropy is less than this share of the largest, log V, stay as they
    are.

    >>> both = guided(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]), 2.0)
    >>> both.softmax(-1).argmax().item()
    1
    """
    own, away = logits.log_softmax(-1), guide.log_softmax(-1)
    led = scale * (own - away) + away
    if plausible:
        led = led.masked_fill(own < own.amax(-1, keepdim=True) + math.log(plausible), NOTHING)
    if uncertain:
        entropy = -(own.exp() * own.clamp_min(-1e9)).sum(-1, keepdim=True)
        led = torch.where(entropy < uncertain * math.log(own.shape[-1]), own, led)
    return led
