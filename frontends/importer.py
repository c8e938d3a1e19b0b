"""From an `ExportedProgram` to a function and its weights.

The trace maps token ids [B,T] (and positions [B,T], if the model takes them, and whatever else a
part of a model reads) to logits and whatever else it returns. Every node is lowered (`aten.py`);
symbolic integers become sizes, in-place ops become ordinary ones, and the wrappers that torch puts
around autocast and no_grad regions are opened.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_aggregate

from ..ir import Function, GraftworkError, Site, TensorType, UnsupportedError, Weight, type_of
from . import aten_convolution, aten_math, aten_shapes  # noqa: F401  (they fill the table)
from .aten import Call, known, lower
from .builder import Builder
from .complex_pairs import involves_complex, lower_complex
from .copies import Copies, is_copy
from .sites import site_of_trace, strip_root
from .sizes import Sizes

INPUTS = {name: TensorType.parse("i64[B,T]") for name in ("tokens", "positions")}
"""The inputs of every imported step."""

LOGITS = ("logits",)
"""What a model returns."""

A = torch.ops.aten
_IGNORED = ("_assert", "sym_constrain_range", "_set_grad_enabled", "_log_api_usage")


@dataclass(frozen=True)
class Imported:
    """An imported function and the weights it may use.

    longest: the largest T it was traced for. origins: of the weights that are the model's, their
    paths there; None for tensors that the trace holds. The others follow from these.
    """

    fn: Function
    weights: dict[str, Weight]
    longest: int | None
    origins: dict[str, str | None]


def import_exported(
    exported: ExportedProgram,
    root: str,
    weight_of: Callable[[str], Weight],
    inputs: Mapping[str, TensorType] = INPUTS,
    outputs: Sequence[str] = LOGITS,
    name: str = "step",
) -> Imported:
    """The function of a trace, called `name`.

    root: path of the model inside the traced wrapper. weight_of: the weight for a parameter or
    buffer, by its path in the model. inputs: what the trace takes, in order, ``tokens`` first.
    outputs: names for the first things that it returns. Errors: `UnsupportedError` naming the op,
    the module and the source line of what programs cannot say.
    """
    if _must_functionalize(exported.graph, _results(exported, len(outputs))):
        exported = exported.run_decompositions(_decompositions())
    return _Importer(exported, root, weight_of, inputs, name).run(outputs)


def _decompositions() -> dict[Any, Any]:
    """Torch's decompositions of all ops that the importer does not know."""
    table: Any = torch.export.default_decompositions()
    for target in [target for target in table if known(target)]:
        table.pop(target)
    return dict(table)


