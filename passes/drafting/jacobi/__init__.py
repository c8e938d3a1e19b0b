"""Jacobi decoding: guess a block, and let each step replace it by the target's predictions.

Sources: Santilli et al., "Accelerating Transformer Inference for Translation via Parallel
Decoding" (2023); Song et al., "Accelerating Feedforward Computation via Parallel Nonlinear
Equation Solving" (2021). Guesses that agree with the target are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import GuessDraft, policy
from ....ir.plan.bounds import Nodes
from ....runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ....runtime.speculate.drafters.base import DRAFTERS, Drafter


@policy
@dataclass(frozen=True)
class JacobiDraft(GuessDraft):
    """A block of guesses that every step replaces by what the target says after each of them.

    Jacobi decoding (Santilli et al. 2023). tokens: of the block. Needs the step's ``argmax`` (pass
    add_argmax), which is the next guess.
    """

    tokens: Nodes = 10
    kind: ClassVar[str] = "jacobi"
    requires: ClassVar[frozenset[str]] = frozenset({"argmax", "cached"})


@DRAFTERS.register(JacobiDraft)
class JacobiDrafter(Drafter):
    """Keeps one block of guesses a sequence. See the module docstring."""

    record: JacobiDraft
    wants = ("argmax",)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """The first guess is the end of the prompt once more."""
        known = [prompt or [0] for prompt in self.known(prompts)]
        self.blocks = [filled([], prompt, self.record.tokens) for prompt in known]

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return [
            Draft(block[:room]) if room > 0 else NO_DRAFT
            for block, room in zip(self.blocks, rooms, strict=True)
        ]

    def observe(self, taken: VerifiedStep) -> None:
        """What the target said after the guesses that were not committed is the next block."""
        said = taken.outputs["argmax"].tolist()
        rows = zip(taken.drafts, taken.paths, taken.tokens, strict=True)
        for index, (draft, path, tokens) in enumerate(rows):
            if not tokens or not draft.tokens:
                continue
            deepest = below(draft, path)
            guesses = [said[index][node + 1] for node in deepest]
            self.blocks[index] = filled(guesses, tokens, self.record.tokens)


def below(draft: Draft, path: Sequence[int]) -> list[int]:
    """The nodes after an accepted path: those of the chain, or of a tree's first branch.

    The first node that was not accepted was wrong, but what the target said after it is still the
    best guess for its place.
    """
    at, found = (path[-1] if path else -1), []
    children = draft.children()
    while at in children:
        at = children[at][0]
        found.append(at)
    return found


def filled(guesses: Sequence[int], tokens: Sequence[int], count: int) -> list[int]:
    """`count` guesses; where there are fewer, the text's last tokens again."""
    block = list(guesses[:count])
    tail = list(tokens[-count:])
    while len(block) < count:
        block += tail[: count - len(block)]
    return block
