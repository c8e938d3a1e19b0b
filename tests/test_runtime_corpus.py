"""Drafts from a corpus: an exact automaton, the same tokens as plain decoding, nothing outside."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_models import TableExecutable, markov, plain, program, setting

from graftwork.ir import PassError
from graftwork.ir.plan import FirstDraft, NoDraft
from graftwork.ir.weights import Weight, WeightStore
from graftwork.passes.drafting.corpus import CorpusDraft, CorpusDrafter, SuffixAutomaton
from graftwork.passes.drafting.corpus.graph import DraftCorpus
from graftwork.runtime import generate

VOCAB = 12
TOKENS = st.lists(st.integers(0, 2), max_size=24)


@given(TOKENS, TOKENS)
def test_the_automaton_finds_the_longest_match(corpus, text):
    automaton = SuffixAutomaton(corpus)
    state = length = 0
    for end, token in enumerate(text, 1):
        state, length = automaton.step(state, length, token)
        there = [n for n in range(end + 1) if occurs(corpus, text[end - n : end])]
        assert length == max(there)
        stop = automaton.end[state]
        assert corpus[stop - length : stop] == text[end - length : end]


def occurs(corpus, part):
    return any(corpus[i : i + len(part)] == part for i in range(len(corpus) - len(part) + 1))


def with_corpus(corpus, draft):
    model = program(VOCAB, draft=draft)
    weight = Weight.of("corpus", torch.tensor(corpus))
    return model.replace(weights=WeightStore({"corpus": weight}))


def test_a_text_of_the_corpus_is_drafted():
    rule = markov(VOCAB, seed=3)
    corpus = plain(rule, [1, 2, 3], 40)
    draft = CorpusDraft(tokens=6)
    known = TableExecutable(rule, with_corpus([1, 2, 3, *corpus, -1], draft))
    other = TableExecutable(rule, with_corpus([0, -1], draft))
    steps = []
    for model in (known, other):
        result = generate(
            model, torch.tensor([[1, 2, 3]]), max_new_tokens=36, return_dict_in_generate=True
        )
        assert result.sequences[0].tolist() == [1, 2, 3, *corpus[:36]]
        steps.append(result.stats.steps)
    assert steps[0] == 5 < steps[1]


def drafts(corpus, prompt, **fields):
    record = CorpusDraft(**fields)
    executable = TableExecutable(markov(VOCAB), with_corpus(corpus, record))
    drafter = CorpusDrafter(record, setting(executable))
    drafter.begin([prompt])
    return list(drafter.propose([9])[0].tokens)


def test_the_longest_match_wins():
    corpus = [1, 2, 3, 4, 5, -1]
    assert drafts(corpus, [2, 3, 9, 1, 2, 3], tokens=2) == [4, 5]  # three tokens against two
    assert drafts(corpus, [1, 2, 3, 9, 1, 2, 3], tokens=2) == [9, 1]  # equally long: the text
    assert drafts(corpus, [9, 3], tokens=2) == []  # one token is too few
    assert drafts(corpus, [9, 3], tokens=2, shortest=1) == [4, 5]


def test_documents_end():
    assert drafts([1, 2, 3, -1, 4, 5, -1], [1, 2], tokens=5) == [3]
    assert drafts([1, 2, 3, -1, 4, 5, -1], [2, 3], tokens=5) == []


def test_the_corpus_becomes_a_weight_that_stays(tmp_path):
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps([[1, 2, 3], [4, 5]]))
    before = program(VOCAB)
    after = DraftCorpus(path=str(path), tokens=4).run(before).program
    assert after.plan.draft == CorpusDraft("corpus", 4, 2)
    assert after.pruned().weights["corpus"].load().tolist() == [1, 2, 3, -1, 4, 5, -1]
    nested = after.replace(
        plan=after.plan.__class__(draft=FirstDraft((NoDraft(), after.plan.draft)))
    )
    assert "corpus" in nested.pruned().weights
    assert "corpus" not in after.replace(plan=before.plan).pruned().weights
    with pytest.raises(PassError, match="already"):
        DraftCorpus(path=str(path)).run(after)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2", "cannot read token ids"),
        ("[]", "document 1 of 1 in .* holds no tokens"),
        ("[[1], []]", "document 2 of 2 in .* holds no tokens: leave it out"),
        ('["def"]', "no JSON list of token ids"),
        ("[true]", "no JSON list of token ids"),
        ("[1, 12]", "outside 0..11"),
        ("[-1]", "outside 0..11"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path, content, said):
    path = tmp_path / "corpus.json"
    path.write_text(content)
    with pytest.raises(PassError, match=said):
        DraftCorpus(path=str(path)).run(program(VOCAB))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PassError, match="nowhere"):
        DraftCorpus(path=str(tmp_path / "nowhere.json")).run(program(VOCAB))


def test_text_is_read_by_the_models_tokenizer(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"a": 3, "b": 5, "c": 20, "?": 0}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "corpus.txt"
    path.write_text("a b\nb a x")
    model = program(VOCAB)
    reading = model.replace(assets={"tokenizer.json": tmp_path / "tokenizer.json"})
    made = DraftCorpus(path=str(path)).run(reading).program
    assert made.weights["corpus"].load().tolist() == [3, 5, 5, 3, 0, -1]
    with pytest.raises(PassError, match="came without a tokenizer"):
        DraftCorpus(path=str(path)).run(model)
    for content, said in (("  ", "which holds none"), ("a c", "token 20 .*vocabulary of 12")):
        path.write_text(content)
        with pytest.raises(PassError, match=said):
            DraftCorpus(path=str(path)).run(reading)


def test_no_corpus_is_asked_for_by_name():
    with pytest.raises(PassError, match="--set draft_corpus"):
        DraftCorpus().run(program(VOCAB))
