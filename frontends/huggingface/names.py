"""What parameters of a model are called in its checkpoints: transformers' rules the other way.

Names changed over time, and experts that are one stack in a model have files of a tensor each, as
many programs expect them. transformers keeps rules for that (`conversion_mapping`), which read a
checkpoint (see `checkpoint`) and, turned around, write one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...ir import UnsupportedError


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of an expert's part of a stack, and their name in checkpoints."""

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class CheckpointNames:
    """Of a model of transformers, which may be without data."""

    model: Any

    def of(self, name: str) -> str:
        """A parameter's name. One that a rule makes of several tensors keeps its own."""
        from transformers.core_model_loading import rename_source_key

        made: tuple[str, str | None] = rename_source_key(name, *self._reversed, reverse=True)
        return made[0] if made[1] is None else name

    def pieces(self, name: str, experts: int, rows: int) -> list[Piece]:
        """The tensors [N,K] that a stack of experts [E,R,K] is in checkpoints.

        Numbers of rows go the way that weights would. Errors: `UnsupportedError` for stacks that
        are no tensor for each expert there.
        """
        from transformers.core_model_loading import revert_weight_conversion

        # Two columns, because older transformers drop any dimension of 1.
        numbers = torch.arange(experts * rows).view(experts, rows, 1).repeat(1, 1, 2)
        made: dict[str, torch.Tensor] = revert_weight_conversion(self.model, {name: numbers})
        found = []
        for key, tensor in made.items():
            first, count = int(tensor.flatten()[0]), tensor.shape[0]
            expert, start = divmod(first, rows)
            wanted = torch.arange(first, first + count).view(count, 1).repeat(1, 2)
            whole = torch.equal(tensor, wanted)
            if not whole or start + count > rows or not key.endswith(".weight"):
                raise UnsupportedError(
                    f"{name}: checkpoints of {type(self.model).__name__} have no weight for each "
                    f"expert, but {key} {list(tensor.shape[:-1])} for all of them"
                )
            found.append(Piece(key, expert, start, start + count))
        return sorted(found, key=lambda piece: (piece.expert, piece.start))

    @cached_property
    def _reversed(self) -> tuple[list[Any], list[Any]]:
        """The renamings and the converters of the model, turned around."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        rules = get_model_conversion_mapping(self.model, add_legacy=False)
        kept = [rule for rule in rules if not isinstance(rule, PrefixChange)]  # as transformers
        turned = [rule.reverse_transform() for rule in kept[::-1]]
        converters = [rule for rule in turned if isinstance(rule, WeightConverter)]
        return [rule for rule in turned if rule not in converters], converters
