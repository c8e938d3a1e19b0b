"""The front door's objects: what they accept, and what they refuse before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import cached_llama, tiny_llama

import graftwork as gw
from graftwork import optimizing as front
from graftwork.backends.target import Target
from graftwork.data.prompts import as_ids, read_prompts, sample_prompts, validation_batch
from graftwork.ir import InputError, Weight, WeightStore
from graftwork.model import Model
from graftwork.recipe import Recipe
from graftwork.report import render
from graftwork.tracing import traced

EAGER = Target("eager", "cpu")
RECIPE = {"name": "test", "contract": "exact"}
PASSES = {"passes": ["insert_kv_cache", "pick_logits", "add_argmax"]}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> str:
    """A source that the frontend turns into the handmade program."""

    monkeypatch.setattr(traced, "import_model", lambda model, dtype, **_: tiny_llama())
    return "tiny"


def test_optimize_gives_a_model_that_generates_and_reports(source: str) -> None:
    model = gw.optimize(source, PASSES, target=EAGER, validate=True, seed=3)
    ids = model.generate([[1, 2, 3]], max_new_tokens=4)
    assert ids.shape == (1, 7) and ids[0, :3].tolist() == [1, 2, 3]
    report = model.report
    assert report is not None and report.recipe == "custom" and report.target == str(EAGER)
    assert [line.name for line in report.passes] == PASSES["passes"]
    for line in report.passes:
        assert line.matches and line.check is not None and line.check.error < 1e-5
    shown = render(report)
    assert "insert_kv_cache" in shown and "width" in shown and "exact" in shown
    assert type(report).model_validate_json(report.model_dump_json()) == report


def test_the_report_and_the_recipe_come_back_with_the_artifact(source: str, tmp_path: Path) -> None:
    model = gw.optimize(source, PASSES, target=EAGER)
    loaded = gw.load(model.save(tmp_path / "out"))
    assert (loaded.report, loaded.recipe) == (model.report, model.recipe)
    assert (loaded.target, str(loaded.program)) == (EAGER, str(model.program))
    ids = torch.tensor([[5, 6], [7, 8]])
    expected = model.generate(ids, max_new_tokens=5)
    assert torch.equal(loaded.generate(ids, max_new_tokens=5), expected)


def test_a_loaded_model_can_run_elsewhere_but_not_in_another_dtype(
    source: str, tmp_path: Path
) -> None:
    folder = gw.optimize(source, PASSES, target=EAGER).save(tmp_path / "out")
    assert str(gw.load(folder, target="onnxruntime").target) == "onnxruntime:cpu:float32"
    with pytest.raises(InputError, match="dtype cannot become"):
        gw.load(folder, target="eager:cpu:bfloat16")


def test_data_that_nothing_uses_and_data_that_is_missing_are_refused(source: str) -> None:
    with pytest.raises(InputError, match="uses none"):
        gw.optimize(source, PASSES, target=EAGER, data=[[1, 2]])
    with pytest.raises(InputError, match="needs data="):
        gw.optimize(source, {**PASSES, "needs": ["data"]}, target=EAGER)
    gw.optimize(source, PASSES, target=EAGER, data=[[1, 2, 3], [4, 5]], validate=True)


def test_data_is_read_before_anything_is_traced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.txt"):
        gw.optimize("nowhere", PASSES, target=EAGER, data=tmp_path / "none.txt", validate=True)


def test_an_artifact_is_not_optimized_again(source: str, tmp_path: Path) -> None:
    folder = gw.optimize(source, PASSES, target=EAGER).save(tmp_path / "out")
    with pytest.raises(InputError, match=r"is a saved artifact.*load it, or give the checkpoint"):
        gw.optimize(folder, PASSES, target=EAGER)


def test_trace_stops_after_a_pass(source: str) -> None:
    recipe = Recipe.load(PASSES)
    program = front.trace(source, recipe, after="pick_logits")
    assert [record.name for record in program.provenance] == ["insert_kv_cache", "pick_logits"]
    assert front.trace(source).provenance == ()
    with pytest.raises(InputError, match="no pass 'dce'"):
        front.trace(source, recipe, after="dce")


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_weight_with_nan_is_named_when_compiling(backend: str) -> None:
    program = cached_llama()
    broken = program.weights["norm"].load().clone()
    broken[0] = float("nan")
    weights = WeightStore({**program.weights, "norm": Weight.of("norm", broken)})
    model = Model(program.replace(weights=weights), Target(backend, "cpu"), RECIPE)
    with pytest.raises(InputError, match="weight norm"):
        model.generate([[1, 2]], max_new_tokens=1)


@pytest.mark.parametrize("kind", ["onnx", "genai"])
def test_a_weight_with_nan_is_named_and_nothing_is_exported(kind: str, tmp_path: Path) -> None:
    program = cached_llama()
    broken = torch.full_like(program.weights["head"].load(), float("nan"))
    weights = WeightStore({**program.weights, "head": Weight.of("head", broken)})
    model = Model(program.replace(weights=weights), EAGER, RECIPE)
    with pytest.raises(InputError, match=r"weight head .*NaN"):
        getattr(model, f"export_{kind}")(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_tokenizer_says_so() -> None:
    with pytest.raises(InputError, match="pass token ids"):
        _ = Model(cached_llama(), EAGER, RECIPE).tokenizer


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    program = cached_llama().replace(assets={"tokenizer.json": tmp_path / "tokenizer.json"})
    with pytest.raises(InputError, match=r"cannot read .*tokenizer\.json"):
        _ = Model(program, EAGER, RECIPE).tokenizer
    with pytest.raises(InputError, match=r"cannot read .*tokenizer\.json"):
        read_prompts(["text"], program)


@pytest.mark.parametrize(
    ("ids", "shape"), [([1, 2], (1, 2)), ([[1], [2]], (2, 1)), (torch.ones(2, 3).int(), (2, 3))]
)
def test_token_ids_in_any_form(ids: Any, shape: tuple[int, int]) -> None:
    tensor = as_ids(ids)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, shape)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("text", "got text"),
        ([[1, 2], [3]], "one length"),
        ([1.5], "expected integers"),
        ([True], "expected integers"),
        ([[[1]]], "shape"),
        (None, "token ids"),
    ],
)
def test_token_ids_that_are_none(ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_ids(ids)


def test_prompts_from_files_and_lists(tmp_path: Path) -> None:
    program = tiny_llama()
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"ids": [1, 2, 3], "text": "x"}\n\n{"ids": [4, 5]}\n')
    assert read_prompts(lines, program) == [[1, 2, 3], [4, 5]]
    lines.write_text('{"ids": [1, 2, 3], "text": "\u2028\x85"}\r\n{"ids": [4, 5]}', "utf-8")
    assert read_prompts(lines, program) == [[1, 2, 3], [4, 5]]
    assert read_prompts([[1], torch.tensor([2, 3])], program) == [[1], [2, 3]]
    assert validation_batch(lines, program).tolist() == [[1, 2], [4, 5]]
    assert torch.equal(sample_prompts(program.info, 1), sample_prompts(program.info, 1))
    assert not torch.equal(sample_prompts(program.info, 1), sample_prompts(program.info, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.jsonl:1: not JSON"),
        ('{"ids": [1]}\n{"id": [1]}', "p.jsonl:2: expected"),
        ('{"ids": [99]}', "token id 99 is outside"),
        ('{"ids": [-1]}', "token id -1 is outside"),
        ('{"ids": []}', "at least one prompt"),
        ('{"ids": [1.5]}', "expected integers"),
        ('{"ids": "text"}', "p.jsonl:1: expected"),
        ('{"text": [1, 2]}', "p.jsonl:1: expected"),
        (f'{{"ids": [{2**70}]}}', "token ids"),
        ('{"ids": ' + "[" * 100_000, "p.jsonl:1: not JSON"),
        ('{"text": "hello"}', "no tokenizer.json"),
        ("", "at least one prompt"),
    ],
)
def test_prompts_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_prompts(path, tiny_llama())
    assert message in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "torch", "onnxruntime"])
def test_the_report_tells_the_memory_by_part(source: str, backend: str) -> None:
    model = gw.optimize(source, PASSES, target=Target(backend, "cpu"))
    report = model.report
    assert report is not None
    stored = sum(weight.type.nbytes for weight in model.program.weights.values())
    assert report.memory() == (stored, 0, 0)
    model.generate([[1, 2, 3]], max_new_tokens=4)
    found = report.memory()
    # ONNX Runtime's weights start at boundaries, and some are laid out anew for its kernels.
    assert abs(found.weights - stored) < 0.1 * stored
    assert found.caches == model.executable.state_bytes() > 0
    assert 0 < found.code < found.total == sum(found)
    assert model.report == type(report).model_validate_json(report.model_dump_json())
    del model
    with pytest.raises(InputError, match="the memory is unknown, because the model was deleted"):
        report.memory()
