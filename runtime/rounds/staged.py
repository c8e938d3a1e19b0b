"""Steps of which not every token runs through every layer."""

from __future__ import annotations

from ..asking.checks import bad_logits
from ..depth.base import StepFeed
from .base import Decoding
from .general import GeneralRound
from .plain import FETCH, one_by_one


class StagedRound(GeneralRound):
    """Asks the depth policy; no faster round does.

    alone: whether the argmax alone decides, step by step, and no other part reads steps.
    Then a step touches what the policy does, and little more: see `plain`.
    """

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding)
        undrafted = decoding.program.plan.columns == 0 and not decoding.length.learns
        self.alone = undrafted and decoding.read is None and one_by_one(decoding)

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        return decoding.program.plan.depth.acts

    def wants(self) -> int | None:
        room = self.decoding.room() if self.alone else 1
        return None if room is None else max(room, 1)

    def run(self, most: int | None) -> int:
        decoding = self.decoding
        if not self.alone:
            return super().run(most)
        # A streamer wants each token at once.
        limits = [n for n in (most, 1 if decoding.emitter is not None else None) if n is not None]
        live = decoding.live
        starts = [len(text.tokens) for text in decoding.texts]
        steps = self._steps(live, min(limits, default=None))
        new = [text.tokens[n:] for text, n in zip(decoding.texts, starts, strict=True)]
        decoding.emit(new)
        decoding.stats.count(steps, len(live))
        return steps

    def _steps(self, live: list[int], most: int | None) -> int:
        """Up to `most` steps, or until a text ends. How many."""
        decoding, texts, depth = self.decoding, self.decoding.texts, self.decoding.depth
        vocabulary, commit = decoding.program.info.vocab_size, decoding.stopping.commit
        room, single = decoding.make_room(1, 1), decoding.feeder.takes_single
        most = room if most is None else min(most, room)
        steps, skipped, ended = 0, 0.0, False
        while steps != most and not ended:
            rows = [[] if text.done else [text.tokens[-1]] for text in texts]
            past = [0 if text.done else text.rows for text in texts]
            starts = [0 if text.done else text.position for text in texts]
            step = StepFeed(rows, past, starts, FETCH, 1, single=single)
            said = depth.feed(step).integers("argmax")
            steps += 1
            skipped += depth.total - depth.ran
            for index in live:
                token = said[index][0]
                if not 0 <= token < vocabulary:
                    raise bad_logits()
                commit(texts[index], [token])
                ended = ended or texts[index].done
        decoding.stats.skipped_layers += skipped * len(live)
        return steps
