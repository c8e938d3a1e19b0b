"""Draft records of models whose tokens are not the target's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Record, Returned, Size, record
from .bounds import Filled
from .combined import StagedDraft
from .draft import CachedDraft

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan

TOKENIZER = "tokenizer.json"
"""The target's tokenizer among a program's assets."""


def tokenizer_of(function: str) -> str:
    """The file among a program's assets that has the tokenizer of a function's own tokens."""
    return f"{function}.{TOKENIZER}"


@dataclass(frozen=True)
class TranslatedDraft(CachedDraft):
    """Base of records of another model with tokens of its own, of which its cache has rows.

    function: is fed the model's ids. The program's assets have its tokenizer, see `tokenizer_of`.
    shared: names of the weights i64[D] with the ids of the tokens that both have, the target's and
    the model's.
    """

    shared: Filled[tuple[str, ...]] = ()
    unrolls: ClassVar[bool] = False
    is_model: ClassVar[bool] = False  # of the target's tokens, for training
    trains: ClassVar[tuple[Record, ...]] = ()
    always: ClassVar[bool] = False

    @property
    def weights(self) -> set[str]:
        return super().weights | set(self.shared)

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        yield from ((name, True, ("",)) for name in self.shared)


@record
@dataclass(frozen=True)
class SharedTokensDraft(TranslatedDraft):
    """Another model that predicts, of its tokens, those that the target has, too (TLI, Timor et al.
    2025). function: returns what it predicts in the target's ids."""

    kind: ClassVar[str] = "shared_tokens"


@record
@dataclass(frozen=True)
class StagedSharedDraft(StagedDraft, TranslatedDraft):
    """`SharedTokensDraft`, and `drafter` drafts for the model, as in `StagedDraft`."""

    kind: ClassVar[str] = "staged_shared"


@record
@dataclass(frozen=True)
class RespelledDraft(TranslatedDraft):
    """Another model whose chains are decoded, and encoded in the target's tokens (universal
    assisted decoding; SLEM of Timor et al. 2025).

    levels: tokens of its own at most, and tokens of a draft. function: is fed the model's ids, and
    returns its own best ``draft_tokens`` [B,S,1] and their ``draft_scores``.
    """

    kind: ClassVar[str] = "respelled"
    tells: ClassVar[bool] = False

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {"draft_tokens": ("", "", 1), "draft_scores": ("", "", 1)}

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: a tree that is no chain, a length that looks at each level."""
        if not plan.tree.chain:
            yield (
                f"draft={self.brief} respells chains of best tokens, and the plan has "
                f"tree={plan.tree.brief}: use draft_model.vocabulary=shared"
            )
        if plan.length.by_level:
            yield (
                f"draft={self.brief} knows a draft's tokens when the text behind them is written, "
                f"and length={plan.length.brief} looks at each of them before: use "
                f"draft_model.vocabulary=shared"
            )
