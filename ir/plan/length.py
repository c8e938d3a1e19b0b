"""Length records: how much of a draft is worth making and verifying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Record, Returned, policy, record
from .bounds import Factor, Inside, Levels, Part, Seed, Share

if TYPE_CHECKING:
    from .decode import DecodePlan


@dataclass(frozen=True)
class LengthRecord(Record):
    """Base of length records.

    shortens: drafts may be shorter than drafter and tree make them. by_level: it looks at what the
    drafter predicts, level by level, and at nothing else. gives_up: it asks for no draft at all
    where drafts do not pay.
    """

    slot: ClassVar[str] = "length"
    noun: ClassVar[str] = "length"
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    shortens: ClassVar[bool] = True
    by_level: ClassVar[bool] = False
    gives_up: ClassVar[bool] = False


@record
@dataclass(frozen=True)
class FixedLength(LengthRecord):
    """Drafts are as long as drafter and tree make them."""

    kind: ClassVar[str] = "fixed"
    shortens: ClassVar[bool] = False


@policy
@dataclass(frozen=True)
class SvipLength(LengthRecord):
    """Go deeper while exp(-scale * sqrt(entropy of the draft's prediction)) exceeds `threshold`.

    The bound grows with the chance that the target accepts (SVIP, Zhang et al. 2024). Entropy in
    nats. For drafters that predict level by level with probabilities: one that copies has none and
    keeps its length.
    """

    threshold: Share = 0.4
    scale: Factor = 1.0
    kind: ClassVar[str] = "svip"
    by_level: ClassVar[bool] = True


@policy
@dataclass(frozen=True)
class ConfidenceLength(LengthRecord):
    """Go deeper while the draft's best token is at least this probable.

    For drafters that predict level by level with probabilities (Kangaroo, Liu et al. 2024): one
    that copies has none and keeps its length. threshold: least probability to go on with. depth:
    levels at most.
    """

    threshold: Part = 0.6
    depth: Levels = 6
    kind: ClassVar[str] = "confidence"
    by_level: ClassVar[bool] = True


@record
@dataclass(frozen=True)
class AcceptanceLength(LengthRecord):
    """Go deeper until a rejection somewhere in the draft is likelier than `threshold` (SpecDec++).

    function: takes ``hidden`` [B,T,H] and returns ``accepted`` [B,T,levels], for each level the log
    odds that the target accepts the draft's token there, those before it being accepted. output:
    the step's output that it takes, of the token that the draft continues. trained: whether the
    head knows anything.
    """

    function: str = "acceptance"
    output: str = "hidden.normed"
    levels: Levels = 8
    threshold: Inside = 0.7
    trained: bool = False
    kind: ClassVar[str] = "acceptance"

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield self.function, {"accepted": ("", "", self.levels)}


@policy
@dataclass(frozen=True)
class ThompsonLength(LengthRecord):
    """Go deeper with the chance of acceptance, drawn from its Beta posterior.

    Each sequence has its own, learned while decoding (EESD, Liu et al. 2024). accepted, rejected:
    the prior's counts. seed: of the draws, which change the speed alone.
    """

    accepted: Factor = 1.0
    rejected: Factor = 1.0
    seed: Seed = 0
    kind: ClassVar[str] = "thompson"


@policy
@dataclass(frozen=True)
class GoodputLength(LengthRecord):
    """The size that yields the most tokens a second, or no draft, as measured while decoding.

    Step times by width and acceptance by place in the draft are learned step by step, so drafts
    that do not pay are given up (SmartSpec, Liu et al. 2024). loss: share of plain decoding's time
    that finding out may cost over 128 tokens.
    """

    loss: Inside = 0.03
    kind: ClassVar[str] = "goodput"
    gives_up: ClassVar[bool] = True
