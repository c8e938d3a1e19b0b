"""Improved MCSD: drafts that begin with the target's candidates, of which the longest is kept."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from every_recipe import steps_of
from runtime_drafts import RuleDraft
from runtime_models import TableExecutable, markov, plain, program
from test_runtime_sampling import assert_distributed, texts_drawn, theirs_warped
from test_runtime_verifiers import LENGTH, PROMPT, RULE, VOCAB, exact
from tiny import MASK, PROMPTS, named, tiny_llama

from graftwork.backends import Target, compile
from graftwork.ir import PassError
from graftwork.ir.check.legality import unmet
from graftwork.ir.plan import SampledTree
from graftwork.ir.plan.contract import Contract
from graftwork.passes.drafting.target_first import (
    LongestBranch,
    TargetFirstDraft,
    following,
    last_node,
)
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.asking.options import GenerationOptions
from graftwork.runtime.feeding.draft import Draft

MANY = 12
TARGET = markov(MANY, seed=3)
GUESS = markov(MANY, seed=4)
SMALL = RuleDraft(lambda seen: TARGET(seen) + GUESS(seen), levels=3)
OTHER = RuleDraft(lambda seen: RULE(seen) / 3 + markov(VOCAB, seed=6)(seen))


def model(rule: Any, draft: RuleDraft, vocab: int, *widths: int) -> TableExecutable:
    drafted = TargetFirstDraft(draft)
    tree, verify = SampledTree(widths), LongestBranch()
    return TableExecutable(rule, program(vocab, draft=drafted, tree=tree, verify=verify))


def by_hand(prompt: list[int], count: int, width: int, depth: int) -> list[int]:
    """The paper's loop over chains from each of the target's candidates, in greedy decoding."""
    text = [*prompt, int(TARGET(tuple(prompt)).argmax())]  # the prompt's own
    known = False
    while len(text) < len(prompt) + count:
        room = min(depth, len(prompt) + count - len(text) - 1)
        if room < 1:
            text.append(int(TARGET(tuple(text)).argmax()))
            break
        first = TARGET if known else SMALL.rule
        chains = []
        for token in first(tuple(text)).topk(width).indices.tolist():
            chain = [token]
            while len(chain) < room:
                chain.append(int(SMALL.rule((*text, *chain)).argmax()))
            agreed = 0
            for place, token in enumerate(chain):
                said = int(TARGET((*text, *chain[:place])).argmax())
                if token != said and not (known and place == 0):
                    break
                agreed += 1
            chains.append(chain[:agreed])
        longest = max(chains, key=len)
        known = bool(longest)
        text += longest or [int(TARGET(tuple(text)).argmax())]
    return text[len(prompt) :][:count]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_texts_are_the_papers_loops(width):
    executable = model(TARGET, SMALL, MANY, width, 1, 1)
    ids, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    asked = {"max_new_tokens": 31, "pad_token_id": 0, "return_dict_in_generate": True}
    result = generate(executable, ids, attention_mask=mask, **asked)
    for row, prompt in enumerate(([5], [1, 2, 3])):
        assert result.sequences[row, 3:].tolist() == by_hand(prompt, 31, width, 3)
    own = [plain(TARGET, prompt, 31) for prompt in ([5], [1, 2, 3])]
    # With one candidate the text is the target's own; with more it is another one, sooner.
    assert (result.sequences[:, 3:].tolist() == own) == (width == 1)


def test_more_candidates_are_kept_longer():
    steps = []
    for width in (1, 3):
        ids = torch.tensor([[1, 2, 3]])
        result = generate(
            model(TARGET, SMALL, MANY, width, 1, 1),
            ids,
            max_new_tokens=50,
            return_dict_in_generate=True,
        )
        steps.append(result.stats.steps)
    assert steps[1] < steps[0] < 50


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.95, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("size", [(1, 160), (4, 50)], ids=str)
def test_with_one_candidate_samples_follow_the_target(size, options):
    """What is left of p behind a rejected token is what the next draft begins with."""
    executable = model(RULE, OTHER, VOCAB, 1, 1)
    found, accepted, drafted = texts_drawn(executable, PROMPT, LENGTH, size, options)
    assert_distributed(found, exact(options))
    assert 0.05 < accepted / drafted < 0.95


def test_a_forgotten_rejection_shows(monkeypatch):
    """The test can fail: a first level from p itself would not be lossless."""

    def forgetful(row, draft, node, options):
        return following(row, Draft(draft.tokens[: node + 1]), node, options)

    monkeypatch.setattr("graftwork.passes.drafting.target_first.following", forgetful)
    executable = model(RULE, OTHER, VOCAB, 1, 1)
    found, _, _ = texts_drawn(executable, PROMPT, LENGTH, (300, 4), {})
    with pytest.raises(AssertionError):
        assert_distributed(found, exact({}))


def test_tokens_that_are_forbidden_are_not_kept():
    executable = model(TARGET, SMALL, MANY, 3, 1, 1)
    never = plain(TARGET, [1, 2, 3], 3)[1]
    ids = torch.tensor([[1, 2, 3]])
    asked = {"max_new_tokens": 40, "bad_words_ids": [[never]]}
    assert never not in generate(executable, ids, **asked)[0, 3:].tolist()
    asked |= {"do_sample": True, "seed": 3}
    assert never not in generate(executable, ids, **asked)[0, 3:].tolist()


def test_a_seed_repeats():
    executable, ids = model(RULE, OTHER, VOCAB, 2, 1), torch.tensor([PROMPT] * 2)
    texts = [
        generate(executable, ids, max_new_tokens=30, do_sample=True, seed=s) for s in (7, 7, 8)
    ]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_the_last_token_of_a_text_in_a_draft():
    draft = Draft([5, 6, 7, 8], None, (-1, -1, 1, 2))
    assert last_node(draft, [1], [6, 7]) == 2 and last_node(draft, [], [6]) == 1
    assert last_node(draft, [1], [6, 9]) is None and last_node(draft, [1], [6]) is None
    assert last_node(Draft(()), [], [6]) is None


def test_what_is_left_by_hand():
    probs = torch.tensor([0.5, 0.3, 0.2])
    told = torch.tensor([[0.0, 1.0, 0.0], [0.1, 0.7, 0.2]])
    draft, options = Draft([1, 1], told, (-1, 0)), GenerationOptions(do_sample=True, top_k=0)
    # Behind node 0 token 1 was rejected: p - q = (0.4, -0.4, 0.0).
    assert np.exp(following(probs.log(), draft, 0, options)).tolist() == [1.0, 0.0, 0.0]
    whole = np.exp(following(probs.log(), draft, 1, options))
    assert whole.tolist() == pytest.approx(probs.tolist())
    warm = GenerationOptions(do_sample=True, top_k=0, temperature=2.0)
    wanted = theirs_warped(probs.log()[None], {"temperature": 2.0})[0]
    found = np.exp(following(probs.log(), draft, 1, warm))
    assert found.tolist() == pytest.approx(wanted.tolist())


def compiled(name: str, backend: str, guest: int = 0):
    with TemporaryDirectory() as folder:
        steps = steps_of(name, Path(folder))
    start = tiny_llama(4)
    made = run_passes(start.replace(guests={"other": tiny_llama(4, seed=guest)}), steps)[0]
    return compile(made, Target(backend, "cpu"))


@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.long)])
def test_a_draft_that_is_the_target_changes_nothing(backend: str) -> None:
    """All branches are kept whole, and of equal ones the first: the target's best token."""
    asked = {"max_new_tokens": 20, "eos_token_id": [], "attention_mask": MASK}
    wanted = generate(compiled("baseline", backend), PROMPTS, **asked)
    found = generate(
        compiled("improved_mcsd", backend), PROMPTS, return_dict_in_generate=True, **asked
    )
    assert torch.equal(found.sequences, wanted)
    assert found.stats.accepted_per_step > 3


def test_the_recipe_says_that_it_is_approximate() -> None:
    assert Recipe.load("improved_mcsd").contract == "approximate"
    assert TargetFirstDraft.contract is Contract.APPROXIMATE


def test_refusals() -> None:
    passes = [named("insert_kv_cache"), named("accept_trees"), named("draft_suffix")]
    with pytest.raises(PassError, match=r"predicts level by level.* got draft=suffix"):
        run_passes(tiny_llama(), [Step(p) for p in (*passes, named("draft_target_first"))])
    held = program(4, draft=OTHER, verify=LongestBranch())
    assert "run draft_target_first" in str(unmet(held))
