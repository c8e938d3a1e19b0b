"""Depth policies: what runs is what the method says, and nobody reads rows that are not there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from selection import one_in
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.budget import DecayBudget, LinearBudget
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.exit.graph import DraftExit
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.rounds import staged

LAYERS = 4
ASKED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
EACH = CutDepth(every=1)


def made(*passes: Pass) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(tiny_llama(LAYERS), [Step(p) for p in every])[0]


@cache
def plain() -> Executable:
    return compile(made(), Target("eager", "cpu"))


def generated(executable: Executable, rows: slice = slice(0, 4), **options: Any) -> Any:
    asked = {**ASKED, "return_dict_in_generate": True, **options}
    return generate(executable, PROMPTS[rows], attention_mask=MASK[rows], **asked)


class ByHand:
    """A sequence that is decoded layer by layer: each step says which layers its tokens run."""

    def __init__(self) -> None:
        self.executable = compile(made(EACH), Target("eager", "cpu"))
        self.executable.begin(1, 64)

    def run(self, tokens: Sequence[int], past: int, layers: Sequence[int]) -> torch.Tensor:
        """Logits [T,V] of tokens through some layers, by their numbers."""
        given = chain_inputs(torch.tensor([list(tokens)]), past)
        for layer in layers:
            name = f"step.{layer}"
            fn = self.executable.program.function(name)
            self.executable.run(name, {k: v for k, v in given.items() if fn.has_input(k)}, ())
        fed = {name: given[name] for name in ("past", "select")}
        return self.executable.run("step.head", fed, ("logits",))["logits"][0].clone()


def budgeted(budget: LinearBudget | DecayBudget, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by the definition: the first layer, and the last ones within the budget."""
    text = ByHand()
    found = [int(text.run(prompt, 0, range(LAYERS))[-1].argmax())]
    while len(found) < count:
        place = len(found) - 1
        layers = [0, *range(LAYERS - budget.layers(place, LAYERS) + 1, LAYERS)]
        found.append(int(text.run(found[-1:], len(prompt) + place, layers)[-1].argmax()))
    return found


BUDGETS = {
    "depth_linear": LinearBudget(least=2, tokens=12),
    "depth_decay": DecayBudget(alpha=0.9, least=1),
}


@pytest.mark.parametrize(("name", "backend"), one_in(3, product(BUDGETS, ["eager", "onnxruntime"])))
def test_budgets_run_the_layers_that_they_say(name: str, backend: str) -> None:
    budget = BUDGETS[name]
    options = {"least": budget.least}
    options |= {"tokens": 12} if name == "depth_linear" else {"alpha": 0.9}
    fast = compile(made(EACH, named(name, **options)), Target(backend, "cpu"))
    found = generated(fast)
    wanted = [budget.layers(place, LAYERS) for place in range(19)]
    assert wanted[0] == LAYERS and wanted[-1] < LAYERS and wanted == sorted(wanted, reverse=True)
    for row, mask, text in zip(PROMPTS, MASK, found.sequences.tolist(), strict=True):
        prompt = row[mask.bool()].tolist()
        assert text[PROMPTS.shape[1] :] == budgeted(budget, prompt, 20)
    assert found.stats.layers == pytest.approx(sum(wanted) / len(wanted))
    assert not torch.equal(found.sequences, generated(plain()).sequences)


def deferred(prompt: list[int], count: int, exit: int, threshold: float, pending: int) -> Any:
    """Greedy tokens by the definition: exits taken one by one, deep rows made when they are due."""
    text = ByHand()
    found = [int(text.run(prompt, 0, range(LAYERS))[-1].argmax())]
    lacking, early = 0, 0
    while len(found) < count:
        past = len(prompt) + len(found) - 1
        logits = text.run(found[-1:], past, range(exit))[-1]
        best = logits.softmax(-1).topk(2).values
        if lacking < pending and float(best[0] - best[1]) > threshold:
            lacking, early = lacking + 1, early + 1
        else:
            fed = found[-1 - lacking :]
            logits = text.run(fed, past - lacking, range(exit, LAYERS))[-1]
            lacking = 0
        found.append(int(logits.argmax()))
    return found, early


@pytest.mark.parametrize(
    ("pending", "backend"), one_in(3, product([1, 3], ["eager", "onnxruntime"]))
)
def test_deferred_rows_are_made_with_the_next_deep_token(pending: int, backend: str) -> None:
    options = {"exit": 2, "threshold": 0.1, "pending": pending}
    passes = (CutDepth(exits=(2,)), named("depth_deferred", **options))
    fast = compile(made(*passes), Target(backend, "cpu"))
    some = 0
    for row in (0, 1, 2, 3):
        prompt = PROMPTS[row][MASK[row].bool()].tolist()
        ids = torch.tensor([prompt])
        found = generate(fast, ids, **ASKED, return_dict_in_generate=True)
        expected, early = deferred(prompt, 20, **options)
        assert found.sequences[0, len(prompt) :].tolist() == expected
        assert found.stats.layers == pytest.approx(LAYERS - 2 * early / 19)
        some += 0 < early < 19
    assert some, "no text both left early and went deep"


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_where_nobody_leaves_the_text_is_the_targets_own(backend: str) -> None:
    passes = (CutDepth(exits=(2,)), named("depth_deferred", exit=2, threshold=1.0))
    found = generated(compile(made(*passes), Target(backend, "cpu")))
    assert torch.equal(found.sequences, generated(plain()).sequences)
    assert found.stats.layers == LAYERS


