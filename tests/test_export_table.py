"""What every format makes of recipes: the model's tokens, or a refusal that says who can."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from onnxruntime_helpers import module_at
from test_export_loop import asked, opened, texts
from test_onnxruntime_export import Loop
from tiny import tiny_llama

from graftwork.backends import Target
from graftwork.backends.onnxruntime import rows_quantized
from graftwork.backends.tiles import kernel_name
from graftwork.ir import UnsupportedError
from graftwork.model import Model
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe

genai = pytest.importorskip("onnxruntime_genai")

PROMPTS = [[(i * 7 + j * (i + 2)) % 30 + 1 for j in range(3 + i)] for i in range(8)]
MOST, EOS = 12, 0
RECIPES: dict[str, Any] = {
    "baseline": "baseline",
    "copyspec": "copyspec",
    "prompt_lookup": "prompt_lookup",
    "medusa as a chain": {
        "extends": "baseline",
        "passes": ["draft_medusa", {"tree_chain": {"depth": 4}}],
    },
    "medusa": "medusa",
    "eagle_chain": "eagle_chain",
    "eagle2": "eagle2",
    "eagle": "eagle",
    "int8": "int8",
    "int8_copyspec": "int8_copyspec",
    "int4": "int4",
    "int4, float products": {
        "extends": "int4",
        "passes": [{"quantize_weights": {"rounded": False}}],
    },
    "kv_int8": "kv_int8",
    "h2o": {"extends": "h2o", "passes": [{"evict_cache": {"budget": 64, "block": 8}}]},
    "skip_layers": {"extends": "baseline", "passes": [{"skip_layers": {"layers": [1]}}]},
    "unified_skipping": "unified_skipping",
    "cut_depth": {"extends": "baseline", "passes": [{"cut_depth": {"every": 2}}]},
    "layerskip": "layerskip",
    "kangaroo": "kangaroo",
    "d3": "d3",
    "calm": {"extends": "calm", "passes": [{"depth_confident": {"threshold": 0.02}}]},
    "free": {"extends": "free", "passes": [{"depth_deferred": {"threshold": 0.02}}]},
    "ffn_skipllm": {
        "extends": "ffn_skipllm",
        "passes": [{"depth_mlp": {"first": 1, "last": 1, "warm": 2, "similarity": 0.9}}],
    },
}

pytestmark = pytest.mark.filterwarnings("ignore:.*untrained")


@cache
def made(name: str) -> Model:
    chosen = Recipe.load(RECIPES[name])
    program, _ = run_passes(tiny_llama(4, dim=16), chosen.steps)
    return Model(program, Target(threads=1), chosen.as_dict())


@cache
def wanted(name: str) -> list[list[int]]:
    model = made(name)
    return [model.generate([p], max_new_tokens=MOST)[0, len(p) :].tolist() for p in PROMPTS]


@cache
def of_kernels(name: str) -> list[list[int]]:
    """The model's tokens by ONNX Runtime's own kernels, which exports run on everywhere."""
    with patch.object(rows_quantized, "quantized_ops_available", lambda: "not here"):
        model = Model(made(name).program, Target(threads=1), {})
        return [model.generate([p], max_new_tokens=MOST)[0, len(p) :].tolist() for p in PROMPTS]


def by_step(folder: Path) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        loop, tokens = Loop(folder, 1), [*prompt]
        fed = torch.tensor([prompt])
        while tokens[len(prompt) :][-1:] != [EOS] and len(tokens) < len(prompt) + MOST:
            tokens.append(int(loop.step(fed)[0, -1].argmax()))
            fed = torch.tensor([tokens[-1:]])
        found.append(tokens[len(prompt) :])
    return found


def by_loop(folder: Path) -> list[list[int]]:
    return texts(opened(folder), asked(PROMPTS, MOST, [EOS]))


def by_plan(folder: Path) -> list[list[int]]:
    runner = module_at(folder / "run.py").Runner(folder)
    return [runner.generate(prompt, MOST) for prompt in PROMPTS]


def by_genai(folder: Path) -> list[list[int]]:
    model, found = genai.Model(str(folder)), []
    for prompt in PROMPTS:
        options = genai.GeneratorParams(model)
        options.set_search_options(max_length=len(prompt) + MOST, do_sample=False)
        generator = genai.Generator(model, options)
        generator.append_tokens(np.array([prompt], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        new = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        found.append(new + [EOS] * (len(new) < MOST))  # it leaves the end out
    return found


FORMATS: dict[str, tuple[str, Callable[[Path], list[list[int]]]]] = {
    "onnx": ("export_onnx", by_step),
    "onnx-loop": ("export_onnx_loop", by_loop),
    "onnx-plan": ("export_onnx_plan", by_plan),
    "genai": ("export_genai", by_genai),
}
"""What writes a format, and what runs it without graftwork."""


def cell(name: str, format: str, folder: Path) -> str:
    """`tokens`, if a format gives the model's own; those of ONNX Runtime's kernel; or who can."""
    export, run = FORMATS[format]
    try:
        written = getattr(made(name), export)(folder / format)
    except UnsupportedError as error:
        assert not (folder / format).exists()
        return f"no: {', '.join(f for f in ('onnx-loop', 'onnx-plan') if f in str(error))}"
    try:
        found = run(written)
    except SystemExit as error:
        assert "does not know" in str(error)
        return "no: " + (
            "onnx-loop" if "onnx-loop carries it" in str(error) else "graftwork itself"
        )
    if found == wanted(name):
        return "tokens"
    if found == of_kernels(name):
        return "tokens of MatMulNBits"
    if name == "int4" and "VNNI" not in kernel_name():
        # Without 8-bit dot products MatMulNBits computes prompts of some lengths in floats.
        return "tokens of MatMulNBits"
    return "other tokens"


def table(folder: Path) -> str:
    """The table of the documentation."""
    lines = [f"| recipe | {' | '.join(FORMATS)} |", "|---" * (1 + len(FORMATS)) + "|"]
    for name in RECIPES:
        cells = [cell(name, format, folder / name.replace(" ", "_")) for format in FORMATS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.long
def test_the_documented_table(tmp_path: Path) -> None:
    docs = Path(__file__).parents[1] / "docs" / "formats.md"
    assert table(tmp_path) in docs.read_text(encoding="utf-8"), table(tmp_path / "again")
