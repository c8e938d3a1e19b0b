"""Prompt tokens that ride along with the step: invisible to the text, and of use once trained."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_training import TEXT
from tiny import MASK, PROMPTS, drafting_llama, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, UnsupportedError
from graftwork.ir.execution.executable import Executable
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_merged import DraftMerged
from graftwork.passes.drafting.ppd import PromptProposer
from graftwork.passes.drafting.ppd.graph import WEIGHT, DraftPpd
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime.feeding.draft import Draft
from graftwork.runtime.generation import generate
from graftwork.runtime.speculate.drafters import grown
from graftwork.runtime.speculate.drafters.combining import merged
from graftwork.training import fit
from graftwork.training.fit import accepted_per_step

TREES = {
    "chain": named("tree_chain", depth=3),
    "static": named(
        "tree_static", paths=((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1))
    ),
    "best_first": named("tree_best_first", nodes=9, depth=3, width=3),
}
PPD = DraftPpd(after=4, candidates=4)
ASKED = {"max_new_tokens": 20, "eos_token_id": []}


@cache
def compiled(backend: str, *passes: Pass) -> Executable:
    return compile(drafting_llama(*passes), Target(backend, "cpu"))


def decoded(executable: Executable, **more: Any) -> Any:
    return generate(
        executable, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **{**ASKED, **more}
    )


@pytest.mark.parametrize(
    ("backend", "tree"), [("eager", t) for t in TREES] + [("onnxruntime", "best_first")]
)
def test_text_is_the_targets_own(backend: str, tree: str) -> None:
    plain, fast = compiled(backend), compiled(backend, PPD, TREES[tree])
    expected = decoded(plain).sequences
    found = decoded(fast)
    assert torch.equal(found.sequences, expected)
    assert found.stats.draft_tokens > found.stats.sequence_steps  # it did draft
    assert torch.equal(generate(fast, PROMPTS[2:3], **ASKED), expected[2:3])


def test_beside_another_drafter_and_to_the_end_of_the_context() -> None:
    for more in ((), (DraftMerged(),)):
        fast = compiled("eager", named("draft_suffix", tokens=2), PPD, TREES["static"], *more)
        found = decoded(fast, max_new_tokens=123)
        assert torch.equal(
            found.sequences, decoded(compiled("eager"), max_new_tokens=123).sequences
        )
        assert found.stats.accepted_tokens


@pytest.mark.parametrize("bits", [8, 4])
def test_prompts_beside_weights_of_few_bits_leave_the_text_as_it_is(bits: int) -> None:
    """The table that tokens are looked up in is stored in few bits, as it is without prompts."""
    few = QuantizeWeights(bits=bits, group=32, embedding=True)
    programs = (drafting_llama(few), drafting_llama(few, PPD, TREES["best_first"]))
    plain, fast = (compile(program, Target("eager", "cpu")) for program in programs)
    step = fast.program.function("step")
    assert len(step.calls(torch.ops.graftwork.quantized_embedding.default)) == 1
    assert torch.equal(decoded(fast).sequences, decoded(plain).sequences)


def test_sampling_repeats_with_its_seed() -> None:
    """Riders are no tokens that could be sampled, and cost no random numbers."""
    fast = compiled("eager", PPD, named("tree_sampled", widths=(2, 1)))
    runs = [decoded(fast, do_sample=True, top_k=4, seed=3) for _ in range(2)]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert runs[0].sequences.max() < 32 and runs[0].stats.draft_tokens


class Noting(PromptProposer):
    """Notes the text and the candidates for what follows it."""

    notes: ClassVar[list[tuple[list[int], Any]]] = []

    def begin(self, prompts: Any) -> None:
        super().begin(prompts)
        self.texts = [list(prompt) for prompt in prompts]

    def observe(self, taken: Any) -> None:
        super().observe(taken)
        for index, tokens in enumerate(taken.tokens):
            self.texts[index] += tokens
            if tokens and self.tokens[index, 0, 0] >= 0:
                self.notes.append((list(self.texts[index]), self.tokens[index].copy()))


def test_what_is_said_after_riders_is_what_whole_sequences_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows, positions and masks: candidates are those of [text; prompt tokens] fed as one chain."""
    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: Noting)
    executable = compiled("eager", PPD, TREES["static"])
    decoded(executable)
    assert len(Noting.notes) > 20
    for text, candidates in Noting.notes[::5]:
        # The last token was said by the node before it: prompt tokens take its place.
        fed = torch.tensor([[*text[:-1], 32, 33, 34]])
        executable.begin(1, fed.shape[1])
        steps = torch.arange(fed.shape[1])[None]
        inputs = {"tokens": fed, "positions": steps, "past": torch.zeros(1, dtype=torch.int64)}
        outputs = executable.run("step", {**inputs, "select": steps}, ("draft_tokens",))
        assert outputs["draft_tokens"][0, -3:].tolist() == candidates.tolist()


