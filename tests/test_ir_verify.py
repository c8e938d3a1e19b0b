"""The verifier: every error once, with the line, its neighbours, the site and what to do."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.fx
from graphs import programs
from handmade import Shape, cached_llama, llama
from hypothesis import given

from graftwork.ir import (
    Function,
    GraftworkError,
    Program,
    Role,
    Site,
    Sym,
    TensorType,
    VerifyError,
    Weight,
    WeightStore,
    verify,
)
from graftwork.ir import verify as _verify_function
from graftwork.ir.ops.stages import register_lowered, stage_of, why_illegal
from graftwork.ir.plan import DecodePlan, DraftRecord

A, G = torch.ops.aten, torch.ops.graftwork
SHAPE = Shape(layers=1, heads=2, groups=1, dim=4, inner=8, vocab=7)
VERIFY_FILE = Path(__import__("sys").modules[_verify_function.__module__].__file__)


def edited(change: Callable[[Function], Any]) -> Program:
    """A valid cached program with one change of its step."""
    program = cached_llama(SHAPE, joined=False)
    verify(program)
    fn = program.function("step").copy()
    change(fn)
    return program.with_function(fn)


def first(fn: Function, target: Any) -> torch.fx.Node:
    return fn.calls(target)[0]


def set_type(node: torch.fx.Node, text: str) -> None:
    node.meta["type"] = TensorType.parse(text)


@dataclass(frozen=True)
class Drafts(DraftRecord):
    """A plan record that refers to functions, outputs and states."""

    function: str = "step"
    output: str = "logits"
    state: str = "kv.0.key"
    kind: ClassVar[str] = "drafts"


# -- what can be wrong: the change, and a part of the message


def no_step() -> Program:
    program = cached_llama(SHAPE)
    return program.replace(functions={"draft": Function("draft")})


def drafting_step() -> Program:
    program = cached_llama(SHAPE)
    return program.with_function(Function("step", program.step.copy().graph, Role.DRAFT))


def states_too_early() -> Program:
    return cached_llama(SHAPE).replace(stage="canonical")


def wrong_key() -> Program:
    program = cached_llama(SHAPE)
    return program.replace(states={**program.states, "x": program.states["kv.0.key"]})


def plan_of_another_slot() -> Program:
    return cached_llama(SHAPE).replace(plan=DecodePlan(tree=Drafts()))


def plan_reference() -> Program:
    return cached_llama(SHAPE).replace(plan=DecodePlan(draft=Drafts(function="heads")))


def foreign_kind() -> Program:
    def change(fn: Function) -> None:
        with fn.graph.inserting_before(fn.output_node):
            fn.graph.call_method("sum", (fn.outputs["logits"],))

    return edited(change)


def same_name() -> Program:
    def change(fn: Function) -> None:
        first(fn, A.view.default)._rename("free")
        first(fn, A.view.default).name = first(fn, A.add.Tensor).name

    return edited(change)


def tensor_argument() -> Program:
    return edited(lambda fn: first(fn, A.add.Tensor).update_arg(1, torch.ones(8)))


def other_graph() -> Program:
    other = llama(SHAPE).function("step")
    return edited(
        lambda fn: setattr(
            first(fn, A.add.Tensor), "args", (*first(other, A.add.Tensor).args[:1], 1)
        )
    )


def before_definition() -> Program:
    def change(fn: Function) -> None:
        late = fn.outputs["logits"]
        first(fn, A.add.Tensor).update_arg(1, late)

    return edited(change)


def unknown_symbol() -> Program:
    def change(fn: Function) -> None:
        node = first(fn, A.view.default)
        node.args = (node.args[0], [Sym("B"), Sym("N"), 2, 4])

    return edited(change)


def duplicate_input() -> Program:
    return edited(lambda fn: fn.add_input("past", TensorType.parse("i64[B]")))


def state_input_type() -> Program:
    return edited(lambda fn: set_type(fn.input("kv.0.key"), "f32[B,1,C,8]"))


def missing_weight() -> Program:
    program = cached_llama(SHAPE)
    return program.replace(weights=program.weights.only(set(program.weights) - {"head"}))


def weight_type() -> Program:
    program = cached_llama(SHAPE)
    other = {**program.weights, "head": Weight.of("head", torch.ones(7, 9))}
    return program.replace(weights=WeightStore(other))


def illegal_op() -> Program:
    program = llama(SHAPE)
    return program.replace(stage="cached")


def no_type() -> Program:
    return edited(lambda fn: first(fn, A.linear.default).meta.pop("type"))


def no_type_of_input() -> Program:
    return edited(lambda fn: fn.input("tokens").meta.pop("type"))


def unfit_arguments() -> Program:
    return edited(lambda fn: first(fn, A.transpose.int).update_arg(1, 9))


def stale_type() -> Program:
    def change(fn: Function) -> None:
        node = first(fn, A.linear.default)
        node.meta["site"] = Site("model.layers.0.q", 0, "model.py:7")
        set_type(node, "f32[B,T,9]")

    return edited(change)


def output_is_no_dict() -> Program:
    return edited(lambda fn: setattr(fn.output_node, "args", ((fn.outputs["logits"],),)))


def two_outputs() -> Program:
    return edited(lambda fn: fn.graph.output({"logits": fn.outputs["logits"]}))


def state_update_type() -> Program:
    def change(fn: Function) -> None:
        fn.set_outputs({**fn.outputs, "kv.0.key": fn.outputs["logits"]})

    return edited(change)


def missing_input() -> Program:
    fn = Function("step")
    tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    fn.set_outputs({"logits": tokens})
    return cached_llama(SHAPE).with_function(fn)


def input_type() -> Program:
    return edited(lambda fn: set_type(fn.input("positions"), "i32[B,T]"))


def no_logits() -> Program:
    def change(fn: Function) -> None:
        outputs = fn.outputs
        outputs["scores"] = outputs.pop("logits")
        fn.set_outputs(outputs)

    return edited(change)


def logits_shape() -> Program:
    def change(fn: Function) -> None:
        outputs = fn.outputs
        with fn.graph.inserting_before(fn.output_node):
            outputs["logits"] = fn.call(A.unsqueeze.default, outputs["logits"], 0)
        fn.set_outputs(outputs)

    return edited(change)


def argmax_shape() -> Program:
    def change(fn: Function) -> None:
        outputs = fn.outputs
        with fn.graph.inserting_before(fn.output_node):
            outputs["argmax"] = fn.call(A.argmax.default, outputs["logits"], 1)
        fn.set_outputs(outputs)

    return edited(change)


def input_name() -> Program:
    return edited(lambda fn: setattr(fn.input("positions"), "target", "../positions"))


def output_name() -> Program:
    def change(fn: Function) -> None:
        outputs = fn.output_node.args[0]
        assert isinstance(outputs, dict)
        fn.output_node.args = ({**outputs, "None": outputs["logits"]},)

    return edited(change)


ERRORS: dict[Callable[[], Program], str] = {
    no_step: "has no function 'step'",
    drafting_step: "the function's role is draft",
    states_too_early: "stage canonical has no states",
    wrong_key: "registered as 'x' calls itself 'kv.0.key'",
    plan_of_another_slot: "is a draft record, not a tree",
    plan_reference: "refers to the function 'heads'; the program has step",
    input_name: "step: an input cannot be called '../positions'",
    output_name: "an output cannot be called so",
    foreign_kind: "nodes of kind call_method are not part of the IR",
    same_name: "two nodes have one name",
    tensor_argument: "an argument is not part of the IR",
    other_graph: "an argument belongs to another graph",
    before_definition: "a value is used before it is defined",
    unknown_symbol: "no input has the size N",
    duplicate_input: "the input past is a duplicate",
    state_input_type: "the state kv.0.key has another type",
    missing_weight: "there is no weight @head",
    weight_type: "the weight @head has another type",
    illegal_op: "graftwork.attention is not legal at stage cached",
    no_type: "a value has no type",
    no_type_of_input: "expected one tensor here",
    unfit_arguments: "the op does not take these arguments",
    stale_type: "a type is not what inference gives",
    output_is_no_dict: "the output is not a dict from name to value",
    two_outputs: "expected one output, at the end",
    state_update_type: "the update of state kv.0.key has another type",
    missing_input: "expected the inputs positions: i64[B,T], past: i64[B]; got tokens",
    input_type: "the input positions has another type",
    no_logits: "expected an output 'logits'",
    logits_shape: "the output logits does not fit the decode loop",
    argmax_shape: "expected: i64[B,S]",
}
LINES: set[int] = set()


def failing_line(error: BaseException) -> int:
    """The line of verify.py that found the error: the deepest that is not in a shared helper."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        shared = ("fail", "same_type", "wrong_output")
        if Path(code.co_filename) == VERIFY_FILE and code.co_name not in shared:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return lines[-1]


