"""Drafts from n-grams: what is drafted, by hand; the text of plain decoding; counts in files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_models import TableExecutable, markov, plain, program, setting
from safetensors.torch import load_file, save_file
from selection import one_in
from tiny import MASK, PROMPTS, drafting_llama, named

from graftwork.backends import Target, compile
from graftwork.ir import InputError, PassError
from graftwork.ir.weights import Weight, WeightStore
from graftwork.model import Model
from graftwork.passes.drafting.ngram_cache import (
    CorpusCounts,
    Counts,
    NgramCacheDraft,
    NgramCacheDrafter,
)
from graftwork.passes.drafting.ngram_cache.graph import DraftNgramCache
from graftwork.passes.drafting.ngram_map import NgramMapDraft, NgramMapDrafter
from graftwork.passes.drafting.ngram_mod import NgramModDraft, NgramModDrafter
from graftwork.runtime import forget, generate
from graftwork.runtime.lore_files import load_learnt, save_learnt
from graftwork.runtime.sealed_files import seal

VOCAB = 12
DRAFTS = {
    "cache": NgramCacheDraft(),
    "map": NgramMapDraft(key=2, tokens=4),
    "one value": NgramMapDraft(key=2, tokens=4, values=1),
    "mod": NgramModDraft(match=2, least=2, tokens=6, size=4096),
}
PASSES = {
    "cache": named("draft_ngram_cache"),
    "map": named("draft_ngram_map", key=1, tokens=4),
    "mod": named("draft_ngram_mod", match=1, least=1, tokens=4),
}


def run(model, prompt, count=40, **options):
    ids = torch.tensor([prompt])
    return generate(model, ids, max_new_tokens=count, return_dict_in_generate=True, **options)


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_are_those_of_plain_decoding_and_what_was_seen_is_drafted(name):
    rule = markov(VOCAB, seed=3)
    model = TableExecutable(rule, program(VOCAB, draft=DRAFTS[name]))
    for prompt in ([1, 2, 3], [4], [7, 7, 2, 7, 7]):
        assert run(model, prompt).sequences[0].tolist() == prompt + plain(rule, prompt, 40)
    # A text in a loop of the second order: once around, and whole drafts are accepted.
    assert run(model, [1, 2, 3], 56).stats.accepted_per_step > 2


@pytest.mark.parametrize("name", DRAFTS)
def test_ragged_batches_and_samples(name):
    rule = markov(VOCAB, seed=3)
    model = TableExecutable(rule, program(VOCAB, draft=DRAFTS[name]))
    ids, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    out = generate(model, ids, attention_mask=mask, max_new_tokens=30, pad_token_id=0)
    assert out[0, 3:].tolist() == plain(rule, [5], 30)
    assert out[1, 3:].tolist() == plain(rule, [1, 2, 3], 30)
    forget(model)
    first = run(model, [1, 2, 3], 30, do_sample=True, seed=5)
    forget(model)
    assert torch.equal(first.sequences, run(model, [1, 2, 3], 30, do_sample=True, seed=5).sequences)


@pytest.mark.parametrize(
    ("name", "backend"),
    one_in(3, [(n, b) for n in PASSES for b in ("eager", "onnxruntime", "torch")]),
)
def test_text_is_the_targets_own(name: str, backend: str) -> None:
    asked = {"max_new_tokens": 48, "eos_token_id": []}
    bare, fast = (
        compile(drafting_llama(*passes), Target(backend, "cpu")) for passes in ([], [PASSES[name]])
    )
    expected = generate(bare, PROMPTS, attention_mask=MASK, **asked)
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, expected)
    assert found.stats.accepted_tokens > 0
    assert torch.equal(generate(fast, PROMPTS[2:3], **asked), expected[2:3])


# -- n-gram caches --------------------------------------------------------------------------------


def with_corpus(corpus, draft):
    model = program(VOCAB, draft=draft)
    return model.replace(weights=WeightStore({"ngrams": Weight.of("ngrams", torch.tensor(corpus))}))


def cached(prompt, corpus=None, before=(), room=9, **fields):
    """What is drafted after a prompt, given a corpus and texts that came before."""
    record = NgramCacheDraft(None if corpus is None else "ngrams", **fields)
    model = program(VOCAB) if corpus is None else with_corpus(corpus, record)
    executable = TableExecutable(markov(VOCAB), model)
    for text in before:
        NgramCacheDrafter(record, setting(executable)).begin([text])
    drafter = NgramCacheDrafter(record, setting(executable))
    drafter.begin([prompt])
    return list(drafter.propose([room])[0].tokens)


def test_the_longest_ngram_that_is_sure_decides():
    # 5 1 2 -> 7 was seen once: enough for three tokens (1, 50%), and decides against 2 -> 8.
    text = [5, 1, 2, 7, 2, 8, 2, 8, 4, 5, 1, 2]
    assert cached(text)[:1] == [7]
    # Of one token twice are needed, and 66 of 100: 2 was followed by 8 twice and by 7 once.
    assert cached([3, 2, 7, 6, 2, 8, 9, 2, 8, 10, 2])[:1] == [8]
    assert cached([3, 2, 7, 6, 2, 8, 9, 2]) == []  # half and half
    assert cached([3, 2, 7, 9, 2]) == []  # once
    assert cached([2]) == []  # below the static cache's two tokens


def test_earlier_texts_are_believed_less():
    # 1 2 -> 3 once is enough in the text itself for three tokens, not for two (2, 50%).
    assert cached([9, 1, 2, 3, 0, 9, 1, 2], room=1) == [3]
    # In earlier texts it takes two for three tokens (2, 66%).
    assert cached([9, 1, 2], before=[[9, 1, 2, 3]]) == []
    assert cached([9, 1, 2], before=[[9, 1, 2, 3], [9, 1, 2, 3]], room=1) == [3]
    assert cached([9, 1, 2], before=[[9, 1, 2, 3]] * 2 + [[9, 1, 2, 4]], room=1) == [3]
    assert cached([9, 1, 2], before=[[9, 1, 2, 3]] * 2 + [[9, 1, 2, 4]] * 2) == []


def test_a_corpus_drafts_alone_and_weighs():
    corpus = [1, 2, 3, -1, 1, 2, 3, -1, 1, 2, 4, -1]
    assert cached([1, 2], corpus) == [3]  # 2 of 3, at least 2 seen; 2 3 ends the documents
    assert cached([1, 2], [1, 2, 3, -1]) == []  # seen once
    # The text says 5 or 4 after 2 alike; the corpus knows 4: 1 * 100 * 1 against 1 * 1.
    text = [1, 2, 5, 6, 1, 2, 4, 7, 1, 2]
    assert cached(text, [1, 2, 4, -1], room=1) == [4]
    assert cached(text, [1, 2, 5, -1], room=1) == [5]


@given(st.lists(st.integers(-1, 3), max_size=40))
def test_counts_of_a_corpus_are_those_of_loops(corpus):
    counts = CorpusCounts(torch.tensor([*corpus, -1]))
    runs = zip(corpus, corpus[1:], corpus[2:], strict=False)
    wanted = Counter(run for run in runs if min(run) >= 0)
    for gram in ((a, b) for a in range(5) for b in range(5)):
        found = counts.get(gram)
        assert dict(found) == {run[2]: n for run, n in wanted.items() if run[:2] == gram}


def test_what_was_not_met_for_long_is_forgotten():
    counts = Counts(1, limit=2)
    for token in range(7):
        counts.add((token,), 9, 1)
    assert [len(counts.get((token,))) for token in range(7)] == [0, 0, 0, 1, 1, 1, 1]
    counts.add((3,), 8, 2)
    assert counts.get((3,)) == {9: 1, 8: 2}


def test_a_text_that_goes_on_is_counted_once():
    executable = TableExecutable(markov(VOCAB), program(VOCAB))
    record = NgramCacheDraft()
    first, second = (NgramCacheDrafter(record, setting(executable)) for _ in "ab")
    first.begin([[1, 2, 3]])
    second.begin([[7]])  # the first goes on
    first.learn(0, [1, 2], ())
    second.begin([[7]])
    first.learn(0, [3], ())
    second.begin([[7]])
    assert second.dynamic.counts.get((1, 2)) == {3: 2}
    assert second.dynamic.counts.get((3, 1)) == {2: 1}


def test_the_corpus_is_optional_and_any_file(tmp_path: Path):
    assert DraftNgramCache().run(program(VOCAB)).program.plan.draft == NgramCacheDraft()
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"ids": [1, 2, 3]}\n\n{"ids": [4, 5]}\n')
    made = DraftNgramCache(path=str(path)).run(program(VOCAB)).program
    assert made.plan.draft == NgramCacheDraft("ngrams")
    assert made.pruned().weights["ngrams"].load().tolist() == [1, 2, 3, -1, 4, 5, -1]
    for content, said in (
        ("{", "corpus.jsonl:1: not JSON"),
        ('{"ids": ["a"]}', r'expected {"text": "..."} or'),
        ('{"ids": [12]}', "token 12 .*vocabulary of 12"),
        ('{"ids": [-1]}', "token -1 .*vocabulary of 12"),
        ('{"text": "a"}', "came without a tokenizer"),
        ("[" * 100_000, "not JSON"),
        ('{"ids": []}', "which holds none"),
    ):
        path.write_text(content)
        with pytest.raises(PassError, match=said):
            DraftNgramCache(path=str(path)).run(program(VOCAB))


@pytest.mark.parametrize(
    "make",
    [
        lambda: NgramCacheDraft(lax=((1, 50),) * 3),
        lambda: NgramCacheDraft(lax=((0, 50),) * 4),
        lambda: NgramCacheDraft(lax=((1, 101),) * 4),
        lambda: NgramModDraft(least=9, tokens=8),
        lambda: NgramModDraft(size=2**40),
        lambda: NgramMapDraft(key=0),
    ],
)
def test_numbers_out_of_bounds_are_refused(make):
    with pytest.raises(InputError, match="ngram"):
        make()


# -- n-gram map -----------------------------------------------------------------------------------


def mapped(prompt, room=9, **fields):
    record = NgramMapDraft(**fields)
    drafter = NgramMapDrafter(record, setting(TableExecutable(markov(VOCAB), program(VOCAB))))
    drafter.begin([prompt])
    return drafter, drafter.chain(0, room)


def test_a_value_must_lead_by_three_to_one():
    three = [1, 2, 3] * 3
    assert mapped([*three, 1, 4, 5, 1], key=1, tokens=2)[1] == [2, 3]  # 3 against 1
    assert mapped([*three, 1, 4, 5, 1, 4, 5, 1], key=1, tokens=2)[1] == []  # 3 against 2
    assert mapped([*three, 1, 4, 5, 1], key=1, tokens=2, share=4)[1] == []
    # The latest one, whatever came before.
    assert mapped([*three, 1, 4, 5, 1], key=1, tokens=2, values=1)[1] == [4, 5]
    assert mapped([1, 2, 3, 1], key=1, tokens=2, hits=2)[1] == []
    # A fifth value has no place and does not count.
    others = [token for last in (5, 6, 7, 8) for token in (1, last)]
    assert mapped([1, 2, *[1, 2] * 11, *others, 1], key=1, tokens=1)[1] == [2]


def test_what_was_wrong_is_not_drafted_again():
    drafter, first = mapped([1, 2, 3, 4, 5, 1], key=1, tokens=4)
    assert first == [2, 3, 4, 5]
    drafter.learn(0, [2, 3, 4, 9], ())  # the last of the four was wrong
    # Another value makes two of the key, at par: the first must lead again.
    drafter.learn(0, [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1], ())
    assert drafter.chain(0, 9) == [2, 3, 4]
    drafter.learn(0, [2, 3, 4, 5, 1], ())
    # What there was no room for is not wrong.
    assert drafter.chain(0, 1) == [2]
    drafter.learn(0, [2], ())
    drafter.learn(0, [3, 4, 5, 1], ())
    assert drafter.chain(0, 9) == [2, 3, 4]


# -- n-gram table ---------------------------------------------------------------------------------


def tabled(prompt, **fields):
    record = NgramModDraft(**{"match": 2, "least": 2, "tokens": 6, "size": 4096, **fields})
    drafter = NgramModDrafter(record, setting(TableExecutable(markov(VOCAB), program(VOCAB))))
    drafter.begin([prompt])
    return drafter


def test_the_table_is_walked():
    drafter = tabled([1, 2, 3, 4, 9, 1, 2])
    assert drafter.chain(0, 9) == [3, 4, 9, 1, 2, 3]
    assert drafter.chain(0, 3) == [3, 4, 9]
    assert tabled([1, 2, 3, 4, 9, 1, 2], least=6, tokens=6).chain(0, 9) == [3, 4, 9, 1, 2, 3]
    assert tabled([1, 2, 3, 9, 2, 3]).chain(0, 9) == [9, 2, 3, 9, 2, 3]
    assert tabled([1, 2, 3, 5, 2, 4]).chain(0, 9) == []
    assert tabled([1]).chain(0, 9) == []


@given(st.lists(st.integers(0, 2**17), min_size=5, max_size=40))
def test_hashes_roll(text):
    table = tabled([1, 2], match=4).table
    value = table.hash(text[:4])
    for begin in range(len(text) - 4):
        value = table.rolled(value, text[begin], text[begin + 4])
        assert value == table.hash(text[begin + 1 : begin + 5])


def test_bad_drafts_empty_the_table():
    drafter = tabled([1, 2, 3, 4, 9, 1, 2])
    for _ in range(3):
        assert drafter.chain(0, 9)
        drafter.learn(0, [7, 1, 2], ())
    assert not drafter.table.used and not drafter.chain(0, 9)
    crowded = tabled([1, 2, 3, 4, 5, 6, 7], size=8)
    assert not crowded.table.used  # a quarter was full


# -- in files -------------------------------------------------------------------------------------


def loaded(draft, path: Path | None = None):
    model = TableExecutable(markov(VOCAB, seed=5, scale=2.0), program(VOCAB, draft=draft))
    if path is not None:
        load_learnt(model, path)
    return model


@pytest.mark.parametrize("name", ["cache", "mod"])
def test_what_was_learnt_goes_through_a_file(name, tmp_path: Path):
    path = tmp_path / "learnt"
    first = loaded(DRAFTS[name])
    once = run(first, [1, 2, 3], 44)
    assert save_learnt(first, path) > 0
    again, more = loaded(DRAFTS[name], path), run(first, [1, 2, 3], 44)
    found = run(again, [1, 2, 3], 44)
    assert torch.equal(found.sequences, once.sequences)
    assert found.stats.steps == more.stats.steps < once.stats.steps
    forget(again)
    assert run(again, [1, 2, 3], 44).stats.steps == once.stats.steps


def test_a_model_saves_and_loads(tmp_path: Path):
    made = Model(drafting_llama(PASSES["cache"]), Target("eager", threads=1), {"name": "test"})
    made.generate(PROMPTS[2:3], max_new_tokens=8, eos_token_id=[])
    made.save_learnt(tmp_path / "learnt")
    made.load_learnt(tmp_path / "learnt")
    bare = Model(drafting_llama(), Target("eager", threads=1), {"name": "test"})
    with pytest.raises(InputError, match="learns nothing of texts"):
        bare.save_learnt(tmp_path / "learnt")


def broken(path: Path, **changed: torch.Tensor) -> None:
    """Change tensors of a file whose sha256 is right."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        said = file.metadata()
    tensors = {**load_file(path), **{f"0.{k}": v for k, v in changed.items()}}
    save_file(tensors, path, metadata={**said, "sha256": "0" * 64})
    seal(path)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("cache", {"tokens": [VOCAB]}, "token ids outside"),
        ("cache", {"tokens": [-1]}, "token ids outside"),
        ("cache", {"grams": [[1, -1, 2, 3]]}, "gaps"),
        ("cache", {"grams": [[-1, -1, -1, -1]]}, "gaps"),
        ("cache", {"grams": [[1, 2, 3]]}, "up to 4 tokens"),
        ("cache", {"counts": [0]}, "counts that no text has"),
        ("cache", {"counts": [2**60]}, "counts that no text has"),
        ("cache", {"counts": [1, 1]}, r"expected grams i32\[N,L\]"),
        ("mod", {"places": [4096]}, "outside the table"),
        ("mod", {"places": [-1]}, "outside the table"),
        ("mod", {"tokens": [VOCAB]}, "token ids outside"),
        ("mod", {"shape": [2, 2**40]}, "size=4096"),
        ("mod", {"shape": [3, 4096]}, "match=2"),
        ("mod", {"more": [1]}, "expected places, tokens and shape"),
    ],
)
def test_hostile_files_are_refused_whole(name, changed, said, tmp_path: Path):
    path, kind = tmp_path / "learnt", f"ngram_{name}"
    whole = {
        "cache": {"grams": [[-1, 1, 2, 3]], "tokens": [4], "counts": [1]},
        "mod": {"places": [1], "tokens": [4], "shape": [2, 4096]},
    }[name]
    wide = {"counts", "places", "shape"}
    tensors = {
        f"{kind}.{key}": torch.tensor(value, dtype=torch.int64 if key in wide else torch.int32)
        for key, value in {**whole, **changed}.items()
    }
    good = loaded(DRAFTS[name])
    run(good, [1, 2, 3], 24)
    save_learnt(good, path)
    broken(
        path,
        **{key: load_file(path)[f"0.{key}"] for key in tensors if f"0.{key}" in load_file(path)},
    )
    load_learnt(loaded(DRAFTS[name]), path)  # so far nothing is wrong
    broken(path, **tensors)
    before = run(good, [1, 2, 3], 24).stats.steps
    with pytest.raises(InputError, match=said):
        load_learnt(good, path)
    assert run(good, [1, 2, 3], 24).stats.steps == before


def test_damaged_and_foreign_files_are_refused(tmp_path: Path):
    path = tmp_path / "learnt"
    model = loaded(DRAFTS["cache"])
    run(model, [1, 2, 3], 24)
    save_learnt(model, path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="sha256 is another"):
        load_learnt(model, path)
    path.write_bytes(data[:50])
    with pytest.raises(InputError, match="cannot read"):
        load_learnt(model, path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="no file of save_learnt"):
        load_learnt(model, path)
    save_learnt(model, path)
    with pytest.raises(InputError, match="saved with another recipe"):
        load_learnt(loaded(DRAFTS["mod"]), path)
    other = TableExecutable(markov(VOCAB + 1), program(VOCAB + 1, draft=DRAFTS["cache"]))
    with pytest.raises(InputError, match="another vocabulary"):
        load_learnt(other, path)
    with pytest.raises(InputError, match="no folder"):
        save_learnt(model, tmp_path / "nowhere" / "learnt")
