"""What texts are written from, where a model reads a source first: from a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...ir import InputError, Program, type_of
from ...ir.plan import Encoded
from .input_ids import check_row

TOKENS, FEATURES = "input_ids", "input_features"
"""What the source is called in calls."""


@dataclass(frozen=True)
class Sources:
    """inputs: of the function that reads sources, by name, one row a sequence. rows: those that the
    longest has in the states. tokens: of each, without padding; () where it is no text, or of
    another vocabulary."""

    inputs: Mapping[str, torch.Tensor]
    rows: int
    tokens: Sequence[Sequence[int]]

    def repeated(self, times: int) -> Sources:
        """Each as often as it is written from."""
        inputs = {name: given.repeat_interleave(times, 0) for name, given in self.inputs.items()}
        return Sources(inputs, self.rows, [row for row in self.tokens for _ in range(times)])


def takes_features(program: Program) -> bool:
    """Whether a program's sources are no texts."""
    encoder = program.plan.source.encoder
    return encoder is not None and program.function(encoder).has_input("features")


def read_sources(given: object, mask: torch.Tensor | None, program: Program) -> Sources:
    """The sources of a call. given: token ids i64[B,S], padded on either side, or features.

    mask [B,S]: 0 for padding; without one nothing is, as in transformers. Errors: `InputError` for
    what is no source of this model.
    """
    plan = program.plan.source
    assert isinstance(plan, Encoded)
    if takes_features(program):
        return _features(given, program, plan)
    ids = _ids(given, program)
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else _kept(mask, ids)
    rows = [row[own].tolist() for row, own in zip(ids, kept, strict=True)]
    for index, row in enumerate(rows):
        check_row(f"{TOKENS}: source {index}", row, plan.vocabulary)
        if len(row) > plan.most:
            raise InputError(
                f"{TOKENS}: source {index} has {len(row)} tokens, and the model reads {plan.most} "
                "at most: shorten it"
            )
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    lengths = torch.tensor(list(map(len, rows)))
    own = plan.vocabulary <= program.info.vocab_size
    inputs = {"tokens": tokens, "lengths": lengths}
    return Sources(inputs, longest, rows if own else [()] * len(rows))


def _ids(given: object, program: Program) -> torch.Tensor:
    if not isinstance(given, torch.Tensor) or given.dtype != torch.int64 or given.dim() != 2:
        raise InputError(
            f"{TOKENS}: expected the source's token ids i64[B,S], got {_shape(given)}; "
            f"{program.name} writes from a text"
        )
    if given.numel() == 0:
        raise InputError(f"{TOKENS}: expected at least one source of at least one token")
    return given.cpu()


def _kept(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """bool[B,S]: which tokens are the source's."""
    if mask.shape != ids.shape:
        raise InputError(
            f"attention_mask: expected the shape of {TOKENS} {list(ids.shape)}, got "
            f"{list(mask.shape)}"
        )
    kept = mask.cpu() != 0
    ends = torch.nn.functional.pad(kept.int(), (1, 1)).diff(dim=1).abs().sum(1)
    for index, count in enumerate(ends.tolist()):
        if count > 2:
            raise InputError(f"attention_mask: source {index} has padding inside its text")
    return kept


def _features(given: object, program: Program, plan: Encoded) -> Sources:
    wanted = type_of(program.function(plan.function).input("features"))
    sizes = wanted.dims[1:]
    fits = isinstance(given, torch.Tensor) and given.dtype.is_floating_point
    if not fits or given.dim() != len(wanted.dims) or tuple(given.shape[1:]) != sizes:  # type: ignore
        raise InputError(
            f"{FEATURES}: expected features {wanted}, got {_shape(given)}; {program.name} writes "
            "from a sound: take its feature extractor, and pad, or cut, to that length"
        )
    assert isinstance(given, torch.Tensor)
    if len(given) == 0 or not bool(given.isfinite().all()):
        raise InputError(f"{FEATURES}: expected at least one source, and finite numbers")
    features = given.cpu().to(wanted.dtype).contiguous()
    lengths = torch.full((len(features),), plan.most)
    return Sources({"features": features, "lengths": lengths}, plan.most, [()] * len(features))


def _shape(given: object) -> str:
    if isinstance(given, torch.Tensor):
        return f"{given.dtype} of shape {list(given.shape)}"
    return "nothing" if given is None else type(given).__name__
