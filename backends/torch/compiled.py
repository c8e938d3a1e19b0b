"""What torch.compile makes of emitted modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.support.threads import traces
from .regions import outline_repeats


def inductor(module: torch.fx.GraphModule) -> Compiled:
    """Compile for the CPU: layers once for all, caches of any length, no checks of each tensor.

    The executable calls each compiled module with inputs of one shape, dtype and layout; only the
    caches grow. What the compiler assumed about sizes and global state (such as the number of
    threads, for which it allocates) is checked.
    """
    weights = _lift_weights(module)
    outline_repeats(module)
    options: dict[str, Any] = {
        "size_asserts": False,
        "guard_filter_fn": lambda guards: [g.guard_type != "TENSOR_MATCH" for g in guards],
    }
    return Compiled(torch.compile(module, fullgraph=True, options=options), weights)


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
        node.replace_all_uses_with(after)
        graph.erase_node(node)
    module.recompile()
    return weights
