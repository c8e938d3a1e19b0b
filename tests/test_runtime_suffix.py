"""The suffix index against brute force, and what the drafter copies from it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import setting

from graftwork.passes.drafting.suffix import SuffixDraft, SuffixDrafter, SuffixIndex
from graftwork.runtime.feeding.draft import NO_DRAFT, VerifiedStep


def brute(tokens: list[int], longest: int) -> tuple[int, int]:
    """Length of the longest suffix that ended earlier, and the last place where it did."""
    size = len(tokens)
    for length in range(min(longest, size), 0, -1):
        suffix = tokens[size - length :]
        for end in range(size - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                return length, end
    return 0, 0


TEXTS = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 200_000), max_size=20).map(lambda part: part * 3),
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 20)).map(
        lambda loop: loop[0] * loop[1]
    ),
)


@settings(deadline=None, max_examples=400)
@given(tokens=TEXTS, longest=st.integers(1, 12))
def test_index_equals_brute_force_after_every_token(tokens, longest):
    index = SuffixIndex(longest)
    for size, token in enumerate(tokens, 1):
        index.extend([token])
        length, end = brute(tokens[:size], longest)
        assert index.length == length
        assert length == 0 or index.end == end


@settings(deadline=None)
@given(tokens=TEXTS, count=st.integers(1, 9))
def test_continuation_is_what_followed_then_repeats(tokens, count):
    index = SuffixIndex(16)
    index.extend(tokens)
    if index.length == 0:
        return
    extended = list(tokens)
    for step in range(count):
        extended.append(extended[index.end + step])
    assert index.continuation(count) == extended[len(tokens) :]
    assert index.tokens == tokens


def entries(longer: dict | None) -> int:
    return sum(1 + entries(below) for _, below in (longer or {}).values())


def test_entries_are_few():
    """A loop adds none once it is known; a text without repeats adds one a token."""
    loop, distinct = SuffixIndex(16), SuffixIndex(16)
    loop.extend([0, 1, 2] * 700)
    distinct.extend(range(2000))
    assert entries(loop._longer) <= 3 * 16 + 3
    assert entries(distinct._longer) == 2000


def taken(*tokens: list[int]) -> VerifiedStep:
    nothing = [0] * len(tokens)
    return VerifiedStep([NO_DRAFT] * len(tokens), [()] * len(tokens), tokens, nothing, {})


def drafter(record: SuffixDraft, *prompts: list[int]) -> SuffixDrafter:
    made = SuffixDrafter(record, setting(None))
    made.begin(prompts)
    return made


def test_drafts_are_bounded_by_room_record_and_match():
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    record = SuffixDraft(tokens=3, longest=16, shortest=2)
    made = drafter(record, text, text, text, [1, 2, 3, 4, 2])
    drafts = made.propose([9, 2, 0, 9])
    assert [list(draft.tokens) for draft in drafts] == [[3, 4, 5], [3, 4], [], []]
    assert drafts[3] is NO_DRAFT and record.most == 3


def test_observed_tokens_are_indexed():
    made = drafter(SuffixDraft(tokens=4), [1, 2, 3], [5])
    assert made.propose([4, 4]) == [NO_DRAFT, NO_DRAFT]
    made.observe(taken([9, 1, 2], []))
    assert made.propose([4, 4])[0].tokens == [3, 9, 1, 2]
    made.observe(taken([3], [5, 5]))
    # Sequence 0 wraps where the copy reaches the end of the text; sequence 1 repeats its token.
    assert made.propose([8, 2])[0].tokens == [9, 1, 2, 3]
    assert made.propose([8, 2])[1].tokens == [5, 5]
