"""Plan folders: every function as a file, and the runners that come with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnxruntime_helpers import module_at, needs_node
from selection import one_in
from tiny import cached_llama, tiny_llama

from graftwork.backends import Target
from graftwork.exporting import plan as export_plan
from graftwork.exporting.plan import export_onnx_plan
from graftwork.exporting.plan_format import PlanFile
from graftwork.ir import InputError, UnsupportedError
from graftwork.model import Model
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe

PROMPTS = ([1, 2, 3, 4], [5, 6, 7, 5, 6, 7, 5, 6], [9])
RECIPES = (
    "baseline",
    "copyspec",
    "medusa",
    "eagle_chain",
    "layerskip",
    "d3",
    "skipdecode",
    "int8",
    "int8_copyspec",
    "skip_layers",
)


@cache
def made(recipe: str) -> Model:
    """A tiny model of four layers after a recipe."""
    chosen = Recipe.load(recipe)
    if recipe == "skip_layers":
        chosen = chosen.with_options(["skip_layers.layers=[1]", "skip_layers.prefill=full"])
    program, _ = run_passes(tiny_llama(4), chosen.steps)
    return Model(program, Target(threads=1), chosen.as_dict())


@cache
def texts(recipe: str) -> list[list[int]]:
    return [made(recipe).generate([p], max_new_tokens=20)[0, len(p) :].tolist() for p in PROMPTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def folder(recipe: str) -> Path:
        return made(recipe).export_onnx_plan(tmp_path_factory.mktemp("plans") / recipe)

    return folder


def runner(folder: Path) -> ModuleType:
    return module_at(folder / "run.py")


@pytest.mark.parametrize("recipe", one_in(2, RECIPES))
@pytest.mark.filterwarnings("ignore:.*untrained")
def test_the_runner_gives_the_models_tokens(recipe: str, folders: Any) -> None:
    run = runner(folders(recipe)).Runner(folders(recipe))
    assert [run.generate(prompt, 20) for prompt in PROMPTS] == texts(recipe)
    drafts = made(recipe).program.plan.speculates and recipe not in ("eagle_chain", "layerskip")
    if drafts:  # those two are untrained and follow nothing
        run.generate(PROMPTS[0], 20)
        assert run.steps < 19


@pytest.mark.parametrize("recipe", ["medusa", "eagle_chain", "d3", "int8"])
@pytest.mark.filterwarnings("ignore:.*untrained")
def test_what_a_folder_holds(recipe: str, folders: Any) -> None:
    """Files that ONNX's checker knows, weights once, a plan of its format, and no more."""
    folder = folders(recipe)
    said = PlanFile.model_validate_json((folder / "plan.json").read_text())
    assert json.loads((folder / "plan.schema.json").read_text()) == PlanFile.model_json_schema()
    files = {v.file for f in said.functions.values() for v in f.variants.values()}
    assert {path.name for path in folder.glob("*.onnx")} == files
    others = {path.name for path in folder.iterdir()} - {"__pycache__"}  # run.py has run there
    assert sorted(others - files) == [
        *("README.md", "generation_config.json", "plan.json", "plan.schema.json"),
        *("plan_functions.py", "run.js", "run.py", "weights.data"),
    ]
    places: dict[str, tuple[str, ...]] = {}
    for name in files:
        onnx.checker.check_model(str(folder / name), full_check=True)
        model = onnx.load(folder / name, load_external_data=False)
        assert {node.domain for node in model.graph.node} <= {"", "com.microsoft"}
        for tensor in model.graph.initializer:
            if tensor.external_data:
                entry = tuple(e.value for e in tensor.external_data)
                assert entry[0] == "weights.data"
                assert places.setdefault(tensor.name, entry) == entry


