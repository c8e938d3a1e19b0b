"""What a step runs: the plan's slot `step`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import PROMPTS, cached_llama, drafting_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import Program, VerifyError, parse_program, program_text, verify
from graftwork.ir.plan import Fused, Whole
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.fuse_draft import FuseDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.runtime.generation import generate


def with_step(program: Program, step: Whole | Fused) -> Program:
    return program.replace(plan=replace(program.plan, step=step))


def test_the_plan_says_which_function_is_the_step() -> None:
    """Nothing depends on its name."""
    program = cached_llama(trees=True)
    fn = program.step.copy()
    fn.name = "whole.model"
    renamed = with_step(program, Whole("whole.model")).replace(functions={fn.name: fn})
    verify(renamed)
    text = program_text(renamed)
    assert 'step = whole(function="whole.model")' in text
    assert program_text(parse_program(text, renamed.weights)) == text
    for backend in ("eager", "onnxruntime"):
        made = [
            generate(compile(p, Target.parse(backend)), PROMPTS[2:3]) for p in (program, renamed)
        ]
        assert made[0].equal(made[1])


def test_a_plan_that_names_no_function_is_refused() -> None:
    with pytest.raises(VerifyError, match="no function 'other', which the plan's step names"):
        verify(with_step(cached_llama(), Whole("other")))


def test_a_fused_draft_needs_a_step_that_makes_it() -> None:
    program = drafting_llama(DraftEagle())
    steps = [Step(UnrollDraft(levels=3)), Step(FuseDraft())]
    program, _ = run_passes(program, steps)
    assert program.plan.step == Fused("step.drafting", "step", 2)
    assert program.plan.step.fed(argmax=True) == ("step.drafting", 2)
    assert program.plan.step.fed(argmax=False) == ("step", 0)
    for step in (Whole(), Fused("step.drafting", "step", 1)):
        with pytest.raises(VerifyError, match="is made by the step"):
            verify(with_step(program, step))
