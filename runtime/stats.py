"""What a generation cost and what its drafts bought."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one call of `generate`.

    steps: decode steps (the prefill, which yields each sequence's first token, is none).
    sequence_steps: steps times the sequences that were unfinished in them. new_tokens: tokens
    generated, first ones included. reused_tokens: of the prompts, those that an earlier call had
    fed; shared_tokens: those that were fed once for several sequences of this call; turned_tokens:
    those behind an edit, whose rows were kept from the text before it. draft_tokens: proposed and
    verified. accepted_tokens: of those, the ones kept. preparing_seconds: wall time of what is done
    once and never again, such as compiling a step and opening its session; prefill_seconds,
    decode_seconds: of the rest; decode_seconds covers executable_seconds, the time spent inside the
    executable during decode steps. target_layers: layers of the step; skipped_layers: of those,
    what decoded tokens did not run through before they were continued, summed over tokens; an MLP
    is half a layer.
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

    def count(self, steps: int, live: int, drafted: int = 0, accepted: int = 0) -> None:
        """So many steps were made, in which `live` sequences were unfinished."""
        self.steps += steps
        self.sequence_steps += steps * live
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

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

    def to_dict(self) -> dict[str, float | int]:
        """Every figure by name, for reports and JSON."""
        counts = {name: getattr(self, name) for name in self.__slots__}
        rates = (
            *("accepted_per_step", "acceptance_rate", "host_overhead", "tokens_per_second"),
            "layers",
        )
        return {**counts, **{name: getattr(self, name) for name in rates}}
