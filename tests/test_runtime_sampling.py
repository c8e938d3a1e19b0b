"""Sampling: transformers' processors one by one, and the distribution of what is generated."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import pytest
import torch
from runtime_models import TableExecutable, markov, program
from selection import one_in
from transformers.generation import logits_process as theirs

from graftwork.ir import InputError
from graftwork.ir.plan import DraftRecord, Lossless
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate
from graftwork.runtime.asking import filters
from graftwork.runtime.asking.options import read_options
from graftwork.runtime.asking.processors import Subject, processors_for
from graftwork.runtime.asking.text import Text
from graftwork.runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from graftwork.runtime.speculate import sampling
from graftwork.runtime.speculate.drafters.base import DRAFTERS, Drafter
from graftwork.runtime.speculate.sampling import StepToVerify
from graftwork.runtime.speculate.verifiers.rejection import RejectionVerifier

ROWS = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)) * 3
TIED = (ROWS * 2).round() / 2
IDS = torch.randint(0, 40, (6, 9), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("rows", [ROWS, TIED, -ROWS.abs()])
@pytest.mark.parametrize(
    ("ours", "processor"),
    [
        (lambda s: filters.keep_top_k(s, 5), theirs.TopKLogitsWarper(5)),
        (lambda s: filters.keep_top_k(s, 1), theirs.TopKLogitsWarper(1)),
        (lambda s: filters.keep_top_k(s, 99), theirs.TopKLogitsWarper(99)),
        (lambda s: filters.keep_top_p(s, 0.7), theirs.TopPLogitsWarper(0.7)),
        (lambda s: filters.keep_top_p(s, 0.0), theirs.TopPLogitsWarper(0.0)),
        (lambda s: filters.keep_min_p(s, 0.2), theirs.MinPLogitsWarper(0.2)),
        (lambda s: filters.keep_min_p(s, 1.0), theirs.MinPLogitsWarper(1.0)),
    ],
)
def test_filters_equal_transformers(ours, processor, rows):
    expected = processor(IDS, rows.clone())
    assert torch.equal(ours(rows.clone()), expected)
    assert not torch.equal(expected, rows) or getattr(processor, "top_k", 0) == 99


def test_penalty_equals_transformers():
    seen = torch.zeros(6, 40, dtype=torch.bool).scatter(1, IDS, True)
    for penalty in (1.7, 0.5):
        expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(IDS, ROWS.clone())
        assert torch.equal(filters.penalize_repetition(ROWS, seen, penalty), expected)


def test_the_whole_chain_equals_transformers_along_a_draft():
    """Row after row of a drafted step; penalty and minimum count along the draft."""
    info = program(40, eos=(7,)).info
    wanted = {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    options = read_options(
        {"do_sample": True, "repetition_penalty": 1.4, "min_new_tokens": 3, **wanted}, info
    )
    prompt, draft = [1, 2, 3, 4], [5, 1, 39]
    texts = [Text([9, 9], 2, 30, done=True), Text(prompt, 3, 30)]
    texts[1].processors = processors_for(options, Subject(1, prompt[:3], prompt, 3, (7,), 40))
    scorer = sampling.Scorer(options)
    logits = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(9))
    logits[..., 7] += 4.0
    scores, owners = scorer.rows(StepToVerify({"logits": logits}, texts, [NO_DRAFT, Draft(draft)]))
    assert owners == [(1, -1), (1, 0), (1, 1), (1, 2)]
    chain = theirs.LogitsProcessorList(
        [
            theirs.RepetitionPenaltyLogitsProcessor(1.4),
            theirs.MinNewTokensLengthLogitsProcessor(3, 3, 7),
            theirs.TemperatureLogitsWarper(0.6),
            theirs.TopKLogitsWarper(12),
            theirs.TopPLogitsWarper(0.9),
            theirs.MinPLogitsWarper(0.02),
        ]
    )
    chances = scorer.warp(scores)
    rows = torch.zeros_like(scores).scatter(
        1, torch.from_numpy(chances.ids), torch.from_numpy(chances.probs)
    )
    for depth, row in enumerate(rows):
        ids = torch.tensor([prompt + draft[:depth]])
        reshaped = theirs.LogitsProcessorList(chain[:2])(ids, logits[1, depth][None].clone())
        assert torch.equal(scores[depth], reshaped[0])
        expected = chain(ids, logits[1, depth][None].clone()).softmax(-1)[0]
        torch.testing.assert_close(row, expected)
    assert scores[0, 7] == scores[1, 7] == -math.inf != scores[2, 7]


@pytest.mark.parametrize("rows", [ROWS, TIED])
def test_ties_with_the_last_candidate_stay(rows):
    info = program(40).info
    for count in range(1, 41):
        options = read_options({"do_sample": True, "top_k": count, "temperature": 0.5}, info)
        probs, ids = sampling.Scorer(options).warp(rows)
        found = torch.from_numpy(probs)
        if ids is not None:
            found = torch.zeros(6, 40).scatter(1, torch.from_numpy(ids), found)
        expected = theirs.TopKLogitsWarper(count)(IDS, rows / 0.5).softmax(-1)
        torch.testing.assert_close(found, expected)


# -- the distribution of generated text -----------------------------------------------------------

VOCAB, LENGTH, PROMPT = 5, 3, [0, 1, 2, 0, 1]
RULE = markov(VOCAB, seed=5, scale=0.7)


@dataclass(frozen=True)
class SampledDraft(DraftRecord):
    """Draft tokens sampled from another model. probs: its own, "none" or "wrong" ones."""

    probs: str = "own"
    kind: ClassVar[str] = "test_sampled"
    most: ClassVar[int] = 3


@DRAFTERS.register(SampledDraft)
class SampledDrafter(Drafter):
    """A drafter in one file: another Markov chain, whose drafts carry their distributions."""

    rule: ClassVar[Callable[..., torch.Tensor]] = staticmethod(markov(VOCAB, seed=6))
    random: ClassVar[torch.Generator] = torch.Generator().manual_seed(77)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(prompt) for prompt in prompts]

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return [self._draft(t, min(r, 3)) for t, r in zip(self.texts, rooms, strict=True)]

    def _draft(self, text: list[int], count: int) -> Draft:
        tokens: list[int] = []
        probs, draws = [], []
        for _ in range(count):
            probs.append(self.rule((*text, *tokens)).softmax(-1))
            draws.append(float(torch.rand((), generator=self.random)))
            tokens.append(min(int((probs[-1].cumsum(-1) < draws[-1]).sum()), VOCAB - 1))
        if not tokens or self.record.probs == "none":
            return Draft(tokens)
        own = torch.stack(probs)
        return Draft(tokens, own if self.record.probs == "own" else own.flip(-1))

    def observe(self, taken: VerifiedStep) -> None:
        for text, tokens in zip(self.texts, taken.tokens, strict=True):
            text += tokens


def theirs_warped(logits: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
    """Probabilities [R,V] through transformers' own warpers."""
    if "temperature" in options:
        logits = theirs.TemperatureLogitsWarper(options["temperature"])(None, logits)
    if options.get("top_k"):
        logits = theirs.TopKLogitsWarper(int(options["top_k"]))(None, logits)
    if "top_p" in options:
        logits = theirs.TopPLogitsWarper(options["top_p"])(None, logits)
    return logits.softmax(-1)


