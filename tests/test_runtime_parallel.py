"""Drafters that predict all their tokens in one call: the same text, one call a draft, learning."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import on_backends
from test_runtime_skipping import same_texts
from test_training import TEXT
from tiny import PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program
from graftwork.ir.execution.executable import Executable
from graftwork.model import Model
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_eagle3 import DraftEagle3
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.parallel import ParallelDraft
from graftwork.passes.drafting.parallel.graph import DraftParallel
from graftwork.passes.drafting.parallel.objective import columns, parallel_loss, seen
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.training import fit
from graftwork.training.objectives.base import Batch

ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
MODEL = (DraftModel(model="other"), DraftParallel(masks=3))
CHAIN = named("tree_chain", depth=4)
DRAFTS: dict[str, tuple[Pass, ...]] = {
    "model": (*MODEL, CHAIN),
    "a token of its own": (DraftModel(model="other"), DraftParallel(masks=3, token=5), CHAIN),
    "layer": (DraftEagle(), DraftParallel(masks=3), CHAIN),
    "layer on three": (DraftEagle3(), DraftParallel(masks=3), CHAIN),
    "tree": (AcceptTrees(), *MODEL, named("tree_best_first", nodes=6, depth=4, width=3)),
    "after copies": (named("draft_suffix", shortest=1), *MODEL, CHAIN),
    "in int8": (*MODEL, CHAIN, in_int8()),
}


def made(*passes: Pass) -> Program:
    """The other model is the target itself, so that drafts are right."""
    start = tiny_llama().replace(guests={"other": tiny_llama()})
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(start, [Step(p) for p in every])[0]


@cache
def compiled(backend: str, which: str) -> Executable:
    passes = DRAFTS[which] if which else ()
    return compile(made(*passes), Target(backend, "cpu", threads=1))


@pytest.mark.parametrize(
    ("which", "backend"),
    on_backends(DRAFTS, {"model", "layer on three"}, rare=["after copies", "in int8"]),
)
def test_the_text_is_the_targets_own(which: str, backend: str) -> None:
    plain = made(in_int8()) if which == "in int8" else None
    whole = compile(plain, Target(backend, "cpu", threads=1)) if plain else compiled(backend, "")
    assert same_texts(whole, compiled(backend, which))


def test_a_draft_goes_to_the_end_of_the_context() -> None:
    assert same_to_the_end(compiled("eager", ""), compiled("eager", "model"))


def same_to_the_end(plain: Executable, fast: Executable) -> bool:
    """Whether both write the same text until the context is full."""
    asked = {**ASKED, "max_new_tokens": plain.program.info.context - PROMPTS.shape[1]}
    expected = generate(plain, PROMPTS[2:3], **asked)
    return torch.equal(generate(fast, PROMPTS[2:3], **asked), expected)


@pytest.mark.parametrize("which", ["model", "layer"])
def test_one_call_drafts_all_tokens(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts by hand, one call over the whole text and the masks, against what is accepted."""
    fast, prompt = compiled("eager", which), PROMPTS[2:3]
    draft = fast.program.plan.draft
    assert isinstance(draft, ParallelDraft)
    calls: Counter[str] = Counter()
    generate(fast, prompt, **ASKED)  # what a first generation does once is not counted
    run, hold = fast.run, fast.hold

    def counted(call: Any) -> Any:
        def counts(function: str, *rest: Any) -> Any:
            calls[function] += 1
            return call(function, *rest)

        return counts

    def held(function: str, *rest: Any) -> Any:
        call = hold(function, *rest)  # type: ignore[arg-type]
        return lambda: counted(lambda _: call())(function)

    monkeypatch.setattr(fast, "run", counted(run))
    monkeypatch.setattr(fast, "hold", held)
    found = generate(fast, prompt, return_dict_in_generate=True, **ASKED)
    monkeypatch.undo()
    text = found.sequences
    place, accepted, steps = prompt.shape[1], 0, 0
    while place < text.shape[1] - 1:
        said = by_hand(fast, draft, text[:, : place + 1])
        room = min(4, text.shape[1] - place - 2)
        alike = (said[:room] == text[0, place + 1 : place + 1 + room]).int()
        count = int(alike.cumprod(0).sum())
        place, accepted, steps = place + count + 1, accepted + count, steps + 1
    assert found.stats.accepted_tokens == accepted
    assert found.stats.steps == steps
    assert calls[draft.function] <= steps + 1
    if which == "model":
        assert accepted > 0  # its first token at least is the target's


