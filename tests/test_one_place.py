"""A method is a folder and a recipe: here are a drafter and a depth policy that a package brings.

The drafter has a record, a proposer, a pass with weights and an objective of its own: four files
with its recipe. The depth policy has a record, a class and a pass: three. Nothing else names them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_export_loop import asked, expected, opened, texts
from test_installed import forget, install
from test_training import TEXT
from tiny import PROMPTS, tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.onnxruntime.chains_in_graph import CHAINS
from graftwork.backends.target import Target
from graftwork.ir import InputError, UnsupportedError
from graftwork.ir.plan import RECORDS
from graftwork.ir.support.discovery import LOOP, OBJECTIVE, import_all, import_methods
from graftwork.model import Model
from graftwork.passes import all_passes
from graftwork.passes.engine import base as pass_base
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.depth import DEPTHS
from graftwork.runtime.speculate.proposers import PROPOSERS
from graftwork.training import fit
from graftwork.training.objectives import OBJECTIVES

EAGER = Target.parse("eager")
ASKED: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": []}
POINTS = "[graftwork.passes]\nx = {name}\n[graftwork.recipes]\nx = {name}.recipes\n"

DRAFTER = {
    "echo/__init__.py": '''
"""A layer on the target's last state says what follows, the same at every level."""

from typing import ClassVar

from graftwork.ir.plan import LearningDraft, candidates, record
from graftwork.ir.plan.bounds import Filled, Levels
from graftwork.runtime.speculate.proposers.base import PROPOSERS, repeated
from graftwork.runtime.speculate.proposers.hidden import HiddenProposer, level_of


@record
class EchoDraft(LearningDraft):
    """function: takes ``hidden``. levels: tokens drafted. trained: whether it knows anything."""

    function: Filled[str] = "echo"
    levels: Levels = 2
    trained: Filled[bool] = False
    kind: ClassVar[str] = "echo"
    grows: ClassVar[bool] = True
    always: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("hidden",)

    def calls(self, plan):
        yield self.function, candidates()


@PROPOSERS.register(EchoDraft)
class EchoProposer(HiddenProposer):
    def start(self, tokens, states, count):
        self.level = level_of(self.run(self.record.function, hidden=states), count)
        return self.level

    def grow(self, tokens, parents, count):
        return repeated(self.level, parents)
''',
    "echo/graph.py": '''
from graftwork.passes.drafting.draft_pass import DraftPass
from graftwork.passes.drafting.grafts import Graft
from graftwork.passes.engine.base import Outcome
from graftwork.passes.policies import builds

from . import EchoDraft


@builds(EchoDraft, aim="distribution")
class DraftEcho(DraftPass):
    """blocks: of the layer."""

    blocks: int = 1

    def insert(self, program):
        graft = Graft(program, self.name, "echo", self.weights)
        x = graft.input(graft.tap(), graft.hidden)
        for block in range(self.blocks):
            x = graft.linear(x, f"echo.{block}", graft.hidden, bias=False, init="eye")
        outputs = graft.candidates(graft.head(graft.norm(x)), self.candidates)
        draft = self.made(function="echo", trained=bool(self.weights))
        return Outcome(graft.drafted(outputs, draft), 1)
''',
    "echo/objective.py": """
from graftwork.training.objectives.base import Loss, distilled, hit_rate, objective

from . import EchoDraft


@objective(EchoDraft)
def echo_loss(record, run, batch):
    student = run(record.function, hidden=batch.hidden["hidden"])["draft_logits"]
    return Loss(distilled(student, batch.target(record.aim), 1), [hit_rate(student, batch.best, 1)])
""",
    "recipes/echo.yaml": """
title: The last state says what follows
contract: lossless
extends: baseline
passes: [draft_echo: {levels: 3}, accept_trees, tree_chain: {depth: 3}]
""",
}

ECHO_LOOP = """
from graftwork.backends.onnxruntime.chains_in_graph import chain

from . import EchoDraft


@chain(EchoDraft)
def echoed(g, record, step):
    hidden = g.op("Gather", step.values["hidden"], g.vector(step.column), axis=1)
    made = step.functions.call(g, record.function, {"hidden": hidden})["draft_tokens"]
    best = g.op("Gather", g.op("Reshape", made, g.const([-1])), g.const([0]))
    return g.op("Expand", best, g.const([record.levels])), step.values
"""

DEPTH = {
    "alternate/__init__.py": '''
"""Some tokens run through the first layers alone."""

from dataclasses import dataclass
from typing import ClassVar

from graftwork.ir.plan import DepthRecord, record
from graftwork.ir.plan.bounds import Filled, Nodes
from graftwork.runtime.depth.base import DEPTHS, DepthPolicy


@record
@dataclass(frozen=True)
class AlternateDepth(DepthRecord):
    """period: every so many tokens one runs through all layers. functions: for each segment but the
    first what makes the cache rows that the others lack."""

    period: Nodes = 2
    functions: Filled[tuple[str, ...]] = ()
    kind: ClassVar[str] = "alternate"

    def calls(self, plan):
        yield from ((name, {}) for name in self.functions)


@DEPTHS.register(AlternateDepth)
class AlternatePolicy(DepthPolicy):
    def feed(self, step):
        self.ran = self.total
        written = max(text.generated for text in self.texts)
        if any(len(row) > 1 for row in step.rows) or written % self.record.period == 0:
            return super().feed(step)
        self.ran = self.sizes[0]
        self.feeder.run_parts(self.parts[:1], step, ())
        outputs = self.feeder.run_parts((self.head,), step, step.fetch)
        self.feeder.run_parts(self.record.functions, step, ())
        return outputs
''',
    "alternate/graph.py": '''
from typing import ClassVar

