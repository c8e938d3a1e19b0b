"""FastCoT: guesses are refined, stand once, and what follows sees them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from recorded import whole
from test_runtime_cached import PROMPTS, decode, plainly
from tiny import drafting_llama, named

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program
from graftwork.passes.drafting.fastcot import FastCotDraft, FastCotDrafter, Glimpse
from graftwork.passes.drafting.jacobi import filled
from graftwork.recipe import Recipe

TOKENS, STEPS, ANSWER = 4, 3, (7, 9)


def made(steps: int = STEPS, answer: Sequence[int] = ANSWER) -> Program:
    return drafting_llama(named("draft_fastcot", tokens=TOKENS, steps=steps, answer=tuple(answer)))


def by_hand(program: Program, prompt: Sequence[int], count: int) -> tuple[list[int], int]:
    """The text after a prompt, of `count` tokens, and where the standing guesses begin in it."""
    # Prompts bring a token before anything is drafted.
    text = [*prompt, int(whole(program, "step", prompt)["logits"][0, -1].argmax())]
    block, began = filled([], prompt, TOKENS), 0
    for step in range(count):
        if len(text) - len(prompt) >= count:
            break
        draft = [*block, *ANSWER] if step == STEPS else block
        logits = whole(program, "step", [*text, *draft])["logits"][0]
        said = logits.argmax(-1).tolist()[len(text) - 1 :]
        right = next((n for n, token in enumerate(draft) if token != said[n]), len(draft))
        if step == STEPS:
            right, began = len(draft), len(text) - len(prompt)
        gained = [*draft[:right], said[right]]
        text, block = [*text, *gained], filled(said[right + 1 :], gained, TOKENS)
    return text[len(prompt) :][:count], began


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_texts_are_those_of_the_method_written_out(backend: str) -> None:
    """Alone, and in a batch of texts of several lengths."""
    program = made()
    executable = compile(program, Target.parse(backend))
    found = decode(executable, PROMPTS, 24).sequences
    alone = decode(executable, PROMPTS[:1], 24).sequences
    assert torch.equal(alone[0, -24:], found[0, -24:])
    differ = 0
    for prompt, row in zip(PROMPTS, found.tolist(), strict=True):
        wanted, began = by_hand(program, prompt, 24)
        assert row[-24:] == wanted
        end = began + TOKENS
        assert wanted[end : end + len(ANSWER)] == list(ANSWER)
        differ += wanted != plainly(executable, [prompt], 24)[0, -24:].tolist()
    assert differ  # the guesses count


def test_before_they_stand_texts_are_the_targets_own() -> None:
    executable = compile(made(steps=40), Target("eager", "cpu"))
    result = decode(executable, PROMPTS, 24)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS, 24))
    assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


def test_sampling_goes_on_behind_them_too() -> None:
    executable = compile(made(), Target("eager", "cpu"))
    found = decode(executable, PROMPTS, 24, do_sample=True, seed=3).sequences
    text = found[0, -24:].tolist()
    assert any(tuple(text[n : n + 2]) == ANSWER for n in range(23))


def test_guesses_stand_up_to_an_end_of_text() -> None:
    drafter = FastCotDrafter.__new__(FastCotDrafter)
    drafter.record, drafter.ends = FastCotDraft(tokens=4, steps=1, answer=(5,)), frozenset({2})
    drafter.blocks, drafter.taken = [[8, 2, 6, 6], [2, 6, 6, 6], [8, 6, 6, 6]], [1, 1, 0]
    assert [list(d.tokens) for d in drafter.propose([9, 9, 9])] == [[8, 5], [5], [8, 6, 6, 6]]
    assert [list(d.tokens) for d in drafter.propose([1, 0, 2])] == [[8], [], [8, 6]]


def test_the_recipe_is_approximate_and_has_both_parts() -> None:
    assert Recipe.load("fastcot").contract == "approximate"
    plan = made().plan
    assert plan.verify == Glimpse(STEPS) and plan.draft.most == TOKENS + len(ANSWER)


def test_what_cannot_be_is_refused_by_name() -> None:
    drafter = named("draft_fastcot", answer=ANSWER)
    with pytest.raises(PassError, match=r"has a verifier already: glimpse\(steps=32\)"):
        drafting_llama(drafter, named("verify_typical"))
    with pytest.raises(PassError, match=r"would keep what others draft, too; got draft=first"):
        drafting_llama(named("draft_suffix"), drafter)
    with pytest.raises(PassError, match=r"keeps tokens for being drafted, and length=goodput"):
        drafting_llama(drafter, named("length_goodput"))
    with pytest.raises(PassError, match=r"answer is empty.* take jacobi or copyspec"):
        made(answer=())
    assert Recipe.load("fastcot").brought == ("tokens that ask for the answer",)
    executable = compile(made(answer=(99,)), Target("eager", "cpu"))
    with pytest.raises(InputError, match=r"answer has the token 99, outside the vocabulary of 32"):
        decode(executable, PROMPTS[:1], 4)
