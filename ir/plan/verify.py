"""Verification records: how much of a draft the target keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Record, Returned, policy, record
from .bounds import Amount, Factor, Filled, Nodes, Part, Share
from .contract import Contract

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan


@dataclass(frozen=True)
class VerifyRecord(Record):
    """Base of verification records.

    siblings: it differs from `Lossless` only on siblings that were sampled independently of each
    other. lone: whether without a draft it keeps what the target itself chooses; stays: if not,
    whether it decides on every token by the text before it, whatever was drafted. told: whether it
    must be told what sampled chains were sampled from; else they are drawn as the text is. begun:
    whether it is for drafts that begin with the target's own tokens (`DraftRecord.begins`), and
    chooses among these. judges: it is trained on what another model drafts, which stays as it is.
    """

    slot: ClassVar[str] = "verify"
    noun: ClassVar[str] = "verifier"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    siblings: ClassVar[bool] = False
    lone: ClassVar[bool] = True
    stays: ClassVar[bool] = False
    told: ClassVar[bool] = False
    begun: ClassVar[bool] = False
    judges: ClassVar[bool] = False

    def along(self, plan: DecodePlan, guest: str) -> str:
        """A function that reads along. Errors: `InputError` for one that does not."""
        if guest not in plan.step.along:
            raise InputError(f"{self.brief}: {guest} does not read along: {plan.step.brief}")
        return guest


@record
class Lossless(VerifyRecord):
    """Keep the target's distribution: argmax agreement when greedy. When sampling, the noise of a
    place says which token comes there, and chains are drawn by the same noise: with a seed the text
    is the same whatever is drafted. Trees that are sampled otherwise are judged by rejection."""

    kind: ClassVar[str] = "lossless"
    contract: ClassVar[Contract] = Contract.LOSSLESS


@policy
class Rejection(VerifyRecord):
    """Keep the target's distribution, when sampling by rejection, whatever drafts: a chain then
    says what it was sampled from (speculative sampling).

    It keeps more of a chain than `Lossless`: 1 - d of a token, d being the distance of draft and
    target, where that keeps (1 - d) / (1 + d) or more; but with a seed the text depends on what was
    drafted, and how far (Leviathan et al. 2023; Chen et al. 2023).
    """

    kind: ClassVar[str] = "rejection"
    told: ClassVar[bool] = True
    contract: ClassVar[Contract] = Contract.LOSSLESS


@policy
class SpecTr(VerifyRecord):
    """Keep the target's distribution, judging independently sampled siblings together (SpecTr).

    By k-sequential selection: it keeps more than recursive rejection where siblings are likely to
    repeat each other (Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", 2023).
    Greedy decoding and drafts of any other kind are verified as by `Lossless`.
    """

    kind: ClassVar[str] = "spectr"
    siblings: ClassVar[bool] = True
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"sampled trees"})

    def into(self, plan: DecodePlan) -> DecodePlan:
        """See `Record.into`. Errors: `InputError` for a tree without such siblings, too."""
        if not plan.tree.independent:
            raise InputError(
                f"expected a tree of independently sampled siblings, got tree={plan.tree.brief}: "
                f"run tree_sampled with replacement: true"
            )
        return super().into(plan)


@policy
class Typical(VerifyRecord):
    """Accept draft tokens that the target finds typical, not only those that it chooses.

    A token passes if its probability exceeds min(`floor`, `share` * exp(-entropy)): where the
    target is unsure, more than its first choice will do (Cai et al., "Medusa", 2024). The text
    depends on the drafter.
    """

    floor: Part = 0.09
    share: Part = 0.3
    kind: ClassVar[str] = "typical"


@policy
class TopKAccept(VerifyRecord):
    """Accept draft tokens that are among the target's `count` likeliest.

    Stern et al., "Blockwise Parallel Decoding" (2018). The text depends on the drafter; greedy
    decoding with count=1 stays exact.
    """

    count: Nodes = 2
    kind: ClassVar[str] = "top_k"


@policy
class Tolerant(VerifyRecord):
    """Accept draft tokens that are among the target's `count` likeliest, and nearly as likely as
    the best: by their log probability at most `gap` below it (generalized aggressive decoding).

    Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
    Generation" (2023), top-beta and tau. The text depends on the drafter; greedy decoding with
    count=1 or gap=0 stays exact.
    """

    count: Nodes = 3
    gap: Amount = 1.0
    kind: ClassVar[str] = "tolerant"


@policy
class Vouched(VerifyRecord):
    """Keep drafts as they are, where the drafter is sure of every token (Lexical Unit Decoding).

    For drafters that draft nothing else (Sun et al., "Decoding at the Speed of Thought", 2024). A
    token that the call's own options rule out ends a draft; of a tree the longest path is kept.
    """

    kind: ClassVar[str] = "vouched"

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: a drafter that guesses."""
        guessing = [leaf for leaf in plan.draft.leaves if not leaf.vouches]
        if guessing:
            yield (
                f"verify={self} keeps all that is drafted, and draft={guessing[0].brief} guesses: "
                f"use a drafter that drafts only what it is sure of, such as draft_lexical, or a "
                f"verifier that looks, such as verify_typical"
            )


@policy
class Contrastive(VerifyRecord):
    """Decode p^(1 + `beta`) / q^`beta`, p being the target's distribution and q the drafter's.

    Only tokens with at least `plausible` times the best one's p come into question (Yuan et al.,
    "Speculative Contrastive Decoding", 2024). The text depends on the drafter; beta=0 is p itself.
    Needs drafts that say what q is (`SampledTree.told`).
    """

    beta: Amount = 0.5
    plausible: Share = 0.1
    kind: ClassVar[str] = "contrastive"
    lone: ClassVar[bool] = False
    requires: ClassVar[frozenset[str]] = frozenset({"drafts", "sampled trees"})

    def into(self, plan: DecodePlan) -> DecodePlan:
        """See `Record.into`; the tree then tells what its tokens were sampled from."""
        return super().into(replace(plan, tree=plan.tree.telling()))

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: a draft token whose distribution is not known."""
        if not (plan.draft.tells and plan.tree.tells):
            yield (
                f"verify={self.brief}: draft={plan.draft.brief} under tree={plan.tree.brief} has "
                f"no distributions to weigh against: draft by one pass that predicts, such as "
                f"draft_model or draft_hydra, and draw the tree by tree_sampled"
            )


@record
class Judge(VerifyRecord):
    """Keep rejected draft tokens, too, that a trained head finds acceptable (judge decoding).

    function: takes ``hidden`` [B,T,H] and returns ``judged`` [B,T,1], the log odds that each token
    is acceptable. output: the step's output that it takes. threshold: how probable that must be; at
    1 nothing is kept that is not the target's own.
    """

    function: Filled[str] = "judge"
    output: Filled[str] = "hidden.normed"
    threshold: Share = 0.5
    trained: Filled[bool] = False
    kind: ClassVar[str] = "judge"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {"judged": ("", "", 1)}


@record
class Rewarded(VerifyRecord):
    """Keep a draft whole if a reward model finds the text good with it, else none of it
    (reward-guided speculative decoding).

    It is good enough from a reward of `threshold` on, whoever else would have written it. guest:
    the function of the reward model, which reads along (`Accompanied`) and returns rewards [B,T] in
    0..1 of the text up to each token. For drafts that end where a thought does, see
    `StretchLength`. Source: Liao et al., "Reward-Guided Speculative Decoding for Efficient LLM
    Reasoning" (2025).
    """

    threshold: Share = 0.7
    guest: Filled[str] = "reward"
    kind: ClassVar[str] = "rewarded"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.along(plan, self.guest), {self.guest: ("", "")}

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: drafts that are several texts."""
        if plan.tree.branches:
            yield (
                f"verify={self.brief} judges one draft as a whole, and tree={plan.tree.brief} "
                f"makes several: take tree_chain"
            )


@record
class Suspicion(VerifyRecord):
    """Replace tokens that the target finds far likelier than a reference model does (CleanGen).

    A token x that the target chose is suspicious if p(x) >= `alpha` q(x), p and q being the
    target's and the reference's distributions as they are, before temperature and filters; then the
    reference's choice stands in its place, and the text goes on from there. guest: the function of
    the reference, which reads along (`Accompanied`). Source: Li et al., "CleanGen: Mitigating
    Backdoor Attacks for Generation Tasks in Large Language Models" (2024).
    """

    alpha: Factor = 20.0
    guest: Filled[str] = "reference"
    kind: ClassVar[str] = "suspicion"
    lone: ClassVar[bool] = False
    stays: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.along(plan, self.guest), {self.guest: ("", "", "V")}