class _Importer:
    def __init__(
        self,
        exported: ExportedProgram,
        root: str,
        weight_of: Callable[[str], Weight],
        inputs: Mapping[str, TensorType],
        name: str,
    ) -> None:
        self.exported, self.root, self.weight_of = exported, root, weight_of
        self.b = Builder(name)
        self.sizes = Sizes({}, {})
        self.env: dict[torch.fx.Node, Any] = {}
        self.inputs = {name: self.b.fn.add_input(name, type) for name, type in inputs.items()}
        self.origins: dict[str, str | None] = {}

    def run(self, outputs: Sequence[str]) -> Imported:
        self.bind_inputs()
        results = _results(self.exported, len(outputs))
        self.live = _live(self.exported.graph, results)
        self.copies = Copies(self.exported, self.root, self.live)
        self.walk(self.exported.graph, results)
        values = [self.value(result) for result in results]
        if not isinstance(values[0], torch.fx.Node):
            raise UnsupportedError("the model's first output is no tensor; expected logits")
        self.b.fn.set_outputs(dict(zip(outputs, values, strict=True)))
        self.b.fn.graph.eliminate_dead_code()
        return Imported(self.b.fn, self.b.weights, self.sizes.limits.get("T"), self.origins)

    def bind_inputs(self) -> None:
        """Give every placeholder of the trace its input or weight."""
        placeholders = {
            node.name: node for node in self.exported.graph.find_nodes(op="placeholder")
        }
        specs = self.exported.graph_signature.input_specs
        given = [placeholders[s.arg.name] for s in specs if s.kind == InputKind.USER_INPUT]
        taken = zip(given, self.inputs.values(), strict=False)
        types = [(node.meta["val"], type_of(own)) for node, own in taken]
        self.sizes = Sizes.of(types, self.exported.range_constraints)
        names = iter(self.inputs)
        for spec in specs:
            node = placeholders[spec.arg.name]
            if spec.kind == InputKind.USER_INPUT:
                self.env[node] = self.inputs[next(names)]
            elif spec.kind == InputKind.TOKEN:
                self.env[node] = _Unusable("the model has side effects")
            else:
                self.env[node] = self.b.weight(self.constant(spec.kind, str(spec.target)))

    def constant(self, kind: InputKind, target: str) -> Weight:
        """The weight behind a parameter, buffer or lifted constant of the trace."""
        if kind in (InputKind.PARAMETER, InputKind.BUFFER):
            path = strip_root(target, self.root)
            weight = self.weight_of(path)
            self.origins[weight.name] = path
            return weight
        tensor = self.exported.constants[target]
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(f"the constant {target} is a {type(tensor).__name__}")
        held = Weight.of(f"constant.{strip_root(target, self.root)}", tensor.detach())
        self.origins[held.name] = None
        return held

    def walk(self, graph: torch.fx.Graph, results: list[torch.fx.Node]) -> None:
        """Lower every node of a graph of the trace that its results need."""
        live = _live(graph, results)
        for node in graph.nodes:
            if node.op == "get_attr":
                self.env[node] = _attribute(graph, str(node.target))
            if node.op == "call_function" and node in live:
                self.visit(node, site_of_trace(node, self.root))

    def visit(self, node: torch.fx.Node, site: Site) -> None:
        """Lower a call of the trace."""
        self.b.site = site
        try:
            self.env[node] = self.copy(node) if is_copy(node) else self.lower(node)
        except GraftworkError as error:
            raise UnsupportedError(f"{_where(site)}: {error}") from error

    def copy(self, node: torch.fx.Node) -> Any:
        """A layer that is like another: what that one does, with this one's weights."""
        like = self.copies.of(node)
        outer, x = self.env, self.value(node.args[0])
        self.env = {**outer, like.begin: x}
        self.env |= {placeholder: outer[own] for placeholder, own in like.own.items()}
        for inner in like.between:
            self.visit(inner, like.site(site_of_trace(inner, self.root)))
        result = self.value(like.end.args[0])
        self.env = outer
        return result

    def lower(self, node: torch.fx.Node) -> Any:
        """The value of one call of the trace."""
        fake = node.meta.get("val")
        if isinstance(fake, (int, torch.SymInt)) and not isinstance(fake, bool):
            return self.size(fake)
        if isinstance(fake, (bool, float, torch.SymBool, torch.SymFloat)):
            return _Unusable(f"{node.target} computes a number from sizes or data while tracing")
        if node.target is A.copy_.default:
            return self.store(node)
        args: Any = map_aggregate(node.args, self.value)
        kwargs: Any = map_aggregate(node.kwargs, self.value)
        if node.target is operator.getitem:
            return self.item(*args)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.open(node.target, list(args))
        target = _functional(node.target)
        call = Call(target, self.b, self.sizes, args, kwargs, fake)
        result = lower_complex(call) if involves_complex(call) else lower(call)
        if target is not node.target:
            self.env[node.args[0]] = result  # type: ignore[index]
        return result

    def store(self, node: torch.fx.Node) -> Any:
        """A slice of a fresh value written: the value with the slice replaced."""
        view, part = node.args[0], self.value(node.args[1])
        base = view.args[0]  # type: ignore[union-attr]
        filled = Call(A.copy.default, self.b, self.sizes, (None, part), {}, node.meta["val"])
        part = lower(filled)
        args = (self.value(base), part, *map_aggregate(view.args[1:], self.value))  # type: ignore
        fake = base.meta["val"]  # type: ignore[union-attr]
        call = Call(A.slice_scatter.default, self.b, self.sizes, args, {}, fake)
        self.env[base] = lower(call)  # type: ignore[index]
        return part

    def size(self, fake: int | torch.SymInt) -> Any:
        """A size, or why it is none; an error only if something uses it."""
        try:
            return self.sizes.dim(fake)
        except UnsupportedError as error:
            return _Unusable(str(error))

    def item(self, source: Any, index: int) -> Any:
        """One result of an op with several."""
        if isinstance(source, (list, tuple)):
            return source[index]
        return self.b.call(operator.getitem, source, index)

    def open(self, target: Any, args: list[Any]) -> Any:
        """The body of a region that torch wraps because of a context manager."""
        name = target.name()
        if not name.startswith("wrap_with"):
            raise UnsupportedError(f"the op {name} (control flow) is not supported yet")
        index = next(i for i, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule))
        if name == "wrap_with_autocast" and args[2]:
            raise UnsupportedError("autocast inside the model: convert the model to one dtype")
        body = args[index].graph
        for placeholder, value in zip(
            body.find_nodes(op="placeholder"), args[index + 1 :], strict=True
        ):
            self.env[placeholder] = value
        self.walk(body, body.output_node().all_input_nodes)
        return map_aggregate(body.output_node().args[0], self.value)

    def value(self, arg: Any) -> Any:
        """A traced argument as a value of the program."""
        if isinstance(arg, torch.fx.Node):
            arg = self.env[arg]
        if isinstance(arg, _Unusable):
            raise UnsupportedError(arg.reason)
        return self.sizes.dim(arg) if isinstance(arg, torch.SymInt) else arg


