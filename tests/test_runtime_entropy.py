"""Two models that take turns: by the definition, at the extremes, and whatever shares a batch."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import pytest
import torch
from recorded import calls_of
from selection import one_in
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, VerifyError, run, verify
from graftwork.ir.execution.executable import Executable
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.entropy.graph import DepthEntropy
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.generation import forget

ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
COUNT = 24


def target() -> Program:
    return tiny_llama(4)


def other() -> Program:
    return tiny_llama(2, seed=1)


def made(*passes: Pass) -> Program:
    start = target().replace(guests={"other": other()})
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(start, [Step(p) for p in every])[0]


@cache
def compiled(backend: str, threshold: float, *names: str) -> Executable:
    more = [in_int8() if name == "int8" else named(name, shortest=1) for name in names]
    turns = DepthEntropy(model="other", threshold=threshold, window=3, least=2, pending=5)
    return compile(made(turns, *more), Target(backend, "cpu", threads=1))


def plainly(program: Program, prompt: list[int]) -> list[int]:
    """Greedy tokens of one model."""
    text = list(prompt)
    for _ in range(COUNT):
        text.append(int(said(program, text).argmax()))
    return text[len(prompt) :]


def said(program: Program, text: list[int]) -> torch.Tensor:
    tokens = torch.tensor([text])
    given = {"tokens": tokens, "positions": torch.arange(len(text))[None]}
    return run(program, "step", given)["logits"][0, -1]


def by_hand(prompt: list[int], threshold: float) -> tuple[list[int], int]:
    """Greedy tokens by the definition, and how many of those after the first the target wrote."""
    models = {False: target(), True: other()}
    text = [*prompt, int(said(models[False], prompt).argmax())]
    recent: deque[float] = deque(maxlen=3)
    small, since, count = False, 0, 0
    while len(text) < len(prompt) + COUNT:
        unsure = bool(recent) and sum(recent) / len(recent) > threshold
        if since >= 2 and small is unsure:
            small, since = not unsure, 0
        since += 1
        logits = said(models[small], text)
        chances = logits.softmax(-1)
        recent.append(float(-(chances * chances.log2()).sum()))
        text.append(int(logits.argmax()))
        count += not small
    return text[len(prompt) :], count


@pytest.mark.parametrize("backend", one_in(2, ["eager", "onnxruntime"]))
def test_models_take_turns_as_the_method_says(backend: str) -> None:
    for index, threshold in ((1, 4.588), (2, 4.4), (2, 4.472)):
        prompt = PROMPTS[index][MASK[index].bool()].tolist()
        fast = compiled(backend, threshold)
        found = generate(fast, torch.tensor([prompt]), return_dict_in_generate=True, **ASKED)
        expected, count = by_hand(prompt, threshold)
        assert found.sequences[0, len(prompt) :].tolist() == expected
        assert found.stats.layers == pytest.approx(4 * count / (COUNT - 1))
        assert 8 < count < COUNT - 4, "both must write"


@pytest.mark.parametrize(
    "more", [(), pytest.param(("draft_suffix",), marks=pytest.mark.long), ("int8",)], ids=str
)
def test_at_a_threshold_of_nothing_the_text_is_the_targets(more: tuple[str, ...]) -> None:
    fast = compiled("eager", 0.0, *more)
    found = generate(fast, PROMPTS, attention_mask=MASK, **ASKED)
    few = [in_int8()] if "int8" in more else []
    passes = [Step(p) for p in (*few, InsertKvCache(), PickLogits(), AddArgmax())]
    plain = compile(run_passes(target(), passes)[0], Target("eager", "cpu"))
    expected = generate(plain, PROMPTS, attention_mask=MASK, **ASKED)
    assert torch.equal(found, expected)


def test_what_the_smaller_model_never_writes_it_never_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = compile(compiled("eager", 0.0).program, Target("eager", "cpu"))
    called = calls_of(fast, monkeypatch)
    generate(fast, PROMPTS, attention_mask=MASK, **ASKED)
    assert set(called) == {"step"}


def test_steps_return_the_entropies_of_their_distributions() -> None:
    program = made(DepthEntropy(model="other"))
    text = PROMPTS[2].tolist()
    given = {"tokens": torch.tensor([text]), "positions": torch.arange(len(text))[None]}
    start = target().replace(guests={"other": other()})
    (step,) = [Step(DepthEntropy(model="other"))]
    early = run_passes(start, [step])[0]
    for name in ("step", "small"):
        found = run(early, name, given)
        chances = found["logits"].double().softmax(-1)
        expected = -(chances * chances.log2()).sum(-1)
        assert torch.allclose(found["entropy"].double(), expected, atol=1e-4), name
        assert str(program.function(name).outputs["entropy"].meta["type"]) == "f32[B,S]"
    with pytest.raises(VerifyError, match="entropy"):  # as of an artifact that lacks it
        fn = early.step.copy()
        fn.set_outputs({k: v for k, v in fn.outputs.items() if k != "entropy"})
        verify(early.with_function(fn))


def test_above_every_entropy_the_smaller_model_writes() -> None:
    fast, prompt = compiled("eager", 100.0), PROMPTS[2:3]
    found = generate(fast, prompt, return_dict_in_generate=True, **ASKED)
    # The target writes the first token, and two more before the other may.
    assert found.stats.layers == pytest.approx(4 * 2 / (COUNT - 1))
    begun = found.sequences[0, : prompt.shape[1] + 3].tolist()
    rest = found.sequences[0, prompt.shape[1] + 3 :].tolist()
    assert plainly(other(), begun)[: len(rest)] == rest


def test_a_prompt_that_goes_on_from_a_text_says_the_same() -> None:
    fast = compiled("eager", 3.1)
    prompt = torch.tensor([[(7 * i) % 31 + 1 for i in range(24)]])
    generate(fast, prompt, **ASKED)
    longer = torch.cat([prompt, torch.tensor([[3, 9]])], 1)
    again = generate(fast, longer, return_dict_in_generate=True, **ASKED)
    assert again.stats.reused_tokens >= 16
    forget(fast)
    assert torch.equal(generate(fast, longer, **ASKED), again.sequences)
    # One whose rows the smaller model has as far as it wrote: it goes on from there.
    turns = torch.cat([again.sequences, torch.tensor([[3, 9]])], 1)
    found = generate(fast, turns, return_dict_in_generate=True, **ASKED)
    assert found.stats.reused_tokens >= 16
    forget(fast)
    assert torch.equal(generate(fast, turns, **ASKED), found.sequences)


def test_drafts_are_verified_by_the_target_between_turns() -> None:
    fast = compiled("eager", 100.0, "draft_suffix")
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    found = generate(fast, prompt, return_dict_in_generate=True, **ASKED)
    assert found.stats.draft_tokens > 0 and 0 < found.stats.layers < 4


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PassError, match="expected the model 'elsewhere' beside the program"):
        made(DepthEntropy(model="elsewhere"))
    with pytest.raises(PassError, match="makes some of them later"):
        made(DepthEntropy(model="other"), named("evict_cache", budget=64, block=32))
    with pytest.raises(PassError, match="holds rows that texts share apart"):
        made(DepthEntropy(model="other"), named("share_prefix"))
