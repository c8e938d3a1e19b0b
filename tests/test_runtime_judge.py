"""Judge decoding: a trained head pardons draft tokens that the target would not have said."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runtime_sampling import assert_distributed
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, Weight
from graftwork.ir.execution.executable import Planned
from graftwork.ir.plan import Chain, Judge, NoDraft
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.verify_judge import VerifyJudge
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.asking.options import read_options
from graftwork.runtime.asking.text import Text
from graftwork.runtime.feeding.draft import Draft
from graftwork.runtime.speculate.sampling import StepToVerify
from graftwork.runtime.speculate.verifiers.base import GREEDY, SAMPLING, VERIFIERS
from graftwork.training import fit

PROMPTS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
TREE = named("tree_static", paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))


def judging(threshold: float, **options: Any) -> Program:
    """A tiny model with draft heads and a judge."""
    judge = VerifyJudge(threshold=threshold, **options)
    start = tiny_llama(vocab=16)
    passes = (
        DraftMedusa(heads=3),
        judge,
        InsertKvCache(),
        AcceptTrees(),
        PickLogits(),
        AddArgmax(),
    )
    return run_passes(start, [Step(p) for p in (*passes, TREE)])[0]


def decode(executable: Any, **options: Any) -> Any:
    options = {"max_new_tokens": 24, "eos_token_id": [], **options}
    return generate(executable, PROMPTS, return_dict_in_generate=True, **options)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_thresholds_decide_between_the_exact_text_and_the_drafters(backend: str) -> None:
    executable = compile(judging(0.5), Target.parse(backend))
    plan = executable.program.plan
    plain = decode(Planned(executable, replace(plan, draft=NoDraft(), tree=Chain()))).sequences
    # Untrained the head says even odds: more than nothing, and not more than a half.
    for threshold, exact in ((1.0, True), (0.5, True), (0.4, False)):
        verify = replace(plan.verify, threshold=threshold)
        result = decode(Planned(executable, replace(plan, verify=verify)))
        assert torch.equal(result.sequences, plain) == exact
        if not exact:
            assert result.stats.accepted_per_step > 3
            # What an option forbids, the judge cannot let pass.
            never = result.sequences[:, 6:12].flatten().tolist()
            for sampled in (False, True):
                options = {"suppress_tokens": never, "do_sample": sampled}
                other = decode(Planned(executable, replace(plan, verify=verify)), **options)
                assert not set(never) & set(other.sequences[:, 4:].flatten().tolist())
                assert other.stats.accepted_per_step > 1


def verdicts(
    trait: str, draft: Draft, marks: list[float], rows: torch.Tensor, many: int = 1
) -> Any:
    """Verdicts of a judge that reads the first value of each token's state, 4 at most."""
    program = judging(0.5)
    weight = torch.zeros(1, 32)
    weight[0, 0] = 1
    program = program.replace(weights=program.weights.replacing(Weight.of("judge.weight", weight)))
    asked = read_options({"do_sample": trait == SAMPLING, "top_k": 0, "seed": 0}, program.info)
    verifier = VERIFIERS.find(program.plan.verify, trait)(program.plan.verify, program, asked, many)
    hidden = torch.zeros(many, len(rows), 32)
    hidden[:, :, 0] = torch.tensor(marks)
    outputs = {"logits": rows[None].expand(many, -1, -1), "hidden.normed": hidden}
    outputs["argmax"] = outputs["logits"].argmax(-1)
    return verifier.verify(
        StepToVerify(outputs, [Text([0], 1, 9) for _ in range(many)], [draft] * many)
    )


ROWS = torch.full((4, 16), -9.0)
ROWS[torch.arange(4), torch.arange(4)] = 0.0
"""The target says 0, then 1, 2, 3, whatever it reads."""


@pytest.mark.parametrize(
    ("tokens", "marks", "path"),
    [
        ([5, 6, 7], [0, 4, 4, 4], [0, 1, 2]),
        ([5, 6, 7], [4, 4, -4, 4], [0]),  # the root's state says nothing of a draft token
        ([0, 1, 2], [0, -4, -4, -4], [0, 1, 2]),  # what the target says needs no pardon
        ([0, 6, 2], [0, -4, -4, -4], [0]),
        ([0, 6, 2], [0, -4, 4, -4], [0, 1, 2]),
    ],
)
def test_a_rejected_token_stays_if_the_judge_lets_it(tokens, marks, path) -> None:
    (verdict,) = verdicts(GREEDY, Draft(tokens), marks, ROWS)
    assert list(verdict.path) == path
    assert verdict.tokens == [*(tokens[n] for n in path), int(ROWS[len(path)].argmax())]


def test_of_siblings_the_right_one_counts_then_the_first_that_passes() -> None:
    tree = (-1, -1, -1)
    (right,) = verdicts(GREEDY, Draft([5, 6, 0], None, tree), [0, 4, 4, -4], ROWS)
    (passes,) = verdicts(GREEDY, Draft([5, 6, 7], None, tree), [0, -4, 4, 4], ROWS)
    assert (right.path, passes.path) == ([2], [1])


def test_sampling_keeps_what_passes_and_else_the_targets_distribution() -> None:
    rows = torch.zeros(2, 16)
    rows[0] = torch.randn(16, generator=torch.Generator().manual_seed(0))
    kept = verdicts(SAMPLING, Draft([5]), [0, 4], rows, 50)
    assert all(verdict.tokens[0] == 5 for verdict in kept)
    drawn = Counter((v.tokens[0],) for v in verdicts(SAMPLING, Draft([5]), [0, -4], rows, 3000))
    shares = rows[0].softmax(-1).tolist()
    assert_distributed(drawn, {(t,): share for t, share in enumerate(shares)})


def test_it_learns_to_tell_text_from_what_might_have_been(tmp_path: Path) -> None:
    # The text has a quarter of the vocabulary, and what the model might say instead all of it.
    text = [[(i * i + j) % 4 for i in range(90)] for j in range(12)]
    model = Model(judging(0.5), Target("eager", "cpu"), {"name": "test"})
    options = {"steps": 100, "batch": 4, "window": 32, "own": 0.0, "rate": 3e-2}
    fitted = fit(model, text, out=tmp_path, **options)
    # Three heads, then the judge. Chance is a half.
    assert fitted.hits[-1] > 0.65
    assert fitted.model.program.plan.verify == Judge(trained=True)
    loaded = judging(0.5, weights=str(tmp_path))
    for name in ("judge.weight", "judge.bias"):
        assert torch.equal(loaded.weights[name].load(), fitted.model.program.weights[name].load())
    assert loaded.plan.verify == Judge(trained=True)


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"judge: .* is not a valid threshold"):
        Judge(threshold=1.5)
    with pytest.raises(PassError, match="never asked: nothing drafts"):
        run_passes(tiny_llama(), [Step(VerifyJudge())])
    twice = with_plan(tiny_llama(), verify=Judge())
    with pytest.raises(PassError, match="the plan has a verifier already"):
        VerifyJudge().run(twice)
