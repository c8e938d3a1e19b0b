"""Drafters without training: the same tokens as plain decoding, and drafts that are of use."""

from __future__ import annotations

import pytest
import torch
from runtime_models import TableExecutable, markov, plain, program, setting, whole
from tiny import MASK, drafting_llama, in_int8, named
from tiny import PROMPTS as BATCH

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir.plan import MergedDraft, StaticTree
from graftwork.passes.drafting.input import InputDraft, InputPlace
from graftwork.passes.drafting.jacobi import JacobiDraft, JacobiDrafter
from graftwork.passes.drafting.lookahead import LookaheadDraft, LookaheadDrafter, Pool
from graftwork.runtime import generate
from graftwork.runtime.feeding.draft import VerifiedStep

VOCAB = 12
LOOKAHEAD = LookaheadDraft(window=4, ngram=4, pool=3)
DRAFTS = {
    "jacobi": JacobiDraft(tokens=5),
    "lookahead": LOOKAHEAD,
    "lookahead, bigrams": LookaheadDraft(window=2, ngram=2, pool=2),
    "lookahead, one place": LookaheadDraft(window=1, ngram=4, pool=2),
    "input": InputDraft(tokens=5),
    "merged": MergedDraft((InputDraft(tokens=5), LOOKAHEAD, JacobiDraft(tokens=3))),
}
PROMPTS = ([1, 2, 3], [4], [7, 7, 2, 7, 7, 3, 0, 1, 5])


def executable(rule, draft, **options):
    return TableExecutable(rule, program(VOCAB, draft=draft, tree=StaticTree(), **options))


def run(model, prompt, count=40, **options):
    ids = torch.tensor([prompt])
    return generate(model, ids, max_new_tokens=count, return_dict_in_generate=True, **options)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("rule", [markov(VOCAB, seed=3), whole(VOCAB)], ids=["markov", "whole"])
def test_tokens_are_those_of_plain_decoding(name, rule):
    model = executable(rule, DRAFTS[name])
    for prompt in PROMPTS:
        assert run(model, prompt).sequences[0].tolist() == prompt + plain(rule, prompt, 40)


@pytest.mark.parametrize("name", DRAFTS)
def test_batches_and_the_end_of_the_context(name):
    """Drafts are cut where the cache ends, and each sequence keeps what it learned to itself."""
    rule = markov(VOCAB, seed=3)
    model = executable(rule, DRAFTS[name], context=24)
    ids, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    out = generate(model, ids, attention_mask=mask, max_new_tokens=21, pad_token_id=0)
    assert out[0, 3:].tolist() == plain(rule, [5], 21)
    assert out[1, 3:].tolist() == plain(rule, [1, 2, 3], 21)


@pytest.mark.parametrize("name", DRAFTS)
def test_sampling_with_a_seed_is_repeatable(name):
    model = executable(markov(VOCAB, seed=3), DRAFTS[name])
    texts = [run(model, [1, 2], do_sample=True, seed=1).sequences for _ in range(2)]
    assert torch.equal(*texts)


def counting(seen):
    """The next token is the last one plus one, whatever came before."""
    return torch.nn.functional.one_hot(torch.tensor((seen[-1] + 1) % VOCAB), VOCAB).float()


def placed(seen):
    """The token at each place, whatever came before: guesses ahead are right at once."""
    return torch.nn.functional.one_hot(torch.tensor(len(seen) * 7 % VOCAB), VOCAB).float()


def test_jacobi_reaches_its_fixed_point():
    stats = run(executable(placed, JacobiDraft(tokens=5)), [1, 2], 41).stats
    # A step finds the block's five tokens, the next one confirms them.
    assert stats.accepted_per_step > 2.5


@pytest.mark.parametrize("rule", [counting, markov(VOCAB, seed=3)], ids=["counting", "markov"])
def test_lookahead_drafts_what_will_come(rule):
    assert run(executable(rule, LOOKAHEAD), [1, 2], 60).stats.accepted_per_step > 1.8


def test_in_int8_lookahead_changes_no_token() -> None:
    draft = named("draft_lookahead", window=4, ngram=4, pool=3)
    plain, fast = (
        compile(drafting_llama(*passes, in_int8()), Target("eager", "cpu"))
        for passes in ((), (draft,))
    )
    asked = {"attention_mask": MASK, "max_new_tokens": 40, "eos_token_id": []}
    found = generate(fast, BATCH, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, generate(plain, BATCH, **asked))
    assert found.stats.accepted_per_step > 1.2


def test_the_window_itself_finds_ngrams():
    """No n-gram of this text comes twice, so only the guesses ahead can know what follows."""
    model = TableExecutable(
        lambda seen: torch.nn.functional.one_hot(torch.tensor((seen[-1] + 1) % 70), 70).float(),
        program(70, draft=LookaheadDraft(8, 4, 8), tree=StaticTree(), context=80),
    )
    result = run(model, [1, 9, 17, 25, 33, 41, 49, 57, 65, 2], 60)
    assert result.stats.accepted_per_step > 1.8