def test_a_batch_leaves_together_or_not_at_all() -> None:
    options = {"exit": 2, "threshold": 0.004, "pending": 3}
    passes = (CutDepth(exits=(2,)), named("depth_deferred", **options))
    fast = compile(made(*passes), Target("eager", "cpu"))
    found = generated(fast)
    assert 2 < found.stats.layers < LAYERS
    # Texts of a batch make up for their rows in the same steps: twice the same text stays so.
    twice = PROMPTS[2:3].expand(2, -1)
    texts = generate(fast, twice, **ASKED)
    assert torch.equal(texts[:1], generate(fast, PROMPTS[2:3], **ASKED))
    assert torch.equal(texts[0], texts[1])


POLICIES: dict[str, tuple[Pass, ...]] = {
    "linear": (EACH, named("depth_linear", least=2, tokens=12)),
    "deferred": (
        CutDepth(exits=(2,)),
        named("depth_deferred", exit=2, threshold=0.004, pending=3),
    ),
    "confident": (EACH, named("depth_confident", threshold=0.004)),
}


@pytest.mark.parametrize("which", POLICIES)
def test_steps_that_touch_little_are_general_steps(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and figures, where texts end at different places, too."""
    fast = compile(made(*POLICIES[which]), Target("eager", "cpu"))
    ends = generated(fast).sequences[1, 12:13].tolist()
    found = []
    for alone in (True, False):
        if not alone:
            monkeypatch.setattr(staged, "one_by_one", lambda decoding: False)
        texts = generated(fast, eos_token_id=ends)
        stats = texts.stats
        figures = (stats.steps, stats.sequence_steps, stats.decoded_tokens, stats.layers)
        found.append((texts.sequences.tolist(), figures))
    assert found[0] == found[1]
    assert found[0][1][1] < 4 * found[0][1][0] and found[0][1][3] < LAYERS


def test_drafts_are_verified_by_all_layers() -> None:
    """Copies of a text that never leaves: the target's own, however the rows came about."""
    options = {"exit": 2, "threshold": 0.02, "pending": 3}
    passes = (CutDepth(exits=(2,)), named("depth_deferred", **options))
    ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    fast = compile(made(*passes, named("draft_suffix")), Target("onnxruntime", "cpu"))
    found = generate(fast, ids, **{**ASKED, "max_new_tokens": 40}, return_dict_in_generate=True)
    assert found.stats.draft_tokens > 0 and found.stats.layers < LAYERS
    budget = compile(made(EACH, named("depth_linear"), named("draft_suffix")), Target("eager"))
    assert generate(budget, ids, **ASKED).shape == (1, 28)


def test_int8_leaves_early_too() -> None:
    passes = (in_int8(), CutDepth(exits=(2,)), named("depth_deferred", exit=2, threshold=1.0))
    fast = compile(made(*passes), Target("onnxruntime", "cpu"))
    whole = compile(made(in_int8()), Target("onnxruntime", "cpu"))
    assert torch.equal(generated(fast).sequences, generated(whole).sequences)


@pytest.mark.parametrize(
    ("place", "layers"), [(0, 32), (64, 24), (128, 17), (255, 2), (256, 2), (9999, 2)]
)
def test_the_linear_budget_by_hand(place: int, layers: int) -> None:
    assert LinearBudget(least=2, tokens=256).layers(place, 32) == layers


def test_the_decaying_budget_by_hand() -> None:
    budget = DecayBudget(alpha=0.99, least=2)
    for place in (0, 1, 10, 100):
        assert budget.layers(place, 32) == math.floor(32 * 0.99**place)
    assert budget.layers(1000, 32) == 2


def test_what_does_not_go_together_is_refused() -> None:
    leaves = named("depth_deferred", exit=2)
    for passes, why in [
        ((leaves,), "needs 'segments'|requires 'segments'"),
        ((leaves, EACH, DraftExit(exit=2)), "leave one of the two out"),
        ((leaves, EACH, DraftMedusa()), "which deeper layers make"),
        ((leaves, CutDepth(exits=(3,))), "cut after 2 layers; it is cut after 3"),
        ((leaves, EACH, named("depth_linear")), "has a depth policy already"),
        ((CutDepth(), leaves), "set exits, every or middle"),
        ((CutDepth(every=9), leaves), "every=9 leaves 4 layers in one piece"),
    ]:
        with pytest.raises(PassError, match=why):
            made(*passes)
    for options in ({"threshold": 1.5}, {"threshold": -0.1}, {"pending": 0}, {"exit": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            named("depth_deferred", **options)
    for options, why in [({"least": 0}, "least"), ({"most": 2, "least": 3}, "more than most=2")]:
        with pytest.raises(ValueError, match=why):
            named("depth_linear", **options)
