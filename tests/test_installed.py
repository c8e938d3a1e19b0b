"""Passes, records and recipes that other installed packages bring: found, used, refused clearly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from test_cli import CPU, TEXT, checkpoint  # noqa: F401  (a fixture)
from tiny import PROMPTS, tiny_llama

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.ir import InputError
from graftwork.ir.ops.numerics import dequantize
from graftwork.ir.support import discovery
from graftwork.ir.support.discovery import import_methods, import_passes
from graftwork.passes import all_passes
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.numerics.methods import base
from graftwork.recipe import Recipe
from graftwork.runtime import generate

discovery.import_all(discovery.PASSES)  # before a test has registries of its own

PASSES = '''\
"""A drafter that repeats the last token, and a pass that scales the logits."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from graftwork.ir.plan import DraftRecord
from graftwork.ir.plan.base import policy
from graftwork.ir.plan.bounds import Nodes
from graftwork.passes import Contract, Effect, Outcome, Pass, register
from graftwork.runtime.speculate.drafters.base import DRAFTERS, ChainDrafter


@policy
@dataclass(frozen=True)
class RepeatDraft(DraftRecord):
    """The last token again. tokens: how often."""

    tokens: Nodes = 2
    kind: ClassVar[str] = "repeat"

    @property
    def most(self) -> int:
        return self.tokens


@DRAFTERS.register(RepeatDraft)
class RepeatDrafter(ChainDrafter):
    def begin(self, prompts):
        self.levels, self.last = self.record.tokens, [prompt[-1] for prompt in prompts]

    def learn(self, index, new, row):
        self.last[index] = new[-1]

    def chain(self, index, room):
        return [self.last[index]] * min(room, self.levels)


@register
class ScaleLogits(Pass):
    """factor: of the logits."""

    factor: float = 2.0
    name: ClassVar[str] = "scale_logits"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.LOGITS})

    def run(self, program):
        fn = program.step.copy()
        with fn.graph.inserting_before(fn.output_node):
            scaled = fn.call(torch.ops.aten.mul.Tensor, fn.outputs["logits"], self.factor)
        fn.set_outputs({**fn.outputs, "logits": scaled})
        return Outcome(program.with_function(fn), 1)
'''
RECIPE = """\
title: Repeat the last token
contract: approximate
extends: baseline
passes: [draft_repeat: {tokens: 3}, scale_logits]
"""
DERIVED = "title: Repeat it once\nextends: repeat\npasses: [draft_repeat: {tokens: 1}]\n"
POINTS = """\
[graftwork.passes]
stub = stub.passes

[graftwork.recipes]
stub = stub.recipes
"""


def install(folder: Path, name: str, points: str, files: Mapping[str, str]) -> Path:
    """What an installer leaves of a package: its files, and its metadata beside them."""
    for path, text in {"__init__.py": "", **files}.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: the-{name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipes = {"recipes/repeat.yaml": RECIPE, "recipes/repeat_once.yaml": DERIVED}
    files = {"passes.py": PASSES, "recipes/__init__.py": "", **recipes}
    return install(tmp_path_factory.mktemp("site"), "stub", POINTS, files)


def run(site: Path, *args: object) -> str:
    """What python says where the package is installed."""
    env = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "120"}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_its_recipes_are_listed_and_shown(stub: Path) -> None:
    listed = run(stub, "-m", "graftwork", "recipes")
    assert "Repeat the last token" in listed and "repeat_once" in listed and "medusa" in listed
    shown = run(stub, "-m", "graftwork", "recipes", "repeat_once")
    assert "tokens=1" in shown and "extends: repeat" in shown


@pytest.mark.long
def test_its_recipe_runs_and_its_artifact_loads(
    stub: Path,
    tmp_path: Path,
    checkpoint: Path,  # noqa: F811
) -> None:
    """In two processes: the second one knows the record from the artifact's text alone."""
    script = (
        "import graftwork as gw, sys\n"
        f"model = gw.optimize(sys.argv[1], 'repeat', target={CPU!r})\n"
        "print(model.program.plan.draft)\n"
        "model.save(sys.argv[2])\n"
    )
    assert "repeat(tokens=3)" in run(stub, "-c", script, checkpoint, tmp_path / "out")
    asked = ("--prompt", TEXT[0], "--max-new-tokens", 24, "--json")
    answer = json.loads(run(stub, "-m", "graftwork", "generate", tmp_path / "out", *asked))
    plain = gw.optimize(checkpoint, "baseline", target=CPU)
    ids = plain.tokenizer.encode(TEXT[0]).ids
    expected = plain.generate([ids], max_new_tokens=24)[0, len(ids) :].tolist()
    assert answer["ids"] == expected and answer["stats"]["draft_tokens"] > 10
    with pytest.raises(InputError, match=r"expected one of .*suffix"):  # here it is not installed
        gw.load(tmp_path / "out")


def forget() -> None:
    """What is installed is looked for again."""
    import_methods.cache_clear()
    import_passes.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose packages are installed in this process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield tmp_path
    forget()


def test_a_recipe_of_a_taken_name_is_refused_with_both_owners(site: Path) -> None:
    points = "[graftwork.recipes]\nx = stub_a.recipes\n"
    recipes = {"recipes/__init__.py": "", "recipes/medusa.yaml": RECIPE}
    install(site, "stub_a", points, recipes)
    with pytest.raises(InputError, match=r"graftwork and the-stub_a both bring .* 'medusa'"):
        gw.recipes()
    with pytest.raises(InputError, match="rename or uninstall one"):
        Recipe.load("baseline")


def test_recipes_that_are_no_package_are_refused(site: Path) -> None:
    points = "[graftwork.recipes]\nx = stub_b.recipes\n"
    install(site, "stub_b", points, {"recipes.py": ""})
    with pytest.raises(InputError, match=r"the-stub_b names stub_b\.recipes .* expected a package"):
        gw.recipes()


METHOD = '''\
"""Half of the columns in the recipe's bits and the others in fewer, all of them shrunk."""

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from graftwork.passes.numerics.methods.base import Method, method
from graftwork.passes.numerics.stored import Form, Stored