def exact(options: dict[str, float]) -> dict[tuple[int, ...], float]:
    """Probability of every continuation."""
    found = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for count, token in enumerate(tokens):
            seen = (*PROMPT, *tokens[:count])
            chance *= float(theirs_warped(RULE(seen)[None], options)[0, token])
        found[tokens] = chance
    return found


def chi_square_limit(freedom: int) -> float:
    """Exceeded by chance once in 100,000 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.265 * spread**0.5) ** 3


def assert_distributed(drawn: Counter, expected: dict[tuple[int, ...], float]) -> None:
    total = sum(drawn.values())
    assert all(expected[tokens] > 0 for tokens in drawn), "a token outside the filters came up"
    cells = [(drawn[t], total * p) for t, p in expected.items() if total * p >= 5]
    rest = total - sum(seen for seen, _ in cells), total - sum(mean for _, mean in cells)
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    assert len(cells) > 2, "too few samples to say anything"
    assert statistic < chi_square_limit(len(cells) - 1), statistic


DRAFTS = {
    "plain": None,
    "suffix": SuffixDraft(tokens=3, shortest=1),
    "sampled": SampledDraft(),
    "unsaid": SampledDraft(probs="none"),
}
BOTH = {"top_k": 4, "top_p": 0.9}
CASES = [
    *itertools.product(["plain", "suffix", "sampled"], [(1, 250), (4, 60), (400, 3)], [{}]),
    *itertools.product(["plain", "suffix"], [(1, 150), (4, 40), (400, 2)], [BOTH]),
    *itertools.product(
        ["suffix"], [(400, 2)], [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}]
    ),
    ("sampled", (400, 3), BOTH),
    ("unsaid", (400, 4), {}),
]


def texts_drawn(
    executable: TableExecutable,
    prompt: Sequence[int],
    length: int,
    size: tuple[int, int],
    options: dict[str, float],
) -> tuple[Counter, int, int]:
    """Continuations of `length` tokens that are drawn in `size` = (batch, calls), draft tokens that
    were kept, and all of them."""
    batch, calls = size
    generator = torch.Generator().manual_seed(batch)
    ids = torch.tensor([list(prompt)] * batch)
    drawn: Counter = Counter()
    accepted = drafted = 0
    for _ in range(calls):
        result = generate(
            executable,
            ids,
            max_new_tokens=length,
            do_sample=True,
            generator=generator,
            return_dict_in_generate=True,
            **options,
        )
        drawn.update(map(tuple, result.sequences[:, len(prompt) :].tolist()))
        accepted += result.stats.accepted_tokens
        drafted += result.stats.draft_tokens
    return drawn, accepted, drafted


@pytest.mark.parametrize(("name", "size", "options"), one_in(2, CASES), ids=str)
def test_samples_follow_the_models_distribution(name, size, options):
    draft = DRAFTS[name]
    executable = TableExecutable(RULE, program(VOCAB, draft=draft))
    drawn, accepted, drafted = texts_drawn(executable, PROMPT, LENGTH, size, options)
    assert_distributed(drawn, exact({"top_k": 50, **options}))
    # The test says something about drafts only if some are kept and some are not.
    assert (draft is None and drafted == 0) or 0.05 < accepted / drafted < 0.95


@pytest.mark.parametrize(
    ("said", "options"), one_in(3, product([True, False], [{}, BOTH])), ids=str
)
def test_verifier_keeps_the_distribution(said, options):
    """The verifier alone, on many sequences at once: token i follows p_i wherever i-1 were kept."""
    many, depths = 20_000, 3
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(depths + 1, VOCAB, generator=generator)
    q = torch.randn(depths, VOCAB, generator=generator).softmax(-1)
    info = program(VOCAB).info
    asked = read_options({"do_sample": True, "seed": 12, **options}, info)
    verifier = RejectionVerifier(Lossless(), program(VOCAB), asked, many)
    guesses = torch.multinomial(q, many, replacement=True, generator=generator).T.tolist()
    drafts = [Draft(tokens, q if said else None) for tokens in guesses]
    texts = [Text([0], 1, 9) for _ in range(many)]
    outputs = {"logits": logits.expand(many, -1, -1)}
    results = [verdict.tokens for verdict in verifier.verify(StepToVerify(outputs, texts, drafts))]
    targets = theirs_warped(logits, {"top_k": 50, **options})
    for depth in range(depths + 1):
        reached = [r for r, g in zip(results, guesses, strict=True) if len(r) > depth]
        drawn = Counter((tokens[depth],) for tokens in reached)
        assert len(reached) > 100
        assert_distributed(drawn, {(t,): float(p) for t, p in enumerate(targets[depth])})
    assert all(r[:-1] == g[: len(r) - 1] for r, g in zip(results, guesses, strict=True))


def test_the_test_can_fail():
    """Drafts said to come from another distribution than they do are not lossless: it shows."""
    executable = TableExecutable(RULE, program(VOCAB, draft=SampledDraft(probs="wrong")))
    ids = torch.tensor([PROMPT] * 400)
    drawn: Counter = Counter()
    for seed in range(4):
        result = generate(executable, ids, max_new_tokens=LENGTH, do_sample=True, seed=seed)
        drawn.update(map(tuple, result[:, len(PROMPT) :].tolist()))
    with pytest.raises(AssertionError):
        assert_distributed(drawn, exact({}))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["suffix", "unsaid"])
def test_a_seed_s_text_does_not_depend_on_drafts_that_were_not_sampled(name, size):
    """Token t of a text is drawn with number t, in steps of one token as in steps of many: texts
    are plain decoding's, and a draft is cut wherever time says so."""
    ids = torch.tensor([PROMPT] * size)
    texts, counts = {}, {}
    for which in (name, "plain"):
        executable = TableExecutable(RULE, program(VOCAB, draft=DRAFTS[which]))
        asked = {"max_new_tokens": 60, "do_sample": True, "seed": 3, "eos_token_id": []}
        found = generate(executable, ids, return_dict_in_generate=True, pad_token_id=0, **asked)
        texts[which], counts[which] = found.sequences.tolist(), found.stats.accepted_tokens
    assert texts[name] == texts["plain"]
    assert counts[name] > 1 > counts["plain"] == 0


