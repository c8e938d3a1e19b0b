"""What a generation cost and what its drafts bought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one call of `generate`.

    steps: decode steps (the prefill, which yields each sequence's first token, is none).
    sequence_steps: steps times the sequences that were unfinished in them. new_tokens: tokens
    generated, first ones included. reused_tokens: of the prompts, those that an earlier call had
    fed; shared_tokens: those that were fed once for several sequences of this call; turned_tokens:
    those behind an edit, whose rows were kept from the text before it. draft_tokens: proposed and
    verified. accepted_tokens: of those, the ones kept; accepted_runs: how many drafts kept that
    many tokens in a row, as verified, before a text's end cut any off. preparing_seconds: wall time
    of what is done once and never again, such as compiling a step and opening its session;
    prefill_seconds, decode_seconds: of the rest; decode_seconds covers executable_seconds, the time
    spent inside the executable during decode steps. target_layers: layers of the step;
    skipped_layers: of those, what decoded tokens did not run through before they were continued,
    summed over tokens; an MLP is half a layer.
    """

    steps: int = 0
    sequence_steps: int = 0
    new_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    decoded_tokens: int = 0
    reused_tokens: int = 0
    shared_tokens: int = 0
    turned_tokens: int = 0
    preparing_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    executable_seconds: float = 0.0
    target_layers: int = 0
    skipped_layers: float = 0
    accepted_runs: dict[int, int] = field(default_factory=dict)

    def count(self, steps: int, live: int) -> None:
        """So many steps were made, in which `live` sequences were unfinished."""
        self.steps += steps
        self.sequence_steps += steps * live

    def verified(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was verified, and as many of them in a row were kept."""
        if drafted:
            self.draft_tokens += drafted
            self.accepted_tokens += accepted
            self.accepted_runs[accepted] = self.accepted_runs.get(accepted, 0) + 1

    @property
    def accepted_by_depth(self) -> tuple[float, ...]:
        """See `by_depth`."""
        return by_depth(self.accepted_runs)

    @property
    def accepted_per_step(self) -> float:
        """Tokens that a step yields for a sequence, the bonus token included; plain decoding: 1."""
        return self.decoded_tokens / self.sequence_steps if self.sequence_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were kept."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def host_overhead(self) -> float:
        """Seconds a decode step spends outside the executable."""
        spent = self.decode_seconds - self.executable_seconds
        return spent / self.steps if self.steps else 0.0

    @property
    def layers(self) -> float:
        """Layers that a decoded token's logits were made of, a mean."""
        skipped = self.skipped_layers / self.decoded_tokens if self.decoded_tokens else 0.0
        return self.target_layers - skipped

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second that decode steps yield, over all sequences."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, for reports and JSON."""
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "accepted_runs"}
        rates = (
            *("accepted_per_step", "acceptance_rate", "host_overhead", "tokens_per_second"),
            *("layers", "accepted_by_depth"),
        )
        return {**counts, **{name: getattr(self, name) for name in rates}}


def by_depth(runs: Mapping[int, int]) -> tuple[float, ...]:
    """The share of drafts whose first, second, ... token was kept, from `Stats.accepted_runs`.

    >>> by_depth({0: 1, 2: 3})
    (0.75, 0.75)
    """
    total, deepest = sum(runs.values()), max(runs, default=0)
    return tuple(
        sum(count for run, count in runs.items() if run >= depth) / total
        for depth in range(1, deepest + 1)
    )
