"""Two recipes at once: refused when the program is made, or right.

Of a program of lossless passes the text is the model's own, and of one approximate recipe and a
lossless one that of the approximate one alone. A call that goes on from an earlier one, or from a
part of it, gives what a fresh program gives.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from every_recipe import NAMES, made_by, steps_of
from tiny import MASK, PROMPTS

from graftwork.backends import Target, compile
from graftwork.ir.execution.executable import Executable
from graftwork.ir.support.errors import PassError, UnsupportedError
from graftwork.passes.engine.manager import Step, weakest
from graftwork.runtime.generation import generate

Names = tuple[str, ...]
ASKED = {"max_new_tokens": 40, "eos_token_id": []}
OWN_TEXT = ("medusa_typical", "contrastive", "judge")
"""Recipes in which drafts have a say in the text: with another drafter they say something else."""
PARTED = ("hydragen",)
"""Recipes that add up a softmax in parts: last bits, which activations in 8 bits make more of."""

BROKEN_ONCE = [("ppd", "int8"), ("layerskip", "copyspec_recycling"), ("s3d", "int4")]


def pairs(count: int) -> list[Names]:
    """So many pairs, drawn once for all, those that have gone wrong first."""
    drawn = random.Random(0)
    found = dict.fromkeys(BROKEN_ONCE)
    while len(found) < count:
        found[tuple(drawn.sample(NAMES, 2))] = None
    return list(found)


def marked(found: Sequence[Names]) -> list[Any]:
    """As parameters: a few every day, some in the long run, the rest in the sweep."""
    marks = [[]] * 2 + [[pytest.mark.long]] * 28 + [[pytest.mark.sweep]] * (len(found) - 30)
    return [
        pytest.param(names, marks=mark, id="+".join(names))
        for names, mark in zip(found, marks, strict=True)
    ]


def merged(names: Names, folder: Path) -> list[Step]:
    """The passes of all, each once: the first recipe's options hold."""
    found: dict[str, Step] = {}
    for name in names:
        for step in steps_of(name, folder):
            found.setdefault(step.pass_.name, step)
    return list(found.values())


def texts(executable: Executable) -> list[torch.Tensor]:
    """What it says in a ragged batch and alone."""
    batch = generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
    return [batch, generate(executable, PROMPTS[2:3], **ASKED)]


@cache
def wanted(names: Names, backend: str) -> list[torch.Tensor]:
    """What recipes say by themselves."""
    with TemporaryDirectory() as folder:
        program = made_by(merged(names, Path(folder)))
    return texts(compile(program, Target(backend, "cpu")))


def is_approximate(name: str, folder: Path) -> bool:
    contracts = [step.pass_.contract for step in steps_of(name, folder)]
    return weakest(contracts).value == "approximate"


@pytest.mark.parametrize("names", marked(pairs(300)))
def test_two_recipes_are_refused_or_right(names: Names, tmp_path: Path) -> None:
    steps = merged(names, tmp_path)
    try:
        program = made_by(steps)
    except (PassError, UnsupportedError):
        return
    approximate = tuple(name for name in names if is_approximate(name, tmp_path))
    for backend in ("eager", "onnxruntime"):
        executable, fresh = (compile(program, Target(backend, "cpu")) for _ in range(2))
        found = texts(executable)
        other = {*OWN_TEXT, *(PARTED if approximate else ())}
        if len(approximate) < 2 and other.isdisjoint(names):
            alone = wanted(approximate or ("baseline",), backend)
            assert all(map(torch.equal, found, alone)), backend
        for kept, more in ((25, [3, 9, 4]), (14, [8, 8])):
            prompt = torch.cat([found[1][:, :kept], torch.tensor([more])], 1)
            again = generate(executable, prompt, **ASKED)
            assert torch.equal(again, generate(fresh, prompt, **ASKED)), (backend, kept)
