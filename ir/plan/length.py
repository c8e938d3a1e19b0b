"""Length records: how much of a draft is worth making and verifying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ..support.errors import InputError
from .base import Record, Returned, policy, record
from .bounds import MOST_NODES, Factor, Filled, Following, Inside, Levels, Part, Seed, Share
from .contract import Contract
from .draft import CachedDraft

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan


@dataclass(frozen=True)
class LengthRecord(Record):
    """Base of length records.

    shortens: drafts may be shorter than drafter and tree make them. by_level: it looks at what the
    drafter predicts, level by level, and at nothing else. gives_up: it asks for no draft at all
    where drafts do not pay. judges: it is trained on what another model drafts, which stays as it
    is.
    """

    slot: ClassVar[str] = "length"
    noun: ClassVar[str] = "length"
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    shortens: ClassVar[bool] = True
    by_level: ClassVar[bool] = False
    gives_up: ClassVar[bool] = False
    judges: ClassVar[bool] = False

    @property
    def steady(self) -> LengthRecord:
        """The same without what depends on measured time."""
        return self

    @property
    def unmeasured(self) -> bool:
        """Whether it waits to be told what drafts cost (`measured`) when the model is made."""
        return False

    def measured(self, cost: float) -> LengthRecord:
        """The same where a step with a whole draft takes as long as `cost` steps without."""
        return self


@record
class FixedLength(LengthRecord):
    """Drafts are as long as drafter and tree make them."""

    kind: ClassVar[str] = "fixed"
    shortens: ClassVar[bool] = False


@policy
class SvipLength(LengthRecord):
    """Go deeper while exp(-`scale` * sqrt(entropy of what is drafted)) exceeds `threshold`.

    The bound grows with the chance that the target accepts (SVIP, Zhang et al. 2024). Entropy in
    nats. For drafters that predict level by level with probabilities: one that copies has none and
    keeps its length.
    """

    threshold: Share = 0.4
    scale: Factor = 1.0
    kind: ClassVar[str] = "svip"
    by_level: ClassVar[bool] = True


@policy
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
class AcceptanceLength(LengthRecord):
    """Go deeper until a rejection somewhere in the draft is likelier than `threshold`, as the state
    says that the draft starts from; whatever drafts.

    function: takes ``hidden`` [B,T,H] and returns ``accepted`` [B,T,levels], for each level the log
    odds that the target accepts the draft's token there, those before it being accepted. output:
    the step's output that it takes, of the token that the draft continues.
    """

    function: Filled[str] = "acceptance"
    output: Filled[str] = "hidden.normed"
    levels: Levels = 8
    threshold: Inside = 0.7
    trained: Filled[bool] = False
    kind: ClassVar[str] = "acceptance"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {"accepted": ("", "", self.levels)}


@record
class DraftAcceptanceLength(LengthRecord):
    """Go deeper until a rejection somewhere in the draft is likelier than `threshold`, as the
    draft's state of each drafted token says (SpecDec++, Huang et al. 2024).

    For another model that drafts, whose function returns ``draft_odds`` [B,S] beside its
    predictions: the log odds that the target accepts the token that was fed, those before it being
    accepted. learned: names of the weights that make them. trained: whether they know anything.
    """

    threshold: Inside = 0.7
    learned: Filled[tuple[str, ...]] = ()
    trained: Filled[bool] = False
    kind: ClassVar[str] = "draft_acceptance"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical", "drafts"})
    by_level: ClassVar[bool] = True
    judges: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        for leaf in plan.draft.leaves:
            if isinstance(leaf, CachedDraft) and leaf.is_model:
                yield leaf.function, {"draft_odds": ("", "")}

    @property
    def weights(self) -> set[str]:
        return set(self.learned)


@policy
class ThompsonLength(LengthRecord):
    """Go deeper with the chance of acceptance, drawn from its Beta posterior.

    Each sequence has its own, learned while decoding (EESD, Liu et al. 2024). accepted, rejected:
    the prior's counts. seed: of the draws, which change the speed alone.
    """

    accepted: Factor = 1.0
    rejected: Factor = 1.0
    seed: Seed = 0
    kind: ClassVar[str] = "thompson"


@dataclass(frozen=True)
class LengthOfAnother(LengthRecord):
    """Base of records that hold another policy, `of`, which ends drafts as it would alone."""

    if TYPE_CHECKING:  # a field of the classes, in the place that they give it
        of: Filled[LengthRecord]

    @property
    def by_level(self) -> bool:  # type: ignore[override]
        return self.of.by_level

    @property
    def judges(self) -> bool:  # type: ignore[override]
        return self.of.judges

    @property
    def trains(self) -> tuple[Record, ...]:
        return self.of.trains

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: those of the other policy."""
        yield from self.of.misfits(plan)