def by_hand(fast: Executable, draft: ParallelDraft, text: torch.Tensor) -> torch.Tensor:
    """What a draft function says after a text and after three masks, in empty caches."""
    count = text.shape[1]
    tokens = torch.cat([text, torch.full((1, 3), draft.token)], 1)
    given = {"past": torch.tensor([0])}
    fast.begin(1, 128)
    if draft.output is not None:
        places = torch.arange(count - 1)[None]
        fed = {"tokens": text[:, :-1], "positions": places, "past": given["past"], "select": places}
        features = fast.run("step", fed, (draft.output,))[draft.output]
        # What lies beside masks must not matter.
        beside = torch.full((1, 3, features.shape[-1]), 7.0)
        tokens, given["hidden"] = tokens[:, 1:], torch.cat([features, beside], 1)
        count -= 1
    given |= {"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None]}
    given["select"] = torch.arange(count - 1, count + 3)[None]
    return fast.run(draft.function, given, ("draft_tokens",))["draft_tokens"][0, :, 0].clone()


def test_places_are_dropped_by_level_and_nested() -> None:
    tokens, record = torch.arange(40)[None], ParallelDraft(levels=5, keep=0.5)
    starts, depths = columns(tokens, 40, record)
    by_level = [starts[depths == level].tolist() for level in range(5)]
    assert by_level[0] == list(range(40))
    # Of the 36 that see all masks: a half, a quarter, and a fifth where less would be left.
    assert [len(level) for level in by_level[1:]] == [18, 9, 7, 7]
    assert set(by_level[4]) == set(by_level[3]) < set(by_level[2]) < set(by_level[1])
    assert torch.equal(columns(tokens, 40, record)[0], starts)


def test_what_columns_see() -> None:
    starts, depths = torch.tensor([0, 1, 2, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 2])
    assert seen(starts, depths).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("output", [None, "hidden"])
def test_the_loss_by_hand(output: str | None) -> None:
    """Each column's logits are a table's row of its token, position and what it sees."""
    vocabulary, width = 7, 9
    tokens = torch.arange(width)[None] % vocabulary
    teacher = torch.randn(1, width, vocabulary, generator=torch.Generator().manual_seed(0))
    states = torch.randn(1, width, 4, generator=torch.Generator().manual_seed(1))
    record = ParallelDraft("draft", output, 3, token=vocabulary, weight="parallel.mask", keep=0.5)
    fed: dict[str, torch.Tensor] = {}

    def run(function: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        fed.update(inputs)
        generator = torch.Generator().manual_seed(2)
        table = torch.randn(1 + vocabulary, vocabulary, generator=generator)
        own = table[inputs["tokens"]] + inputs["positions"][..., None]
        return {"draft_logits": own * inputs["ancestors"].sum(-1, keepdim=True)}

    batch = Batch(tokens, {"hidden": states}, teacher)
    found = parallel_loss(record, run, batch)
    shift = int(output is not None)
    logits = run(None, **fed)["draft_logits"][0].log_softmax(-1)
    starts, depths = columns(tokens, width - shift, record)
    assert fed["tokens"][0, width - shift :].eq(vocabulary).all()
    text = [*tokens[0].tolist()[1:], int(teacher[0, -1].argmax())]
    losses = [
        -logits[place, text[start + depth + shift]]
        for place, (start, depth) in enumerate(zip(starts.tolist(), depths.tolist(), strict=True))
    ]
    torch.testing.assert_close(found.total, torch.stack(losses).mean())
    assert len(found.hits) == 3
    if output is not None:
        assert torch.equal(fed["hidden"][:, : width - 1], states[:, :-1])


@pytest.mark.parametrize(
    ("drafter", "changed"),
    [
        (DraftModel(model="other"), "draft."),
        pytest.param(DraftEagle3(), "eagle3", marks=pytest.mark.long),
    ],
    ids=["model", "layer"],
)
def test_drafters_learn_to_read_masks(drafter: Pass, changed: str, tmp_path: Path) -> None:
    program = made(drafter, DraftParallel(masks=2), named("tree_chain", depth=3))
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    states: list[Any] = []
    options = {"steps": 60, "batch": 6, "window": 24, "own": 0.0, "rate": 1e-2}
    done = fit(model, TEXT, out=tmp_path, progress=states.append, **options)
    assert {len(state.hits) for state in states if state.hits} == {3}
    losses = [state.loss for state in states if not math.isnan(state.loss)]
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]
    after = done.model.program.weights
    moved = {n for n, w in program.weights.items() if not torch.equal(w.load(), after[n].load())}
    assert all(name.startswith((changed, "parallel.")) for name in moved)
    assert any(name.startswith(changed) for name in moved) and "parallel.mask" in moved
    again = made(drafter, DraftParallel(masks=2, weights=str(tmp_path)))
    assert again.plan.draft.trained  # type: ignore[attr-defined]
    for name in moved:
        torch.testing.assert_close(again.weights[name].load(), after[name].load())


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ((named("draft_suffix"), DraftParallel()), "drafts a token a call"),
        ((DraftModel(model="other", drafter="suffix()"), DraftParallel()), "drafts a token a call"),
        ((DraftModel(model="other"), DraftParallel(token=999)), r"token=999 is no token"),
        ((*MODEL, named("length_draft_acceptance")), "expected one model that drafts"),
    ],
    ids=["copies", "staged", "no token", "odds of tokens that are not fed"],
)
def test_what_is_refused(passes: tuple[Pass, ...], said: str) -> None:
    with pytest.raises(PassError, match=said):
        made(*passes)
