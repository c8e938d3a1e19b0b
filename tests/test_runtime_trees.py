"""Trees in the decode loop: greedy text equals plain decoding, and the paths that fit are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_drafts import RuleDraft, digest, ranked
from runtime_models import TableExecutable, plain, program, whole
from test_runtime_loop import ENDS, SETTINGS, check_ends, check_greedy, left_padded, texts_of
from tiny import cached_llama

from graftwork.backends import Target, compile
from graftwork.ir import UnsupportedError
from graftwork.ir.plan import Chain, DraftRecord, FirstDraft, SampledTree, StaticTree, TreeRecord
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate
from graftwork.runtime.feeding.draft import Draft

VOCAB = 11
WIDE = StaticTree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 1, 0), (0, 1, 2)])
TREES: list[TreeRecord] = [
    Chain(depth=3),
    WIDE,
    StaticTree.of([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]),
    StaticTree.of([(0,), (1,), (2,), (3,), (4,)]),
    SampledTree((3, 2, 1)),
    SampledTree((1, 1)),
]


def guesses(rule, vocab: int, least: int = 0) -> RuleDraft:
    """A drafter that is right at some rank, wrong at others, and at times has (almost) nothing."""

    def answer(seen):
        return None if digest(seen, 1) % 5 == 0 else int(rule(seen).argmax())

    return RuleDraft(ranked(answer, lambda seen: least + digest(seen, 2) % 4, vocab, 3))


@settings(deadline=None, max_examples=80)
@given(
    prompts=texts_of(VOCAB, 15),
    widths=st.sampled_from([None, (1, 10), (1, 2, 5, 16), (1, 3, 40), (6,), (2, 7)]),
    tree=st.sampled_from(TREES),
    first=st.booleans(),
    **SETTINGS,
)
def test_greedy_equals_plain(first, **given):
    draft: DraftRecord = guesses(whole(VOCAB), VOCAB)
    if first:  # some sequences bring a chain, others a tree, others nothing
        draft = FirstDraft((SuffixDraft(tokens=4, shortest=2), draft))
    check_greedy(draft=draft, **given)


@settings(deadline=None, max_examples=40)
@given(tree=st.sampled_from(TREES), **ENDS)
def test_ends_within_a_path_are_where_plain_decoding_has_them(**given):
    check_ends(draft=guesses(whole(6, period=3), 6), **given)


def knowing(rank: int) -> tuple[RuleDraft, object]:
    """A drafter that has the right token at the same rank always, and the rule it knows."""
    rule = whole(VOCAB)
    knows = ranked(lambda seen: int(rule(seen).argmax()), lambda seen: rank, VOCAB)
    return RuleDraft(knows), rule


SECOND = StaticTree.of([(0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)])


@pytest.mark.parametrize(
    ("rank", "tree", "depth"),
    [
        (0, Chain(depth=3), 3),
        (1, SECOND, 3),
        (2, SECOND, 1),
        (0, SECOND, 1),
        (3, SECOND, 0),
        (1, SampledTree((2, 2, 2)), 3),
        (1, SampledTree((2, 2, 1)), 2),
        (0, SampledTree((1, 1, 1)), 3),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_tree_holds_is_accepted(rank, tree, depth, batch):
    """Greedy equality cannot see a useless tree: these are the exact counts."""
    draft, rule = knowing(rank)
    count = 1 + 5 * (depth + 1)  # one token from the prompt, then five whole steps
    model = program(VOCAB, draft=draft, tree=tree)
    prompts = [[3, 1, 4, 1, 5][: 5 - b] for b in range(batch)]
    ids, mask = left_padded(prompts)
    executable = TableExecutable(rule, model, (1, 16))
    result = generate(
        executable,
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        return_dict_in_generate=True,
    )
    stats = result.stats
    assert stats.steps == 5 and stats.sequence_steps == 5 * batch
    assert stats.accepted_tokens == 5 * depth * batch
    assert stats.accepted_per_step == depth + 1
    # Near the end there is no room for levels whose tokens nobody would want any more.
    assert 0 < stats.draft_tokens <= 5 * tree.most * batch
    for row, prompt in zip(result.sequences[:, ids.shape[1] :].tolist(), prompts, strict=True):
        assert row == plain(rule, prompt, count)


def test_a_proposer_bounds_the_depth():
    draft, rule = knowing(1)
    draft = RuleDraft(draft.rule, levels=2)
    executable = TableExecutable(rule, program(VOCAB, draft=draft, tree=SECOND))
    result = generate(
        executable, torch.tensor([[1, 2]]), max_new_tokens=16, return_dict_in_generate=True
    )
    assert result.stats.accepted_per_step == 3.0


@pytest.mark.parametrize("how", ["nothing", "front"])
def test_the_tests_see_rows_that_were_not_kept(how):
    """Were a path's cache rows not moved, or moved wrongly, the text would show it."""

    class Forgetful(TableExecutable):
        def commit(self, states, past, source):
            if how == "front":
                super().commit(states, past, torch.arange(source.shape[1]).expand_as(source))

    draft, rule = knowing(1)
    model = program(VOCAB, draft=draft, tree=SECOND)
    wanted = plain(rule, [1, 2], 12)

    def text(executable):
        return generate(executable, torch.tensor([[1, 2]]), max_new_tokens=12)[0, 2:].tolist()

    assert text(TableExecutable(rule, model)) == wanted
    assert text(Forgetful(rule, model)) != wanted


