"""Token recycling and merged drafts: the same tokens as plain decoding, in far fewer steps."""

from __future__ import annotations

import pytest
import torch
from runtime_models import TableExecutable, markov, plain, program, setting, whole

from graftwork.ir import InputError
from graftwork.ir.plan import FirstDraft, MergedDraft, StaticTree
from graftwork.passes.drafting.recycling import RecyclingDraft, RecyclingDrafter
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate
from graftwork.runtime.feeding.draft import Draft
from graftwork.runtime.lore_files import load_learnt, save_learnt
from graftwork.runtime.memo import learnt
from graftwork.runtime.speculate.drafters.combining import merged

VOCAB = 12
TREES = StaticTree()


class TopExecutable(TableExecutable):
    """A model whose step returns the best tokens after each token, too."""

    def run(self, function, inputs, fetch):
        known = [name for name in dict.fromkeys((*fetch, "logits")) if name != "top_tokens"]
        given = super().run(function, inputs, known)
        best = given["logits"].topk(4, -1).indices
        results = {**given, "top_tokens": best}
        return {name: results[name] for name in fetch}


def executable(rule, draft):
    outputs = ("logits", "argmax", "top_tokens")
    return TopExecutable(rule, program(VOCAB, draft=draft, tree=TREES, outputs=outputs))


def run(model, prompt, count=40, **options):
    ids = torch.tensor([prompt])
    return generate(model, ids, max_new_tokens=count, return_dict_in_generate=True, **options)


