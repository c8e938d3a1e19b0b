"""Recipes that store weights in few bits, on models that hold theirs in few bits already."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from archs import ARCHS, build
from every_recipe import steps_of
from evidence import evidence_for
from quantized_checkpoints import (
    awq_config,
    awq_layer,
    compressed_config,
    compressed_layer,
    gptq_config,
    gptq_layer,
    nf4_config,
    nf4_layer,
    write,
)
from selection import mostly_long

import graftwork as gw
from graftwork.backends.target import Target
from graftwork.frontends import import_model
from graftwork.ir import GraftworkWarning, PassError, arguments
from graftwork.ir.ops.numerics import Numeric, dequantize
from graftwork.model import Model
from graftwork.passes.engine.manager import PassReport, Step, run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.recipe import Recipe

G = torch.ops.graftwork
EXPERTS = ("gate_up", "gate_up_scale", "gate_up_offset")
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
INT = "int-quantized"
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}

FORMATS: dict[str, Any] = {
    "gptq": (gptq_config(), gptq_layer()),
    "gptq-act-order": (gptq_config(desc_act=True), gptq_layer(ordered=False)),
    "awq": (awq_config(), awq_layer()),
    "nf4": (nf4_config(), nf4_layer()),
}


def remarks(reports: list[PassReport]) -> str:
    return "; ".join(said for report in reports for said in report.remarks)


def only(*passes: QuantizeWeights) -> list[Step]:
    """These passes behind what makes a program canonical."""
    steps = Recipe.load("baseline").steps
    end = next(i for i, step in enumerate(steps) if step.pass_.name == "canonicalize")
    return [*steps[: end + 1], *map(Step, passes)]


@pytest.fixture(autouse=True)
def _nothing_else_is_dequantized() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraftworkWarning)
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .gguf of two layers: products in 4 bits with offsets, one in 5, tables in 8."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    kinds = {"": "Q4_1", "up_proj.weight": "Q5_0", "lm_head.weight": "Q8_0"}
    gguf_files.write(path, {**kinds, "embed_tokens.weight": "Q8_0"}, **SIZES)
    return path


@pytest.mark.parametrize("case", mostly_long(FORMATS, keep=("gptq-act-order",)))
def test_other_bits_are_those_of_the_float_model(case: str, tmp_path: Path) -> None:
    """A folder of few bits in other bits is the floats that its own stand for in those, weight by
    weight, whatever the format."""
    config, layer = FORMATS[case]
    quantized, plain = write(tmp_path, config, layer, **SIZES)
    asked = only(QuantizeWeights(bits=8, group=32))
    (one, reports), (two, _) = (run_passes(import_model(x), asked) for x in (quantized, plain))
    assert "quantized anew: 14 of 4 bits" in remarks(reports)
    calls = [program.step.calls(G.quantized_linear.default) for program in (one, two)]
    assert len(calls[0]) == 14 and all(arguments(call)["bits"] == 8 for call in calls[0])
    for call, other in zip(*calls, strict=True):
        ours, theirs = arguments(call), arguments(other)
        assert ours["rounded"]
        for part in ("weight", "scale", "offset"):
            a, b = one.weights[ours[part].target], two.weights[theirs[part].target]
            assert torch.equal(a.load(), b.load()), a.name


def test_the_same_bits_stay(file: Path) -> None:
    """Of a file those weights keep their bytes that have the bits which the recipe asks for, in
    groups as fine; activations are rounded as it says; and the report tells both."""
    start = import_model(file)
    made, reports = run_passes(start, only(QuantizeWeights(bits=4, group=32, embedding=8)))
    assert "quantized anew: 2 of 6 bits" in remarks(reports)
    assert "stay as they are: 12 of 4 bits, 2 of 8 bits" in remarks(reports)
    for name, weight in made.weights.items():
        if ".q" in name and "up_proj" not in name:
            assert torch.equal(weight.load(), start.weights[name].load()), name
    found = [arguments(call) for call in made.step.calls(G.quantized_linear.default)]
    assert [given["bits"] for given in found].count(4) == 14
    assert all(given["rounded"] for given in found)
    # Coarser groups would lose nothing that finer ones hold, but finer ones would not be there.
    finer, reports = run_passes(start, only(QuantizeWeights(bits=4, group=16)))
    assert "quantized anew: 12 of 4 bits, 2 of 6 bits" in remarks(reports)
    assert len(finer.step.calls(G.quantized_embedding.default)) == 1  # as the file has it


def test_a_folder_in_8_bits_stays_as_it_is(tmp_path: Path) -> None:
    """What comes by output channel in int8 is what the recipe int8 makes of layers."""
    config, layer = compressed_config(INT, INT8), compressed_layer(INT, INT8)
    start = import_model(write(tmp_path, config, layer, **SIZES)[0])
    made, reports = run_passes(start, only(QuantizeWeights(bits=8, group=0, symmetric=True)))
    assert remarks(reports).endswith("stay as they are: 14 of 8 bits")
    for name in (name for name in start.weights if ".q8" in name):
        assert torch.equal(made.weights[name].load(), start.weights[name].load())
    assert all(arguments(c)["rounded"] for c in made.step.calls(G.quantized_linear.default))


def test_a_second_pass_leaves_what_the_first_has_stored(file: Path) -> None:
    first = QuantizeWeights(bits=8, group=32, select=("*.down_proj.weight",))
    made, _ = run_passes(import_model(file), only(first, QuantizeWeights(bits=3, group=32)))
    bits = {
        str(given["weight"].target).split(".")[-3]: given["bits"]
        for given in map(arguments, made.step.calls(G.quantized_linear.default))
    }
    assert bits["down_proj"] == 8 and bits["up_proj"] == 3 and bits["q_proj"] == 3
    with pytest.raises(PassError, match="matched nothing"):
        run_passes(made, [Step(first.model_copy(update={"select": ("*.norm.weight",)}))])


def test_experts_of_mixtures() -> None:
    """Stacks of few bits are the stacks of their floats in other bits."""
    model = build(ARCHS["qwen3_moe"])
    stored, _ = run_passes(import_model(model), only(QuantizeWeights(bits=8, group=8)))
    (call, *_) = stored.step.calls(G.quantized_moe.default)
    again, reports = run_passes(stored, [Step(QuantizeWeights(bits=4, group=8))])
    given = arguments(next(iter(again.step.calls(G.quantized_moe.default))))
    assert given["bits"] == 4 and "quantized anew" in remarks(reports)
    before = arguments(call)
    parts = [stored.weights[before[p].target].load() for p in EXPERTS]
    floats = dequantize(*parts, bits=8)
    numeric = Numeric(4, 8, "affine", torch.float16)
    wanted = numeric.quantize(floats.flatten(0, 1))
    found = again.weights[given["gate_up"].target].load()
    assert torch.equal(found.flatten(0, 1), wanted.weight)


RECIPES = (
    *("int8", "int4", "olive", "double_rounding", "int8_eagle_chain", "medusa", "skip_layers"),
    *("gptq", "awq", "decoupleq", "autoround", "jlcm", "ptq161", "mixed_precision"),
    *("quarot", "vq_logits", "round_activations", "kv_int8", "recycling", "copyspec"),
)


@pytest.mark.parametrize("recipe", mostly_long(RECIPES, keep=("gptq", "quarot", "medusa")))
def test_any_recipe_runs_on_a_quantized_model(recipe: str, file: Path, tmp_path: Path) -> None:
    start = import_model(file)
    steps = steps_of(recipe, tmp_path)
    evidence = evidence_for(start) if any(step.pass_.text for step in steps) else None
    program, _ = run_passes(start, steps, evidence=evidence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)  # heads are untrained
        model = Model(program, Target("eager"), {})
        assert model.generate([[1, 5, 9, 30]], max_new_tokens=4, eos_token_id=[]).shape == (1, 8)


def test_products_that_were_merged_are_quantized_anew(file: Path) -> None:
    """A recipe merges products before it stores them; no product keeps other bits, and the report
    says what was done."""
    model = gw.optimize(file, "int8", target="eager:cpu:float32")
    calls = model.program.step.calls(G.quantized_linear.default)
    assert {(arguments(call)["bits"], arguments(call)["rounded"]) for call in calls} == {(8, True)}
    said = remarks(list(model.report.passes)) if model.report else ""
    assert "quantized anew: 8 of 4 bits, 2 of 6 bits" in said
    assert "stay as they are: 2 of 8 bits" in said
