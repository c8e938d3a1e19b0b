"""Names of nodes and values in ONNX graphs, for whoever opens one in a viewer.

A node is called after where it comes from and what it does, and its result like it::

    model.layers.3.self_attn.o_proj/MatMul
    model.layers.3.self_attn/Transpose.2       the second one there
    step_mask/Range                            of no module of the source model: of an op of the IR
    step/i64[0,-1,384]                         a small constant: its values

In a graph of several functions the function's name stands before them, in loops the loop's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import onnx_ir as oir
import torch
import torch.fx

from ...ir import TensorType, site_of
from ...ir.rewrite.expand import origin_of, short_name

SHOWN = 8
"""Values of a constant that its name may say."""

_STORED = re.compile(r"\.(weight|bias|q\d).*$")
"""Behind the module in a weight's name: what it is there, and what passes made of it."""


class Names:
    """Gives every name once: the second of a kind ends in .2."""

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()

    def free(self, name: str) -> str:
        """The name, with a number behind it if it was given before."""
        self.given[name] += 1
        return name if self.given[name] == 1 else f"{name}.{self.given[name]}"


def name_results(node: oir.Node, unwanted: Sequence[int] = ()) -> None:
    """Call a node's first value like itself, and others by their place, too; "" leaves one out."""
    for index, value in enumerate(node.outputs):
        value.name = node.name if index == 0 else f"{node.name}/{index}"
        if index in unwanted:
            value.name = ""


class Places:
    """Says of calls, one after the other, where they come from."""

    def __init__(self) -> None:
        self.known: dict[torch.fx.Node, tuple[int, str]] = {}

    def of(self, node: torch.fx.Node) -> str:
        """The module of the source model, of several that were merged all
        (``self_attn.q_proj_k_proj_v_proj``); without one the weight that is read; without either
        where the last call that is read comes from. Then the op whose meaning the call is part
        of."""
        module, origin = site_of(node).module, origin_of(node)
        read = [_STORED.sub("", str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        beside = module.rpartition(".")[0]
        merged = len(set(read)) == 1 and beside and read[0].startswith(f"{beside}.")
        if read and (merged or not module):
            module = read[0]
        before = [self.known[n] for n in node.all_input_nodes if n in self.known]
        if not module and not origin and before:
            module = max(before)[1]
        place = "/".join(part for part in (module, origin) if part) or short_name(node)
        self.known[node] = len(self.known), place
        return place


def constant_name(owner: str, tensor: torch.Tensor, number: int) -> str:
    """A constant's name in the graph of `owner`: its values, or its type and a number."""
    dtype = str(TensorType.of(tensor)).partition("[")[0]
    if tensor.dim() == 0:
        return f"{owner}/{dtype}:{tensor.item()}"
    if tensor.dim() == 1 and tensor.numel() <= SHOWN:
        return f"{owner}/{dtype}[{','.join(map(str, tensor.tolist()))}]"
    return f"{owner}/{dtype}.{'x'.join(map(str, tensor.shape))}.{number}"