from graftwork.passes.depth.confident.graph import filling
from graftwork.passes.engine.plan_edits import with_record
from graftwork.passes.engine.base import Effect, Outcome
from graftwork.passes.policies import RecordPass, builds

from . import AlternateDepth


@builds(AlternateDepth)
class DepthAlternate(RecordPass):
    """See the record."""

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS, Effect.DECODE_PLAN})

    def run(self, program):
        _, *deeper, _ = program.plan.step.parts
        fills = {f"{name}.fill": filling(program, name) for name in deeper}
        made = program.replace(functions={**program.functions, **fills})
        record = self.made(functions=tuple(fills))
        return Outcome(with_record(made, self.name, record), len(fills))
''',
    "recipes/alternate.yaml": """
title: Every other token runs through the first layers alone
contract: approximate
extends: baseline
passes: [cut_depth: {exits: [1]}, depth_alternate: {period: 2}]
""",
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a package declares is gone after a test."""
    all_passes()
    import_methods(OBJECTIVE)
    import_methods(LOOP)
    import_all("graftwork.training.objectives")
    tables: list[dict[Any, Any]] = [RECORDS, pass_base._PASSES, OBJECTIVES, CHAINS]
    for registry in (PROPOSERS, DEPTHS):
        import_all(registry.package)
        tables.append(registry.classes)
    before = [dict(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)
    monkeypatch.undo()
    forget()


def brought(site: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, str]) -> None:
    """A package with one method is installed."""
    install(site, name, POINTS.format(name=name), {"recipes/__init__.py": "", **files})
    monkeypatch.syspath_prepend(str(site))
    forget()


def optimized(recipe: str) -> Model:
    """The tiny model under a recipe."""
    found = Recipe.load(recipe)
    return Model(run_passes(tiny_llama(), found.steps)[0], EAGER, found.as_dict())


LIGHT = """
import sys, torch, graftwork as gw
model = gw.load(sys.argv[1])
print(model.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=4, eos_token_id=[]).tolist())
heavy = ("transformers", "graftwork.training", "echo_drafts.echo.graph")
heavy += ("echo_drafts.echo.objective", "graftwork.passes.drafting.grafts")
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.long
def test_a_drafter_with_an_objective_is_four_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(DRAFTER) <= 4
    site = tmp_path / "site"
    brought(site, monkeypatch, "echo_drafts", DRAFTER)
    with pytest.raises(InputError, match=r"'levels': Input should be less than or equal to 256"):
        Recipe.load("echo").with_options(["draft_echo.levels=300"])
    with pytest.raises(InputError, match="draft_echo' has no option 'trained'"):
        Recipe.load("echo").with_options(["draft_echo.trained=true"])
    model = optimized("echo")
    assert str(model.program.plan.draft) == (
        "echo(aim='distribution', function='echo', levels=3, trained=False)"
    )
    plain = optimized("baseline").generate(PROMPTS[:2], **ASKED)
    assert torch.equal(model.generate(PROMPTS[:2], **ASKED), plain)
    options: dict[str, Any] = {"steps": 3, "batch": 2, "window": 24, "own": 0.0, "rate": 1e-2}
    fitted = fit(model, TEXT, out=tmp_path / "fit", **options).model
    before, after = (made.program.weights for made in (model, fitted))
    changed = {name for name in before if not torch.equal(before[name].load(), after[name].load())}
    assert changed == {"echo.0.weight"}
    assert fitted.program.plan.draft.trained  # type: ignore[attr-defined]
    fitted.save(tmp_path / "saved")
    again = gw.load(tmp_path / "saved")
    assert again.program.plan == fitted.program.plan
    found = again.generate(PROMPTS[:2], **ASKED, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain) and found.stats.draft_tokens > 8
    told = subprocess.run(
        [sys.executable, "-c", LIGHT, tmp_path / "saved"],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "[]"  # what is only for passes and training stays out


def test_a_drafter_that_nothing_carries_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = DRAFTER["echo/__init__.py"].replace("@PROPOSERS.register(EchoDraft)", "")
    brought(tmp_path, monkeypatch, "echo_mute", {**DRAFTER, "echo/__init__.py": start})
    with pytest.raises(UnsupportedError, match=r"registered for EchoDraft; .*draft=heads"):
        optimized("echo").generate(PROMPTS[:1], **ASKED)


def test_a_loop_is_a_file_of_the_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought(tmp_path, monkeypatch, "echo_loops", {**DRAFTER, "echo/loop.py": ECHO_LOOP})
    model = optimized("echo")
    session = opened(model.export_onnx_loop(tmp_path / "out"))
    prompts = [[5, 6, 7, 8, 9], [4, 9, 9, 1]]
    wanted = [expected(model, prompt, 10, []) for prompt in prompts]
    assert texts(session, asked(prompts, 10, [])) == wanted


def test_a_depth_policy_is_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(DEPTH) <= 3
    brought(tmp_path, monkeypatch, "alternate_depths", DEPTH)
    model = optimized("alternate")
    assert str(model.program.plan.depth) == "alternate(period=2, functions=('step.1.fill',))"
    shallow = model.generate(PROMPTS[:1], **ASKED, return_dict_in_generate=True)
    whole = optimized("baseline").generate(PROMPTS[:1], **ASKED, return_dict_in_generate=True)
    assert shallow.stats.layers < whole.stats.layers
    model.save(tmp_path / "saved")
    assert torch.equal(
        gw.load(tmp_path / "saved").generate(PROMPTS[:1], **ASKED), shallow.sequences
    )
    every = Recipe.load("alternate").with_options(["depth_alternate.period=1"])
    deep = compile(run_passes(tiny_llama(), every.steps)[0], EAGER)
    assert torch.equal(generate(deep, PROMPTS[:1], **ASKED), whole.sequences)
