"""A model that drafts, and a drafter for it: the same drafts in fewer steps of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_runtime_cached import PROMPTS, decode, plainly
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, parse_program, program_text
from graftwork.ir.plan import StagedDraft
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.suffix import SuffixDraft, SuffixIndex
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.recipe import Recipe
from graftwork.runtime.speculate.lengths.base import LengthPolicy
from graftwork.tracing import draft_models
from graftwork.tracing.draft_models import with_draft_models

COPYING = "suffix(tokens=4, longest=16, shortest=1)"
SMALL = [[1, 2, 3, 1, 2, 5, 4]]


class Counted:
    """An executable that counts the runs of each function."""

    def __init__(self, executable: Any) -> None:
        self.executable, self.runs = executable, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)

    def run(self, function: str, inputs: Any, fetch: Any) -> Any:
        self.runs[function] = self.runs.get(function, 0) + bool(fetch)
        return self.executable.run(function, inputs, fetch)

    def hold(self, function: str, inputs: Any, fetch: Any) -> Any:
        return lambda: self.run(function, inputs, fetch)


def drafting(drafter: str, *more: Pass, guest_seed: int = 0, **shape: int) -> Program:
    """A tiny model that another tiny model drafts for; with the same seed it is the same one."""
    start = tiny_llama(**shape).replace(guests={"other": tiny_llama(seed=guest_seed, **shape)})
    draft = DraftModel(model="other", levels=6, drafter=drafter)
    passes = (draft, InsertKvCache(), PickLogits(), AddArgmax(), *more)
    return run_passes(start, [Step(p) for p in passes])[0]


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_same_drafts_in_fewer_steps(backend: str, batch: int) -> None:
    """A draft equal to the target is accepted whole, so every mistake in a row costs tokens."""
    executable = Counted(compile(drafting(COPYING), Target.parse(backend)))
    count = 1 + 8 * 7
    result = decode(executable, PROMPTS[:batch], count)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:batch], count))
    assert (result.stats.steps, result.stats.accepted_tokens) == (8, 8 * 6 * batch)
    # Without guesses it is six steps a draft. The tiny model's text repeats itself.
    assert executable.runs["draft"] < {1: 0.75, 4: 0.95}[batch] * 8 * 6


def test_a_text_that_is_not_drafted_costs_the_draft_model_nothing() -> None:
    """Its prompt is read with the first draft."""
    executable = Counted(compile(drafting(COPYING), Target.parse("eager")))
    decode(executable, PROMPTS[:1], 1)
    assert "draft" not in executable.runs  # silent runs, which make rows alone, are noted as 0
    decode(executable, PROMPTS[:1], 9)
    assert executable.runs["draft"] > 0


def test_another_model_drafts_the_same_with_and_without_guesses() -> None:
    """Where the target refuses drafts, rows are forgotten and the text stays its own."""
    results = {}
    for drafter in ("", COPYING):
        program = drafting(drafter, guest_seed=5, vocab=6)
        executable = Counted(compile(program, Target.parse("eager")))
        result = decode(executable, SMALL, 20)
        assert torch.equal(result.sequences, plainly(executable, SMALL, 20))
        results[drafter] = (result.stats.steps, result.stats.accepted_tokens, executable.runs)
    assert results[""][:2] == results[COPYING][:2]
    assert results[COPYING][2]["draft"] < results[""][2]["draft"]


def test_up_to_the_end_of_the_context() -> None:
    executable = compile(drafting(COPYING, context=40), Target.parse("eager"))
    result = decode(executable, PROMPTS[:3], 32)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:3], 32))


def test_sampled_drafts_say_what_they_were_sampled_from() -> None:
    """With the target's own distribution every sampled token passes, guessed or not."""
    tree = (AcceptTrees(), named("tree_sampled", widths=(1, 1, 1, 1)))
    executable = compile(drafting(COPYING, *tree), Target.parse("eager"))
    options = {"do_sample": True, "top_k": 0, "temperature": 0.5, "seed": 3}
    result = decode(executable, PROMPTS, 1 + 6 * 5, **options)
    assert (result.stats.steps, result.stats.accepted_tokens) == (6, 6 * 4 * 4)


def test_a_recipe_names_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever brings the model runs the recipe on it; the pass takes the drafter from there."""
    monkeypatch.setitem(draft_models.IMPORTERS, "language", lambda path, dtype: tiny_llama())
    settings = ["draft_model.model=other", "draft_model.drafter=copyspec"]
    recipe = Recipe.load("draft_model").with_options(settings)
    program = with_draft_models(tiny_llama(), recipe, torch.float32)
    (draft,) = [step.pass_ for step in recipe.steps if step.pass_.models]
    made = draft.run(program).program
    assert isinstance(made.plan.draft, StagedDraft)
    assert made.plan.draft.drafter == SuffixDraft()
    assert parse_program(program_text(made)).plan == made.plan


def test_recycled_candidates_draft_too() -> None:
    """The target's step says what it recycles."""
    recycling = "recycling(nodes=8, depth=4, successors=4, context=2)"
    executable = Counted(compile(drafting(recycling, AddTopTokens()), Target.parse("eager")))
    result = decode(executable, PROMPTS[:1], 1 + 8 * 7)
    assert result.stats.accepted_tokens == 8 * 6
    assert executable.runs["draft"] < 0.85 * 8 * 6


def test_refusals() -> None:
    with pytest.raises(PassError, match=r"(?s)drafter='sufix.*': .*expected one of"):
        drafting("sufix(tokens=2)")
    with pytest.raises(PassError, match="expected a drafter that copies"):
        drafting('heads(function="heads")')
    with pytest.raises(PassError, match="expected a drafter that copies"):
        drafting("copyspec")  # nobody made the guest's plan
    with pytest.raises(PassError, match=r"drafts by jacobi\(tokens=3\): expected a drafter that"):
        drafting("jacobi(tokens=3)")
    with pytest.raises(PassError, match=r"one node a level, and tree=.* asks for up to 2"):
        drafting(COPYING, AcceptTrees(), named("tree_static", paths=((0,), (1,), (0, 0), (1, 0))))


class Stops(LengthPolicy):
    """Two levels are enough."""

    def goes_on(self, level: Any, depth: int) -> Any:
        return self.always & (depth < 2)


def test_a_shorter_tree_asks_for_fewer_guesses() -> None:
    executable = Counted(
        compile(drafting(COPYING, named("tree_chain", depth=2)), Target.parse("eager"))
    )
    result = decode(executable, PROMPTS[:1], 1 + 10 * 3)
    assert (result.stats.steps, result.stats.accepted_tokens) == (10, 10 * 2)


def test_what_follows_text_that_is_not_committed() -> None:
    """As a fresh index of the whole text says, and nothing is learned."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        text, extra = (torch.randint(3, (n,), generator=generator).tolist() for n in (30, 3))
        index, whole = SuffixIndex(8), SuffixIndex(8)
        index.extend(text)
        whole.extend([*text, *extra])
        length, copied = index.following(extra, 4)
        if length:
            tail = [*text, *extra][-length:]
            places = [e for e in range(length, len(text) + 1) if text[e - length : e] == tail]
            assert places, (text, extra, length)
            assert copied in [([*text, *extra, *copied])[e : e + 4] for e in places]
        assert length <= whole.length
        assert index.tokens == text
