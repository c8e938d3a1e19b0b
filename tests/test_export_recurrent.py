"""Models with recurrences, as plan folders and loops: texts are the model's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnxruntime_helpers import module_at, needs_node
from recurrent_archs import RECURRENT
from test_architectures import same_tokens
from test_export_loop import asked, opened, texts
from test_recurrent import imported

import graftwork as gw
from graftwork.exporting.plan_format import PlanFile

MOST = 24
CHAIN = {"extends": "baseline", "passes": ["draft_medusa", {"tree_chain": {"depth": 3}}]}
RECIPES: dict[str, Any] = {
    "baseline": "baseline",
    "copyspec": "copyspec",
    "heads": CHAIN,
    "eagle_chain": "eagle_chain",
    "int8_copyspec": "int8_copyspec",
}
QUICK = {("recurrent_gemma", "copyspec")}
LONG = {
    ("mamba2", "baseline"),
    ("lfm2", "eagle_chain"),
    ("falcon_mamba", "eagle_chain"),
    ("qwen3_5_text", "heads"),
    ("mamba2", "int8_copyspec"),
    ("granitemoehybrid", "int8_copyspec"),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*untrained")


def combinations() -> Iterator[Any]:
    """Families with recipes: that which shows most, and the rest."""
    for name in RECURRENT:
        for recipe in RECIPES:
            case = name, recipe
            rare = pytest.mark.long if case in LONG else pytest.mark.sweep
            yield pytest.param(name, recipe, marks=[] if case in QUICK else [rare])


@cache
def prompts(name: str) -> list[list[int]]:
    """More tokens than recurrences are fed at once, where contexts have as many; one that repeats
    itself; and a lone token."""
    count = min(70, imported(name)[1].info.context - MOST - 1)
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 128, (count,), generator=generator).tolist(), [7] * 12, [17]]


def made(name: str, recipe: str) -> Any:
    return gw.optimize(imported(name)[0], RECIPES[recipe], target=gw.Target(threads=1))


def expected(name: str, fast: Any) -> list[list[int]]:
    """New tokens of the model."""
    options: dict[str, Any] = {"max_new_tokens": MOST, "eos_token_id": [], "pad_token_id": 0}
    return [fast.generate([p], **options)[0, len(p) :].tolist() for p in prompts(name)]


def check(name: str, got: list[list[int]], want: list[list[int]], rounds: bool) -> None:
    """Texts are equal, or part where the best two logits tie; where activations are rounded, they
    are equal."""
    for prompt, ours, theirs in zip(prompts(name), got, want, strict=True):
        pair = [torch.tensor([*prompt, *text]) for text in (ours, theirs)]
        assert ours == theirs or (not rounds and same_tokens(imported(name)[0], *pair))


@pytest.mark.parametrize(("name", "recipe"), combinations())
def test_the_models_texts(name: str, recipe: str, tmp_path: Path) -> None:
    """From a folder, and from a loop, alone and with others; what drafts is kept somewhere."""
    fast = made(name, recipe)
    plan = fast.export_onnx_plan(tmp_path / "plan")
    loop = fast.export_onnx_loop(tmp_path / "loop")
    for file in (*plan.glob("*.onnx"), loop / "generate.onnx"):
        onnx.checker.check_model(str(file), full_check=True)
    given, want, rounds = prompts(name), expected(name, fast), recipe.startswith("int8")
    runner, session = module_at(plan / "run.py").Runner(plan), opened(loop)
    got, steps = [], 0
    for prompt in given:
        got.append(runner.generate(prompt, MOST, eos=[]))
        steps += runner.steps
    check(name, got, want, rounds)
    assert steps < 3 * (MOST - 1) or (name, recipe) != ("recurrent_gemma", "copyspec")
    check(name, texts(session, asked(given, MOST, [])), want, rounds)
    check(name, [texts(session, asked([p], MOST, []))[0] for p in given], want, rounds)
    ends = {text[MOST // 2] for text in got}
    until = [text[: min(text.index(e) for e in ends if e in text) + 1] for text in got]
    assert texts(session, asked(given, MOST, sorted(ends))) == until
    assert [runner.generate(p, MOST, eos=sorted(ends)) for p in given] == until


@pytest.mark.long
def test_loops_of_onnx_alone(tmp_path: Path) -> None:
    """No domain but ONNX's; states are as they are, and caches grow."""
    for name, recipe in (("mamba2", "baseline"), ("recurrent_gemma", "copyspec")):
        fast = made(name, recipe)
        folder = fast.export_onnx_loop(tmp_path / name, ops="standard")
        got = texts(opened(folder), asked(prompts(name), MOST, []))
        check(name, got, expected(name, fast), False)


@pytest.mark.long
def test_a_sampled_text_is_the_plain_loops(tmp_path: Path) -> None:
    """By the same numbers, whatever is drafted."""
    numbers = np.random.default_rng(3).random((3, MOST), np.float32)
    drawn = {"uniforms": numbers, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    drawn |= {"repetition_penalty": 1.1}
    found = []
    for recipe in ("baseline", "copyspec"):
        folder = made("mamba2", recipe).export_onnx_loop(tmp_path / recipe, sample=True)
        session = opened(folder)
        kinds = {
            i.name: np.float32 if "float" in i.type else np.int64 for i in session.get_inputs()
        }
        given = asked(prompts("mamba2"), MOST, [])
        given |= {key: np.array(value, kinds[key]) for key, value in drawn.items()}
        found.append(texts(session, given))
    assert found[0] == found[1]


@pytest.mark.long
def test_what_a_folder_says(tmp_path: Path) -> None:
    """States of recurrences are read and written apart; prompts come in pieces of so many."""
    for name, chunk in (("mamba2", 64), ("mamba", 16), ("lfm2", 64)):
        fast = made(name, "copyspec")
        folder = fast.export_onnx_plan(tmp_path / name)
        said = PlanFile.model_validate_json((folder / "plan.json").read_text())
        assert "states:recurrent" in said.requires
        kinds = {(state.rows, state.in_place) for state in said.states.values()}
        assert {(None, False), ("W", False)} <= kinds
        assert said.step.chunk == (fast.program.info.context if name == "lfm2" else chunk)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["recycling", "medusa"])
def test_paths_of_trees(recipe: str, tmp_path: Path) -> None:
    """Folders hold trees; a loop says who carries them. Logs move with the caches' rows."""
    fast = gw.optimize(imported("mamba2")[0], recipe, target=gw.Target(threads=1))
    with pytest.raises(gw.GraftworkError, match="The format onnx-plan carries it"):
        fast.export_onnx_loop(tmp_path / "loop")
    if recipe == "medusa":
        folder = fast.export_onnx_plan(tmp_path / "plan")
        runner = module_at(folder / "run.py").Runner(folder)
        got = [runner.generate(p, MOST, eos=[]) for p in prompts("mamba2")]
        check("mamba2", got, expected("mamba2", fast), False)


@pytest.mark.long
def test_the_runners_from_the_command_line(tmp_path: Path) -> None:
    """In Python, and in Node where that is."""
    fast = made("mamba2", "copyspec")
    folder = fast.export_onnx_plan(tmp_path / "plan")
    prompt = prompts("mamba2")[1]
    want = ",".join(map(str, expected("mamba2", fast)[1]))
    for command in ([sys.executable, "-I", "run.py"], ["node", "run.js"]):
        if command[0] == "node":
            needs_node()
        *start, file = command
        line = [*start, str(folder / file), str(folder), ",".join(map(str, prompt)), str(MOST)]
        shown = subprocess.run(line, capture_output=True, text=True)
        assert shown.stdout.strip() == want, shown.stderr
