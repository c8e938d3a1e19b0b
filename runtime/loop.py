"""The decode loop: draft -> step -> verify -> commit, until every sequence is done."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..ir import Program, UnsupportedError
from ..ir.executable import Executable, Outputs
from ..ir.legality import check_carried, unmet
from ..ir.plan import FullDepth, KeepAll
from .asking.options import GenerationOptions
from .asking.stopping import Stopping
from .asking.streaming import Emitter
from .asking.text import Text
from .feeding.feed import Feeder
from .feeding.prefill import prefill
from .rounds.chained import ChainedDecoding, is_chained
from .rounds.plain import PlainDecoding, is_plain, may_be_plain
from .speculate.draft import NO_DRAFT, Draft
from .speculate.drafters.base import Fed, Taken
from .speculate.drafters.grown import drafter_for
from .speculate.lengths.base import LENGTHS
from .speculate.verifiers.base import GREEDY, SAMPLING, VERIFIERS
from .stats import Stats

REST = 4
"""Steps without drafts from which on plain decoding is worth changing to."""


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
        self.texts, self.program = texts, program
        self.length = LENGTHS.find(plan.length)(plan.length, executable, batch)
        self.drafter = drafter_for(plan.draft, executable, options, self.length)
        self.feeder = Feeder(executable, batch, *plan.step.fed(options.by_argmax))
        trait = SAMPLING if options.do_sample else GREEDY
        verifier = VERIFIERS.find(plan.verify, trait)
        self.verifier = verifier(plan.verify, program, options, batch)
        self.stopping = Stopping(options, program.info)
        wanted = (*self.verifier.fetch, *self.drafter.wants, *self.length.wants)
        self.fetch = tuple(dict.fromkeys(wanted))
        self.read = self.drafter.read if self.drafter.reads else None
        self.no_drafts = [NO_DRAFT] * batch
        self.nowhere = [0] * batch
        self.stats = Stats()

    def run(self, emitter: Emitter | None) -> Stats:
        """Decode until every text is done; the texts grow in place."""
        self._start(emitter)
        first = sum(text.generated for text in self.texts)
        start, inside = perf_counter(), self.feeder.seconds
        if is_plain(self.program, self.feeder, self.verifier, self.stopping):
            PlainDecoding(self.feeder, self.texts, self.stopping, self.stats).run(emitter)
        else:
            if is_chained(self.drafter, self.feeder, self.verifier, self.length, self.stopping):
                chained = ChainedDecoding(
                    self.feeder, self.texts, self.stopping, self.stats, self.drafter
                )
                chained.run(emitter)
            self._decode(emitter)
        self.stats.decode_seconds = perf_counter() - start
        self.stats.executable_seconds = self.feeder.seconds - inside
        self.stats.new_tokens = sum(text.generated for text in self.texts)
        self.stats.decoded_tokens = self.stats.new_tokens - first
        return self.stats

    def _decode(self, emitter: Emitter | None) -> None:
        """Steps of every kind, until every text is done."""
        live = [text for text in self.texts if not text.done]
        plain = PlainDecoding(self.feeder, self.texts, self.stopping, self.stats, self.drafter)
        rests = may_be_plain(self.feeder, self.verifier, self.stopping)
        while live:
            rest = self.length.rest() if rests else 0
            if rest >= REST:
                self.length.rested(plain.run(emitter, rest))
                live = [text for text in live if not text.done]
                continue
            before = self._clock()
            drafts = self._propose()
            between = self._clock()
            outputs, past, drafts, columns = self._step(drafts)
            taken = self._commit(outputs, past, drafts, columns, emitter)
            self.length.observe(taken, between - before, self._clock() - between)
            self.stats.steps += 1
            self.stats.sequence_steps += len(live)
            live = [text for text in live if not text.done]

    def _clock(self) -> float:
        """Seconds; what is done once and never again takes none."""
        return perf_counter() - self.feeder.executable.preparing

    def _start(self, emitter: Emitter | None) -> None:
        """Prefill the prompts and commit each sequence's first token."""
        start = perf_counter()
        prompts = [text.tokens for text in self.texts]
        most = self.program.plan.columns
        self.feeder.begin(max(text.limit for text in self.texts), most)
        self.drafter.begin(prompts)
        # Always the logits: the same compiled prefill serves every option, and one look at real
        # logits tells a broken model at once.
        fetch = tuple(dict.fromkeys(("logits", *self.drafter.wants)))
        outputs, columns = prefill(self.feeder, prompts, self.nowhere, fetch, self.read)
        past = [len(prompt) - 1 for prompt in prompts]
        self._commit(outputs, past, self.no_drafts, columns, emitter)
        self.stats.prefill_seconds = perf_counter() - start

    def _propose(self) -> Sequence[Draft]:
        """A draft for each sequence, as far as the length policy and its room allow."""
        rooms = [text.room for text in self.texts]
        counts = self.length.limits(rooms)
        if not any(counts):
            return self.no_drafts
        drafts = self.drafter.propose(list(map(min, rooms, counts)))
        return [
            draft.cut(count) if len(draft.tokens) > count else draft
            for draft, count in zip(drafts, counts, strict=True)
        ]

    def _step(
        self, drafts: Sequence[Draft]
    ) -> tuple[Outputs, list[int], Sequence[Draft], list[int]]:
        """Feed each sequence's last token and its draft; finished sequences get garbage.

        Returns the outputs, the cache rows before the step, the drafts as they were fed (near the
        end of the context there may be no compiled width for all of them), and where the last
        token's values are.
        """
        feeder = self.feeder
        past = [0 if text.done else len(text.tokens) - 1 for text in self.texts]
        need = 1 + max(len(draft.fed) for draft in drafts)
        width = feeder.width(need, feeder.context - max(past))
        if width is None:
            tokens = [[] if text.done else text.tokens for text in self.texts]
            outputs, columns = prefill(feeder, tokens, past, self.fetch, self.read)
            return outputs, past, self.no_drafts, columns
        if width < need:
            drafts = [draft.fitting(width - 1) for draft in drafts]
        rows = [
            [] if text.done else [text.tokens[-1], *draft.fed]
            for text, draft in zip(self.texts, drafts, strict=True)
        ]
        trees = drafts if any(draft.branches for draft in drafts) else None
        outputs = feeder.run(rows, past, width, self.fetch, trees=trees)
        if self.read is not None:
            self.read(Fed(rows, past, outputs))
        return outputs, past, drafts, self.nowhere

    def _commit(
        self,
        outputs: Outputs,
        past: list[int],
        drafts: Sequence[Draft],
        columns: list[int],
        emitter: Emitter | None,
    ) -> Taken:
        """Verify a step, append each sequence's gain, tell drafter and streamer."""
        verdicts = self.verifier.verify(outputs, self.texts, drafts)
        if any(draft.parents is not None for draft in drafts):
            self.feeder.keep(past, [verdict.path for verdict in verdicts])
        commits, paths, stats = [], [], self.stats
        for text, verdict, draft in zip(self.texts, verdicts, drafts, strict=True):
            path, gained = verdict
            kept = self.stopping.commit(text, gained) if gained else []
            if len(kept) < len(path):
                path = path[: len(kept)]
            commits.append(kept)
            paths.append(path)
            stats.draft_tokens += len(draft.tokens)
            stats.accepted_tokens += len(path)
        taken = Taken(drafts, paths, commits, past, columns, outputs)
        self.drafter.observe(taken)
        if emitter is not None:
            emitter.push(self.texts, commits)
        return taken


def _check_plan(program: Program) -> None:
    plan = program.plan
    check_carried(plan)
    for record, expected in ((plan.depth, FullDepth), (plan.cache, KeepAll)):
        if not isinstance(record, expected):
            raise UnsupportedError(
                f"the runtime cannot carry out {record.slot}={record}; it has {expected.kind}"
            )
    if fault := unmet(program):
        lacks = f"; the program lacks a pass that provides {fact!r}" if (fact := fault[1]) else ""
        raise UnsupportedError(f"{fault[0]}{lacks}")