def test_seed_generator_and_global_state_repeat():
    executable = TableExecutable(RULE, program(VOCAB, draft=SuffixDraft(shortest=1)))
    ids = torch.tensor([PROMPT] * 3)

    def sample(**given):
        return generate(executable, ids, max_new_tokens=12, do_sample=True, **given)

    assert torch.equal(sample(seed=3), sample(seed=3))
    assert not torch.equal(sample(seed=3), sample(seed=4))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(sample(generator=generators[0]), sample(generator=generators[1]))
    torch.manual_seed(3)
    first = sample()
    torch.manual_seed(3)
    assert torch.equal(first, sample())


@pytest.mark.parametrize("draft", [None, SuffixDraft(shortest=1)], ids=["plain", "suffix"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("outputs", [("logits",), ("logits", "argmax")])
@pytest.mark.parametrize("late", [False, True])
def test_nan_logits_are_an_error(draft, do_sample, outputs, late):
    def rule(seen):
        broken = not late or len(seen) > 8
        return torch.full((VOCAB,), math.nan) if broken else RULE(seen)

    class Broken(TableExecutable):
        # A backend's argmax of NaN need not be a token.
        def best(self, logits):
            return super().best(logits).masked_fill(logits.isnan().any(-1), -1)

    executable = Broken(rule, program(VOCAB, draft=draft, outputs=outputs))
    with pytest.raises(InputError, match="NaN"):
        generate(executable, torch.tensor([PROMPT]), max_new_tokens=9, do_sample=do_sample)


def test_greedy_with_penalty_and_minimum_equals_step_by_step():
    """Options that reshape logits: drafts must be judged with the penalty of their own prefix."""
    rule = markov(12, seed=8, scale=2.0)
    prompt = [1, 2, 3, 1, 2]
    for draft in (None, SuffixDraft(tokens=5, shortest=1)):
        executable = TableExecutable(rule, program(12, draft=draft))
        result = generate(
            executable,
            torch.tensor([prompt]),
            max_new_tokens=30,
            repetition_penalty=1.3,
            min_new_tokens=6,
            eos_token_id=[0, 4],
        )
        seen = list(prompt)
        while len(seen) < 35 and (len(seen) <= 5 or seen[-1] not in (0, 4)):
            scores = rule(tuple(seen))[None].clone()
            scores = theirs.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), scores)
            if len(seen) - 5 < 6:
                scores[:, [0, 4]] = -math.inf
            seen.append(int(scores.argmax()))
        assert result[0].tolist() == seen


def test_samples_follow_the_distribution_under_processors():
    """Of the text and of whole rows; drafts are judged by scores that are processed."""
    asked = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "typical_p": 0.9}
    chain = theirs.LogitsProcessorList(
        [
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
            theirs.NoRepeatNGramLogitsProcessor(2),
            theirs.TypicalLogitsWarper(0.9),
        ]
    )
    expected = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for count, token in enumerate(tokens):
            seen = (*PROMPT, *tokens[:count])
            scores = chain(torch.tensor([seen]), RULE(seen)[None].clone())
            chance *= float(scores.softmax(-1)[0, token])
        expected[tokens] = chance
    for name in ("suffix", "sampled"):
        executable = TableExecutable(RULE, program(VOCAB, draft=DRAFTS[name]))
        drawn, accepted, drafted = texts_drawn(executable, PROMPT, LENGTH, (400, 3), asked)
        assert_distributed(drawn, expected)
        # Copies are what such n-grams forbid.
        assert drafted and (accepted == 0 if name == "suffix" else accepted > 0.03 * drafted)
