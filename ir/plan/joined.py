"""The draft record of heads that see how a drafter came to where they go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import record
from .draft import HeadsDraft


@record
@dataclass(frozen=True)
class JoinedHeadsDraft(HeadsDraft):
    """Heads that go on below a node, from all steps that led there (Gumiho).

    function: takes ``tokens`` i64[B,T,S], the last S tokens of the path down to each node, its own
    last, and ``hidden`` [B,T,S,H], the state that each of them was chosen from; returns what
    `HeadsDraft` says. Part of a `ContinuedDraft` whose first drafter makes S levels.
    """

    function: str = "heads"
    kind: ClassVar[str] = "joined_heads"
    whole_path: ClassVar[bool] = True
