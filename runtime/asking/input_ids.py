"""From `input_ids` and `attention_mask` to sequences without padding."""

from __future__ import annotations

import torch

from ...ir import InputError, ModelInfo
from .options import GenerationOptions
from .text import Text


def read_prompts(
    input_ids: torch.Tensor, options: GenerationOptions, info: ModelInfo
) -> list[Text]:
    """`options.copies` texts a prompt, left padding removed; nothing has run yet.

    input_ids: i64[B,S] on any device. Padding is what `attention_mask` [B,S] marks with 0, or,
    without a mask, leading pad tokens (when the pad token does not also end sequences), as in
    transformers. Errors: `InputError` for a wrong dtype or shape, an empty prompt, padding that is
    not on the left (see `aligned`), a token id outside the vocabulary, a prompt or a request longer
    than the context.
    """
    _check_tensor(input_ids)
    kept = _kept(input_ids, options, info)
    rows = [row[mask].tolist() for row, mask in zip(input_ids.cpu(), kept, strict=True)]
    for index, row in enumerate(rows):
        check_row(f"input_ids: sequence {index}", row, info.vocab_size)
    longest = max(len(row) for row in rows)
    count = options.new_tokens(input_ids.shape[1], longest, info)
    each = range(options.copies)
    return [Text(list(row), len(row), len(row) + count) for row in rows for _ in each]


def aligned(
    input_ids: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts i64[B,S] and their mask [B,S], padding on the right moved to the left."""
    if mask is None or mask.shape != input_ids.shape or mask.dim() != 2 or not mask.numel():
        return input_ids, mask
    kept = (mask.cpu() != 0).int()
    if bool(kept[:, -1].all()):
        return input_ids, mask
    behind = kept.flip(1).argmax(1, keepdim=True) * kept.any(1, keepdim=True)
    places = (torch.arange(kept.shape[1]) - behind) % kept.shape[1]
    return input_ids.cpu().gather(1, places), kept.gather(1, places)


def check_positions(input_ids: torch.Tensor, options: GenerationOptions) -> None:
    """Errors: `InputError` for `position_ids` other than those that follow from the mask."""
    given, mask = options.position_ids, options.attention_mask
    if given is None:
        return
    kept = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
    if given.shape != kept.shape or bool(((given - (kept.cumsum(1) - 1)) * kept).any()):
        raise InputError(
            "position_ids: expected those that follow from attention_mask, 0, 1, 2, ... in each "
            "text: give attention_mask alone"
        )


def check_ids(input_ids: object, info: ModelInfo) -> None:
    """Errors: `InputError` for what are no token ids i64[B,S] of the vocabulary."""
    _check_tensor(input_ids)
    assert isinstance(input_ids, torch.Tensor)
    for index, row in enumerate(input_ids.tolist()):
        check_row(f"input_ids: sequence {index}", row, info.vocab_size)


def _check_tensor(input_ids: object) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise InputError(
            f"input_ids: expected a tensor i64[B,S], got {type(input_ids).__name__}; "
            f"use torch.tensor([ids])"
        )
    if input_ids.dtype != torch.int64 or input_ids.dim() != 2:
        shape = list(input_ids.shape)
        raise InputError(
            f"input_ids: expected i64[B,S], got {input_ids.dtype} of shape {shape}; "
            f"use .long() and one row a sequence"
        )
    if input_ids.numel() == 0:
        raise InputError(
            f"input_ids: expected at least one sequence of at least one token, got shape "
            f"{list(input_ids.shape)}"
        )


def _kept(input_ids: torch.Tensor, options: GenerationOptions, info: ModelInfo) -> torch.Tensor:
    """bool[B,S]: which tokens are text. Padding may only stand on the left."""
    mask = options.attention_mask
    if mask is None:
        return _without_leading_pads(input_ids.cpu(), options, info)
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask: expected the shape of input_ids {list(input_ids.shape)}, "
            f"got {list(mask.shape)}"
        )
    kept = mask.cpu() != 0
    broken = (kept[:, :-1] & ~kept[:, 1:]).any(1)
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        raise InputError(
            f"attention_mask: sequence {row} has padding inside its text; pad prompts on the left"
        )
    return kept


def _without_leading_pads(
    input_ids: torch.Tensor, options: GenerationOptions, info: ModelInfo
) -> torch.Tensor:
    pad = options.pad_token_id if options.pad_token_id is not None else info.pad
    if pad is None or pad in options.eos(info):
        return torch.ones_like(input_ids, dtype=torch.bool)
    return (input_ids != pad).cummax(1).values


def check_row(what: str, row: list[int], vocabulary: int) -> None:
    """Errors: `InputError` naming `what` for no tokens, and for one outside the vocabulary."""
    if not row:
        raise InputError(f"{what} is empty (all of it is padding)")
    if min(row) < 0 or max(row) >= vocabulary:
        bad = next(t for t in row if not 0 <= t < vocabulary)
        raise InputError(
            f"{what} holds the token id {bad}; expected 0 to {vocabulary - 1} (is this the model's "
            f"tokenizer?)"
        )
