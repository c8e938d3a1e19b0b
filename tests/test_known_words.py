"""Draft vocabularies: what drafters know, are taught, and propose; and the text they learn from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_eagle3 import SOME, knowing
from test_front_door import ROOT
from test_runtime_cached import CHAIN, PROMPTS, decode, drafting, plainly
from test_training import FEW, TEXT, drafted

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.data.corpus import Windows
from graftwork.ir import Program
from graftwork.ir.plan import GoodputLength
from graftwork.model import Model
from graftwork.passes.drafting.dflash.graph import DraftDflash
from graftwork.passes.drafting.draft_amphista import DraftAmphista
from graftwork.passes.drafting.draft_clover import DraftClover
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_eagle3 import DraftEagle3
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.draft_mlp_speculator import DraftMlpSpeculator
from graftwork.passes.drafting.draft_pass import DraftHeadPass
from graftwork.passes.drafting.draft_redrafter import DraftRedrafter
from graftwork.passes.drafting.draft_vocabulary import narrow
from graftwork.passes.drafting.falcon.graph import DraftFalcon
from graftwork.passes.drafting.gumiho.graph import DraftGumiho
from graftwork.passes.drafting.jakiro.graph import DraftJakiro
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.training import FitState, fit
from graftwork.training.fit import accepted_per_step
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch, distilled
from graftwork.training.teacher_cache import FOLDER, Teacher
from graftwork.training.texts import Author

CPU = torch.device("cpu")
KNOWS: dict[str, Any] = {"vocabulary": 5}
DRAFTERS = [
    DraftMedusa(**KNOWS),
    DraftMedusa(own_head=False, **KNOWS),
    DraftHydra(bias=True, **KNOWS),
    DraftHydra(prefix=True, **KNOWS),
    DraftEagle(**KNOWS),
    DraftEagle(sampled=True, apart=True, **KNOWS),
    DraftEagle3(**KNOWS),
    DraftClover(**KNOWS),
    DraftGumiho(**KNOWS),
    DraftAmphista(**KNOWS),
    DraftJakiro(**KNOWS),
    DraftRedrafter(**KNOWS),
    DraftMlpSpeculator(**KNOWS),
    DraftDflash(**KNOWS),
    DraftFalcon(**KNOWS),
]


def title(drafter: DraftHeadPass) -> str:
    said = drafter.model_dump(exclude_defaults=True, exclude={"vocabulary"})
    return " ".join([drafter.name, *(f"{name}={value}" for name, value in said.items())])


@pytest.mark.parametrize("drafter", DRAFTERS, ids=title)
def test_what_a_drafter_does_not_know_it_does_not_propose(drafter: DraftHeadPass) -> None:
    """Every drafter has the option: all that it says is of tokens that it knows, and the text is
    the target's."""
    program = knowing(drafting(drafter, CHAIN))
    heads = [name for name, fn in program.functions.items() if "draft_logits" in fn.outputs]
    assert heads
    for name in heads:
        found = narrow(program, name)
        assert found is not None and torch.equal(found[1], SOME)
        assert found[0].outputs["draft_logits"].meta["type"].dims[-1] == len(SOME)
    executable = compile(program, Target.parse("eager"))
    result = decode(executable, PROMPTS, 10)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS, 10))
    assert result.stats.draft_tokens > 0


