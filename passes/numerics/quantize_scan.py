"""Round what the recurrences of state-space models read to 8 bits, on steps that text has fixed.

Before::

    %v: f32[B,T,H,V] = aten.mul.Tensor(%x, %dt)
    %r: (...) = graftwork.linear_attention_step(..., %q, %k, %vp, %g)       # %vp is %v turned about

After, of %x and likewise of %q and %k::

    %n: f32[B,T,H,V] = aten.div.Tensor(%x, @recurrent.0.x.step)
    %o: f32[B,T,H,V] = aten.round(%n)
    %c: f32[B,T,H,V] = aten.clamp(%o, -127, 127)
    %y: f32[B,T,H,V] = aten.mul.Tensor(%c, @recurrent.0.x.step)
    %v: f32[B,T,H,V] = aten.mul.Tensor(%y, %dt)

Which heads and channels of x are large, and which keys, is the same for all tokens. So the heads
that share keys are sorted by the largest number that text shows of each, and clustered; so are the
channels of the heads of a cluster; and all numbers of a cluster of both have one step. The keys k
and queries q that heads share have a step for each group of heads. What other texts have beyond
that is clipped. The paper puts heads and channels of a cluster side by side, for its kernel; here
they stay where they are, each with the step of its cluster, which gives the same numbers. These are
multiplied in float: the pass by itself saves neither time nor memory.

Refuses recurrences whose values are no product of an input and of the step size that their decay is
made of, as Mamba's and Mamba-2's are. Source: Chiang et al., Quamba2 (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.fx
from pydantic import Field
from torch import Tensor

from ...ir import Function, PassError, Program, Weight, arguments, site_of, type_of
from ...ir.ops.rounded_state import LARGEST, RECURRENCES
from ..caching.contents import LearnedContents
from ..engine.base import Effect, Evidence, Outcome, register
from ..engine.feed import watched

A = torch.ops.aten
VIEWS = (A.permute.default, A.unsqueeze.default, A.transpose.int)

Clusters = Annotated[int, Field(ge=1, le=64)]


@register
class QuantizeScan(LearnedContents):
    """heads: clusters of the heads that share keys. channels: of the channels of a cluster of
    heads. windows, length: of the text that is read."""

    heads: Clusters = 4
    channels: Clusters = 4

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.WEIGHT_NUMERICS})

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        found = list(_scans(program.step))
        if not found:
            few = "has no recurrence whose values are an input times the step size of its decay"
            return Outcome(program, 0, f"{program.step.name} {few}")
        largest = _largest(program, found, evidence.sampled(self.sample, program))
        fn = program.step.copy()
        copies, weights = dict(zip(program.step, fn, strict=True)), []
        for scan, (x, q, k) in zip(found, largest, strict=True):
            steps = {
                "x": clustered(x, len(k), self.heads, self.channels) / LARGEST,
                "q": (q.amax(1) / LARGEST)[:, None, None],
                "k": (k.amax(1) / LARGEST)[:, None, None],
            }
            for part, step in steps.items():
                weight = Weight.of(f"{scan.prefix}.{part}.step", step.clamp(min=1e-12).contiguous())
                weights.append(weight)
                _round(fn, copies[getattr(scan, part)], weight, copies[scan.step])
        changed = program.with_function(fn)
        return Outcome(changed.replace(weights=program.weights.adding(*weights)), len(found))


@dataclass(frozen=True)
class _Scan:
    """A recurrence and what it reads: x [B,T,H,V] or [B,H,T], q and k [B,G,T,K]."""

    step: torch.fx.Node
    x: torch.fx.Node
    q: torch.fx.Node
    k: torch.fx.Node

    @property
    def prefix(self) -> str:
        """What the names of its states begin with."""
        return str(arguments(self.step)["keys"].target).rpartition(".")[0]


def _scans(fn: Function) -> Iterator[_Scan]:
    """The recurrences of a function whose inputs are known."""
    for node in fn.calls(*RECURRENCES):
        given = arguments(node)
        value, decay = _seen(given["v"]), _seen(given["g"])
        if value.target is not A.mul.Tensor or decay.target is not A.mul.Tensor:
            continue
        sizes = {_seen(x) for x in decay.all_input_nodes if x.op != "get_attr"}
        inputs = [x for x in value.all_input_nodes if _seen(x) not in sizes]
        if len(inputs) == 1 and _is_input(inputs[0], given["v"]):
            yield _Scan(node, inputs[0], given["q"], given["k"])


def _is_input(x: torch.fx.Node, values: torch.fx.Node) -> bool:
    """Whether x is [B,T,H,V], or [B,H,T] of heads with one channel; values [B,H,T,V]."""
    _, heads, _, channels = type_of(values).dims
    dims = type_of(x).dims
    one = len(dims) == 3 and dims[1] == heads and channels == 1
    return one or (len(dims) == 4 and dims[2:] == (heads, channels))


def _seen(node: Any) -> torch.fx.Node:
    """What a value is a view of."""
    while node.target in VIEWS:
        node = node.args[0]
    assert isinstance(node, torch.fx.Node)
    return node


def _largest(
    program: Program, scans: list[_Scan], windows: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The largest sizes in the text of each recurrence's x f32[H,V], q and k f32[G,K]."""
    parts = {f"{part}.{n}": getattr(s, part) for n, s in enumerate(scans) for part in "xqk"}
    most = dict[str, Tensor]()
    for seen in watched(program, program.step, parts, windows):
        for name, value in seen.items():
            if not torch.isfinite(value).all():
                raise PassError(f"quantize_scan: %{parts[name].name} is not finite on the text")
            size = value.abs().float().amax(_tokens(value.dim(), name))
            most[name] = torch.maximum(size, most.get(name, size))
    found = []
    for n in range(len(scans)):
        x, q, k = (most[f"{part}.{n}"] for part in "xqk")
        found.append((x if x.dim() == 2 else x[:, None], q, k))
    return found


