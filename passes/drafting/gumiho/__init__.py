"""Parallel heads below a drafted path, which see all of its tokens and states.

Source: Li et al., "Gumiho: A Hybrid Architecture to Prioritize Early Tokens in Speculative
Decoding" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import HeadsDraft, record
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.heads import HeadsProposer


@record
@dataclass(frozen=True)
class JoinedHeadsDraft(HeadsDraft):
    """Heads that go on below a node, from all steps that led there (Gumiho).

    function: takes ``tokens`` i64[B,T,S], the last S tokens of the path down to each node, its own
    last, and ``hidden`` [B,T,S,H], the state that each of them was chosen from; returns what
    `HeadsDraft` says. Part of a `ContinuedDraft` whose first drafter makes S levels.
    """

    kind: ClassVar[str] = "joined_heads"
    whole_path: ClassVar[bool] = True


PROPOSERS.register(JoinedHeadsDraft)(HeadsProposer)