def error_lines() -> list[range]:
    """Every statement of verify.py, outside the shared helpers, that raises or fails."""
    found = []
    for scope in ast.walk(ast.parse(VERIFY_FILE.read_text())):
        shared = ("fail", "same_type", "wrong_output")
        if not isinstance(scope, ast.FunctionDef) or scope.name in shared:
            continue
        for node in ast.walk(scope):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if isinstance(node, ast.Raise) or (called and node.func.attr in shared):
                found.append(range(node.lineno, node.end_lineno + 1))
    return found


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: make.__name__)
def test_error(make: Callable[[], Program]) -> None:
    program = make()
    with pytest.raises(VerifyError) as caught:
        verify(program)
    assert ERRORS[make] in str(caught.value)


def test_every_error_is_tested() -> None:
    lines = set()
    for make in ERRORS:
        with pytest.raises(VerifyError) as caught:
            verify(make())
        lines.add(failing_line(caught.value))
    untested = [span for span in error_lines() if not lines & set(span)]
    assert untested == [], f"no test reaches the errors in lines {untested} of verify.py"


def test_an_error_shows_where_and_what_to_do() -> None:
    with pytest.raises(VerifyError) as caught:
        verify(stale_type())
    lines = str(caught.value).split("\n")
    assert lines[0] == "handmade, step, %linear: a type is not what inference gives"
    marked = [i for i, line in enumerate(lines) if line.startswith("  > ")]
    assert len(marked) == 1 and 0 < marked[0] < len(lines) - 4
    assert lines[marked[0]].startswith("  >   %linear: f32[B,T,9] = aten.linear(")
    assert lines[marked[0] + 1].startswith("      %view: ")
    assert lines[-4:] == [
        "  from   model.layers.0.q layer=0 at model.py:7",
        "  expected: f32[B,T,8]",
        "  got: f32[B,T,9]",
        "  to fix: call Function.retype() after changing arguments",
    ]


