"""What a round is, and what all rounds share: one generation of a batch while it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias, TypeVar

import torch

from ...ir import InputError, Program
from ...ir.execution.executable import Executable
from ...ir.plan import LengthRecord, Pictures
from ..asking.input_embeds import check_rows, reader_of
from ..asking.options import GenerationOptions
from ..asking.request import Request
from ..asking.stopping import Stopping
from ..asking.superposed import Superposition, ngrams_of
from ..cache.base import CACHES
from ..cache.conversations import Conversations, Start, memo_of
from ..cache.taking_over import take_over
from ..depth.base import policy_of
from ..feeding.draft import NO_DRAFT, Draft, UnverifiedStep, VerifiedStep
from ..feeding.encode import encode, place, place_rows
from ..feeding.feed import Feeder
from ..feeding.prefill import prefill
from ..memo import Resumes
from ..speculate.drafters.grown import drafter_for
from ..speculate.lengths.base import LENGTHS
from ..speculate.sampling import StepToVerify
from ..speculate.setting import Setting
from ..speculate.verifiers.base import BEAMS, GREEDY, SAMPLING, SUPERPOSED, VERIFIERS, Verdict
from ..stats import Stats

T = TypeVar("T")
StepOutputs: TypeAlias = Mapping[str, torch.Tensor]

MANY = 4
"""Parts of a step from which on calling them costs more than memory for one that is whole."""

SOON = 7
"""Steps beyond the next one that caches have room for, if the text goes on as long."""


class Decoding:
    """One generation: what the plan's parts are, and what every round does in the same way.

    texts: the sequences, which grow in place; own: those that are returned, which come before
    their guides. feeder: runs steps; reader: prompts, or their last tokens where `ahead` has the
    others; whole: the same where it runs in one call what steps run in many. kept: what earlier
    calls left in the caches. retired: texts of which nothing lies there any more. grammars: whether
    texts have any. fetch: outputs that a general step must return; rests: those of one without
    drafts, which `resting` runs. read: told of each step before it is verified; None if no part
    reads.
    told: who is told of the prompts' logits, token by token, which are then all fed. mixes: whether
    rows stand for several texts.
    Errors: `UnsupportedError` for a plan that cannot be carried out.
    """

    def __init__(
        self,
        executable: Executable,
        request: Request,
        told: Callable[[UnverifiedStep], None] | None = None,
    ) -> None:
        self.told = told
        program, options = executable.program, request.options
        plan, batch = program.plan, len(request.texts)
        self.program, self.texts, self.stopping = program, request.texts, request.stopping
        self.own = request.own
        self.depth = policy_of(executable)
        self.cache = CACHES.find(plan.cache)(plan.cache, executable)
        fed, read = plan.step.fed(options.by_argmax), plan.step.read(options.by_argmax)
        length = self._length_of(request, fed[0])
        self.length = LENGTHS.find(length)(length, executable, batch)
        if request.pictures:
            read = Pictures.function(read[0]), read[1]
            _require(program, read[0])
        ahead, parts = plan.step.ahead, plan.step.parts
        self.feeder = self.resting = Feeder(executable, batch, *fed, parts=parts)
        if fed[0] != plan.step.plain and self.length.record.gives_up:
            # Prompts, too: where drafts are given up nothing else ever runs.
            read = plan.step.plain, 0
            self.resting = Feeder(executable, batch, *read)
        if request.embeds:
            check_rows(request.embeds[0], program)
            read, ahead, parts = reader_of(program, argmax=options.by_argmax)
        same = read == fed and parts == plan.step.parts
        self.reader = self.feeder if same else Feeder(executable, batch, *read, parts=parts)
        self.whole: Feeder | None = None
        if self.resting is not self.feeder:
            self.reader = self.resting
        self.ahead = Feeder(executable, batch, ahead) if ahead else None
        trait = SAMPLING if options.do_sample else GREEDY
        if request.search is not None:
            trait = BEAMS if options.beams else SUPERPOSED
        verifier = VERIFIERS.find(plan.verify, trait)
        self.verifier = verifier(plan.verify, program, options, batch)
        self.verifier.begin(request)
        noise = self.verifier.noise if plan.coupled else None
        setting = Setting(executable, options, self.length, self.feeder, self.texts, noise)
        self.drafter = drafter_for(plan.draft, setting)
        self.mixes = isinstance(request.search, Superposition)
        if isinstance(request.search, Superposition):
            request.search.ngrams = ngrams_of(executable, request.search.plan)
        if request.search is not None:  # it ends them
            self.stopping = Stopping(GenerationOptions(eos_token_id=()), program.info)
        wanted = (*self.verifier.fetch, *self.drafter.wants, *self.length.wants)
        self.fetch = tuple(dict.fromkeys(wanted))
        wanted = (*self.verifier.fetch, *self.drafter.rests, *self.length.wants)
        self.rests = tuple(dict.fromkeys(wanted))
        if self.reader is self.feeder and self._reads_whole(request):
            self.reader = self.whole = Feeder(executable, batch, plan.step.plain)
        followers: tuple[Resumes, ...] = (self.drafter, self.depth)
        readers = [part.read for part in followers if part.reads]
        self.read = partial(_tell, readers) if readers else None
        self.emitter = request.emitter()
        self.no_drafts = [NO_DRAFT] * batch
        self.grammars = any(text.grammar is not None for text in self.texts)
        self.stats, self.away = Stats(target_layers=self.depth.total), 0.0
        # A step without states is none of a model's. What texts are written from a source holds of
        # them is nothing to texts from another one.
        self.sources, self.pictures = request.sources, request.pictures
        self.embeds = request.embeds
        others = self.sources is not None or self.pictures or self.embeds
        holds = bool(program.states) and not others
        self.kept = Conversations.of(executable) if holds else None
        # Of beams only the best is worth being gone on from.
        beside = range(batch if options.beams else 0)
        self.retired = {index for index in beside if index % options.num_beams}

    def _reads_whole(self, request: Request) -> bool:
        """Whether prompts run the step in one call, where decoding cuts it: what the parts hand on
        is wanted of the last tokens alone."""
        plan, apart = self.program.plan, request.pictures or request.embeds or self.ahead
        if len(plan.step.parts) <= MANY or plan.depth.acts or apart:
            return False
        made = self.program.function(plan.step.plain).outputs
        return {"logits", *self.drafter.wants} <= made.keys()

    def _length_of(self, request: Request, fed: str) -> LengthRecord:
        """The plan's length record, or, where time must not or cannot decide, the same without."""
        plan = self.program.plan
        told = not plan.coupled and request.options.repeats
        # Rows that plain steps leave out are made by place, from what the text says.
        apart = not plan.cache.aligned or request.pictures or request.embeds
        always = fed != plan.step.plain and apart
        return plan.length.steady if told or always else plan.length

    @property
    def live(self) -> list[int]:
        """The sequences that go on."""
        return [index for index, text in enumerate(self.texts) if not text.done]

    @property
    def reads_as_it_steps(self) -> bool:
        """Whether prompts and steps run alike, so that a token's rows do not depend on which."""
        alike = self.reader in (self.feeder, self.resting, self.whole) and self.ahead is None
        return alike and not self.program.plan.depth.acts and not self.mixes

    @property
    def argmax_decides(self) -> bool:
        """Whether a step without a draft yields its argmax, and an end shows in the last token."""
        return self.verifier.takes_argmax and self.stopping.simple

    def make_room(self, gain: int, columns: int) -> int:
        """Let the caches hold what the next steps add; how many steps may follow each other then,
        whatever they accept. gain: tokens that each yields at most; columns: those that it feeds.
        """
        feeder, live = self.feeder, [self.texts[index] for index in self.live]
        rows = max(text.rows for text in live) + columns
        # Caches that would soon be full grow now: every look at them takes time.
        feeder.make_room(max(rows, min(rows + SOON * gain, feeder.rows - feeder.spare)))
        left = feeder.executable.capacity - feeder.spare - rows
        wanted = max(text.limit - len(text.tokens) for text in live)
        # A step yields a token at least, and no text grows beyond its limit.
        return wanted if left >= wanted else 1 + max(left, 0) // gain

    def start(self) -> None:
        """Run the prompts and commit each sequence's first token."""
        for _ in self.starting():
            pass

    def starting(self) -> Generator[None, int | None, None]:
        """The same, piece by piece; sent: tokens of the next piece at most."""
        begun = self.clock()
        texts, batch = self.texts, len(self.texts)
        rows = max(text.limit for text in texts)
        if self.cache.most is not None:
            rows = min(rows, self.cache.most)
        starts = self._starts(rows)
        if self.sources is not None:
            encode(self.feeder.executable, self.sources)
        if self.pictures:
            place(self.feeder.executable, self.pictures)
        if self.embeds:
            place_rows(self.feeder.executable, self.embeds)
        self.reader.rows = self.resting.rows = self.feeder.rows
        if any(text.generated for text in texts):  # what no step was asked for
            self.emit([text.tokens[text.prompt :] for text in texts])
        self.depth.begin(self.feeder, texts)
        self.cache.begin(batch)
        self.drafter.begin([text.tokens for text in texts])
        fed = [self._resume(index, start) for index, start in enumerate(starts)]
        if self.ahead is not None:
            self.ahead.rows = self.feeder.rows
            yield from prefill(self.ahead, texts, (), self.cache, begun=fed, whole=False)
            fed = [text.fed for text in texts]
        # Always the logits: the same compiled prefill serves every option, and one look at real
        # logits tells a broken model at once.
        rests = self.resting is not self.feeder
        wanted = self.drafter.rests if rests else self.drafter.wants
        fetch = tuple(dict.fromkeys(("logits", *self.verifier.begins, *wanted)))
        pieces = prefill(self.reader, texts, fetch, self.cache, self.read, fed, told=self.told)
        outputs, columns = yield from pieces
        self.verify(outputs, self.no_drafts, columns)
        self.stats.prefill_seconds = self.clock() - begun

    def clock(self) -> float:
        """Seconds; what is done once and never again takes none, nor what is done for others."""
        return perf_counter() - self.feeder.executable.preparing - self.away

    def _starts(self, rows: int) -> Sequence[Start | None]:
        """Begin; which conversation each text goes on from."""
        executable, columns = self.feeder.executable, self.program.plan.columns
        if self.kept is None:
            self.feeder.begin(rows, columns)
            return [None] * len(self.texts)
        starts = self.kept.find(executable, self)
        if self.told is not None:
            starts = [None] * len(starts)
        self.cache.share(self.texts, [0 if start is None else start.count for start in starts])
        begin = partial(self.kept.place, executable, starts, self.cache)
        self.feeder.begin(rows - self.cache.shared, columns, begin)
        return starts

    def _resume(self, index: int, start: Start | None) -> int:
        """Tokens of a text that need not be fed."""
        if start is None:
            return 0
        conversation, count, text = start.conversation, start.count, self.texts[index]
        missing = len(conversation.tokens) - count
        text.rows = conversation.rows - missing - self.cache.shared
        text.position = conversation.position - missing
        memo = memo_of(self, conversation)
        self.drafter.resume(index, memo, count)
        self.depth.resume(index, memo, count)
        self.stats.reused_tokens += count
        return count

    def retire(self) -> None:
        """Keep what the caches hold of texts that are done, while others go on."""
        if self.kept is None:
            return
        for index, text in enumerate(self.texts):
            if text.done and index not in self.retired:
                self.kept.retire(self.feeder.executable, index, self)
                self.retired.add(index)

    def finish(self) -> None:
        """Every text is done."""
        if self.kept is not None:
            self.kept.leave(self.feeder.executable, self, self.retired)
        if self.emitter is not None:
            self.emitter.end()

    def room(self) -> int | None:
        """Tokens that all may grow by before the cache policy's turn; None: any, or all done."""
        rows = [text.rows for text in self.texts if not text.done]
        return self.cache.room(rows) if rows else None

    def verify(
        self, outputs: StepOutputs, drafts: Sequence[Draft], columns: Sequence[int]
    ) -> VerifiedStep:
        """Verify a step, commit each sequence's gain, tell drafter and streamer.

        columns: where the values of each sequence's last token are.
        """
        own = self.own
        verdicts = self.verifier.verify(StepToVerify(outputs, own, drafts[: len(own)], columns))
        if any(draft.parents is not None for draft in drafts):
            past = [0 if text.done else text.rows for text in self.texts]
            self.feeder.keep(past, [verdict.path for verdict in self.paired(verdicts)])
        if (parents := self.verifier.parents) is not None:
            self._take_over(parents)
        commits, paths = self._commit(verdicts, drafts)
        step = VerifiedStep(drafts, paths, commits, columns, outputs)
        self.drafter.observe(step)
        self.emit(commits)
        return step

    def _take_over(self, parents: Sequence[int]) -> None:
        """Texts, and their guides, go on from others."""
        count = len(parents)
        guides = [count + parent for parent in parents[: len(self.texts) - count]]
        source, feeder = [*parents, *guides], self.feeder
        take_over(feeder.executable, self.cache, self.texts, source)
        feeder.folded = [feeder.folded[one] for one in source]

    def _commit(
        self, verdicts: Sequence[Verdict], drafts: Sequence[Draft]
    ) -> tuple[Sequence[list[int]], Sequence[Sequence[int]]]:
        """Commit what each sequence gained: its tokens, and the accepted nodes among them."""
        commits: list[list[int]] = []
        paths: list[Sequence[int]] = []
        for text, (path, gained), draft in zip(self.own, verdicts, drafts, strict=False):
            kept = self.stopping.commit(text, gained) if gained else []
            if self.verifier.scorer.records:
                self.verifier.scorer.record(len(commits), text, [-1, *path][: len(kept)])
            if len(kept) < len(path):
                path = path[: len(kept)]
            commits.append(kept)
            paths.append(path)
            self.stats.verified(len(draft.tokens), len(path))
        for text, guide, kept in zip(self.own, self.texts[len(self.own) :], commits, strict=False):
            guide.tokens += kept
            guide.grow(len(kept))
            guide.done = text.done
        return self.paired(commits), self.paired(paths)

    def paired(self, each: Sequence[T]) -> Sequence[T]:
        """What the texts have, for them and for their guides."""
        count = len(self.own)
        return each if count == len(self.texts) else [*each[:count], *each[:count]]

    def emit(self, commits: Sequence[Sequence[int]]) -> None:
        """Hand on what a step committed."""
        if self.emitter is not None:
            self.emitter.push(self.own, commits[: len(self.own)])