@pytest.mark.parametrize("drafter", DRAFTERS, ids=title)
def test_training_chooses_words_and_teaches_these(
    drafter: DraftHeadPass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is as wide as the draft vocabulary, which comes back with the weights."""
    widths: set[int] = set()

    def noting(student: torch.Tensor, target: torch.Tensor, shift: int) -> torch.Tensor:
        widths.update((student.shape[-1], target.shape[-1]))
        return distilled(student, target, shift)

    for module in _modules_that_distil():
        monkeypatch.setattr(module, "distilled", noting)
    text = [[token % 5 + 20 for token in row] for row in TEXT]
    more = [AcceptTrees()] if isinstance(drafter, DraftDflash | DraftFalcon) else []
    made = drafted(drafter, *more)
    fitted = fit(made, text, out=tmp_path, **{**FEW, "own": 0.0})
    assert widths == {5}
    (function, *_) = [n for n, f in made.program.functions.items() if "draft_logits" in f.outputs]
    found = narrow(fitted.model.program, function)
    assert found is not None and found[1].tolist() == [20, 21, 22, 23, 24]
    again = drafted(drafter.model_copy(update={"weights": str(tmp_path), "vocabulary": 9}), *more)
    for name, weight in fitted.model.program.weights.items():
        assert torch.equal(weight.load(), again.program.weights[name].load()), name


def _modules_that_distil() -> list[Any]:
    import sys

    from graftwork.training.objectives.base import objective_of

    objective_of(drafted(DraftMedusa()).program.plan.draft)  # imports all of them
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("graftwork.") and getattr(module, "distilled", None) is distilled
        if not name.endswith("objectives.base")
    ]


def test_vllms_layout_has_the_ids_of_the_rows(tmp_path: Path) -> None:
    """As its Medusa reads them: heads of D rows, ``token_map`` and ``truncated_vocab_size``."""
    for knows, size in ((KNOWS, 5), ({}, 32)):
        made = drafted(DraftMedusa(heads=2, **knows))
        fitted = fit(made, TEXT, out=tmp_path / f"heads{size}", **FEW)
        folder = fitted.model.export_vllm_medusa(tmp_path / f"vllm{size}")
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        assert (config["vocab_size"], config["truncated_vocab_size"]) == (32, size)
        assert tensors["lm_heads.1.weight"].shape == (size, 32)
        assert ("token_map" in tensors) == (size == 5)
        if size == 5:
            found = narrow(fitted.model.program, "medusa")
            assert found is not None and torch.equal(tensors["token_map"], found[1])


def test_targets_of_some_words() -> None:
    """A student that knows tokens 1 and 3 of four learns the target's distribution between them,
    where the target's best token is one of them, and nothing where it is not."""
    logits = torch.tensor([[[0.0, 2.0, 1.0, 1.0], [3.0, 0.0, 0.0, 1.0]]])
    known = torch.tensor([1, 3])
    tokens = torch.tensor([[0, 3]])
    made = Batch(tokens, {}, logits[..., known], known=known, chosen=logits.argmax(-1))
    assert made.best.tolist() == [[0, -1]]
    e = torch.e
    torch.testing.assert_close(
        made.target("distribution"), torch.tensor([[[e / (e + 1), 1 / (e + 1)], [0.0, 0.0]]])
    )
    # The text goes on with 3, the second token that is known; after it the target's best is not.
    assert made.target("text").tolist() == [[[0.0, 1.0], [0.0, 0.0]]]
    assert made.target("both")[0, 1].tolist() == [0.0, 0.0]
    student = torch.tensor([[[0.5, -1.0], [4.0, 2.0]]], requires_grad=True)
    loss = distilled(student, made.target("text"), 0)
    torch.testing.assert_close(loss, -student[0, 0].log_softmax(-1)[1] / 2)
    loss.backward()
    assert student.grad is not None and bool(student.grad[0, 0].abs().min() > 0)
    assert not student.grad[0, 1].any()


@pytest.mark.parametrize("bias", [False, True])
def test_the_teacher_says_the_same_of_some_words(bias: bool) -> None:
    model = drafted(DraftMedusa(**KNOWS))
    teacher = Teacher(Net(model.program, [], CPU))
    states = teacher.states(torch.arange(12).view(3, 4))
    whole, some = teacher.logits(states), teacher.logits(states, SOME)
    assert some.shape[-1] == len(SOME)
    torch.testing.assert_close(some, whole[..., SOME])
    # A head that is no product of floats.
    teacher.rest = _twice(teacher.rest) if bias else teacher.rest
    teacher.some.clear()
    torch.testing.assert_close(teacher.logits(states, SOME)[..., : len(SOME)], some)


def _twice(rest: Any) -> Any:
    """The same function, of whose products one cannot tell which makes the logits."""
    made = rest.copy()
    (head,) = made.calls(torch.ops.aten.linear.default)
    with made.graph.inserting_before(made.output_node):
        other = made.graph.node_copy(head, lambda n: n)
        made.set_outputs({**made.outputs, "more": other})
    return made


def test_runs_share_texts_and_what_the_target_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "lessons"
    first = fit(drafted(DraftMedusa()), TEXT, out=tmp_path / "a", lessons=shared, **FEW)
    files = {path.name: path.read_bytes() for path in (shared / FOLDER).iterdir()}
    assert len(files) == 2 and first.steps == 3

    def refuse(*given: Any) -> Any:
        raise AssertionError("the text is there")

    monkeypatch.setattr(Author, "write", refuse)
    fit(drafted(DraftHydra()), TEXT, out=tmp_path / "b", lessons=shared, **FEW)
    monkeypatch.setattr(Teacher, "states", refuse)
    again = fit(drafted(DraftMedusa()), TEXT, out=tmp_path / "c", lessons=shared, **FEW)
    kept = {path.name: path.read_bytes() for path in (shared / FOLDER).iterdir()}
    assert kept == files  # Hydra reads the states that Medusa reads
    for name, weight in first.model.program.weights.items():
        assert torch.equal(weight.load(), again.model.program.weights[name].load())
    with pytest.raises(AssertionError, match="the text is there"):
        fit(drafted(DraftMedusa()), TEXT[:6], out=tmp_path / "d", lessons=shared, **FEW)


def test_text_that_is_there_counts_as_long_as_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second drafter has as much text as the first, and spends no time on more."""
    few = {**FEW, "minutes": 0.02, "steps": 400, "lessons": tmp_path / "lessons"}
    fit(drafted(DraftMedusa()), TEXT, out=tmp_path / "a", **few)
    kept = sorted(path.name for path in (tmp_path / "lessons" / FOLDER).iterdir())

    def refuse(*given: Any) -> Any:
        raise AssertionError("the text is there")

    monkeypatch.setattr(Author, "write", refuse)
    fit(drafted(DraftHydra()), TEXT, out=tmp_path / "b", **few)
    after = {path.name for path in (tmp_path / "lessons" / FOLDER).iterdir() if "text" in path.name}
    assert after == {name for name in kept if "text" in name}


def test_acceptance_is_measured_with_whole_drafts(tmp_path: Path) -> None:
    """Not with those that a busy machine leaves."""
    model = drafted(DraftMedusa())
    plan = replace(model.program.plan, length=GoodputLength(loss=1e-9))
    given_up = replace(model, program=model.program.replace(plan=plan))
    assert accepted_per_step(given_up, TEXT) == accepted_per_step(model, TEXT) > 1.0


def test_another_form_of_the_model_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote: list[str] = []
    write = Author.write

    def noting(self: Author, number: int, count: int) -> Any:
        wrote.append(str(self.model.recipe["name"]))
        return write(self, number, count)

    monkeypatch.setattr(Author, "write", noting)
    writer = Model(drafted().program, Target("eager", "cpu"), {"name": "writer"})
    fit(drafted(DraftMedusa()), TEXT, out=tmp_path / "a", writer=writer, **FEW)
    fit(drafted(DraftMedusa()), TEXT, out=tmp_path / "b", **FEW)
    assert wrote == ["writer", "test"]


def test_progress_says_what_held_out_windows_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fit_module(), "MEASURED", 0.0)
    monkeypatch.setattr(_fit_module(), "LARGER", 1)
    seen: list[FitState] = []
    fit(
        drafted(DraftMedusa(heads=2)),
        TEXT,
        out=tmp_path,
        progress=seen.append,
        **{**FEW, "steps": 36, "passes": 2, "own": 0.0, "rate": 1e-2},
    )
    steps = [state for state in seen if state.phase == "training"]
    assert len(steps) == 36 and all(1 <= state.accepted <= 3 for state in steps)
    assert len({state.accepted for state in steps}) > 1 and steps[-1].rate > 0
    before, after = seen[: seen.index(steps[0])], seen[seen.index(steps[-1]) + 1 :]
    assert [state.phase for state in before[-2:]] == ["preparing", "first step"]
    assert after[0].phase == "opening the trained model" and len(after) > 1
    assert all(state.phase == "measuring" and state.share < 1 for state in after[1:])


def _fit_module() -> Any:
    import importlib

    return importlib.import_module("graftwork.training.fit")


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> gw.Model:
    """The demo model with a chat template."""
    model = gw.optimize(ROOT / "graftwork" / "demo_model", target="eager:cpu:float32")
    folder = tmp_path_factory.mktemp("talking")
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}# answer"
    path.write_text(json.dumps({"chat_template": template}))
    assets = {**model.program.assets, path.name: path}
    program: Program = model.program.replace(assets=assets)
    return Model(program, model.target, model.recipe)


def test_a_model_that_chats_asks_itself(talking: gw.Model) -> None:
    """Of eight windows two are the user's text, three go on with it, three are conversations."""
    stream = torch.arange(400) % 90 + 5
    windows = Windows([stream.tolist()], 48, seed=0)
    author = Author(talking, windows, 0.75, 0.0, seed=3)
    tokens, firsts = author.write(0, 8)
    assert tokens.shape == (8, 48) and len(firsts) == 8
    decoded = [talking.tokenizer.decode(row.tolist()) for row in tokens[:3]]
    assert all(text.startswith("# user\n") and "# answer" in text for text in decoded)
    for row, first, text in zip(tokens[:3], firsts[:3].tolist(), decoded, strict=True):
        begun = talking.tokenizer.decode(row[: first + 1].tolist())
        assert text.startswith(begun) and begun.endswith("# answer")
        # What follows is what the model itself says, greedily.
        said = talking.generate(row[None, : first + 1], max_new_tokens=47 - first, do_sample=False)
        assert torch.equal(said[0, :48], row[: said.shape[1]])
    assert firsts[3:].tolist() == [11, 11, 11, 0, 0]
    assert torch.equal(tokens[6:], windows(0, 8)[6:])
    again = Author(talking, windows, 0.75, 0.0, seed=3).write(0, 8)
    assert torch.equal(again[0], tokens)
    other = author.write(1, 8)
    assert not torch.equal(other[0][:3], tokens[:3])
