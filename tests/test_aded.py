"""ADED: tri-grams by hand, the search by hand, the text of plain decoding, and weights in files."""

from __future__ import annotations

from math import log, sqrt
from pathlib import Path
from random import Random

import pytest
import torch
from runtime_models import TableExecutable, markov, plain, program, setting
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from selection import one_in
from test_runtime_sampling import assert_distributed, texts_drawn
from test_runtime_verifiers import LENGTH, PROMPT, RULE, exact
from test_runtime_verifiers import VOCAB as FEW
from tiny import MASK, PROMPTS, drafting_llama, named

from graftwork.backends import Target, compile
from graftwork.ir import InputError, PassError
from graftwork.ir.weights import Weight, WeightStore
from graftwork.passes.drafting.aded import Matrix, Search, TrigramDraft, TrigramDrafter
from graftwork.passes.drafting.aded.graph import DraftTrigrams
from graftwork.runtime import forget, generate
from graftwork.runtime.lore_files import load_learnt, save_learnt
from graftwork.runtime.sealed_files import seal

VOCAB = 12
TREES = ("tokens", "positions", "past", "select", "ancestors")
DRAFT = TrigramDraft(nodes=9, depth=4, searches=60)


def run(model, prompt, count=40, **options):
    ids = torch.tensor([prompt])
    return generate(model, ids, max_new_tokens=count, return_dict_in_generate=True, **options)


def test_weights_grow_with_what_is_written():
    matrix = Matrix(TrigramDraft(gain=0.5, most_weight=1.2, successors=2))
    matrix.add([1, 2, 3, 1, 2, 4])
    assert matrix.after((1, 2)) == [(3, 0.5), (4, 0.5)] and matrix.after((9, 9)) == []
    matrix.add([1, 2, 4])
    matrix.add([1, 2, 5])
    assert matrix.after((1, 2)) == [(4, 1.0), (3, 0.5)]  # two successors are looked at
    matrix.add([1, 2, 4])
    assert matrix.after((1, 2))[0] == (4, 1.2)


def test_pairs_that_change_no_more_are_forgotten():
    matrix = Matrix(TrigramDraft(), limit=2)
    for token in range(7):
        matrix.add([token, 10, 11])
    assert not matrix.after((0, 10)) and matrix.after((6, 10)) == [(11, 0.04)]


def test_the_corpus_says_what_is_not_written_yet():
    corpus = [1, 2, 3, 1, 2, 3, 1, 2, 4, -1, 7, 8, 9]
    held = program(VOCAB, draft=TrigramDraft(weight="trigrams"))
    weight = Weight.of("trigrams", torch.tensor(corpus))
    model = TableExecutable(markov(VOCAB), held.replace(weights=WeightStore({}).adding(weight)))
    drafter = TrigramDrafter(TrigramDraft(weight="trigrams", gain=0.5), setting(model))
    drafter.begin([[5]])
    assert drafter.matrix.after((1, 2)) == [(3, pytest.approx(2 / 3)), (4, pytest.approx(1 / 3))]
    assert drafter.matrix.after((4, 7)) == []  # documents are apart
    drafter.matrix.add([1, 2, 4])
    assert drafter.matrix.after((1, 2)) == [(4, pytest.approx(5 / 6)), (3, pytest.approx(2 / 3))]


def test_the_search_by_hand():
    """Two successors of weights 0.6 and 0.2, and nothing behind them: each visit is worth 1 + P."""
    after = {(0, 1): [(2, 0.6), (3, 0.2)]}
    record = TrigramDraft(searches=9, c1=8.0, c2=4.0)
    found = Search(record, lambda pair: after.get(pair, []), Random(0)).run((0, 1), 3)
    priors, visits = [0.6, 0.2], [1, 1]  # the likelier one first, then what was not visited
    total = 2
    for _ in range(7):
        values = [
            (1 + p) + (8.0 + log((total + 5) / 4)) * p * sqrt(total) / (1 + n)
            for p, n in zip(priors, visits, strict=True)
        ]
        visits[values.index(max(values))] += 1
        total += 1
    assert visits != [8, 1] and sum(visits) == 9  # both are visited again
    assert [(node.path, node.visits) for node in found] == [((2,), visits[0]), ((3,), visits[1])]


def test_paths_are_worth_what_lies_behind_them():
    """Of equal successors the search prefers the one that weighty ones follow."""
    after = {(0, 1): [(2, 0.5), (3, 0.5)], (1, 3): [(4, 1.0)], (3, 4): [(5, 1.0)]}
    record = TrigramDraft(searches=80, c1=0.2, c2=8.0)
    found = Search(record, lambda pair: after.get(pair, []), Random(0)).run((0, 1), 3)
    visits = {node.path: node.visits for node in found}
    assert visits[(3,)] > 2 * visits[(2,)] and visits[(3, 4, 5)] <= visits[(3, 4)] <= visits[(3,)]


def test_the_draft_is_what_is_visited_most_and_one_token_more():
    model = TableExecutable(markov(VOCAB), program(VOCAB, draft=DRAFT))
    drafter = TrigramDrafter(TrigramDraft(nodes=3, depth=2), setting(model))
    drafter.begin([[1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 4, 1, 2]])
    (draft,) = drafter.propose([9])
    # After 1 2 came 3 twice and 5 once: 3 and its likeliest successor, then 5.
    assert list(draft.tokens) == [3, 4, 5] and draft.parents == (-1, 0, -1)
    assert list(drafter.propose([1])[0].tokens) == [3, 5]
    assert not drafter.propose([0])[0].tokens
    assert drafter.ahead([[3]], [3]) == [[4, 1, 2]] and drafter.ahead([[9]], [3]) == [[]]
    drafter.begin([[5]])
    assert not drafter.propose([9])[0].tokens


