"""Linear classifiers of whether the head says at an exit what it says at the end.

Source: Schuster et al., "Confident Adaptive Language Modeling" (CALM, 2022), early-exit classifier
with its consistency labels, an independent one for each exit.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.fx

from ...ir import Program, run
from ...ir.execution.analysis import blocks_of
from ..engine.feed import empty_inputs

Probe: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Weight f32[1,H] and bias f32[1] of the log odds."""

ROUNDS = 100
DECAY = 1e-3
"""Of the squared weights of standardised channels, so that classes that can be told apart do not
make them infinite."""


def fitted_probes(program: Program, windows: torch.Tensor) -> dict[str, Probe]:
    """A probe for each segment but the last of a step that is cut, by its name, fitted on windows
    i64[N,T] of text that runs through all layers."""
    plan = program.plan.step
    *segments, _, head = plan.parts
    fn = program.step.copy()
    exits = {float(layer) + 1: node for layer, node in blocks_of(fn).items()}
    kept = {name: exits[exit] for name, exit in zip(segments, plan.cuts, strict=True)}
    fn.set_outputs({**kept, "logits": fn.outputs["logits"]})
    watched = program.with_function(fn)
    states: dict[str, list[torch.Tensor]] = {name: [] for name in segments}
    alike: dict[str, list[torch.Tensor]] = {name: [] for name in segments}
    for window in windows:
        outputs = run(watched, fn.name, empty_inputs(watched, fn.name, window[None]))
        best = outputs["logits"].argmax(-1)
        for name in segments:
            inputs = empty_inputs(program, head, window[None])
            inputs |= {plan.state: outputs[name][:, None]}  # type: ignore[attr-defined]
            early = run(program, head, inputs)["logits"].argmax(-1)
            states[name].append(outputs[name][0].float())
            alike[name].append((early == best)[0])
    return {name: fitted(torch.cat(states[name]), torch.cat(alike[name])) for name in segments}


def fitted(states: torch.Tensor, labels: torch.Tensor) -> Probe:
    """The logistic regression of labels bool[N] on states f32[N,H]."""
    mean, scale = states.mean(0), states.std(0, unbiased=False).clamp(min=1e-6)
    given = (states - mean) / scale
    # Never quite sure: a class that was not seen may exist.
    wanted = labels.float().clamp(0.5 / len(labels), 1 - 0.5 / len(labels))
    weight = torch.zeros(states.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        odds = given @ weight + bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, wanted)
        loss = loss + DECAY * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    slope = (weight / scale).detach()
    return slope[None], (bias - (slope * mean).sum()).detach()
