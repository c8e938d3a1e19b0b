"""Draft records: where the tokens that a step verifies come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from ..types import ValueType
from .base import Record, Returned, record
from .bounds import Aim, Context, Factor, Filled, Levels, Rollout

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .combined import UnrolledDraft
    from .decode import DecodePlan


@dataclass(frozen=True)
class DraftRecord(Record):
    """Base of draft records.

    What a drafter can do and what it needs of the rest of a plan is declared here; `ir/legality`
    reads it. Fields: `of` holds the drafters that it is made of; `tokens` or `nodes` bounds a
    draft.

    grows: predicts level by level, so the plan's tree draws its drafts and the length policy is
    asked after each level. branches: its drafts are trees, or have riders, whatever the plan's
    tree. in_step: the step makes the draft, and takes every draft for a chain. narrow: predicts
    what follows one node a level. foresees: knows what may follow text that is not committed, so it
    can draft for another drafter. in_turn: a later part is asked where the earlier ones have no
    draft. goes_on: predicts from the states that another drafter makes. whole_path: from the states
    of all nodes on the path, not only of the last. in_parts: runs parts of the step, which must be
    cut. samples: tells what its drafts were sampled from, when sampling, whatever the tree is.
    unrolls: one call of a function can make its levels (`unroll_draft`). vouches: drafts only what
    would do unverified, too (`Vouched`). begins: its drafts begin with the target's own candidates,
    so it needs a verifier for such (`VerifyRecord.begun`).
    """

    slot: ClassVar[str] = "draft"
    noun: ClassVar[str] = "drafter"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    grows: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    in_step: ClassVar[bool] = False
    narrow: ClassVar[bool] = False
    foresees: ClassVar[bool] = False
    in_turn: ClassVar[bool] = False
    goes_on: ClassVar[bool] = False
    whole_path: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    unrolls: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    vouches: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    @property
    def core(self) -> DraftRecord | None:
        """The drafter in it that begins its drafts: it reads what that reads, and has a draft
        wherever that has one. None: no other."""
        return None

    @property
    def reads(self) -> tuple[str, ...]:
        """Outputs of the step that it learns from."""
        return () if self.core is None else self.core.reads

    @property
    def cached(self) -> tuple[str, ...]:
        """Its functions that need a cache of their own."""
        return () if self.core is None else self.core.cached

    @property
    def mutual(self) -> tuple[str, ...]:
        """Its functions in whose calls a token may see tokens behind it."""
        return tuple(name for part in self.parts for name in part.mutual)

    @property
    def always(self) -> bool:
        """Whether it has a draft wherever there is room for one."""
        return any(part.always for part in self.parts or filter(None, [self.core]))

    @property
    def tells(self) -> bool:
        """Whether its drafts say what their tokens were sampled from, if the tree samples."""
        return all(part.tells for part in self.parts) if self.parts else self.grows

    @property
    def parts(self) -> tuple[DraftRecord, ...]:
        """The drafters that it is made of, each of which drafts for the target; () for one."""
        parts: tuple[DraftRecord, ...] = getattr(self, "of", ())
        return parts

    @property
    def leaves(self) -> tuple[DraftRecord, ...]:
        """The drafters that are not made of others, in order."""
        return tuple(leaf for part in self.parts for leaf in part.leaves) or (self,)

    def with_leaves(self, change: Callable[[DraftRecord], DraftRecord]) -> DraftRecord:
        """The same with the drafters changed that are not made of others."""
        if not self.parts:
            return change(self)
        return self.with_inside(lambda part: part.with_leaves(change))

    @property
    def trains(self) -> tuple[Record, ...]:
        core = () if self.core is None else self.core.trains
        return (super().trains or core) + tuple(r for part in self.parts for r in part.trains)

    @property
    def unrolled(self) -> UnrolledDraft | None:
        """The chain that one call makes."""
        return None if self.core is None else self.core.unrolled

    @property
    def levels(self) -> int:
        """Tokens that it predicts one after the other, at most."""
        return 0 if self.core is None else self.core.levels

    @property
    def most(self) -> int | None:
        """Tokens of a draft at most, `tokens` or `nodes`; None: as many as the plan's tree has."""
        own: int | None = getattr(self, "tokens", getattr(self, "nodes", None))
        return own

    def at_most(self, tree: int | None) -> int:
        """Tokens of a draft at most. tree: nodes of the plan's tree; None: a chain of no given
        depth, which has a token a level."""
        if self.most is not None:
            return self.most
        return self.levels if tree is None else tree

    def covers(self, other: DraftRecord) -> bool:
        """Whether it has a draft wherever another one has."""
        return self == other

    def sizes(self, tree: int | None) -> frozenset[int]:
        """Tokens that drafts have where they are whole: each part's alone, and all it makes.

        tree: nodes of the plan's tree.
        """
        return frozenset({self.at_most(tree)}).union(*(part.sizes(tree) for part in self.parts))

    def riders(self, nodes: int) -> int:
        """Tokens that are fed along behind a draft of so many nodes (`Draft.riders`), at most."""
        return sum(part.riders(nodes) for part in self.parts)

    def lacking(self, step: Mapping[str, ValueType]) -> str | None:
        """See `Record.lacking`: outputs that it reads."""
        missing = [name for name in self.reads if name not in step]
        return f"step returns no {missing[0]}, which {self.kind} reads" if missing else None

    def into(self, plan: DecodePlan) -> DecodePlan:
        """The plan with one drafter more: where the earlier ones have no draft, it has its turn."""
        if not plan.speculates:
            return replace(plan, draft=self)
        earlier = plan.draft.parts if plan.draft.in_turn else (plan.draft,)
        return replace(plan, draft=FirstDraft((*earlier, self)))