@method
class Halves(Method):
    """fewer: bits of the second half. share: of their size that weights keep."""

    fewer: int = 2
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    name: ClassVar[str] = "halves"
    reads_text: ClassVar[bool] = False

    def form(self, numeric, rows, columns):
        return Form((numeric, replace(numeric, bits=self.fewer)), (columns // 2, columns // 2))

    def stored(self, weight, form, prepared):
        halves = (weight * self.share).chunk(2, 1)
        terms = tuple(n.quantize(half) for n, half in zip(form.numerics, halves, strict=True))
        return Stored(terms, torch.arange(weight.shape[1]).chunk(2))
'''
HALVES = """\
title: Weights in two widths
contract: approximate
extends: baseline
passes: [quantize_weights: {method: halves, group: 16, tuning: {fewer: 3}}]
"""


def test_a_weight_method_is_its_file_and_a_recipe(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a form of its own, made of terms that ops know; kernels run it."""
    monkeypatch.setattr(base.METHODS, "entries", {**base.METHODS.entries})
    points = "[graftwork.passes]\nx = stub_g.halves\n[graftwork.recipes]\nx = stub_g.recipes\n"
    recipes = {"recipes/__init__.py": "", "recipes/halves.yaml": HALVES}
    install(site, "stub_g", points, {"halves.py": METHOD, **recipes})
    start = tiny_llama()
    made, _ = run_passes(start, Recipe.load("halves").steps)
    calls = made.step.calls(torch.ops.graftwork.quantized_linear.default)
    assert Counter(call.kwargs["bits"] for call in calls) == {4: len(calls) / 2, 3: len(calls) / 2}
    for call in calls:
        picked = made.weights[call.args[0].args[2].target].load()
        assert (picked[0] == 0) == (call.kwargs["bits"] == 4), call
    name = next(n for n in start.weights if f"{n}.q4" in made.weights)
    columns = start.weights[name].load() * 0.5
    for bits, half in zip((4, 3), columns.chunk(2, 1), strict=True):
        parts = [made.weights[f"{name}.q{bits}{part}"].load() for part in ("", ".scale", ".offset")]
        assert (dequantize(*parts, bits=bits) - half).abs().max() < 0.1
    want = generate(compile(made, Target("eager", "cpu")), PROMPTS, max_new_tokens=4)
    assert torch.equal(generate(compile(made, Target()), PROMPTS, max_new_tokens=4), want)


def test_a_weight_method_of_a_taken_name_is_refused_with_both(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.METHODS, "entries", {**base.METHODS.entries})
    text = METHOD.replace('"halves"', '"awq"')
    install(site, "stub_h", "[graftwork.passes]\nx = stub_h.halves\n", {"halves.py": text})
    with pytest.raises(InputError, match=r"stub_h\.halves and .*awq both bring a method 'awq'"):
        all_passes()


@pytest.mark.parametrize(
    ("name", "passes", "message"),
    [
        ("stub_c", "import nothing_of_the_kind", "ModuleNotFoundError: No module named 'nothing"),
        (
            "stub_d",
            "from graftwork.passes import Pass, register\n@register\nclass A(Pass):\n"
            "    name = 'dce'\n",
            r"stub_d\.passes\.A and graftwork\.passes\.fusing\.dce\.\w+ are both passes called 'd",
        ),
        (
            "stub_e",
            "from dataclasses import dataclass\n"
            "from graftwork.ir.plan import LengthRecord\n"
            "from graftwork.ir.plan.base import policy\n"
            "@policy\n@dataclass(frozen=True)\nclass A(LengthRecord):\n    kind = 'svip'\n",
            r"stub_e\.passes\.A cannot be length=svip: .*SvipLength is",
        ),
    ],
)
def test_a_broken_package_is_refused_by_name(
    site: Path, name: str, passes: str, message: str
) -> None:
    points = f"[graftwork.passes]\nx = {name}.passes\n"
    install(site, name, points, {"passes.py": passes})
    with pytest.raises(InputError, match=f"the-{name} names .*{message}.* uninstall the-{name}"):
        all_passes()


def test_a_broken_recipe_says_whose_it_is(site: Path) -> None:
    points = "[graftwork.recipes]\nx = stub_f.recipes\n"
    recipes = {"recipes/__init__.py": "", "recipes/odd.yaml": "title: Odd\npasses: [drop]\n"}
    install(site, "stub_f", points, recipes)
    with pytest.raises(InputError, match=r"stub_f/recipes/odd\.yaml:2: no pass is called 'drop'"):
        Recipe.load("odd")