@policy
class GoodputLength(LengthOfAnother):
    """The size that yields the most tokens a second, or no draft, as measured while decoding.

    Step times by width and acceptance by place in the draft are learned step by step, so drafts
    that do not pay are given up (SmartSpec, Liu et al. 2024). loss: share of plain decoding's time
    that finding out may cost over 128 tokens. of: the policy that ends drafts within the size, if
    the plan had one; what it makes is what is measured.
    """

    loss: Inside = 0.02
    of: Filled[LengthRecord] = FixedLength()
    kind: ClassVar[str] = "goodput"
    gives_up: ClassVar[bool] = True

    @property
    def steady(self) -> LengthRecord:
        return self.of

    def check(self) -> None:
        if self.of.gives_up:
            raise InputError(f"length=goodput of {self.of.brief}: that gives up drafts itself")

    def into(self, plan: DecodePlan) -> DecodePlan:
        """See `Record.into`: a length that is there ends drafts within the size."""
        if plan.length.gives_up:
            return super().into(plan)
        return replace(plan, length=replace(self, of=plan.length))

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: a verifier whose text depends on what is drafted."""
        if plan.verify.contract is Contract.APPROXIMATE and not plan.verify.stays:
            yield (
                f"verify={plan.verify.brief} keeps tokens for being drafted, and length="
                f"{self.brief} drafts as measured time says: the text would depend on the clock. "
                f"Take length_earned, which counts tokens; optimize(strict=True) refuses what is "
                f"slower than the model"
            )
        yield from super().misfits(plan)


@record
class NotedLength(LengthOfAnother):
    """What another policy says, while notes are taken of the tokens that drafts brought: those that
    nobody foresaw are what a drafter has to learn (see `Learner`). of: that policy."""

    of: Filled[LengthRecord] = FixedLength()
    kind: ClassVar[str] = "noted"

    @property
    def steady(self) -> LengthRecord:
        return replace(self, of=self.of.steady)

    @property
    def shortens(self) -> bool:  # type: ignore[override]
        return self.of.shortens

    @property
    def gives_up(self) -> bool:  # type: ignore[override]
        return self.of.gives_up


@policy
class EarnedLength(LengthRecord):
    """Whole drafts while they yield what they cost, or none, as each text's own tokens say.

    A step with a draft is to yield `worth` tokens in the mean: what it costs over one without,
    which is measured once, when the model is made, and stays with it; None: it was not, and
    `ASSUMED` stands for it. A text whose drafts keep to less goes on without, and tries one ever
    more rarely. Time has no part in what a made model writes, so it goes with verifiers that keep
    tokens for being drafted, where `goodput` cannot.
    """

    ASSUMED: ClassVar[float] = 1.5
    worth: Annotated[float, Field(ge=1, le=MOST_NODES)] | None = None
    kind: ClassVar[str] = "earned"
    gives_up: ClassVar[bool] = True

    @property
    def unmeasured(self) -> bool:
        return self.worth is None

    def measured(self, cost: float) -> LengthRecord:
        return replace(self, worth=min(max(round(cost, 2), 1.0), float(MOST_NODES)))

    @property
    def least(self) -> float:
        """Tokens that a step with a draft is to yield in the mean."""
        return self.ASSUMED if self.worth is None else self.worth


@record
class StretchLength(LengthRecord):
    """Drafts that are stretches of text, up to a token of `ends` or `most` tokens.

    Where a text keeps nothing of one, the target writes alone up to the next end. For verifiers
    that judge drafts as a whole, such as `Rewarded`.
    """

    most: Levels = 128
    ends: Filled[Following] = ()
    kind: ClassVar[str] = "stretch"


@policy
class BatchLength(LengthRecord):
    """One length for all drafts of a batch, after its best text (BASS, Qian et al. 2024).

    Where a text accepted its whole draft, the next drafts are longer by `rise`, `limit` at most.
    Else they are shorter by length / `shrink`, rounded up, and by one more if the step before was
    such a step, too; never below what some text accepted, or `least`. start: the first length.
    """

    start: Levels = 7
    limit: Levels = 32
    least: Levels = 1
    rise: Levels = 2
    shrink: Levels = 10
    kind: ClassVar[str] = "batch"

    def check(self) -> None:
        if not self.least <= self.start <= self.limit:
            raise InputError(
                f"batch length: expected least <= start <= limit, got least={self.least}, "
                f"start={self.start}, limit={self.limit}"
            )
