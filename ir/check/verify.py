"""The verifier: checks a program against the rules of the IR and of its stage.

Every type is inferred again and every argument looked up. Errors quote the printed line with its
neighbours, the site, expected and got, and a remedy.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.fx

from ..function import Function, Role, site_of
from ..inference.infer import inferred
from ..ops.stages import stage_of, why_illegal
from ..plan.inputs import INPUTS, REQUIRED
from ..program import Program
from ..support.errors import GraftworkError, InputError, VerifyError
from ..support.names import check_name, check_program_name, is_name, shown
from ..text.printer import function_lines, site_text
from ..types import Sym, TensorType, leaves, type_text
from .verify_plan import verify_plan

_PLAIN = (Sym, bool, int, float, str, type(None), torch.dtype, torch.device)
_LAYOUT = (torch.memory_format, torch.layout)


def verify(program: Program) -> None:
    """Check a program. Errors: `VerifyError` about the first violation."""
    stage = stage_of(program.stage)
    if (plain := program.plan.step.plain) not in program.functions:
        raise VerifyError(
            f"program {program.name!r} has no function {plain!r}, which the plan's step names"
        )
    if (role := program.step.role) is not Role.TARGET:
        raise VerifyError(
            f"{plain}: the plan's step is the target's, and the function's role is {role.value}"
        )
    if program.states and not stage.states:
        raise VerifyError(
            f"stage {stage.name} has no states, but the program declares {list(program.states)}; "
            "a pass that adds states must set the stage to 'cached'"
        )
    for table in (program.functions, program.states, program.weights):
        _check_keys(table)
    _check_names(program)
    for function in program.functions.values():
        _Checker(program, function).check()
    verify_plan(program)


def _check_keys(table: Any) -> None:
    for key, value in table.items():
        if value.name != key:
            raise VerifyError(f"what is registered as {key!r} calls itself {value.name!r}")


def _check_names(program: Program) -> None:
    """Names are checked again, because graphs and functions can be edited."""
    try:
        check_program_name(program.name)
        for fn in program.functions.values():
            check_name("a function", fn.name)
            for node in fn.inputs:
                check_name(f"{fn.name}: an input", node.target)
    except InputError as error:
        raise VerifyError(str(error)) from error


class _Checker:
    def __init__(self, program: Program, function: Function) -> None:
        self.program, self.function = program, function
        self.seen: set[torch.fx.Node] = set()
        self.names: set[str] = set()
        self.symbols: set[str] = set()

    def check(self) -> None:
        """All checks of one function."""
        for node in self.function.graph.nodes:
            self.check_arguments(node)
            checks = {
                "placeholder": self.check_input,
                "get_attr": self.check_weight,
                "call_function": self.check_call,
                "output": self.check_output,
            }
            if node.op not in checks:
                self.fail(
                    node,
                    f"nodes of kind {node.op} are not part of the IR",
                    expected="inputs, weights, calls of ops and one output",
                    got=f"{node.op} {node.target}",
                    fix="trace the call down to core ATen ops",
                )
            checks[node.op](node)
            self.seen.add(node)
            if node.name in self.names:
                self.fail(
                    node,
                    "two nodes have one name",
                    expected="a unique name",
                    got=node.name,
                    fix="let the graph choose names; do not assign node.name",
                )
            self.names.add(node.name)
        self.check_end()
        if self.function.role is Role.TARGET:
            self.check_results()

    # -- nodes

    def check_arguments(self, node: torch.fx.Node) -> None:
        for arg in leaves((node.args, dict(node.kwargs))):
            if isinstance(arg, torch.fx.Node):
                self.check_use(node, arg)
            elif isinstance(arg, Sym):
                self.check_symbols(node, arg.symbols)
            elif not isinstance(arg, (*_PLAIN, *_LAYOUT)):
                self.fail(
                    node,
                    "an argument is not part of the IR",
                    expected="values, numbers, sizes (Sym), strings, dtypes",
                    got=f"{arg!r} ({type(arg).__name__})",
                    fix="make tensors weights, and sizes Sym",
                )

    def check_use(self, node: torch.fx.Node, arg: torch.fx.Node) -> None:
        if arg.graph is not self.function.graph:
            self.fail(
                node,
                "an argument belongs to another graph",
                expected=f"a node of {self.function.name}",
                got=f"%{arg.name}",
                fix="look nodes up in the copy that you edit, not in the original",
            )
        if arg not in self.seen:
            self.fail(
                node,
                "a value is used before it is defined",
                expected=f"%{arg.name} above this line",
                got="its definition below, or erased",
                fix="choose the insertion point with graph.inserting_before(first user)",
            )

    def check_symbols(self, node: torch.fx.Node, used: Any) -> None:
        if unknown := set(used) - self.symbols:
            self.fail(
                node,
                f"no input has the size {', '.join(sorted(unknown))}",
                expected=f"sizes over {', '.join(sorted(self.symbols)) or 'nothing'}",
                got=", ".join(sorted(unknown)),
                fix="use a size that an input or state has, or add the input",
            )

    def check_input(self, node: torch.fx.Node) -> None:
        given = self.tensor_type(node)
        earlier = [n for n in self.seen if n.op == "placeholder" and n.target == node.target]
        if earlier or any(n.op != "placeholder" for n in self.seen):
            self.fail(
                node,
                f"the input {node.target} is a duplicate or comes after other nodes",
                expected="inputs first, each name once",
                got=str(node.target),
                fix="use Function.add_input, and Function.has_input before it",
            )
        state = self.program.states.get(str(node.target))
        if state is not None:
            self.same_type(node, f"the state {state.name}", state.type, given)
        fed = INPUTS.get(str(node.target))
        if self.function.role is Role.TARGET and fed is not None and fed.form:
            # Before the less clear errors of ops that read it.
            count = given.dims[-1] if given.dims else 1
            own = {"K": count} if isinstance(count, int) else {}
            self.same_type(node, f"the input {node.target}", fed.type.bind(own), given)
        plain = [d.symbols for d in given.dims if isinstance(d, Sym) and d.plain]
        self.symbols |= set().union(*plain)

    def check_weight(self, node: torch.fx.Node) -> None:
        name = str(node.target)
        if name not in self.program.weights:
            self.fail(
                node,
                f"there is no weight @{name}",
                expected="a weight of the program's store",
                got=name,
                fix="hand new weights on: program.with_function(fn, weights=...)",
            )
        expected = self.program.weights[name].type
        self.same_type(node, f"the weight @{name}", expected, self.tensor_type(node))

    def check_call(self, node: torch.fx.Node) -> None:
        reason = why_illegal(self.program.stage, node.target)
        if reason is not None:
            self.fail(
                node,
                f"an op is not legal at stage {self.program.stage}",
                expected="an op of the stage's table (ir/ops/stages.py)",
                got=reason,
                fix="decompose or raise the op before the program enters this stage",
            )
        if "type" not in node.meta:
            self.fail(
                node,
                "a value has no type",
                expected="a type from inference",
                got="none",
                fix="build nodes with Function.call",
            )
        self.check_inferred(node)

    def check_inferred(self, node: torch.fx.Node) -> None:
        try:
            found = inferred(node)
        except GraftworkError as error:
            self.fail(
                node,
                "the op does not take these arguments",
                expected="arguments that its type rule accepts",
                got=str(error),
                fix="check dtypes and sizes of the arguments",
            )
        if found != node.meta["type"]:
            self.fail(
                node,
                "a type is not what inference gives",
                expected=type_text(found),
                got=type_text(node.meta["type"]),
                fix="call Function.retype() after changing arguments",
            )
        types = [t for t in leaves(found) if isinstance(t, TensorType)]
        symbols = [d.symbols for t in types for d in t.dims if isinstance(d, Sym)]
        self.check_symbols(node, set().union(*symbols, set()))

    def check_output(self, node: torch.fx.Node) -> None:
        outputs = node.args[0] if node.args else None
        plain = isinstance(outputs, dict) and all(
            isinstance(k, str) and isinstance(v, torch.fx.Node) for k, v in outputs.items()
        )
        if not plain:
            self.fail(
                node,
                "the output is not a dict from name to value",
                expected="{name: node}",
                got=repr(outputs),
                fix="use Function.set_outputs",
            )
        assert isinstance(outputs, dict)
        for name, value in outputs.items():
            if not is_name(name):
                self.fail(
                    node,
                    "an output cannot be called so",
                    expected="a name such as logits or kv.0.key (see ir/support/names.py)",
                    got=shown(name),
                    fix="use Function.set_outputs",
                )
            given = self.tensor_type(value)
            state = self.program.states.get(name)
            if state is not None:
                self.same_type(value, f"the update of state {name}", state.type, given)

    # -- the function as a whole

    def check_end(self) -> None:
        nodes = list(self.function.graph.nodes)
        count = sum(node.op == "output" for node in nodes)
        if count != 1 or nodes[-1].op != "output":
            raise VerifyError(
                f"{self.function.name}: expected one output, at the end; got {count} outputs"
                + (f" and %{nodes[-1].name} last" if nodes else "")
                + "\n  to fix: use Function.set_outputs after building"
            )

    def check_results(self) -> None:
        """Inputs and outputs that the decode loop relies on (see `executable.Executable`)."""
        name, outputs = self.function.name, self.function.outputs
        given = {str(node.target): node for node in self.function.inputs}
        if name in self.program.plan.step.variants:
            required = [*REQUIRED, *["past"] * bool(self.program.states)]
            if missing := [wanted for wanted in required if wanted not in given]:
                listing = ", ".join(f"{wanted}: {INPUTS[wanted].form}" for wanted in missing)
                raise VerifyError(f"{name}: expected the inputs {listing}; got {', '.join(given)}")
            if "logits" not in outputs:
                raise VerifyError(f"{name}: expected an output 'logits'; got {', '.join(outputs)}")
        rows = Sym("S") if "select" in given else Sym("T")
        wanted = {"logits": f"a floating [B,{rows},vocabulary]", "argmax": f"i64[B,{rows}]"}
        for output in (name for name in wanted if name in outputs):
            got = self.tensor_type(outputs[output])
            floating, size = (True, 3) if output == "logits" else (False, 2)
            typed = got.dtype.is_floating_point if floating else got.dtype == torch.int64
            if not typed or len(got.dims) != size or got.dims[:2] != (Sym("B"), rows):
                self.fail(
                    outputs[output],
                    f"the output {output} does not fit the decode loop",
                    expected=wanted[output],
                    got=str(got),
                    fix="with the input select, rows are selected tokens, else all tokens",
                )

    # -- helpers

    def tensor_type(self, node: torch.fx.Node) -> TensorType:
        given = node.meta.get("type")
        if not isinstance(given, TensorType):
            self.fail(
                node,
                "expected one tensor here",
                expected="a tensor type",
                got="no type" if given is None else type_text(given),
                fix="take one result with Function.item",
            )
        assert isinstance(given, TensorType)
        return given

    def same_type(
        self, node: torch.fx.Node, what: str, expected: TensorType, got: TensorType
    ) -> None:
        if expected != got:
            self.fail(
                node,
                f"{what} has another type",
                expected=str(expected),
                got=str(got),
                fix="cast or reshape explicitly, or change the declaration as well",
            )

    def fail(
        self, node: torch.fx.Node, what: str, *, expected: str, got: str, fix: str
    ) -> NoReturn:
        """Raise the error about a node."""
        place = [f"  from{site_text(site_of(node)).replace('#', '')}"] if site_of(node) else []
        raise VerifyError(
            "\n".join(
                [
                    f"{self.program.name}, {self.function.name}, %{node.name}: {what}",
                    *quote(self.function, node),
                    *place,
                    f"  expected: {expected}",
                    f"  got: {got}",
                    f"  to fix: {fix}",
                ]
            )
        )


def quote(function: Function, node: torch.fx.Node) -> list[str]:
    """The printed line of a node, or of a user for inputs and weights, marked, with neighbours."""
    lines = function_lines(function, strict=False)
    shown = {line.node: i for i, line in enumerate(lines) if line.node is not None}
    nodes = [node, *node.users]
    index = next((shown[n] for n in nodes if n in shown), 0)
    first = max(0, index - 2)
    window = lines[first : index + 3]
    return [f"  {'>' if first + i == index else ' '} {ln.text}" for i, ln in enumerate(window)]
