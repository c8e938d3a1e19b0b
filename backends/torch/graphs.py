"""Steps on a GPU as CUDA graphs: what a step launches is recorded once and launched at once.

torch.compile records none for a step that changes its caches: it takes them for inputs whose
addresses may change. Here they keep their addresses, a step's inputs are copied to one place, and
what it returns is copied from one; so its launches are recorded for as long as the caches stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...ir import TensorType
from ...ir.execution.executable import Outputs
from ..staging import Staging, Stream

Step = Callable[..., Sequence[Tensor]]


def capture(step: Step, arguments: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """The tensors that a step returns for arguments, and what works them out, and all that the
    step changes, from what is in the arguments' memory then; nothing is worked out before.

    The step has run before: what is done once, such as choosing kernels, cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*arguments)
    return results, graph.replay


class CapturedStep:
    """A compiled step for inputs of certain types, on states where they lie now.

    outputs: those of the last call, in the host's memory, which the next call writes again.
    """

    def __init__(
        self,
        step: Step,
        names: Sequence[str],
        states: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        fetch: Sequence[str],
        device: torch.device,
    ) -> None:
        types = {name: TensorType.of(inputs[name]) for name in names if name not in states}
        self.staging = Staging(types, {}, device, Stream(device, own=False))
        given = {**self.staging.bound, **{n: states[n] for n in names if n in states}}
        arguments = [given[name] for name in names]
        results, self.launch = capture(step, arguments)
        self.staging.outputs = dict(zip(fetch, results, strict=True))
        self.fetch = tuple(fetch)
        self.outputs: Outputs = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> None:
        """Run the step on these inputs, in the host's memory."""
        self.staging.upload(inputs)
        self.launch()
        found = self.staging.download(self.fetch)
        self.outputs = self.outputs or found
