"""Calls that come again with the same input tensors: bound to their memory, and not looked at.

A decode loop feeds the same few tensors step after step. After a model has run, the processor's
caches hold weights, and the first use of anything in torch, a shape or a copy, takes 20 us to be
fetched again. So a held call is bound to the caller's own tensors, and a step touches no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...ir.execution.executable import Outputs
from ..states import StateBuffers
from .attention import SEQLENS
from .routing import Counts, Inputs, Route
from .step import Step

Routed = Callable[[], Callable[[str, Inputs], tuple[Step, Route]] | None]
"""A weak reference to what finds the step that takes a call of a function."""


class RepeatedCall:
    """A call of a function. It is routed, and bound, when it is first made, and again whenever the
    memory of the states has changed or the route may be another one."""

    def __init__(
        self,
        routed: Routed,
        states: StateBuffers,
        function: str,
        inputs: Mapping[str, torch.Tensor],
        fetch: Sequence[str],
    ) -> None:
        self.routed, self.states = routed, states
        self.function, self.inputs, self.fetch = function, dict(inputs), tuple(fetch)
        self.binding: _Binding | None = None

    def __call__(self) -> Outputs:
        """The outputs for what lies in the inputs now. Errors: as those of a run."""
        binding = self.binding
        if binding is None or binding.epoch != self.states.epoch or not binding.fits():
            return self._anew()
        return binding.run()

    def _anew(self) -> Outputs:
        routed = self.routed()
        assert routed is not None, "a held call is made after its executable is gone"
        step, route = routed(self.function, self.inputs)
        if not _can_be_bound(step, route):
            self.binding = None
            results = step.run(route.feeds, self.fetch)
            return step.first_column(results) if route.widened else results
        room = self.states.room(self.function)
        binding = self.binding = _Binding(step, route, self.fetch, room)
        return binding.run()


class _Binding:
    """A step bound to the tensors of one call. room: rows of a text that its states hold."""

    def __init__(self, step: Step, route: Route, fetch: Sequence[str], room: int) -> None:
        self.step, self.fetch, self.epoch = step, fetch, step.states.epoch
        self.past: memoryview | None = None
        self.counts: Counts | None = None
        feeds = dict(route.feeds)
        if route.rows:
            past = self.past = feeds["past"].numpy().data
            self.width, self.variant = route.rows - max(past), route.variant
            self.most = room - self.width - route.overhang
            # What is recorded is for as many rows as there may be.
            self.total = room if step.records else None
            if SEQLENS in feeds:
                self.counts = Counts()
                feeds.update(self._counted(max(past)))
        self.feeds, self.bound = feeds, step.bind(feeds, copy=False)
        self.results = self.bound.results(fetch)

    def run(self) -> Outputs:
        """Run the step; its outputs, in memory that is theirs as long as the binding lives.

        Errors: `ExecutionError` with what the runtime says.
        """
        self.step.go(self.bound, self.feeds)
        if self.bound.staging is not None:
            self.bound.staging.download(self.fetch)
        return self.results

    def fits(self) -> bool:
        """Whether the step may run for the rows that are there now; it is then ready to."""
        if self.past is None:
            return True
        longest = max(self.past)
        # The first rows of a cache may take another route.
        if not 0 < longest <= self.most:
            return False
        if self.counts is not None:
            self._counted(longest)
        return True

    def _counted(self, longest: int) -> dict[str, torch.Tensor]:
        assert self.past is not None and self.counts is not None
        return self.counts.of(self.past, longest, self.width, self.variant, self.total)


def _can_be_bound(step: Step, route: Route) -> bool:
    """Whether a step may be bound to what it is fed, and no look at the route is due next time."""
    feeds = route.feeds
    if route.widened or not all(name in feeds for name in step.inputs):
        return False
    fed = [feeds[name] for name in step.inputs]
    if route.rows:
        fed.append(feeds["past"])
        if max(feeds["past"].tolist()) < 1:
            return False
    return all(tensor.is_cpu and tensor.is_contiguous() for tensor in fed)