def _require(program: Program, function: str) -> None:
    """Errors: `InputError` for a recipe whose step reads texts alone."""
    if function not in program.functions:
        raise InputError(
            f"image_embeds: the recipe's step reads texts alone: it is cut, or packs tokens, or "
            f"its drafts have tokens of their own ({program.plan.draft.brief}), or its caches lose "
            f"rows ({program.plan.cache.brief}) of pictures that are read otherwise than tokens: "
            f"take another recipe"
        )


def _tell(readers: Sequence[Callable[[UnverifiedStep], None]], fed: UnverifiedStep) -> None:
    """Pass on a step before it is verified."""
    for read in readers:
        read(fed)


class Round(ABC):
    """One way to run decode steps; a list of them, fastest first, serves every generation."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding

    @classmethod
    @abstractmethod
    def fits(cls, decoding: Decoding) -> bool:
        """Whether the plan and the options allow this way."""

    def wants(self) -> int | None:
        """Steps to make now; 0: none, another round takes the turn; None: as many as there are."""
        return None

    @abstractmethod
    def run(self, most: int | None) -> int:
        """Make up to `most` steps, which end early where a text ends; how many were made.

        Errors: `InputError` for logits that are NaN.
        """

    def least(self, *limits: int | None) -> int:
        """The least of some numbers of steps (None: no limit); 1 where there is a streamer."""
        known = [limit for limit in limits if limit is not None]
        return min(known) if self.decoding.emitter is None else min(1, *known)

    def commit(self, new: list[list[int]], live: Sequence[int]) -> None:
        """Append what steps gained to each text of `live`; `new` becomes what was appended."""
        decoding = self.decoding
        for index in live:
            gained = new[index]
            new[index] = decoding.stopping.commit(decoding.texts[index], gained)
            # What a last step gained beyond the end was drafted, but for its own token.
            decoding.stats.accepted_tokens -= max(len(gained) - len(new[index]) - 1, 0)
        decoding.emit(new)