def test_some_sequences_have_no_draft():
    rule = whole(VOCAB)

    def answer(seen):
        return None if seen[0] == 2 else int(rule(seen).argmax())

    draft = RuleDraft(ranked(answer, lambda seen: 1, VOCAB))
    executable = TableExecutable(rule, program(VOCAB, draft=draft, tree=SECOND))
    ids = torch.tensor([[1, 5, 5], [2, 5, 5], [3, 5, 5]])
    result = generate(executable, ids, max_new_tokens=13, return_dict_in_generate=True)
    for row, prompt in zip(result.sequences.tolist(), ids.tolist(), strict=True):
        assert row == prompt + plain(rule, prompt, 13)
    # Two sequences take three steps of four tokens, the one without drafts twelve of one.
    assert result.stats.steps == 12 and result.stats.sequence_steps == 3 + 3 + 12
    assert result.stats.accepted_tokens == 2 * 9


def test_trees_need_a_step_that_takes_them():
    model = program(VOCAB, draft=knowing(0)[0])
    branching = model.replace(plan=replace(model.plan, tree=WIDE))
    with pytest.raises(UnsupportedError, match="ancestors"):
        generate(TableExecutable(whole(VOCAB), branching), torch.tensor([[1]]))


def test_cutting_a_draft_leaves_a_tree():
    draft = Draft([5, 6, 7, 8], torch.rand(4, 9), parents=(-1, -1, 0, 2), independent=True)
    assert draft.within(1).tokens == [5, 6] and draft.within(1).parents == (-1, -1)
    shorter = draft.cut(3)
    assert shorter.tokens == [5, 6, 7] and shorter.parents == (-1, -1, 0)
    for part in (shorter, draft.within(2)):
        assert part.independent and torch.equal(part.probs, draft.probs[:3])
    assert draft.path(3) == [0, 2, 3] and draft.depth(3) == 3 and draft.depth(-1) == 0
    assert draft.children() == {-1: [0, 1], 0: [2], 2: [3]}


# -- real backends --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return cached_llama(trees=True, context=40)


@pytest.fixture(scope="module")
def prompts():
    random = torch.Generator().manual_seed(5)
    return [torch.randint(1, 32, (n,), generator=random).tolist() for n in (9, 4, 13, 7)]


@pytest.fixture(scope="module")
def texts(llama, prompts):
    """Plain greedy text of each prompt, up to the context's end."""
    executable = compile(llama, Target.parse("eager"))
    return [
        generate(executable, torch.tensor([p]), max_new_tokens=40 - len(p), eos_token_id=None)[
            0
        ].tolist()
        for p in prompts
    ]


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("tree", [WIDE, SampledTree((3, 2, 1))], ids=["static", "sampled"])
def test_real_backends_commit_paths(llama, prompts, texts, backend, tree):
    """A drafter that knows the text at ranks 0 to 3: the tree steps must not change it."""

    def answer(seen):
        for text in texts:
            if len(seen) < len(text) and tuple(text[: len(seen)]) == seen:
                return text[len(seen)]
        return digest(seen) % 32

    draft = RuleDraft(ranked(answer, lambda seen: digest(seen, 3) % 3, 32))
    branching = llama.replace(plan=replace(llama.plan, draft=draft, tree=tree))
    executable = compile(branching, Target.parse(backend))
    for count in (1, 4):
        batch = prompts[:count]
        ids, mask = left_padded(batch)
        longest = max(map(len, batch))
        result = generate(
            executable,
            ids,
            attention_mask=mask,
            max_new_tokens=40 - longest,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        for row, prompt, text in zip(result.sequences.tolist(), batch, texts, strict=False):
            new = row[longest:]
            assert new == text[len(prompt) : len(prompt) + len(new)]
        assert result.stats.accepted_per_step > 1.5