RECYCLING = RecyclingDraft(nodes=12, depth=6, successors=4)
SUFFIX = SuffixDraft(tokens=6, shortest=2)
DRAFTS = {
    "recycling": RECYCLING,
    "one token of context": RecyclingDraft(nodes=12, depth=6, successors=4, context=1),
    "first": FirstDraft((SUFFIX, RECYCLING)),
    "merged": MergedDraft((SUFFIX, RECYCLING)),
    "merged within a budget": MergedDraft((SUFFIX, RECYCLING), nodes=9),
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("rule", [markov(VOCAB, seed=3), whole(VOCAB)], ids=["markov", "whole"])
def test_tokens_are_those_of_plain_decoding(name, rule):
    model = executable(rule, DRAFTS[name])
    for prompt in ([1, 2, 3], [4], [7, 7, 2, 7, 7]):
        wanted = plain(rule, prompt, 40)
        assert run(model, prompt).sequences[0].tolist() == prompt + wanted


@pytest.mark.parametrize("name", DRAFTS)
def test_what_was_seen_is_drafted(name):
    """A text in a loop of the second order: once around, and whole drafts are accepted."""
    rule = markov(VOCAB, seed=3)
    stats = run(executable(rule, DRAFTS[name]), [1, 2, 3], 56).stats
    assert stats.accepted_per_step > (1.4 if name == "one token of context" else 2.5)


def test_tables_outlive_a_request():
    rule = markov(VOCAB, seed=5, scale=2.0)
    model = executable(rule, RECYCLING)
    first, second = (run(model, [1, 2, 3], 24).stats.steps for _ in range(2))
    assert second <= 24 // 6 + 1 < first


def test_tables_go_through_a_file(tmp_path):
    rule, path = markov(VOCAB, seed=5, scale=2.0), tmp_path / "learnt"
    first = executable(rule, RECYCLING)
    once = run(first, [1, 2, 3], 24).stats.steps
    save_learnt(first, path)
    again = executable(rule, RECYCLING)
    load_learnt(again, path)
    assert run(again, [1, 2, 3], 24).stats.steps == run(first, [1, 2, 3], 24).stats.steps < once
    for record, said in (
        (RecyclingDraft(nodes=12, depth=6, successors=3), "expected 3 successors"),
        (RecyclingDraft(nodes=12, depth=6, successors=4, context=2), "1 to 2 tokens"),
    ):
        with pytest.raises(InputError, match=said):
            load_learnt(executable(rule, record), path)
    (known,) = learnt(first, RecyclingDrafter).values()
    memo = known.tensors()
    for name, row, said in (
        ("successors.1", [VOCAB, 0, 0, 0], "outside 0..11"),
        ("successors.1", [-1, 0, 0, 0], "below 0"),
        ("contexts.3", [0, 0, -1], "below 0"),
        ("contexts.3", [0, -2, 0], "below 0"),
    ):
        wrong = memo[name].clone()
        wrong[0] = torch.tensor(row)
        with pytest.raises(InputError, match=said):
            known.take({**memo, name: wrong}, VOCAB)


def test_ragged_batches_share_the_tables():
    rule = markov(VOCAB, seed=3)
    model = executable(rule, DRAFTS["merged"])
    ids = torch.tensor([[0, 0, 5], [1, 2, 3]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    out = generate(model, ids, attention_mask=mask, max_new_tokens=30, pad_token_id=0)
    assert out[0, 3:].tolist() == plain(rule, [5], 30)
    assert out[1, 3:].tolist() == plain(rule, [1, 2, 3], 30)


def test_sampling_with_a_seed_is_repeatable():
    rule = markov(VOCAB, seed=3)
    model = executable(rule, DRAFTS["merged"])
    run(model, [1, 2], do_sample=True, seed=1)
    texts = [run(executable(rule, DRAFTS["merged"]), [1, 2], do_sample=True, seed=1) for _ in "ab"]
    assert torch.equal(texts[0].sequences, texts[1].sequences)


def drafter(record, prompt):
    made = RecyclingDrafter(record, setting(executable(markov(VOCAB), record)))
    made.begin([prompt])
    return made


def test_the_longest_known_context_decides():
    prompt = [1, 2, 9, 3, 2, 8, 5, 1, 2]
    short = drafter(RecyclingDraft(nodes=1, context=1), prompt).propose([5])
    long = drafter(RecyclingDraft(nodes=1, context=2), prompt).propose([5])
    assert short[0].tokens == [8]  # the last token that followed 2
    assert long[0].tokens == [9]  # what followed 1 2


def test_nodes_are_the_likeliest_ones():
    rates = ((0.5, 0.3), (0.8, 0.1))
    record = RecyclingDraft(nodes=4, successors=2, context=2, rates=rates)
    # After 1 2 came 3 (known with two tokens: 0.8), then 4 (0.8), 1 (0.8) and so on.
    draft = drafter(record, [1, 2, 3, 4, 1, 2]).propose([9])[0]
    assert (draft.tokens, draft.parents) == ([3, 4, 1, 2], (-1, 0, 1, 2))
    # A text that never had its last token before: nothing is known.
    assert not drafter(record, [1, 2, 3, 4, 1, 5]).propose([9])[0].tokens


def test_depth_is_bounded_by_the_room():
    draft = drafter(RecyclingDraft(nodes=9), [1, 2, 3, 4, 1, 2]).propose([2])[0]
    assert max(map(draft.depth, range(len(draft.tokens)))) == 2


def test_merging_keeps_every_path_once():
    chain, tree = Draft([1, 2, 3]), Draft([4, 1, 2, 5], None, (-1, -1, 1, 2))
    whole = merged([chain, tree], None)
    paths = {tuple(whole.tokens[i] for i in whole.path(node)) for node in range(len(whole.tokens))}
    assert paths == {(1,), (1, 2), (1, 2, 3), (4,), (1, 2, 5)}
    assert len(whole.tokens) == 5
    assert merged([chain, tree], 4).tokens == [1, 2, 3, 4]
    assert merged([Draft(()), chain], 2) == Draft([1, 2])
    assert merged([Draft(())], None).tokens == ()


def test_a_merged_plan_makes_room_for_all_parts():
    assert MergedDraft((SUFFIX, RECYCLING)).at_most(None) == 18
    assert MergedDraft((SUFFIX, RECYCLING), nodes=9).at_most(None) == 9
