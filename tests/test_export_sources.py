"""Models that write from a source, as plan folders and loops: texts are the model's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime_helpers import module_at, needs_node
from source_models import TYPES, made, model, sources, written
from test_export_loop import opened

import graftwork as gw
from graftwork.exporting.plan_format import PlanFile
from graftwork.ir import UnsupportedError

RECIPES = ("baseline", "copyspec", "int8", "int8_copyspec")
MOST = 20


@cache
def fast(name: str, recipe: str) -> Any:
    return gw.optimize(model(name), recipe, target=gw.Target(threads=1))


def combinations() -> Iterator[Any]:
    """Types with recipes: that which shows most, those that add something, and the rest."""
    quick = {("t5", "int8_copyspec")}
    for name in TYPES:
        for recipe in RECIPES:
            rare = recipe in ("int8", "copyspec") and name != "t5"
            often = pytest.mark.sweep if rare else pytest.mark.long
            marks = [] if (name, recipe) in quick else [often]
            yield pytest.param(name, recipe, marks=marks)


def rows(given: dict[str, torch.Tensor]) -> list[Any]:
    """Each source by itself, without padding."""
    if "input_features" in given:
        return [features.numpy() for features in given["input_features"]]
    ids = given["input_ids"]
    mask = given.get("attention_mask", torch.ones_like(ids))
    return [row[own.bool()].tolist() for row, own in zip(ids, mask, strict=True)]


def feeds(given: dict[str, torch.Tensor], start: Sequence[int], eos: Sequence[int]) -> Any:
    """What a loop is fed."""
    sources = rows(given)
    begin = np.tile(np.array([start]), (len(sources), 1))
    inputs = {"decoder_input_ids": begin, "max_new": np.array(MOST), "eos": np.array(eos, np.int64)}
    if "input_features" in given:
        return inputs | {"input_features": given["input_features"].numpy()}
    lengths = np.array([len(row) for row in sources])
    return inputs | {"input_ids": given["input_ids"].numpy(), "lengths": lengths}


def expected(plain: Any, given: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    """New tokens of the model, up to the end of each text."""
    ids = plain.generate(**given, max_new_tokens=MOST, **options)
    begun = options["decoder_input_ids"].shape[1] if "decoder_input_ids" in options else 1
    return [_ended(row[begun:].tolist(), plain.program.info.eos) for row in ids]


def _ended(row: list[int], eos: Sequence[int]) -> list[int]:
    ends = [place for place, token in enumerate(row) if token in eos]
    return row[: ends[0] + 1] if ends else row


@pytest.mark.parametrize(("name", "recipe"), combinations())
def test_the_models_texts(name: str, recipe: str, tmp_path: Path) -> None:
    """One source, and three of several lengths: from a folder, and from a loop side by side."""
    plain = fast(name, recipe)
    plan, loop = (
        plain.export_onnx_plan(tmp_path / "plan"),
        plain.export_onnx_loop(tmp_path / "loop"),
    )
    for file in (*plan.glob("*.onnx"), loop / "generate.onnx"):
        onnx.checker.check_model(str(file), full_check=True)
    runner, session = module_at(plan / "run.py").Runner(plan), opened(loop)
    eos, start = plain.program.info.eos, plain.program.plan.source.start
    for count in (1, 3):
        given = sources(name, count)
        want = expected(plain, given)
        if not recipe.startswith("int8"):
            theirs = written(model(name), given, max_new_tokens=MOST)
            assert want == [_ended(row[1:].tolist(), eos) for row in theirs]
        assert [runner.generate(row, MOST) for row in rows(given)] == want
        assert found(session, feeds(given, start, eos)) == want


def found(session: Any, given: Any) -> list[list[int]]:
    tokens, counts = session.run(None, given)
    return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]


@pytest.mark.parametrize("recipe", ["int8", pytest.param("baseline", marks=pytest.mark.long)])
def test_files_of_a_folder_take_batches(recipe: str, tmp_path: Path) -> None:
    """Sources of several lengths in one call of the encoder, texts in one call of each step."""
    plain, given = fast("t5", recipe), sources("t5", 3)
    folder = plain.export_onnx_plan(tmp_path / "plan")
    said = PlanFile.model_validate_json((folder / "plan.json").read_text())
    sessions = {
        name: onnxruntime.InferenceSession(folder / said.functions[name].variants[kind].file)
        for name, kind in (("encode", "chain"), ("step", "batch"))
    }
    ids, lengths = given["input_ids"].numpy(), given["attention_mask"].sum(1).numpy()
    sizes = {"B": 3, "E": ids.shape[1], "C": MOST + 3}
    states = {}
    for name, state in said.states.items():
        dims = state.type.rstrip("]").split("[")[1].split(",")
        dtype = np.bool_ if state.type.startswith("bool") else np.float32
        states[name] = np.zeros([sizes.get(d) or int(d) for d in dims], dtype)

    def run(name: str, **inputs: Any) -> dict[str, Any]:
        session = sessions[name]
        taken = {i.name for i in session.get_inputs()}
        names = [o.name for o in session.get_outputs()]
        fed = {k: v for k, v in {**states, **inputs}.items() if k in taken}
        outputs = dict(zip(names, session.run(names, fed), strict=True))
        states.update({n: outputs[f"{n}.next"] for n in states if f"{n}.next" in outputs})
        return outputs

    places = np.tile(np.arange(ids.shape[1]), (3, 1))
    run("encode", tokens=ids, positions=places, lengths=lengths)
    wide = 2 if said.functions["step"].lone_token == "twice" else 1
    tokens, texts = np.zeros((3, 1), np.int64), []
    for past in range(MOST):
        fed = np.tile(tokens, (1, wide))
        past_rows, zeros = np.full(3, past), np.zeros((3, 1), np.int64)
        outputs = run(
            "step", tokens=fed, positions=np.full_like(fed, past), past=past_rows, select=zeros
        )
        tokens = outputs["argmax"]
        texts.append(tokens)
    eos = plain.program.info.eos
    assert [_ended(row.tolist(), eos) for row in np.concatenate(texts, 1)] == expected(plain, given)


@pytest.mark.long
def test_what_generation_configs_force(tmp_path: Path) -> None:
    """First and last tokens that are forced, and tokens that never come, or not at first; texts
    that begin with several tokens."""
    bart, speech = made("bart"), made("whisper")
    bart.generation_config.forced_bos_token_id = 5
    bart.generation_config.forced_eos_token_id = 2
    first, later = written(model("whisper"), sources("whisper", 1), max_new_tokens=12)[0, 1:3]
    speech.generation_config.suppress_tokens = [int(later)]
    speech.generation_config.begin_suppress_tokens = [int(first)]
    for reference, recipe, name in ((bart, "copyspec", "bart"), (speech, "baseline", "whisper")):
        plain = gw.optimize(reference, recipe, target=gw.Target(threads=1))
        plan = plain.export_onnx_plan(tmp_path / name / "plan")
        loop = plain.export_onnx_loop(tmp_path / name / "loop")
        runner, session = module_at(plan / "run.py").Runner(plan), opened(loop)
        given, eos = sources(name, 2), plain.program.info.eos
        usual = expected(fast(name, "baseline"), given)
        for begin in (plain.program.plan.source.start, (2, 5, 6)):
            decoder = torch.tensor([begin, begin])
            want = expected(plain, given, decoder_input_ids=decoder)
            theirs = written(reference, given, decoder_input_ids=decoder, max_new_tokens=MOST)
            assert want == [_ended(row[len(begin) :].tolist(), eos) for row in theirs]
            assert want != usual
            assert [runner.generate(row, MOST, begin=begin) for row in rows(given)] == want
            assert found(session, feeds(given, begin, eos)) == want


def test_refusals(tmp_path: Path) -> None:
    """Formats with one graph for a step, loops of ONNX's own ops, and bad sources: by name."""
    plain = fast("bart", "copyspec")
    for export in (plain.export_onnx, plain.export_genai):
        with pytest.raises(
            UnsupportedError, match=r"writes from a source.*onnx-loop and onnx-plan"
        ):
            export(tmp_path / "other")
    with pytest.raises(UnsupportedError, match=r"writes from a source.*ops=contrib"):
        plain.export_onnx_loop(tmp_path / "other", ops="standard")
    assert not (tmp_path / "other").exists()
    plan, loop = (
        plain.export_onnx_plan(tmp_path / "plan"),
        plain.export_onnx_loop(tmp_path / "loop"),
    )
    runner = module_at(plan / "run.py").Runner(plan)
    for source in ([], [5] * 129):
        with pytest.raises(SystemExit, match=f"source of 1 to 128 tokens, got {len(source)}"):
            runner.generate(source, 3)
    with pytest.raises(SystemExit, match="prompt of 1 to 127 tokens, got 0"):
        runner.generate([5], 3, begin=[])
    given = feeds(sources("bart", 1), (2,), (2,)) | {"lengths": np.array([20])}
    with pytest.raises(Exception, match="lengths_are_1_to_prompt_length"):
        opened(loop).run(None, given)


@pytest.mark.long
def test_the_runners_from_the_command_line(tmp_path: Path) -> None:
    """Token ids, or a file of features; in Python, and in Node where that is."""
    for name in TYPES:
        plain, given = fast(name, "copyspec"), sources(name, 1)
        folder = plain.export_onnx_plan(tmp_path / name)
        argument = ",".join(map(str, given.get("input_ids", torch.zeros(1, 1))[0].tolist()))
        if name == "whisper":
            argument = str(folder / "sound.f32")
            given["input_features"].numpy().tofile(argument)
        want = ",".join(map(str, expected(plain, given)[0]))
        for command in ([sys.executable, "-I", "run.py"], ["node", "run.js"]):
            if command[0] == "node":
                needs_node()
            *start, file = command
            line = [*start, str(folder / file), str(folder), argument, str(MOST)]
            shown = subprocess.run(line, capture_output=True, text=True)
            assert shown.stdout.strip() == want, shown.stderr
