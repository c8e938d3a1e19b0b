"""Which layers a model misses least, by a text.

The cosine of the states before and behind a layer says how much it changes (block influence: Men et
al., "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect", 2024). That
alone misleads: of two layers that change as little the text may miss one three times as much. So
cosines say which layers come into question, and the text's loss without each of those decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ...ir import Program, run
from ..engine.feed import empty_inputs, watched

G = torch.ops.graftwork

Part: TypeAlias = tuple[str, int]
"""An option of `skip_layers` ("layers", "attention" or "mlp"), and a layer's number."""
SHARE = 1 / 3
"""Of the layers that come into question."""


def loss(program: Program, windows: torch.Tensor) -> float:
    """Nats a token of windows i64[N,T] by a program without a cache, first tokens aside."""
    step, found = program.step.name, []
    for window in windows:
        logits = run(program, step, empty_inputs(program, step, window[None]))["logits"][0, :-1]
        found.append(torch.nn.functional.cross_entropy(logits.float(), window[1:]).item())
    return statistics.mean(found)


def cosines(program: Program, windows: torch.Tensor, sublayers: bool = False) -> dict[Part, float]:
    """The mean cosine of the states before and behind every layer, or its attention and its MLP."""
    fn = program.step
    markers = fn.calls(G.hidden.default)
    pairs: dict[Part, tuple[int, int]] = {}
    before = 0
    for index, node in enumerate(markers):
        layer, point = int(str(node.kwargs["layer"])), node.kwargs["point"]
        if point == "block":
            if sublayers and index - before > 1:
                pairs["attention", layer] = (before, index - 1)
                pairs["mlp", layer] = (index - 1, index)
            elif not sublayers:
                pairs["layers", layer] = (before, index)
            before = index
    sums = dict.fromkeys(pairs, 0.0)
    values = {f"state.{index}": node for index, node in enumerate(markers)}
    for states in watched(program, fn, values, windows):
        rows = list(states.values())
        for part, (first, last) in pairs.items():
            alike = torch.cosine_similarity(rows[first].float(), rows[last].float(), dim=-1)
            sums[part] += float(alike.mean()) / len(windows)
    return sums


def missed_least(
    costs: Callable[[Sequence[Part]], float], parts: Sequence[Part], count: int
) -> list[Part]:
    """`count` parts, one after the other: each time the one without which the text costs least,
    beside those that are gone already. costs: of a text without some parts."""
    gone: list[Part] = []
    for _ in range(count):
        left = [part for part in parts if part not in gone]
        gone.append(min(left, key=lambda part: costs([*gone, part])))
    return gone


def in_question(alike: dict[Part, float], count: int) -> list[Part]:
    """The parts that change their states least, `count` at least."""
    most = max(count, round(SHARE * len(alike)))
    return sorted(alike, key=lambda part: -alike[part])[:most]
