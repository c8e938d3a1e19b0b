"""What the target makes of windows: right, worked out once, and kept over an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file
from test_training import FEW, TEXT, drafted, weights
from tiny import tiny_llama

from graftwork.ir import InputError, UnsupportedError
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan import DraftRecord, HeadsDraft, RecurrentDraft
from graftwork.ir.rewrite.subgraph import beyond
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.training import FitState, checkpoint, fit
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch, objective_of
from graftwork.training.teacher_cache import CHOSEN, FOLDER, Teacher, TeacherCache

TOKENS = torch.arange(12).view(3, 4) % 32
FIRSTS = torch.tensor([1, 1, 1])
MARK = {"window": 4}


def teacher(drafter: object = None) -> Teacher:
    model = drafted(*([] if drafter is None else [drafter]))
    return Teacher(Net(model.program, [], torch.device("cpu")))


@pytest.mark.parametrize("drafter", [DraftMedusa(), DraftEagle(), None], ids=str)
def test_logits_come_from_the_kept_states(drafter: object) -> None:
    made = teacher(drafter)
    whole = made.net.outputs("step", ("logits", *made.taps), {"tokens": TOKENS})
    states = made.states(TOKENS)
    assert bool(made.taps) == (drafter is not None)
    torch.testing.assert_close(made.logits(states), whole["logits"])
    for name in made.taps:
        torch.testing.assert_close(states[name], whole[name])
    # What Medusa takes serves for the logits too; without, a value of the model's width does.
    assert set(states) == {*made.taps, made.bottleneck, CHOSEN}
    assert torch.equal(states[CHOSEN], whole["logits"].argmax(-1))
    assert (made.bottleneck == "bottleneck") is not isinstance(drafter, DraftMedusa)
    assert states[made.bottleneck].shape == (3, 4, 32)


def test_the_rest_of_a_function_takes_what_is_known() -> None:
    step = tiny_llama().function("step")
    logits = step.outputs["logits"]
    rest = beyond(step, {"known": logits}, ("logits",))
    assert [str(node.target) for node in rest.inputs] == ["known"] and not rest.calls()
    assert beyond(step, {}, ("logits",)).has_input("tokens")


def test_each_window_is_used_once_before_one_comes_again(tmp_path: Path) -> None:
    lessons = TeacherCache(tmp_path, teacher(DraftMedusa()), MARK, seed=0)
    for number in range(3):
        lessons.add(number, lambda n=number: (TOKENS + 3 * n, FIRSTS + n))
    assert lessons.count == 9
    starts = [lessons.batch(step, 3).tokens[:, 0] for step in range(6)]
    first, second = torch.cat(starts[:3]).tolist(), torch.cat(starts[3:]).tolist()
    everything = sorted((TOKENS[:, :1] + 3 * torch.arange(3)).flatten().tolist())
    assert sorted(first) == sorted(second) == everything and first != second
    lesson = lessons.batch(4, 2)
    expected = lessons.teacher.states(lesson.tokens)
    for name, value in expected.items():
        stored = value.bfloat16().float() if value.is_floating_point() else value
        assert torch.equal(lesson.states[name], stored)
    # What belongs to a window stays with it: here the n-th file's tokens are n higher a row.
    assert torch.equal(lesson.firsts, 1 + -lesson.tokens[:, 0] % 4)
    # Windows that are held out are not among the others.
    lessons.held, lessons.turn = 2, -1
    held = lessons.held_out().tokens[:, 0].tolist()
    kept = torch.cat([lessons.batch(step, 1).tokens[:, 0] for step in range(7)]).tolist()
    assert held == [0, 4] and sorted([*held, *kept]) == everything
    lessons.remove()
    assert not list(tmp_path.iterdir())


def test_files_are_made_anew_where_they_do_not_fit(tmp_path: Path) -> None:
    target = teacher(DraftMedusa())
    TeacherCache(tmp_path, target, MARK, seed=0).add(0, lambda: (TOKENS, FIRSTS))

    def refuse() -> NoReturn:
        raise AssertionError("the file is there")

    TeacherCache(tmp_path, target, MARK, seed=0).add(0, refuse)
    assert not TeacherCache(tmp_path, target, {"window": 5}, seed=0).has(0)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(path.read_bytes()[:100])
    again = TeacherCache(tmp_path, target, MARK, seed=0)
    assert not again.has(0)
    again.add(0, lambda: (TOKENS + 1, FIRSTS))
    assert torch.equal(load_file(path)["tokens"], TOKENS + 1)


def test_an_interrupted_training_goes_on_with_its_windows(tmp_path: Path, monkeypatch) -> None:
    asked = []
    states = Teacher.states

    def counted(self: Teacher, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        asked.append(len(tokens))
        return states(self, tokens)

    monkeypatch.setattr(Teacher, "states", counted)
    options = {**FEW, "steps": 80, "save_every": 10}

    def stop(state: FitState) -> None:
        if state.step == 15:
            raise KeyboardInterrupt

    model = drafted(DraftMedusa())
    with pytest.raises(KeyboardInterrupt):
        fit(model, TEXT, out=tmp_path / "a", progress=stop, **options)
    # 80 steps of 2 windows, each used 4 times: 40 windows, in files of 16: text, and activations.
    assert asked == [16, 16, 16] and len(list((tmp_path / "a" / FOLDER).iterdir())) == 6
    resumed = fit(model, TEXT, out=tmp_path / "a", resume=True, **options)
    assert len(asked) == 3 and not (tmp_path / "a" / FOLDER).exists()
    whole = fit(model, TEXT, out=tmp_path / "b", **options)
    first, second = weights(resumed.model), weights(whole.model)
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_moments_lie_where_their_parameters_do() -> None:
    """Checkpoints are read on the CPU, whatever device trains on."""
    elsewhere = torch.device("meta")
    names = ["heads/0.weight", "heads/1.weight"]
    kept = {}
    for device in (torch.device("cpu"), elsewhere):
        made = [torch.nn.Parameter(torch.ones(size, device=device)) for size in (2, 3)]
        optimizer = torch.optim.AdamW(made[::-1])
        if device == elsewhere:
            weights = dict(zip(names, made, strict=True))
            checkpoint.restore(optimizer, names, made, weights, kept)
        else:
            for parameter in made:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            kept = checkpoint.moments(optimizer, names, made)
    for parameter in made:
        state = optimizer.state[parameter]
        assert state["exp_avg"].device == state["exp_avg_sq"].device == elsewhere
        assert state["exp_avg"].shape == parameter.shape
        assert state["step"].is_cpu and float(state["step"]) == 1.0


@pytest.mark.parametrize(
    "record", [HeadsDraft("heads", 2), RecurrentDraft(("heads",), 2)], ids=lambda r: r.kind
)
def test_drafts_of_one_place_learn_from_where_the_target_goes_on(record: DraftRecord) -> None:
    weight = torch.randn(6, 4)

    def run(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        state = inputs["state"] if "state" in inputs else inputs["hidden"]
        logits = state @ weight.T
        levels = logits[:, :, None].expand(-1, -1, 2, -1)
        return {"draft_logits": logits if "state" in inputs else levels, "state": state}

    hidden, logits = torch.randn(2, 12, 4), torch.randn(2, 12, 6)
    tokens = torch.arange(24).view(2, 12) % 6

    def loss(hidden: torch.Tensor, logits: torch.Tensor, *firsts: int) -> float:
        batch = Batch(tokens, {"hidden": hidden}, logits, firsts=firsts)
        return float(objective_of(record)(record, run, batch).total)

    before, after = hidden.clone(), hidden.clone()
    before[0, :5], after[0, 5] = 9.0, 9.0
    strange = logits.clone()
    strange[0, :6] = 9.0
    expected = loss(hidden, logits, 5, 2)
    assert loss(before, strange, 5, 2) == pytest.approx(expected)
    assert loss(after, logits, 5, 2) != pytest.approx(expected, rel=1e-3)
    assert loss(before, logits, 0, 2) != pytest.approx(expected, rel=1e-3)
    assert loss(hidden, logits) == pytest.approx(loss(hidden, logits, 0, 0))


def test_a_step_whose_logits_need_the_text_is_refused() -> None:
    program = tiny_llama()
    step = program.function("step").copy()
    logits, tokens = step.outputs["logits"], step.input("tokens")
    with step.graph.inserting_before(step.output_node):
        ids = step.call(torch.ops.aten.unsqueeze.default, tokens, -1)
        biased = step.call(torch.ops.aten.add.Tensor, logits, ids)
    step.set_outputs({"logits": biased})
    with pytest.raises(UnsupportedError, match="each also needs inputs"):
        Teacher(Net(program.with_function(step), [], torch.device("cpu")))


@pytest.mark.parametrize("drafter", [DraftMedusa(), DraftEagle()], ids=str)
def test_states_come_from_another_form_of_the_model(drafter: object) -> None:
    plain, model = teacher(drafter), drafted(drafter)
    reader = Teacher(plain.net, (model.program, model.target))
    found, wanted = reader.states(TOKENS), plain.states(TOKENS)
    assert reader.reader is not None and found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])
    torch.testing.assert_close(plain.logits(found), plain.logits(wanted))


def test_heads_are_taught_on_what_the_reader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = drafted(DraftMedusa()), Teacher._read
    rows = []

    def noted(self: Teacher, reader: Executable, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        rows.append(len(tokens))
        return read(self, reader, tokens)

    monkeypatch.setattr(Teacher, "_read", noted)
    fitted = fit(model, TEXT, out=tmp_path / "a", reader=model, **FEW)
    count = sum(rows)
    other = fit(model, TEXT, out=tmp_path / "b", **FEW)
    assert count and count == sum(rows)  # by the reader where there is one, and by it alone
    first, second = weights(fitted.model), weights(other.model)
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first)
    strange = replace(model, program=tiny_llama(vocab=48))
    with pytest.raises(InputError, match=r"reader: expected .* in another form, got another model"):
        fit(model, TEXT, out=tmp_path / "c", reader=strange, **FEW)
