"""A step in segments: the same tokens as in one piece, and no trace of the whole step."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import on_backends, one_in
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.artifact.saved import load, save
from graftwork.backends import compile
from graftwork.backends.onnxruntime.executable import OnnxExecutable
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, VerifyError, parse_program, program_text, verify
from graftwork.ir.check.legality import unmet
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan import Segments
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.ir.support.errors import InputError
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_eagle3 import DraftEagle3
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.fuse_draft import FuseDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.fusing.fuse_qkv import FuseQkv
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.feeding.calls import run_in_turn
from graftwork.runtime.scoring import score

CUT = CutDepth(exits=(1, 3))
STOP = "session.force_spinning_stop"
ASKED = {"max_new_tokens": 16, "eos_token_id": []}
TREES = (AcceptTrees(), AddTopTokens(), named("draft_recycling", successors=4))
WITH: dict[str, tuple[Pass, ...]] = {
    "nothing": (),
    "copies": (named("draft_suffix", shortest=1),),
    "trees": TREES,
    "heads": (DraftMedusa(heads=2, candidates=4),),
    "eagle": (DraftEagle(levels=2), AcceptTrees(), named("tree_chain", depth=2)),
    "int8": (in_int8(),),
    "int8 copies": (in_int8(), named("draft_suffix", shortest=1)),
}


def made(*passes: Pass, **shape: int) -> Program:
    """A program of four layers that backends compile."""
    every = (*passes, FuseQkv(), InsertKvCache(), PickLogits(), FuseResidualNorm(), AddArgmax())
    return run_passes(tiny_llama(4, **shape), [Step(p) for p in every])[0]


@cache
def compiled(backend: str, which: str, cut: bool) -> Executable:
    return compile(made(*WITH[which], *[CUT] * cut), Target(backend, "cpu"))


@pytest.mark.parametrize(("which", "backend"), one_in(3, product(WITH, ["eager", "onnxruntime"])))
def test_the_text_is_that_of_the_whole_step(which: str, backend: str) -> None:
    whole, cut = compiled(backend, which, False), compiled(backend, which, True)
    for rows in (slice(0, 4), slice(2, 3)):
        ids, mask = PROMPTS[rows], MASK[rows]
        expected = generate(whole, ids, attention_mask=mask, **ASKED)
        assert torch.equal(generate(cut, ids, attention_mask=mask, **ASKED), expected)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_what_is_added_to_a_step_that_is_cut_already_its_head_returns_too(backend: str) -> None:
    passes = (InsertKvCache(), PickLogits(), CUT, *TREES, AddArgmax())
    program = run_passes(tiny_llama(4), [Step(p) for p in passes])[0]
    names = [record.name for record in program.provenance]
    assert names.index("cut_depth") < names.index("add_top_tokens")
    found = generate(compile(program, Target(backend, "cpu")), PROMPTS[2:3], **ASKED)
    assert torch.equal(found, generate(compiled(backend, "nothing", False), PROMPTS[2:3], **ASKED))


def test_sessions_that_run_in_turn_do_not_wait_for_work() -> None:
    """Several thread pools that spin take each other's cores."""
    for cut in (False, True):
        executable = compiled("onnxruntime", "nothing", cut)
        generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
        assert isinstance(executable, OnnxExecutable)
        steps = [step for made in executable._made.values() for step in made.values()]
        assert len(steps) >= 1 + 3 * cut
        for step in steps:
            options = step.session.get_session_options()
            if cut:
                assert options.get_session_config_entry(STOP) == "1"
            else:
                with pytest.raises(RuntimeError, match=STOP):
                    options.get_session_config_entry(STOP)


@pytest.mark.long
def test_compiled_steps_are_cut_too() -> None:
    program = run_passes(
        tiny_llama(2),
        [Step(p) for p in (InsertKvCache(), PickLogits(), CutDepth(exits=(1,)), AddArgmax())],
    )[0]
    said = []
    for backend in ("eager", "torch"):
        executable = compile(program, Target(backend, "cpu"))
        executable.begin(1, 8)
        tokens = [5]
        for past in range(6):
            given = chain_inputs(torch.tensor([tokens[-1:]]), past)
            outputs = run_in_turn(executable, program.plan.step.parts, given, ("argmax",))
            tokens.append(int(outputs["argmax"]))
        said.append(tokens)
    assert said[0] == said[1] and len(set(said[0])) > 2


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_prompts_longer_than_a_piece(backend: str) -> None:
    ids = torch.randint(1, 32, (2, 700), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :150] = 0
    texts = [
        generate(
            compile(made(*cut, context=1024), Target(backend, "cpu")),
            ids,
            attention_mask=mask,
            **ASKED,
        )
        for cut in ((), (CUT,))
    ]
    assert torch.equal(*texts)


