"""Calls that come again with the same input tensors: bound to their memory, and not looked at.

A decode loop feeds the same few tensors step after step. After a model has run, the processor's
caches hold weights, and the first use of anything in torch, a shape or a copy, takes 20 us to be
fetched again. So a call that is seen a second time is bound to the caller's own tensors, and from
then on a step touches no tensor at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from .attention import SEQLENS
from .routing import Counts, Route
from .step import Step

KEPT = 64
"""Calls that are remembered: each width of a step is one."""

Key = tuple[int, ...]
Outputs = dict[str, torch.Tensor]


class Replay:
    """A step bound to the tensors of one call."""

    def __init__(self, step: Step, route: Route, inputs: Mapping[str, torch.Tensor]) -> None:
        self.step, self.epoch = step, step.states.epoch
        self.past = _past(inputs)
        self.counts: Counts | None = None
        feeds = dict(route.feeds)
        if self.past is not None:
            self.variant, self.overhang = route.variant, route.overhang
            self.width = inputs["tokens"].shape[1]
        if self.past is not None and SEQLENS in feeds:
            self.counts = Counts()
            feeds.update(self._counted(self.counts, self.past.tolist()))
        self.bound = step.bind(feeds, copy=False)

    def run(self, fetch: Sequence[str]) -> Outputs | None:
        """The outputs; None where the call has to be routed anew."""
        states = self.step.states
        if states.epoch != self.epoch:
            return None
        if self.past is not None:
            past = self.past.tolist()
            longest = max(past)
            # The first rows of a cache may take another route.
            if not longest or longest + self.width + self.overhang > states.capacity:
                return None
            if self.counts is not None:
                self._counted(self.counts, past)
        return self.step.call(self.bound, fetch)

    def _counted(self, counts: Counts, past: list[int]) -> Mapping[str, torch.Tensor]:
        return counts.of(past, max(past), self.width, self.variant)


class Replays:
    """The calls of one function, by the identity of their tensors (which are kept, so that no other
    tensor can take their place)."""

    def __init__(self) -> None:
        self.calls: OrderedDict[Key, tuple[Mapping[str, torch.Tensor], Replay | None]]
        self.calls = OrderedDict()

    def run(self, key: Key, fetch: Sequence[str]) -> Outputs | None:
        """The outputs of a call that is known; None where it has to be routed."""
        found = self.calls.get(key)
        replay = None if found is None else found[1]
        return None if replay is None else replay.run(fetch)

    def learn(self, key: Key, inputs: Mapping[str, torch.Tensor], step: Step, route: Route) -> None:
        """A call that was routed and has run."""
        again = key in self.calls and _can_come_again(inputs, route, step)
        self.calls[key] = (dict(inputs), Replay(step, route, inputs) if again else None)
        while len(self.calls) > KEPT:
            self.calls.popitem(last=False)


def key_of(inputs: Mapping[str, torch.Tensor]) -> Key:
    """What tells a call from others."""
    return tuple([id(tensor) for tensor in inputs.values()])


def _can_come_again(inputs: Mapping[str, torch.Tensor], route: Route, step: Step) -> bool:
    past = _past(inputs)
    if route.widened or (past is not None and not any(past)):
        return False
    fed = [route.feeds[name] for name in step.inputs]
    return all(tensor.is_cpu and tensor.is_contiguous() for tensor in fed)


def _past(inputs: Mapping[str, torch.Tensor]) -> memoryview | None:
    """The cache rows before a call, read from the tensor's own memory."""
    return inputs["past"].numpy().data if "past" in inputs else None