def test_riders_follow_their_nodes() -> None:
    draft = Draft([5, 6, 7], None, (-1, -1, 0)).riding((9, 10, 9, 10), (2, 3, -1, 5))
    assert draft.fed == [5, 6, 7, 9, 10, 9, 10] and draft.shape.depths == (1, 1, 2, 3, 4, 1, 2)
    for less in (draft.cut(2), draft.within(1)):
        assert (less.tokens, less.riders, less.follows) == ([5, 6], (9, 10), (-1, 2))
    assert draft.fitting(7) is draft and draft.fitting(6).fed == [5, 6, 7]
    assert draft.children() == {-1: [0, 1], 0: [2]}
    union = merged([Draft([6, 8]), draft], None)
    assert (union.tokens, union.riders) == ([6, 8, 5, 7], (9, 10, 9, 10))
    assert union.follows == (3, 4, -1, 6)


@pytest.mark.long
def test_trained_prompts_are_accepted_and_the_target_stays(tmp_path: Path) -> None:
    # A random model's distributions are next to even: its text says more.
    ppd = DraftPpd(**{**dict(PPD), "aim": "text"})
    model = Model(drafting_llama(ppd, TREES["chain"]), Target("eager", "cpu"), {"name": "test"})
    options = {"batch": 4, "window": 32, "own": 1.0, "rate": 0.1, "seed": 1}
    fitted = fit(model, TEXT, out=tmp_path, steps=100, **options)
    # What is held out of so little text says little. Untrained it is 1.4.
    assert accepted_per_step(fitted.model, TEXT) > 0.1 + accepted_per_step(model, TEXT)
    before, after = model.program.weights, fitted.model.program.weights
    changed = {n for n in before if not torch.equal(before[n].load(), after[n].load())}
    assert changed == {WEIGHT} and fitted.model.program.plan.draft.trained
    again = drafting_llama(DraftPpd(after=4, candidates=4, weights=str(tmp_path)), TREES["chain"])
    assert torch.equal(again.weights[WEIGHT].load(), after[WEIGHT].load())


def test_steps_that_take_no_riders_are_refused(tmp_path: Path) -> None:
    steps = [Step(PPD), Step(InsertKvCache()), Step(PickLogits()), Step(AddArgmax())]
    with pytest.raises(PassError, match=r"takes ancestors; add accept_trees"):
        run_passes(tiny_llama(), steps)
    program = run_passes(tiny_llama(), steps, after="add_argmax")[0]
    executable = compile(program, Target("eager", "cpu"))
    with pytest.raises(UnsupportedError, match=r"draft=prompts.*that takes ancestors"):
        generate(executable, PROMPTS[2:3], **ASKED)
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    with pytest.raises(UnsupportedError, match=r"draft=prompts.*that takes ancestors"):
        fit(model, TEXT, out=tmp_path, steps=1, batch=1, window=24, own=0.0)