def test_sampled_texts_are_the_same() -> None:
    asked: dict[str, Any] = {**ASKED, "do_sample": True, "seed": 3}
    for which in ("nothing", "copies"):
        whole, cut = compiled("eager", which, False), compiled("eager", which, True)
        assert torch.equal(generate(cut, PROMPTS, **asked), generate(whole, PROMPTS, **asked))


def test_logits_of_texts_are_those_of_the_whole_step() -> None:
    for backend in ("eager", "onnxruntime"):
        whole, cut = compiled(backend, "nothing", False), compiled(backend, "nothing", True)
        torch.testing.assert_close(score(cut, PROMPTS), score(whole, PROMPTS))


def test_nothing_runs_or_holds_the_whole_step() -> None:
    executables = []
    for cut in (False, True):
        executable = compile(made(*WITH["copies"], *[CUT] * cut), Target("onnxruntime", "cpu"))
        generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
        score(executable, PROMPTS)
        assert isinstance(executable, OnnxExecutable)
        executables.append(executable)
    whole, cut = executables
    opened = {name for name, variants in cut._made.items() if variants}
    assert opened == {"step.0", "step.1", "step.2", "step.head"}
    assert cut.memory().weights <= 1.1 * whole.memory().weights
    of_parts = [cut.program.function(name).weights for name in sorted(opened)]
    shared = {"cos", "sin"}
    assert sum(len(names - shared) for names in of_parts) == len(set().union(*of_parts) - shared)


def test_an_artifact_and_its_text_keep_the_cut(tmp_path: Path) -> None:
    program = made(CUT)
    text = program_text(program)
    assert program_text(parse_program(text, program.weights)) == text
    step = Segments(("step.0", "step.1", "step.2"), exits=(1, 3), layers=4)
    assert program.plan.step == step
    save(program, tmp_path / "out", target=Target(), recipe={})
    loaded = load(tmp_path / "out").program
    assert loaded.plan == program.plan
    found = generate(compile(loaded, Target("eager", "cpu")), PROMPTS[2:3], **ASKED)
    assert torch.equal(found, generate(compiled("eager", "nothing", False), PROMPTS[2:3], **ASKED))


def test_a_plan_of_segments_that_do_not_fit_is_refused() -> None:
    program = made(CUT)
    text = program_text(program)
    for old, new, error in [
        ('head="step.head"', 'head="step.tail"', "refers to the head"),
        ('head="step.head"', 'head="step.0"', "reads 'logits', which step.0 does not return"),
        ('functions=("step.0", "step.1", "step.2")', 'functions=("step.0",)', "rising exits"),
        ("exits=(1, 3)", "exits=(3, 1)", "rising exits"),
        ('state="stream"', 'state="kv.0.key"', "reads kv.0.key of step.0 as"),
        ('functions=("step.0"', 'functions=("step.1"', "different functions"),
    ]:
        assert old in text
        with pytest.raises((VerifyError, InputError), match=error):
            verify(parse_program(text.replace(old, new), program.weights))


def test_what_a_drafter_reads_and_no_segment_returns_is_missed() -> None:
    passes = (InsertKvCache(), PickLogits(), *TREES, CUT, AddArgmax())
    program = run_passes(tiny_llama(4), [Step(p) for p in passes])[0]
    assert unmet(program) is None
    head = program.function("step.head").copy()
    head.set_outputs({n: node for n, node in head.outputs.items() if n != "top_tokens"})
    fault = unmet(program.with_function(head))
    assert fault is not None and fault[1] == "top_tokens"
    assert "which step.0, step.1, step.2, step.head do not return" in fault[0]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PassError, match=r"joined of step.2 also need the state .* before the cut"):
        made(CUT, DraftEagle3(layers=(1, 3, 4)))
    with pytest.raises(PassError, match="whose step is one function"):
        made(CUT, DraftEagle(), UnrollDraft(levels=2), FuseDraft())
    for exits in ((4,), (7,)):
        with pytest.raises(PassError, match=f"no exit after {exits[0]} layers; expected one of"):
            made(CutDepth(exits=exits))


@pytest.mark.parametrize(("recipe", "backend"), on_backends(["int8", "baseline"], ["int8"]))
def test_a_cut_changes_no_bit(recipe: str, backend: str) -> None:
    """Rounded activations would make a step of the smallest difference."""
    found = []
    for cuts in ((), (CutDepth(exits=(1, 3)),), (CutDepth(every=1, sublayers=True),)):
        steps = [*Recipe.load(recipe).steps, *(Step(cut) for cut in cuts)]
        program = run_passes(tiny_llama(4), steps)[0]
        executable = compile(program, Target(backend, "cpu", threads=1))
        executable.begin(1, 32)
        given = chain_inputs(torch.arange(3, 15)[None], 0)
        for part in program.plan.step.parts or ("step",):
            fn = program.function(part)
            fed = {name: value for name, value in given.items() if fn.has_input(name)}
            fetch = ("logits",) if "logits" in fn.outputs else ()
            made = executable.run(part, fed, fetch)
        found.append(made["logits"].clone())
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])
