"""Targets whose steps all have so many columns: plain decoding and chains have the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import program_of
from tiny import PROMPTS

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.ir import InputError, Role
from graftwork.ir.execution.executable import Widths
from graftwork.runtime import generate

ASKED: dict[str, Any] = {"do_sample": False, "eos_token_id": [], "max_new_tokens": 40}


def rows_of(recipe: str, target: Target, folder: Path) -> dict[str, torch.Tensor]:
    """What the target's caches hold of a greedy text."""
    executable = compile(program_of(recipe, folder), target)
    prompt = PROMPTS[2:3]
    found = generate(executable, prompt, return_dict_in_generate=True, **ASKED)
    assert (found.stats.accepted_tokens > 5) == (recipe != "baseline")
    names = [name for name in executable.program.states if name.startswith("kv.")]
    return executable.read_rows(names, 0, 0, prompt.shape[1] + ASKED["max_new_tokens"] - 1)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_chains_change_no_bit(backend: str, tmp_path: Path) -> None:
    target = Target(backend, "cpu", columns=12)
    plain, fast = (rows_of(name, target, tmp_path) for name in ("baseline", "copyspec"))
    assert plain.keys() == fast.keys()
    assert all(torch.equal(plain[name], fast[name]) for name in plain)


def test_without_them_a_bit_may_change(tmp_path: Path) -> None:
    """So that the test above can fail."""
    plain, fast = (rows_of(name, Target("eager"), tmp_path) for name in ("baseline", "copyspec"))
    assert not all(torch.equal(plain[name], fast[name]) for name in plain)


@pytest.mark.parametrize("backend", ["eager", "torch", "onnxruntime"])
def test_every_step_of_the_target_has_them(backend: str, tmp_path: Path) -> None:
    """And caches have one size, of whatever length a text is."""
    program = program_of("draft_model", tmp_path)
    executable = compile(program, Target(backend, "cpu", columns=12))
    for name, function in program.functions.items():
        if function.role is Role.TARGET:
            assert executable.widths(name) == Widths((12, 128))
        else:
            assert executable.widths(name) != Widths((12, 128))
    sizes = set()
    for rows in (8, 60):
        executable.begin(1, rows)
        executable.reserve(rows)
        sizes.add(executable.capacity)
    assert sizes == {executable.limit}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"up to 11 columns.*take columns=11 or more"):
        compile(program_of("copyspec", tmp_path), Target("eager", "cpu", columns=4))
    for text in ("eager:cpu:float32:8", "eager:cpu:float32:columns=-1", "eager:cpu:float32:rows=8"):
        with pytest.raises(InputError, match="expected columns=N after the dtype"):
            Target.parse(text)
    with pytest.raises(InputError, match="expected 1 to 128 columns"):
        Target.parse("eager:cpu:float32:columns=129")
    assert str(Target.parse("eager:cpu:float32:columns=9")) == "eager:cpu:float32:columns=9"


def test_it_is_part_of_a_target() -> None:
    with pytest.raises(InputError, match="take columns="):
        gw.optimize(demo_folder(), "copyspec", target="eager:cpu:float32:columns=2")
