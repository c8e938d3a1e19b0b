"""Verification records: how much of a draft the target keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Record, record
from .bounds import Amount, Nodes, Part, Share


@dataclass(frozen=True)
class VerifyRecord(Record):
    """Base of verification records.

    told: it must know of every draft token what distribution it comes from. siblings: it differs
    from `Lossless` only on siblings that were sampled independently of each other.
    """

    slot: ClassVar[str] = "verify"
    told: ClassVar[bool] = False
    siblings: ClassVar[bool] = False


@record
@dataclass(frozen=True)
class Lossless(VerifyRecord):
    """Keep the target's distribution: argmax agreement when greedy, rejection when sampling."""

    kind: ClassVar[str] = "lossless"


@record
@dataclass(frozen=True)
class SpecTr(VerifyRecord):
    """Keep the target's distribution, judging independently sampled siblings together (SpecTr).

    Greedy decoding and drafts of any other kind are verified as by `Lossless`.
    """

    kind: ClassVar[str] = "spectr"
    siblings: ClassVar[bool] = True


@record
@dataclass(frozen=True)
class Typical(VerifyRecord):
    """Accept draft tokens that the target finds typical, not only those that it chooses (Medusa).

    A token passes if its probability exceeds min(`floor`, `share` * exp(-entropy)).
    """

    floor: Part = 0.09
    share: Part = 0.3
    kind: ClassVar[str] = "typical"


@record
@dataclass(frozen=True)
class TopKAccept(VerifyRecord):
    """Accept draft tokens that are among the target's `count` likeliest (Stern et al. 2018)."""

    count: Nodes = 2
    kind: ClassVar[str] = "top_k"


@record
@dataclass(frozen=True)
class Contrastive(VerifyRecord):
    """Decode p^(1 + beta) / q^beta, p being the target's distribution and q the drafter's.

    Only tokens with at least `plausible` times the best one's p come into question. 0 is p itself.
    Needs drafts that say what q is (`SampledTree.told`).
    """

    beta: Amount = 0.5
    plausible: Share = 0.1
    kind: ClassVar[str] = "contrastive"
    told: ClassVar[bool] = True


@record
@dataclass(frozen=True)
class Judge(VerifyRecord):
    """Keep rejected draft tokens, too, that a trained head finds acceptable (judge decoding).

    function: takes ``hidden`` [B,T,H] and returns ``judged`` [B,T,1], the log odds that each token
    is acceptable. output: the step's output that it takes. threshold: how probable that must be; at
    1 nothing is kept that is not the target's own. trained: whether the head knows anything.
    """

    function: str = "judge"
    output: str = "hidden.normed"
    threshold: Share = 0.5
    trained: bool = False
    kind: ClassVar[str] = "judge"