def _tokens(axes: int, name: str) -> tuple[int, int]:
    """The axes of x [B,T,H,V] or [B,H,T], or of q and k [B,G,T,K], that count tokens."""
    return (0, 1) if name.startswith("x") and axes == 4 else (0, 2)


def _round(fn: Function, value: torch.fx.Node, step: Weight, scan: torch.fx.Node) -> None:
    """Put a value's nearest multiple of a step in its place, where it recurs or is multiplied."""
    users = [user for user in value.users if user is scan or user.target is A.mul.Tensor]
    site = site_of(value)
    with fn.graph.inserting_before(value.next):
        size = fn.weight(step)
        whole = fn.call(A.round.default, fn.call(A.div.Tensor, value, size, site=site), site=site)
        kept = fn.call(A.clamp.default, whole, -LARGEST, LARGEST, site=site)
        near = fn.call(A.mul.Tensor, kept, size, site=site)
    for user in users:
        user.replace_input_with(value, near)


ROUNDS = 50
"""Of moving centres, at most."""


def clustered(largest: Tensor, groups: int, heads: int, channels: int) -> Tensor:
    """For each number of x f32[H,V] the largest of its cluster: the heads of a group are clustered
    by their largest number, and the channels of a cluster of heads by theirs.

    largest: of each head and channel. groups: of heads that share keys. heads, channels: clusters.
    """
    found = torch.empty_like(largest)
    for group in torch.arange(len(largest)).chunk(groups):
        labels = clusters(largest[group].amax(1), heads)
        for label in labels.unique():
            mine = group[labels == label]
            sizes = largest[mine].amax(0)
            found[mine] = _largest_alike(sizes, clusters(sizes, channels))
    return found


def clusters(sizes: Tensor, count: int) -> Tensor:
    """To which of at most `count` clusters each of some sizes f32[N] belongs, i64[N]: to that whose
    centre is nearest, the centres being the means of their clusters. They begin where as many of
    the sorted sizes lie between each two."""
    places = torch.linspace(0, len(sizes) - 1, min(count, len(sizes))).round().long()
    centres = sizes.sort().values[places]
    labels = torch.zeros(len(sizes), dtype=torch.long)
    for _ in range(ROUNDS):
        labels = (sizes[:, None] - centres).abs().argmin(1)
        sums = torch.zeros_like(centres).index_add(0, labels, sizes)
        members = torch.bincount(labels, minlength=len(centres))
        moved = torch.where(members > 0, sums / members.clamp(min=1), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return labels


def _largest_alike(sizes: Tensor, labels: Tensor) -> Tensor:
    """For each size f32[N] the largest of those with its label."""
    most = sizes.new_zeros(int(labels.max()) + 1).scatter_reduce(0, labels, sizes, "amax")
    return most[labels]
