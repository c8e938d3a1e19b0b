"""Calls with the same tensors again, bound to their memory, mean what routed calls mean."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from handmade import Shape, cached_llama

from graftwork.backends import compile
from graftwork.backends.onnxruntime.executable import OnnxExecutable
from graftwork.backends.onnxruntime.replay import KEPT
from graftwork.backends.target import Target


def made(trees: bool = False) -> OnnxExecutable:
    executable = compile(cached_llama(Shape(), trees=trees), Target(threads=1))
    assert isinstance(executable, OnnxExecutable)
    return executable


def inputs(batch: int, width: int, trees: bool = False) -> dict[str, torch.Tensor]:
    """What a step of `width` columns takes, as tensors that are written before each step."""
    found = {
        "tokens": torch.zeros(batch, width, dtype=torch.int64),
        "positions": torch.zeros(batch, width, dtype=torch.int64),
        "past": torch.zeros(batch, dtype=torch.int64),
        "select": torch.arange(width).repeat(batch, 1),
    }
    if trees:
        found["ancestors"] = torch.zeros(batch, width, width, dtype=torch.bool)
    return found


def write(into: Mapping[str, torch.Tensor], past: list[int], seed: int) -> None:
    """Random tokens after `past` rows; a tree of a random shape if there are ancestors."""
    random = torch.Generator().manual_seed(seed)
    batch, width = into["tokens"].shape
    into["tokens"].copy_(torch.randint(0, 61, (batch, width), generator=random))
    into["past"].copy_(torch.tensor(past))
    seen = torch.ones(width, width, dtype=torch.bool).tril().expand(batch, width, width).clone()
    if "ancestors" in into:
        for column in range(1, width):
            parent = int(torch.randint(0, column, (1,), generator=random))
            seen[:, column] = seen[:, parent]
            seen[:, column, column] = True
        into["ancestors"].copy_(seen)
    into["positions"].copy_(torch.tensor(past)[:, None] + seen.sum(-1) - 1)


@pytest.mark.parametrize(("batch", "trees"), [(1, False), (1, True), (3, False), (3, True)])
def test_the_same_results_in_the_same_tensors(batch: int, trees: bool) -> None:
    kept, fresh = made(trees), made(trees)
    mine = {width: inputs(batch, width, trees and width > 1) for width in (1, 4)}
    past = [0] * batch
    for executable in (kept, fresh):
        executable.begin(batch, 8)
    for step in range(40):
        if step == 20:  # another generation
            past = [0] * batch
            for executable in (kept, fresh):
                executable.begin(batch, 8)
        width = (4, 1, 1)[step % 3]
        write(mine[width], past, step)
        given = {name: tensor.clone() for name, tensor in mine[width].items()}
        for executable in (kept, fresh):
            executable.reserve(max(past) + width)
        got = kept.run("step", mine[width], ("logits",))["logits"].clone()
        want = fresh.run("step", given, ("logits",))["logits"]
        assert torch.equal(got, want), step
        past = [rows + 1 + (width > 1) * (number % 3) for number, rows in enumerate(past)]
    replayed = [call[1] for call in kept._replays["step"].calls.values()]
    assert len(replayed) == 2 and None not in replayed
    assert all(call[1] is None for call in fresh._replays["step"].calls.values())


def test_calls_that_never_come_again_are_forgotten() -> None:
    executable = made()
    executable.begin(1, KEPT + 20)
    executable.reserve(KEPT + 20)
    for rows in range(KEPT + 10):
        given = inputs(1, 1)
        write(given, [rows], rows)
        executable.run("step", given, ("logits",))
    assert len(executable._replays["step"].calls) == KEPT


def test_tensors_that_are_not_contiguous_are_copied() -> None:
    executable, twin = made(), made()
    wide = inputs(1, 8)
    given = {name: t[:, ::2] if t.dim() == 2 else t for name, t in wide.items()}
    given["select"].copy_(torch.arange(4))
    for rows in (1, 2, 3):
        write(given, [rows], rows)
        for each in (executable, twin):
            each.begin(1, 32)
        plain = {name: tensor.contiguous() for name, tensor in given.items()}
        got = executable.run("step", given, ("logits",))["logits"].clone()
        assert torch.equal(got, twin.run("step", plain, ("logits",))["logits"])