def test_a_pool_forgets_what_was_not_seen_for_longest():
    pool = Pool(2)
    for gram in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.add(0, gram)
    assert pool.after(0) == [(5, 6), (1, 2)]
    assert pool.after(9) == []


def taken(draft, tokens, said, path=()):
    return VerifiedStep([draft], [path], [tokens], [0], {"argmax": torch.tensor([said])})


def drafter(kind, record, prompt):
    made = kind(record, setting(executable(counting, record)))
    made.begin([prompt])
    return made


def test_jacobi_takes_over_what_the_target_said():
    made = drafter(JacobiDrafter, JacobiDraft(tokens=3), [1, 2])
    [draft] = made.propose([9])
    assert draft.tokens == [1, 2, 1]
    made.observe(taken(draft, [1, 5], [1, 5, 6, 7], path=[0]))
    # Node 0 was right and 5 is the text's; the target's answers after nodes 1 and 2 go on.
    assert made.propose([9])[0].tokens == [6, 7, 1]


def test_a_lookahead_window_is_filled_by_what_the_target_says() -> None:
    """window + ngram - 3 guesses of the prompt are the first row; each step drops a place and adds
    a row, and only a full window pools n-grams and verifies them."""
    made = drafter(LookaheadDrafter, LookaheadDraft(window=2, ngram=4, pool=4), [1, 2])
    [window] = made.windows
    window.pool.add(11, (9, 9, 9))
    assert len(window.rows) == 1 and len(window.rows[0]) == 3 and set(window.rows[0]) <= {1, 2}
    window.rows = [[5, 6, 7]]
    [draft] = made.propose([9])
    assert (draft.tokens, draft.parents) == ([5, 6, 7], (-1, 0, 1))
    made.observe(taken(draft, [3], [3, 10, 11, 8]))
    assert window.rows == [[6, 7], [10, 11, 8]]
    [draft] = made.propose([9])
    # Below the root 10, below 6 another 11, below 7 an 8.
    assert (draft.tokens, draft.parents) == ([10, 6, 11, 7, 8], (-1, -1, 1, 1, 3))
    assert window.pool.grams.keys() == {11} and not window.full
    # Two tokens are gained; the window moves on by one place all the same.
    made.observe(taken(draft, [10, 11], [10, 0, 1, 3, 4, 9], path=[0]))
    assert window.full and window.rows == [[7], [11, 8], [3, 9]]
    [draft] = made.propose([9])
    assert draft.tokens == [9, 9, 9, 11, 3, 7, 8, 9]
    made.observe(taken(draft, [0], [0, 0, 0, 0, 0, 4, 0, 0, 5]))
    assert window.pool.after(11) == [(11, 3, 4), (9, 9, 9)] and window.pool.after(7) == [(8, 9, 5)]
    assert window.rows == [[8], [3, 9], [4, 5]]


def test_lookahead_completes_ngrams_and_moves_its_rows():
    made = drafter(LookaheadDrafter, LookaheadDraft(window=2, ngram=3, pool=4), [1, 2])
    [window] = made.windows
    window.rows = [[9], [3, 4]]
    [draft] = made.propose([9])
    # Root 2 - 3 is the branch of place 0; root - 9 - 4 that of place 1.
    assert (draft.tokens, draft.parents) == ([3, 9, 4], (-1, -1, 1))
    made.observe(taken(draft, [7], [7, 5, 0, 6]))
    assert window.rows == [[4], [5, 6]]
    assert window.pool.after(2) == [(3, 5)] and window.pool.after(9) == [(4, 6)]


@pytest.mark.parametrize(("window", "ngram"), [(1, 2), (1, 9), (3, 3), (7, 5)])
def test_no_step_of_lookahead_has_more_nodes_than_it_says(window: int, ngram: int) -> None:
    record = LookaheadDraft(window=window, ngram=ngram, pool=1)
    made = drafter(LookaheadDrafter, record, list(range(VOCAB)))
    for step in range(12):
        [draft] = made.propose([99])
        assert len(draft.tokens) <= record.most
        made.observe(taken(draft, [step], [(7 * step + n) % VOCAB for n in range(100)]))


def test_editing_copies_the_input():
    """The target repeats its prompt with one word changed."""
    source = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 10]
    edited = [3, 1, 4, 1, 5, 9, 0, 6, 5, 3, 5, 8, 9, 7, 10]

    def rule(seen):
        done = len(seen) - len(source)
        return torch.nn.functional.one_hot(torch.tensor(edited[done]), VOCAB).float()

    result = run(executable(rule, InputDraft(tokens=6)), source, len(edited))
    assert result.sequences[0].tolist() == source + edited
    assert result.stats.steps <= 5


def test_a_place_is_found_again_at_or_after_the_old_one():
    place = InputPlace([1, 2, 3, 1, 2, 4], start=3, longest=2)
    place.move([9, 1, 2])
    assert place.at == 5
    place.move([11])
    assert place.lost
    place.move([2, 3])
    assert not place.lost and place.at == 3