def test_a_runner_refuses_what_it_does_not_know(folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(folders("copyspec"), folder)
    said = json.loads((folder / "plan.json").read_text())
    for change, message in (
        ({"requires": [*said["requires"], "tree:best_first"]}, "does not know tree=best_first"),
        ({"version": 2}, "version 1"),
    ):
        (folder / "plan.json").write_text(json.dumps(said | change))
        with pytest.raises(SystemExit, match=message):
            runner(folder).Runner(folder)
    with pytest.raises(SystemExit, match="1 to 127 tokens, got 0"):
        runner(folders("copyspec")).Runner(folders("copyspec")).generate([], 3)


DAMAGES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "a number": ({"overhang": 3}, False, "plan.json is damaged: its sha256 is another"),
    "no model": ({"model": None}, True, "cannot be run"),
    "no hash": ({"sha256": None}, False, "cannot be run"),
    "a file outside": ({}, True, "no file of this folder"),
    "no function": ({"step": {"decode": ["x"], "prompt": ["x"]}}, True, "cannot be run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("runs", ["run.py", "run.js"])
def test_a_damaged_plan_ends_its_runners_with_a_line(
    runs: str, damage: str, folders: Any, tmp_path: Path
) -> None:
    """Sealed anew or not."""
    if runs == "run.js":
        needs_node()
    folder, (change, sealed, message) = tmp_path / "plan", DAMAGES[damage]
    shutil.copytree(folders("copyspec"), folder)
    said = json.loads((folder / "plan.json").read_text())
    if damage == "a file outside":
        shutil.copy(folder / "0.chain.onnx", tmp_path / "1.chain.onnx")
        said["functions"]["step"]["variants"]["chain"]["file"] = "../1.chain.onnx"
    (folder / "plan.json").write_text(json.dumps({**said, **change}, indent=2))
    if sealed:
        export_plan.seal(folder / "plan.json")
    command = [sys.executable, "-I"] if runs == "run.py" else ["node"]
    ran = subprocess.run(
        [*command, str(folder / runs), str(folder), "1,2,3", "4"], capture_output=True, text=True
    )
    assert ran.returncode == 1 and not ran.stdout
    assert len(ran.stderr.splitlines()) == 1 and message in ran.stderr, ran.stderr


def test_the_runner_is_short_and_needs_nothing_of_ours(folders: Any) -> None:
    path = folders("baseline") / "run.py"
    assert len(path.read_text().splitlines()) <= 200
    command = [sys.executable, "-I", str(path), str(path.parent), "1,2,3,4", "20"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [int(token) for token in shown.split(",")] == texts("baseline")[0]


@pytest.mark.filterwarnings("ignore:.*untrained")
def test_the_runner_for_node(folders: Any) -> None:
    needs_node()
    for recipe in ("copyspec", "medusa", "eagle_chain", "layerskip", "d3", "int8"):
        folder = folders(recipe)
        command = ["node", str(folder / "run.js"), str(folder), "5,6,7,5,6,7,5,6", "20"]
        shown = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        assert shown.stdout.strip() == ",".join(map(str, texts(recipe)[1])), shown.stderr


@pytest.mark.parametrize("command", [(sys.executable, "-ISB", "run.py"), ("node", "run.js")])
def test_runners_say_how_they_are_used(command: tuple[str, ...]) -> None:
    """Before they look for onnxruntime, which whoever asks may not have yet."""
    *interpreter, name = command
    if shutil.which(interpreter[0]) is None:
        pytest.skip(f"needs {interpreter[0]}")
    path = Path(export_plan.__file__).parent / "runners" / name

    def ran(*args: str) -> tuple[int, str, str]:
        done = subprocess.run([*interpreter, str(path), *args], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    for asked in ("--help", "-h"):
        code, shown, errors = ran(asked)
        assert (code, errors) == (0, "") and f"{name} FOLDER 1,2,3 32" in shown
    for wrong in ((), ("folder",), ("folder", "1,2,3", "32", "more")):
        assert ran(*wrong) == (2, "", shown)


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no KV cache"):
        export_onnx_plan(tiny_llama(), tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="something else"):
        export_onnx_plan(cached_llama(), other)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
