"""Agreement of an approximate recipe's text with the target's.

An approximate recipe can trade agreement for speed (a verifier that accepts everything is the
fastest), so reports of speed show the agreement as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir import Program
from ..ir.execution.executable import Executable, Planned
from ..ir.plan import DecodePlan
from ..ir.plan.contract import changes
from ..passes.engine.base import Effect, all_passes
from ..runtime.asking.options import BEST
from ..runtime.generation import Generated, forget, generate

PLANNED = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})
"""Effects that do not change the step's results."""


@dataclass(frozen=True)
class OwnText:
    """Agreement with the target's texts. texts: number compared; equal: number of identical ones.
    tokens: total of the target's texts; kept: of these, those before the first difference. first:
    median position of the first difference; None if there is none.
    """

    texts: int
    equal: int
    tokens: int
    kept: int
    first: float | None

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> OwnText:
        """From pairs of new tokens (the target's, the recipe's), one for each text.

        >>> str(OwnText.of([([1, 2, 3, 4], [1, 2, 9, 4]), ([5, 6], [5, 6])]))
        "67% of the target's own text (1 of 2 texts equal, else the first other token after 2)"
        """
        known = [(list(own), list(got)) for own, got in pairs]
        kept = [_alike(own, got) for own, got in known]
        equal = [own == got for own, got in known]
        first = [count for count, same in zip(kept, equal, strict=True) if not same]
        return cls(
            texts=len(known),
            equal=sum(equal),
            tokens=sum(len(own) for own, _ in known),
            kept=sum(kept),
            first=float(statistics.median(first)) if first else None,
        )

    @property
    def share(self) -> float:
        """Share of the target's tokens before the first difference, 0..1."""
        return self.kept / max(self.tokens, 1)

    def __str__(self) -> str:
        texts = f"{self.equal} of {self.texts} texts equal"
        if self.first is not None:
            texts += f", else the first other token after {self.first:.0f}"
        return f"{self.share:.0%} of the target's own text ({texts})"


def _alike(own: Sequence[int], got: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    pairs = enumerate(zip(own, got, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(own), len(got)))


def is_approximate(program: Program) -> bool:
    """Whether any pass of the program may change texts: its contract is approximate or tuned."""
    return bool(_approximate(program))


def keeps_step(program: Program) -> bool:
    """Whether only the plan is approximate: plain decoding then gives the target's text."""
    known = all_passes()
    return all(name in known and known[name].effects <= PLANNED for name in _approximate(program))


def _approximate(program: Program) -> list[str]:
    return [record.name for record in program.provenance if changes(record.contract)]


def plain_plan(plan: DecodePlan) -> DecodePlan:
    """The plan without drafts and with lossless verification."""
    return plan.undrafted()


def own_text(executable: Executable, prompts: Iterable[Sequence[int]], tokens: int) -> OwnText:
    """Agreement of a plan with plain decoding; both continue prompts by `tokens`, greedily."""
    plain = Planned(executable, plain_plan(executable.program.plan))
    pairs = []
    for prompt in prompts:
        own = continued(plain, prompt, tokens)
        forget(executable)  # no state is shared between the two texts
        got = continued(executable, prompt, tokens)
        own_ids, got_ids = (made.sequences[0, len(prompt) :].tolist() for made in (own, got))
        pairs.append((own_ids, got_ids))
    return OwnText.of(pairs)


def continued(executable: Any, prompt: Sequence[int], tokens: int) -> Generated:
    """Continue a prompt greedily by `tokens` tokens, whatever the checkpoint's defaults."""
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": tokens, "eos_token_id": [], "return_dict_in_generate": True}
    made = generate(executable, ids, attention_mask=torch.ones_like(ids), **options, **BEST)
    assert isinstance(made, Generated)
    return made