@dataclass(frozen=True)
class _Unusable:
    """A number of the trace that programs cannot hold."""

    reason: str


def _attribute(graph: torch.fx.Graph, name: str) -> Any:
    owner: Any = graph.owning_module
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def _ignored(node: torch.fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return name.startswith(_IGNORED)


def _where(site: Site) -> str:
    module = f"module {site.module}" if site.module else "the model"
    return f"{module} ({site.line})" if site.line else module


def _mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _functional(target: Any) -> Any:
    """The op that computes what an in-place op would store."""
    if not _mutable(target):
        return target
    packet = getattr(torch.ops.aten, target._schema.name.partition("::")[2].rstrip("_"))
    return getattr(packet, target._overloadname)


def _is_view(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.op != "call_function"
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _results(exported: ExportedProgram, count: int) -> list[torch.fx.Node]:
    """The nodes of the first `count` things that the traced module returns."""
    specs = exported.graph_signature.output_specs
    changed = [spec.target for spec in specs if spec.kind == OutputKind.BUFFER_MUTATION]
    if changed:
        raise UnsupportedError(
            f"the model changes its buffer {changed[0]} when it runs; buffers that live across "
            "steps are not supported yet"
        )
    names = [spec.arg.name for spec in specs if spec.kind == OutputKind.USER_OUTPUT]
    nodes: dict[str, torch.fx.Node] = {node.name: node for node in exported.graph.nodes}
    return [nodes[name] for name in names[:count]]


def _must_functionalize(graph: torch.fx.Graph, results: list[torch.fx.Node]) -> bool:
    """Whether torch has to remove views and mutation, or decompose ops that we do not know.

    Simple mutation (of a value that nothing else aliases) is handled here: it takes no time.
    """
    order: Mapping[torch.fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
    for node in _live(graph, results):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if _mutable(node.target) and not _alone(node, order):
            return True
        if not known(_functional(node.target)) and not _gives_size(node):
            return True
    return False


def _live(graph: torch.fx.Graph, results: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes that the results need, directly or by writing to what they read."""
    live = set(results)
    for node in reversed(list(graph.nodes)):
        if node in live or (_mutable(node.target) and not _ignored(node)):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _gives_size(node: torch.fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _alone(node: torch.fx.Node, order: Mapping[torch.fx.Node, int]) -> bool:
    """Whether an in-place op's target has no aliases that are used afterwards."""
    if not node.target._schema.name.endswith("_"):  # type: ignore[union-attr]
        return False
    source = node.args[0]
    if node.target is A.copy_.default:
        if source.target is not A.slice.Tensor or len(source.users) > 1:  # type: ignore[union-attr]
            return False
        source = source.args[0]  # type: ignore[union-attr]
    if not isinstance(source, torch.fx.Node) or _is_view(source):
        return False
    views = [user for user in source.users if _is_view(user) and order[user] < order[node]]
    return not any(order[user] > order[node] for view in views for user in view.users)
