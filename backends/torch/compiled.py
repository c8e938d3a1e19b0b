"""What torch.compile makes of emitted modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.support.threads import traces
from .regions import cut_repeats

CHECKED = ("SHAPE_ENV", "DUPLICATE_INPUT", "GLOBAL_STATE", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS")
"""Guards that are kept: what they check may change between calls. Some hundred others, such as that
a library's function is still the same, would be checked in each call of a layer."""


def inductor(module: torch.fx.GraphModule) -> Compiled:
    """Compile for the CPU: layers once for all, caches of any length, no checks of each tensor.

    The executable calls each compiled module with inputs of one shape, dtype and layout; only the
    caches grow. What the compiler assumed about sizes and global state (such as the number of
    threads, for which it allocates) is checked. Pieces are compiled one by one: as nested regions
    of one function, each layer's call would be traced and functionalized again. Axes that are
    dynamic in what a piece returns are dynamic in the next.
    """
    weights = _lift_weights(module)
    cut_repeats(module)
    pieces = dict(module.named_children())
    if not pieces:
        return Compiled(_compiled(module), weights)
    calls = {name: PieceCalls(piece) for name, piece in pieces.items()}
    for number, node in enumerate(module.graph.find_nodes(op="call_module")):
        one = calls[str(node.target)].another()
        node.target = f"call_{number}"
        setattr(module, node.target, one)
    for name in pieces:
        delattr(module, name)
    module.recompile()
    return Compiled(module.forward, weights)


def _compiled(module: torch.fx.GraphModule) -> Callable[..., Any]:
    options: dict[str, Any] = {
        "size_asserts": False,
        "guard_filter_fn": lambda guards: [g.guard_type in CHECKED for g in guards],
    }
    compiled: Callable[..., Any] = torch.compile(module.forward, fullgraph=True, options=options)
    return compiled


class PieceCalls:
    """What a piece is compiled to: once for all of its calls whose tensors lie alike."""

    def __init__(self, piece: torch.nn.Module) -> None:
        assert isinstance(piece, torch.fx.GraphModule)
        self.piece = piece
        self.codes: dict[object, Callable[..., Any]] = {}

    def another(self) -> Callable[..., Any]:
        """One of the calls, to be made in every step."""
        code: Callable[..., Any] | None = None

        def call(*values: torch.Tensor) -> Any:
            nonlocal code
            if code is None:
                code = self._code(values)
            return code(*values)

        return call

    def _code(self, values: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        # Layouts of one step can be compared: its symbols have one size each.
        layouts = tuple((value.dtype, value.shape, value.stride()) for value in values)
        if layouts not in self.codes:
            # Of a module of its own, since the compiler keeps what it made by the Python code.
            self.codes[layouts] = _compiled(torch.fx.GraphModule({}, self.piece.graph))
        return self.codes[layouts]


@dataclass(frozen=True)
class Compiled:
    """Compiled code and the weights that it takes after its other arguments."""

    code: Callable[..., Any]
    weights: list[torch.Tensor]

    @traces
    def __call__(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the module returns for these arguments."""
        results: tuple[torch.Tensor, ...] = self.code(*arguments, *self.weights)
        return results


def for_gpu(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile for a GPU; see `graphs` for how its kernels are launched together."""
    compiled: Callable[..., Any] = torch.compile(module, fullgraph=True, dynamic=False)
    return traces(compiled)


def any_size(buffer: torch.Tensor, axis: int) -> None:
    """Have what is compiled next take any size of this axis, or fail."""
    torch._dynamo.mark_dynamic(buffer, axis)


def _lift_weights(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Make arguments of a module's tensors, after its others, and return them.

    The compiler would hash constants, which takes long, and unpack packed ones ahead of time.
    """
    graph, weights = module.graph, []
    after = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        weights.append(getattr(module, str(node.target)))
        with graph.inserting_after(after):
            after = graph.placeholder(f"weight_{len(weights)}")
        after.meta.update(node.meta)
        node.replace_all_uses_with(after)
        graph.erase_node(node)
    module.recompile()
    return weights