def test_retype_repairs_what_the_verifier_found() -> None:
    program = stale_type()
    changed = program.function("step").retype()
    assert [(str(b), str(a)) for _, b, a in changed] == [("f32[B,T,9]", "f32[B,T,8]")]
    verify(program)


def test_a_plan_may_refer_to_what_there_is() -> None:
    verify(cached_llama(SHAPE).replace(plan=DecodePlan(draft=Drafts())))


@given(programs())
def test_valid_programs_pass(program: Program) -> None:
    verify(program)


@given(programs(stage="traced"))
def test_valid_traced_programs_pass(program: Program) -> None:
    verify(program)
    verify(program.replace(stage="canonical"))


def test_stages() -> None:
    with pytest.raises(GraftworkError, match="unknown stage 'raw'; expected one of"):
        stage_of("raw")
    assert why_illegal("traced", G.pick_rows.default) is not None
    assert why_illegal("canonical", G.pick_rows.default) is None
    assert why_illegal("canonical", G.attend.default) is not None
    assert why_illegal("cached", G.attend.default) is None
    assert why_illegal("traced", A.add_.Tensor) is not None
    assert why_illegal("traced", torch.add) is not None


def test_a_backend_declares_its_stage() -> None:
    register_lowered("test_plain")
    assert why_illegal("lowered:test_plain", G.hidden.default) is not None
    assert why_illegal("lowered:test_plain", G.attend.default) is None
    register_lowered("test_picky", lambda target: target is A.add.Tensor)
    assert why_illegal("lowered:test_picky", A.add.Tensor) is None
    reason = why_illegal("lowered:test_picky", A.mul.Tensor)
    assert reason == "lowered:test_picky does not take aten.mul.Tensor"


def test_replace_keeps_programs_immutable() -> None:
    program = llama(SHAPE)
    with pytest.raises(AttributeError):
        program.stage = "cached"  # type: ignore[misc]
    assert replace(program, stage="traced").stage == "traced" and program.stage == "canonical"
