"""A cached drafter and heads that go on from its states: Clover, Gumiho, Amphista."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import Recorded, whole
from selection import mostly_long, one_in
from test_training import TEXT
from tiny import MASK, PROMPTS, drafting_llama, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, Program, parse_program, program_text, run
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan import HeadsDraft
from graftwork.ir.plan.continued import TwofoldDraft
from graftwork.model import Model
from graftwork.passes.drafting.copied_layer import copied_layer
from graftwork.passes.drafting.draft_amphista import DraftAmphista
from graftwork.passes.drafting.draft_clover import DraftClover
from graftwork.passes.drafting.grafts import Graft
from graftwork.passes.drafting.gumiho.graph import DraftGumiho
from graftwork.passes.drafting.jakiro import AheadProposer
from graftwork.passes.drafting.jakiro.graph import DraftJakiro
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.base import Pass
from graftwork.runtime.generation import generate
from graftwork.runtime.speculate.drafters import grown
from graftwork.runtime.speculate.proposers.continued import ContinuedProposer
from graftwork.training import FitState, fit
from graftwork.training.fit import accepted_per_step

DRAFTERS: dict[str, Pass] = {
    "clover": DraftClover(heads=3, candidates=4),
    "amphista": DraftAmphista(heads=2, candidates=4),
    "gumiho": DraftGumiho(serial=2, layers=2, heads=2, candidates=4),
    "jakiro": DraftJakiro(levels=3, candidates=4),
}
TREES: dict[str, Pass] = {
    "chain": named("tree_chain", depth=3),
    "static": named(
        "tree_static", paths=((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 1))
    ),
    "best_first": named("tree_best_first", nodes=9, depth=3, width=3),
}


@cache
def compiled(backend: str, drafter: str = "", tree: str = "") -> Executable:
    passes = [DRAFTERS[drafter], TREES[tree]] if drafter else []
    return compile(drafting_llama(*passes), Target(backend, "cpu"))


def decoded(executable: Executable, count: int = 20) -> Any:
    return generate(
        executable,
        PROMPTS,
        attention_mask=MASK,
        return_dict_in_generate=True,
        max_new_tokens=count,
        eos_token_id=[],
    )


RUNS = [("eager", "static"), ("eager", "best_first"), ("onnxruntime", "static")]


@pytest.mark.parametrize(
    ("drafter", "backend", "tree"),
    one_in(2, ((drafter, *run) for drafter in DRAFTERS for run in RUNS)),
)
def test_text_is_the_targets_own(drafter: str, backend: str, tree: str) -> None:
    plain, fast = compiled(backend), compiled(backend, drafter, tree)
    expected, found = decoded(plain).sequences, decoded(fast)
    assert torch.equal(found.sequences, expected)
    assert found.stats.draft_tokens > found.stats.sequence_steps  # it did draft
    alone = generate(fast, PROMPTS[2:3], max_new_tokens=20, eos_token_id=[])
    assert torch.equal(alone, expected[2:3])


@pytest.mark.parametrize("drafter", mostly_long(DRAFTERS, keep=("clover", "gumiho")))
def test_text_in_int8_is_the_int8_targets_own(drafter: str) -> None:
    plain = compile(drafting_llama(in_int8()), Target("eager", "cpu"))
    passes = DRAFTERS[drafter], TREES["static"], in_int8()
    found = decoded(compile(drafting_llama(*passes), Target("eager", "cpu")))
    assert torch.equal(found.sequences, decoded(plain).sequences)
    assert found.stats.draft_tokens > found.stats.sequence_steps


def test_up_to_the_end_of_the_context() -> None:
    found = decoded(compiled("eager", "gumiho", "best_first"), 123).sequences
    assert torch.equal(found, decoded(compiled("eager"), 123).sequences)


# -- what is drafted step by step is what whole sequences give


class RecordedContinued(Recorded, ContinuedProposer):
    """Notes what both parts predict; of a text of one token neither knows anything at first."""

    blanks = False


class RecordedAhead(Recorded, AheadProposer):
    """The same of one whose last call predicts two levels."""

    blanks = False


RECORDED = {"continued": RecordedContinued, "ahead": RecordedAhead}


def expected(program: Program, text: list[int], path: tuple[int, ...]) -> torch.Tensor:
    """The logits after a text and a path below it."""
    record = program.plan.draft
    assert isinstance(record, TwofoldDraft)
    states = whole(program, "step", text)[record.first.output][:, :-1]
    serial, made = record.first.levels, []
    for length in range(min(len(path), serial - 1) + 1):
        outputs = whole(program, record.first.function, [*text[1:], *path[:length]], hidden=states)
        made.append(outputs["hidden"][:, -1:])
        states = torch.cat([states, made[-1]], 1)
    if len(path) < serial:
        return outputs["draft_logits"][0, -1]
    state = outputs["ahead"][:, -1:] if record.kind == "ahead" else states[:, -1:]
    if record.then.kind == "joined_heads":
        steps = torch.tensor([[path[:serial]]])
        given = {"tokens": steps, "hidden": torch.stack(made, 2)}
        heads = run(program, record.then.function, given)["draft_logits"]
        return heads[0, 0, len(path) - serial]
    if record.then.kind == "heads":
        heads = run(program, record.then.function, {"hidden": state})["draft_logits"]
        return heads[0, 0, len(path) - serial]
    for place, token in enumerate(path[serial - 1 :]):
        functions = record.then.functions
        name = functions[min(place, len(functions) - 1)]
        outputs = run(program, name, {"tokens": torch.tensor([[token]]), "state": state})
        state = outputs["state"]
    return outputs["draft_logits"][0, -1]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tree", ["chain", "static"])
def test_predictions_are_those_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, drafter: str, tree: str
) -> None:
    find = grown.PROPOSERS.find
    monkeypatch.setattr(
        grown.PROPOSERS, "find", lambda record: RECORDED.get(record.kind) or find(record)
    )
    notes: list[Any] = []
    for kind in RECORDED.values():
        kind.notes = notes
    executable = compiled("eager", drafter, tree)
    decoded(executable, 8)
    assert {len(path) for _, path, _ in notes} >= {0, 1, 2}
    for text, path, logits in notes[::7]:
        wanted = expected(executable.program, text, path)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-4, rtol=2e-4)


# -- training


@pytest.mark.long
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_trained_heads_are_accepted_and_the_target_stays(drafter: str, tmp_path: Path) -> None:
    model = Model(
        drafting_llama(DRAFTERS[drafter], TREES["chain"]), Target("eager", "cpu"), {"name": "t"}
    )
    options = {"batch": 4, "window": 32, "own": 1.0, "rate": 2e-2, "seed": 1, "passes": 8}
    seen: list[tuple[float, ...]] = []

    def note(state: FitState) -> None:
        seen.extend([state.hits] if state.hits else [])

    fitted = fit(model, TEXT, out=tmp_path, steps=100, progress=note, **options)
    # Clover starts as the target's own head, which this model's loops reward: 1.67 untrained.
    assert accepted_per_step(fitted.model, TEXT, 4) > 0.2 + accepted_per_step(model, TEXT, 4)
    # One step's accuracy is of one window, which begins with random text: means of several.
    early, late = np.array(seen[:10]).mean(0), np.array(seen[-20:]).mean(0)
    assert len(seen) == 100 and late.min() > 0.16 + early.max()
    before, after = model.program.weights, fitted.model.program.weights
    changed = {n for n in before if not torch.equal(before[n].load(), after[n].load())}
    own = {name for name in before if name.startswith(drafter)}
    assert changed == own and fitted.model.program.plan.draft.trained
    again = drafting_llama(
        type(DRAFTERS[drafter])(**{**dict(DRAFTERS[drafter]), "weights": str(tmp_path)})
    )
    assert all(torch.equal(again.weights[n].load(), after[n].load()) for n in own)


def test_a_copied_layer_is_the_targets_last() -> None:
    program = tiny_llama()
    graft = Graft(program, "test", "copy")
    x = graft.input("hidden", graft.hidden)
    y = copied_layer(graft, x, graft.input("positions", dtype=torch.int64), "copy")
    copied = graft.done({"y": y})
    (attention,) = copied.function("copy").calls(torch.ops.graftwork.attention.default)
    assert attention.kwargs["layer"] == 2
    tokens = torch.tensor([[3, 4, 5, 6]])
    steps = torch.arange(4)[None]
    # The step's outputs by layer: what goes into the last layer, and what comes out of it.
    tapped = Graft(program, "test", "none")
    names = [tapped.tap(0), tapped.tap(1)]
    states = run(
        tapped.program.with_function(tapped.step), "step", {"tokens": tokens, "positions": steps}
    )
    found = run(copied, "copy", {"hidden": states[names[0]], "positions": steps})["y"]
    torch.testing.assert_close(found, states[names[1]])
    own = copied.function("copy").weights - {"cos", "sin"}
    assert own and all(name.startswith("copy.layers.1.") for name in own)


def test_plans_read_back_and_other_pairs_are_refused() -> None:
    program = drafting_llama(DRAFTERS["clover"], TREES["chain"])
    text = program_text(program)
    assert parse_program(text).plan == program.plan
    draft = program.plan.draft
    with pytest.raises(InputError, match="not a valid first"):
        replace(draft, first=SuffixDraft())
    with pytest.raises(InputError, match="suffix cannot go on where cached stops"):
        replace(draft, then=SuffixDraft())
    ahead = drafting_llama(DRAFTERS["jakiro"], TREES["chain"]).plan.draft
    with pytest.raises(InputError, match="expected heads of one level then, got heads of 2"):
        replace(ahead, then=HeadsDraft("jakiro_ahead", 2))