def test_tokens_are_those_of_plain_decoding_and_what_was_seen_is_drafted():
    rule = markov(VOCAB, seed=3)
    model = TableExecutable(rule, program(VOCAB, draft=DRAFT, inputs=TREES))
    for prompt in ([1, 2, 3], [4], [7, 7, 2, 7, 7]):
        assert run(model, prompt).sequences[0].tolist() == prompt + plain(rule, prompt, 40)
    # A text in a loop of the second order: all but its first round is drafted.
    assert run(model, [1, 2, 3], 56).stats.accepted_per_step > 3
    forget(model)
    assert run(model, [1, 2, 3], 56).stats.accepted_per_step > 1.5


def test_ragged_batches_and_seeds():
    rule = markov(VOCAB, seed=3)
    model = TableExecutable(rule, program(VOCAB, draft=DRAFT, inputs=TREES))
    ids, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    out = generate(model, ids, attention_mask=mask, max_new_tokens=30, pad_token_id=0)
    assert out[0, 3:].tolist() == plain(rule, [5], 30)
    assert out[1, 3:].tolist() == plain(rule, [1, 2, 3], 30)
    # Drafts are not sampled: with a seed the text is plain decoding's.
    bare = TableExecutable(rule, program(VOCAB))
    asked = {"do_sample": True, "seed": 5}
    one, two = (run(m, [1, 2, 3], 30, **asked).sequences for m in (model, bare))
    assert torch.equal(one, two)


@pytest.mark.parametrize("size", [(1, 160), (4, 60)], ids=str)
def test_samples_follow_the_models_distribution(size):
    model = TableExecutable(RULE, program(FEW, draft=DRAFT, inputs=TREES))
    found, accepted, drafted = texts_drawn(model, PROMPT, LENGTH, size, {})
    assert_distributed(found, exact({}))
    assert 0.02 < accepted / drafted < 0.95


@pytest.mark.parametrize("backend", one_in(3, ["eager", "onnxruntime", "torch"]))
def test_text_is_the_targets_own(backend: str) -> None:
    asked = {"max_new_tokens": 48, "eos_token_id": []}
    passes = [named("draft_trigrams", nodes=8)]
    bare, fast = (compile(drafting_llama(*extra), Target(backend, "cpu")) for extra in ([], passes))
    expected = generate(bare, PROMPTS, attention_mask=MASK, **asked)
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, expected)
    assert found.stats.accepted_tokens > 0
    assert torch.equal(generate(fast, PROMPTS[2:3], **asked), expected[2:3])


def test_what_it_learned_goes_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "learnt.safetensors"
    rule = markov(VOCAB, seed=3)
    first, second = (
        TableExecutable(rule, program(VOCAB, draft=DRAFT, inputs=TREES)) for _ in range(2)
    )
    run(first, [1, 2, 3])
    save_learnt(first, path)
    load_learnt(second, path)
    again = run(first, [1, 2, 3]).stats.steps
    assert (
        run(second, [1, 2, 3]).stats.steps
        == again
        < run(TableExecutable(rule, first.program), [1, 2, 3]).stats.steps
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(pairs=t["pairs"].long()), "expected pairs i32"),
        (lambda t: t.update(pairs=t["pairs"][:, :1].contiguous()), "expected pairs i32"),
        (lambda t: t.update(tokens=t["tokens"][1:].clone()), "as many"),
        (lambda t: t["tokens"].fill_(VOCAB), "outside 0..11"),
        (lambda t: t["pairs"].fill_(-1), "outside 0..11"),
        (lambda t: t["weights"].fill_(float("nan")), "not above 0"),
        (lambda t: t["weights"].fill_(-1.0), "not above 0"),
        (lambda t: t.pop("weights"), "expected pairs, tokens and weights"),
    ],
)
def test_bad_files_are_refused(change, message, tmp_path: Path) -> None:
    path = tmp_path / "learnt.safetensors"
    model = TableExecutable(markov(VOCAB), program(VOCAB, draft=DRAFT, inputs=TREES))
    run(model, [1, 2, 3, 1, 2, 3], 4)
    save_learnt(model, path)
    with safe_open(path, "pt") as file:
        marks = file.metadata()
    tensors = {name.removeprefix("0.trigrams."): t for name, t in load_file(path).items()}
    change(tensors)
    save_file({f"0.trigrams.{name}": t for name, t in tensors.items()}, path, marks)
    seal(path)
    with pytest.raises(InputError, match=message):
        load_learnt(model, path)


def test_a_corpus_becomes_a_weight(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.json"
    corpus.write_text("[[1, 2, 3], [4, 5]]")
    program = drafting_llama(named("draft_trigrams", path=str(corpus)))
    assert program.weights["trigrams"].load().tolist() == [1, 2, 3, -1, 4, 5, -1]
    assert program.plan.draft.weight == "trigrams"
    with pytest.raises(PassError, match="a weight 'trigrams' already"):
        DraftTrigrams(path=str(corpus)).run(program)
