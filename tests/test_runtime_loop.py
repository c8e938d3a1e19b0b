"""The decode loop: greedy text equals plain decoding whatever the batch, widths and drafts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import TableExecutable, markov, plain, program, whole

from graftwork.ir import UnsupportedError
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate

VOCAB = 11
PLANS = [None, SuffixDraft(tokens=4, longest=8, shortest=1)]


def left_padded(prompts: list[list[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask of ragged prompts."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def texts_of(vocab: int, longest: int) -> st.SearchStrategy[list[list[int]]]:
    """One to four prompts."""
    prompt = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=longest)
    return st.lists(prompt, min_size=1, max_size=4)


SETTINGS = {
    "count": st.integers(1, 20),
    "roomy": st.booleans(),
    "outputs": st.sampled_from([("logits",), ("logits", "argmax")]),
    "selects": st.booleans(),
    "data": st.data(),
}
ENDS = {
    "prompts": texts_of(6, 9),
    "eos": st.lists(st.integers(0, 5), min_size=1, max_size=2),
    "stop": st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=2),
}


def check_greedy(prompts, widths, count, roomy, outputs, selects, data, **plan):
    """The text is that of plain decoding. plan: draft and tree of the program."""
    # A context that just holds the longest text: steps at its end have no room for every width.
    longest = max(map(len, prompts)) + count
    context = data.draw(st.integers(longest, longest + 10))
    if widths is not None and min(widths) > context:
        context = min(widths)
    rule = whole(VOCAB)
    inputs = ("tokens", "positions", "past", *(["select"] if selects else []))
    model = program(VOCAB, context=context, outputs=outputs, inputs=inputs, **plan)
    executable = TableExecutable(rule, model, widths, roomy)
    ids, mask = left_padded(prompts)
    result = generate(executable, ids, attention_mask=mask, max_new_tokens=count)
    assert result.shape == (len(prompts), ids.shape[1] + count)
    assert torch.equal(result[:, : ids.shape[1]], ids)
    for row, prompt in zip(result[:, ids.shape[1] :].tolist(), prompts, strict=True):
        assert row == plain(rule, prompt, count)


def check_ends(prompts, eos, stop, **plan):
    """Texts end where those of plain decoding do. plan: draft and tree of the program."""
    rule = whole(6, period=3)
    executable = TableExecutable(rule, program(6, **plan))
    ids, mask = left_padded(prompts)
    result = generate(
        executable,
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        eos_token_id=eos,
        pad_token_id=3,
        stop=stop,
    )
    wanted = [cut(plain(rule, prompt, 12), eos, stop) for prompt in prompts]
    longest = max(map(len, wanted))
    assert result[:, ids.shape[1] :].tolist() == [w + [3] * (longest - len(w)) for w in wanted]


@settings(deadline=None, max_examples=100)
@given(
    prompts=texts_of(VOCAB, 23),
    widths=st.sampled_from([None, (1, 4), (1, 2, 5, 16), (1, 3, 40), (6,), (2, 7)]),
    draft=st.sampled_from(PLANS),
    **SETTINGS,
)
def test_greedy_equals_plain(**given):
    check_greedy(**given)


@settings(deadline=None, max_examples=60)
@given(draft=st.sampled_from(PLANS), **ENDS)
def test_ends_are_where_plain_decoding_has_them(**given):
    check_ends(**given)


def cut(tokens: list[int], eos: list[int], stop: list[list[int]]) -> list[int]:
    for end in range(1, len(tokens) + 1):
        head = tokens[:end]
        if head[-1] in eos or any(len(s) <= end and head[-len(s) :] == s for s in stop):
            return head
    return tokens


def test_prompt_runs_in_chunks_and_its_logits_once():
    executable = TableExecutable(whole(VOCAB), program(VOCAB), (1, 4, 16))
    generate(executable, torch.arange(40)[None] % VOCAB, max_new_tokens=2)
    assert [width for width, _, _ in executable.fed] == [16, 16, 16, 1]
    assert executable.fed[-1] == (1, [40], ("argmax",))


def test_without_select_only_the_last_chunk_fetches():
    model = program(VOCAB, inputs=("tokens", "positions", "past"))
    executable = TableExecutable(whole(VOCAB), model, (1, 16))
    generate(executable, torch.arange(20)[None] % VOCAB, max_new_tokens=1)
    assert [fetch for _, _, fetch in executable.fed] == [(), ("logits",)]


def test_repeating_text_is_accepted():
    """Greedy equality cannot see a useless drafter: a floor on what it must win."""
    prompt = [1, 2, 3, 4, 5] * 4

    def rule(seen):
        return torch.nn.functional.one_hot(torch.tensor(seen[-5]), VOCAB).float()

    executable = TableExecutable(rule, program(VOCAB, draft=SuffixDraft(tokens=4)), (1, 5, 16))
    result = generate(
        executable, torch.tensor([prompt]), max_new_tokens=30, return_dict_in_generate=True
    )
    assert result.sequences[0, 20:].tolist() == [1, 2, 3, 4, 5] * 6
    stats = result.stats
    # The last step has room for 3 draft tokens and the bonus token.
    assert (stats.steps, stats.draft_tokens, stats.accepted_tokens) == (6, 23, 23)
    assert stats.accepted_per_step == 29 / 6 and stats.acceptance_rate == 1.0
    assert stats.new_tokens == 30 and stats.decoded_tokens == 29
    assert stats.decode_seconds >= stats.executable_seconds > 0
    assert stats.to_dict()["host_overhead"] == stats.host_overhead > 0


def test_plain_decoding_yields_one_token_a_step():
    executable = TableExecutable(markov(VOCAB), program(VOCAB))
    result = generate(
        executable, torch.tensor([[1], [2]]), max_new_tokens=8, return_dict_in_generate=True
    )
    assert result.stats.steps == 7 and result.stats.sequence_steps == 14
    assert result.stats.accepted_per_step == 1.0 and result.stats.draft_tokens == 0


def test_finished_sequences_stop_costing():
    """One ends at its second token; the loop runs on for the other, which drafts alone."""

    def rule(seen):
        best = 9 if seen[0] == 1 and len(seen) == 3 else (seen[-1] + 1) % 9
        return torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()

    executable = TableExecutable(rule, program(VOCAB, draft=SuffixDraft(tokens=3, shortest=1)))
    result = generate(
        executable,
        torch.tensor([[1, 2], [4, 5]]),
        max_new_tokens=30,
        eos_token_id=9,
        pad_token_id=10,
        return_dict_in_generate=True,
    )
    assert result.sequences[0].tolist() == [1, 2, 3, 9] + [10] * 28
    assert result.sequences[1].tolist() == [(4 + i) % 9 for i in range(32)]
    assert result.stats.sequence_steps < 2 * result.stats.steps
    assert all(past[0] in (0, 2) for _, past, _ in executable.fed)


def test_generation_may_be_repeated():
    executable = TableExecutable(whole(VOCAB), program(VOCAB, draft=PLANS[1]))
    first = generate(executable, torch.tensor([[1, 2, 3]]), max_new_tokens=9)
    generate(executable, torch.tensor([[7], [8]]), max_new_tokens=3)
    assert torch.equal(first, generate(executable, torch.tensor([[1, 2, 3]]), max_new_tokens=9))


def test_a_program_without_cache_is_refused():
    model = program(VOCAB, inputs=("tokens", "positions"))
    with pytest.raises(UnsupportedError, match="insert_kv_cache"):
        generate(TableExecutable(whole(VOCAB), model), torch.tensor([[1]]))


def test_a_plan_nobody_carries_out_is_refused():
    from graftwork.ir.plan import DraftRecord

    class Unknown(DraftRecord):
        kind, most = "unknown", 1

    model = program(VOCAB, draft=Unknown())
    with pytest.raises(UnsupportedError, match=r"draft=unknown\(\).*draft=none.*draft=suffix"):
        generate(TableExecutable(whole(VOCAB), model), torch.tensor([[1]]))


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [(1, [1]), (4, [5]), (100, [128]), (130, [128, 5]), (300, [512]), (700, [512, 128, 128])],
)
def test_a_prompt_is_cut_into_the_steps_that_cost_least(prompt, steps):
    """Each reads all weights once, which takes as long as some columns' arithmetic."""
    model = program(VOCAB, context=2048)
    executable = TableExecutable(markov(VOCAB), model, widths=(1, 5, 128, 512))
    generate(executable, torch.ones(1, prompt, dtype=torch.int64), max_new_tokens=1)
    assert [width for width, _, _ in executable.fed] == steps