@dataclass(frozen=True)
class LearningDraft(DraftRecord):
    """Base of drafters with weights that somebody trains.

    aim: in training, what is asked of them (see `Aim`); their papers differ in it.
    """

    aim: Aim = field(default="text", kw_only=True)


def candidates(*levels: int) -> Returned:
    """What functions return that predict: distributions and their best tokens, of these levels."""
    return {
        "draft_tokens": ("", "", *levels, "K"),
        "draft_scores": ("", "", *levels, "K"),
        "draft_logits": ("", "", *levels, "V"),
    }


@record
@dataclass(frozen=True)
class NoDraft(DraftRecord):
    """Plain decoding: every step verifies an empty draft and yields one token."""

    kind: ClassVar[str] = "none"
    most: ClassVar[int] = 0


@record
@dataclass(frozen=True)
class HeadsDraft(LearningDraft):
    """Heads that predict several places ahead at once, from the last hidden state (Medusa).

    function: takes ``hidden`` [B,T,H]; returns ``draft_logits`` [B,T,levels,V] and the best
    ``draft_tokens`` and ``draft_scores`` (log probabilities) [B,T,levels,K]. levels: places
    predicted. decay: in training, the weight of level d's loss is decay^d.
    """

    function: Filled[str] = "heads"
    levels: Levels = 4
    decay: Factor = 0.8
    trained: Filled[bool] = False
    kind: ClassVar[str] = "heads"
    grows: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("hidden",)
    always: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, candidates(self.levels)


@record
@dataclass(frozen=True)
class RecurrentDraft(LearningDraft):
    """Functions that predict one token each from a state and the token before it (Hydra, RNNs).

    functions: one a level, the last one for all deeper levels; each takes ``tokens`` [B,T] and
    ``state`` [B,T,Z] (the first: the target's last hidden state) and returns ``state`` for the next
    level, and ``draft_logits`` [B,T,V], ``draft_tokens``, ``draft_scores`` [B,T,K]. entry: a
    function with a cache that takes the text so far, ``tokens`` [B,T] and their last hidden states
    ``hidden`` [B,T,H], and returns ``hidden``, which then is the first one's state. levels, decay,
    trained: as in `HeadsDraft`.
    """

    functions: Filled[tuple[str, ...]] = ()
    levels: Levels = 4
    decay: Factor = 0.8
    trained: Filled[bool] = False
    entry: Filled[str | None] = None
    kind: ClassVar[str] = "recurrent"
    grows: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("hidden",)
    always: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        if not self.functions:
            raise InputError(f"{self.brief} names no functions")
        for function in self.functions:
            yield function, {**candidates(), "state": ("", "", "")}
        if self.entry is not None:
            yield self.entry, {"hidden": ("", "", "")}

    @property
    def cached(self) -> tuple[str, ...]:
        return () if self.entry is None else (self.entry,)


@record
@dataclass(frozen=True)
class CachedDraft(LearningDraft):
    """A function with a cache of its own: a layer beside the target (EAGLE), or another model.

    function: takes ``tokens``, ``positions`` [B,T], ``past``, ``select`` [B,S] and its states;
    returns ``draft_logits`` [B,S,V], ``draft_tokens``, ``draft_scores`` [B,S,K]. output: the step's
    output [B,T,H] that the function takes as ``hidden`` beside the token that follows; it then
    returns a ``hidden`` [B,T,H] that stands in for it where the target has not been. None: tokens
    alone. levels: tokens predicted ahead at most. context: positions that the function supports;
    None: as many as the target. trained: whether the weights know anything. entry: a function that
    takes the output as ``hidden`` and returns the ``hidden`` that `function` takes; None: that is
    the output itself. rollout: levels that it is trained on, each on its own states of the one
    before, weighted `decay` to the power of the level (EAGLE-3); 0: it is trained to predict the
    output (EAGLE).
    stepwise: whether it is fed each token that it drafts before it predicts the next.
    """

    function: Filled[str] = "draft"
    output: Filled[str | None] = None
    levels: Levels = 5
    context: Filled[Context | None] = None
    trained: Filled[bool] = False
    entry: Filled[str | None] = None
    rollout: Rollout = 0
    decay: Factor = 0.8
    kind: ClassVar[str] = "cached"
    grows: ClassVar[bool] = True
    unrolls: ClassVar[bool] = True
    stepwise: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, candidates()
        if self.entry is not None:
            yield self.entry, {"hidden": ("", "", "")}

    @property
    def reads(self) -> tuple[str, ...]:
        return () if self.output is None else (self.output,)

    @property
    def cached(self) -> tuple[str, ...]:
        return (self.function,)

    @property
    def always(self) -> bool:
        """Unless a text outgrows its context."""
        return self.context is None

    @property
    def alone(self) -> bool:
        """Whether it reads nothing of the target: it is another model."""
        return self.output is None

    @property
    def is_model(self) -> bool:
        """Whether it is another model, and drafts a token a call."""
        return self.alone and self.stepwise


@record
@dataclass(frozen=True)
class FirstDraft(DraftRecord):
    """The draft of the first of several drafters that has one, step by step and by sequence.

    of: the drafters, in order of preference.
    """

    of: tuple[DraftRecord, ...] = ()
    kind: ClassVar[str] = "first"
    in_turn: ClassVar[bool] = True

    def at_most(self, tree: int | None) -> int:
        return max((part.at_most(tree) for part in self.of), default=0)
