"""The decode loop: draft -> step -> verify -> commit, until every sequence is done."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from ..ir import Program, UnsupportedError
from ..ir.executable import Executable
from ..ir.plan import Chain, FullDepth, KeepAll
from .drafters.base import DRAFTERS, NO_DRAFT, Draft
from .feed import Feeder
from .options import GenerationOptions
from .prefill import prefill
from .stats import Stats
from .stopping import Stopping
from .streaming import Emitter
from .text import Text
from .verifiers.base import GREEDY, SAMPLING, VERIFIERS


class DecodeLoop:
    """One generation of a batch: holds the plan's drafter and verifier and the sequences' texts.

    Errors: `UnsupportedError` for a plan, or a program, that the loop cannot carry out.
    """

    def __init__(
        self, executable: Executable, texts: Sequence[Text], options: GenerationOptions
    ) -> None:
        program = executable.program
        _check_plan(program)
        plan, batch = program.plan, len(texts)
        self.texts = texts
        self.feeder = Feeder(executable, batch)
        self.drafter = DRAFTERS.find(plan.draft)(plan.draft, executable, options)
        trait = SAMPLING if options.do_sample else GREEDY
        verifier = VERIFIERS.find(plan.verify, trait)
        self.verifier = verifier(plan.verify, program, options, batch)
        self.stopping = Stopping(options, program.info)
        self.fetch = tuple(dict.fromkeys((*self.verifier.fetch, *self.drafter.wants)))
        self.no_drafts = [NO_DRAFT] * batch
        self.stats = Stats()

    def run(self, emitter: Emitter | None) -> Stats:
        """Decode until every text is done; the texts grow in place."""
        self._start(emitter)
        start, inside = perf_counter(), self.feeder.seconds
        live = [text for text in self.texts if not text.done]
        while live:
            proposed = self.drafter.propose([text.room for text in self.texts])
            outputs, drafts = self._step(proposed)
            self.stats.steps += 1
            self.stats.sequence_steps += len(live)
            self.stats.decoded_tokens += self._commit(outputs, drafts, emitter)
            live = [text for text in live if not text.done]
        self.stats.decode_seconds = perf_counter() - start
        self.stats.executable_seconds = self.feeder.seconds - inside
        self.stats.new_tokens = sum(text.generated for text in self.texts)
        return self.stats

    def _start(self, emitter: Emitter | None) -> None:
        """Prefill the prompts and commit each sequence's first token."""
        start = perf_counter()
        prompts = [text.tokens for text in self.texts]
        self.feeder.begin(max(text.limit for text in self.texts), self.drafter.most)
        self.drafter.begin(prompts)
        # Always the logits: the same compiled prefill serves every option, and one look at real
        # logits tells a broken model at once.
        fetch = tuple(dict.fromkeys(("logits", *self.drafter.wants)))
        outputs = prefill(self.feeder, prompts, [0] * len(prompts), fetch)
        self._commit(outputs, self.no_drafts, emitter)
        self.stats.prefill_seconds = perf_counter() - start

    def _step(self, drafts: Sequence[Draft]) -> tuple[dict[str, torch.Tensor], Sequence[Draft]]:
        """Feed each sequence's last token and its draft; finished sequences get garbage.

        Returns the outputs and the drafts as they were fed: near the end of the context there may
        be no compiled width for all of them.
        """
        feeder = self.feeder
        past = [0 if text.done else len(text.tokens) - 1 for text in self.texts]
        need = 1 + max(len(draft.tokens) for draft in drafts)
        width = feeder.width(need, feeder.context - max(past))
        if width is None:
            tokens = [[] if text.done else text.tokens for text in self.texts]
            return prefill(feeder, tokens, past, self.fetch), self.no_drafts
        if width < need:
            drafts = [draft.cut(width - 1) for draft in drafts]
        rows = [
            [] if text.done else [text.tokens[-1], *draft.tokens]
            for text, draft in zip(self.texts, drafts, strict=True)
        ]
        return feeder.run(rows, past, width, self.fetch), drafts

    def _commit(
        self,
        outputs: dict[str, torch.Tensor],
        drafts: Sequence[Draft],
        emitter: Emitter | None,
    ) -> int:
        """Verify a step, append what each sequence gained, tell drafter and streamer; the count."""
        new = self.verifier.verify(outputs, self.texts, drafts)
        commits = []
        for text, tokens, draft in zip(self.texts, new, drafts, strict=True):
            kept = self.stopping.commit(text, tokens) if tokens else tokens
            commits.append(kept)
            self.stats.draft_tokens += len(draft.tokens)
            self.stats.accepted_tokens += min(len(kept), max(len(tokens) - 1, 0))
        self.drafter.observe(commits, outputs)
        if emitter is not None:
            emitter.push(self.texts, commits)
        return sum(map(len, commits))


def _check_plan(program: Program) -> None:
    plan = program.plan
    for record, expected in ((plan.tree, Chain), (plan.depth, FullDepth), (plan.cache, KeepAll)):
        if not isinstance(record, expected):
            raise UnsupportedError(
                f"the runtime cannot carry out {record.slot}={record}; it has {expected.kind}"
            )
