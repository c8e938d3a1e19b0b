"""Every architecture of the table imports, and generates what transformers does, on both backends.

Both are tested here because files are what test processes share out: each model is traced once.

Writes nothing unless asked: ``pytest tests/test_architectures.py --update`` rewrites the table in
docs/architectures.md, which the last test compares with what this run found.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import (
    ARCHS,
    TOLERANCE,
    Arch,
    error,
    imported,
    logits_of,
    tokens_and_positions,
)
from graphs import symbols_of
from selection import rarely

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.ir import Program, Sym, TensorType, site_of, type_of
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.validate import reference_logits
from graftwork.runtime.generation import generate

G = torch.ops.graftwork
TABLE = Path(__file__).parent.parent / "docs" / "architectures.md"
NEW, LONG, SHORT = 32, 11, 7
TIE = 1e-5
"""Tokens may differ only where the best two logits are this close, as a share of their scale."""

FOUND: dict[str, dict[str, str]] = {}


FAMILIES = (*("bloom", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llama"),)
"""Of each way in which models differ, one."""

NAMES = rarely(sorted(ARCHS), every=4, keep=FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_import(name: str) -> None:
    """Logits, dynamic sizes, one attention a layer, experts, markers and sites."""
    model, program = imported(name)
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert error(logits_of(program, ids, positions), expected) < TOLERANCE
    shorter = logits_of(program, ids[:1, :7], positions[:1, :7])
    assert error(shorter, expected[:1, :7]) < TOLERANCE
    _check_structure(program, ARCHS[name])
    _check_options(program, name)
    if name in LEARNED or name in ROTARY:
        _check_positions(model, program, learned=name in LEARNED)


def _check_structure(program: Program, arch: Arch) -> None:
    step = program.function("step")
    attentions = step.calls(G.attention.default)
    heads = 2 if arch.model_type == "diffllama" else 1
    assert [node.kwargs["layer"] for node in attentions] == list(range(arch.blocks * heads))
    assert len(step.calls(G.moe.default)) == arch.experts
    points = ["block"] if arch.parallel else ["attention", "block"]
    expected = [(block, point) for block in range(arch.blocks) for point in points]
    markers = step.calls(G.hidden.default)
    placed = [(node.kwargs["layer"], node.kwargs["point"]) for node in markers]
    assert placed == [(-1, "embedding"), *expected]
    for node in attentions:
        site = site_of(node)
        assert site.module and site.layer is not None and site.line.startswith("modeling_")
    logits = type_of(step.outputs["logits"])
    assert logits == TensorType(torch.float32, (Sym("B"), Sym("T"), 128))
    assert symbols_of(step) == {"B", "T"}
    assert program.stage == "traced" and program.info.vocab_size == 128


def _check_positions(model: Any, program: Program, learned: bool) -> None:
    """Tokens at positions 5, 6, ... get the logits that transformers gives them there."""
    ids, positions = tokens_and_positions(first=5)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits
    assert error(logits_of(program, ids, positions), expected) < TOLERANCE
    moved = logits_of(program, ids, positions - 5)
    assert (error(moved, expected) > 100 * TOLERANCE) == learned


def _check_options(program: Program, name: str) -> None:
    """Windows, scales, soft caps, sinks, slopes and grouped heads reach the op."""
    attentions = program.function("step").calls(G.attention.default)
    first = attentions[0]
    if name in WINDOWS:
        assert [node.kwargs.get("window") for node in attentions] == WINDOWS[name]
    if name in CHUNKS:
        assert [node.kwargs.get("chunk") for node in attentions] == CHUNKS[name]
    if name in GROUPS:
        heads = [type_of(arg).dims[1] for arg in first.args[:3]]  # type: ignore[arg-type]
        assert heads == [4, GROUPS[name], GROUPS[name]]
    for option, value in OPTIONS.get(name, {}).items():
        assert first.kwargs[option] == pytest.approx(value)
    names = [str(arg.target) for arg in first.args[3:] if isinstance(arg, torch.fx.Node)]
    assert names == EXTRA.get(name, [])


LEARNED = ("biogpt", "ctrl", "gpt2", "gpt_neo", "openai-gpt", "opt", "xglm")
"""Models with absolute positions, where a wrong position shows even if all are shifted alike."""

ROTARY = ("cohere", "gptj", "llama")

WINDOWS = {
    "gemma3_text": [5, None],
    "gpt_neo": [None, 5],
    "mistral": [5, 5],
    "phimoe": [5, 5],
    "qwen2": [None, 5],
    "qwen2_moe": [5, None],
}
"""They come from the masks that a model would build, not from how its configuration spells them."""

CHUNKS = {"llama4_text": [5, None]}
"""Likewise."""

GROUPS = {"falcon": 2, "falcon-multi-query": 1, "gpt_bigcode": 1, "llama": 2}
"""Key heads (of four query heads)."""

OPTIONS = {
    "bloom": {"scale": 8**-0.5},
    "gemma2": {"softcap": 2.0, "scale": 12**-0.5},
    "granite": {"scale": 0.3},
    "xglm": {"scale": 1.0},
}

EXTRA = {
    "bloom": ["alibi.0"],
    "falcon-alibi": ["alibi.0"],
    "gpt_oss": ["model.layers.0.self_attn.sinks"],
    "mpt": ["alibi.0"],
}
"""Names of sinks and slopes."""


@lru_cache(maxsize=1)
def prepared(name: str) -> tuple[Any, Program, torch.Tensor, list[torch.Tensor]]:
    """The transformers model, our program, two prompts, and transformers' 32 greedy tokens each."""
    model, traced = imported(name)
    program, _ = run_passes(traced, gw.Recipe.load("baseline").steps)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 128, (2, LONG), generator=generator)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = [
            model.generate(prompts[:1], attention_mask=torch.ones(1, LONG).long(), **options)[0],
            model.generate(
                prompts[1:, :SHORT], attention_mask=torch.ones(1, SHORT).long(), **options
            )[0],
        ]
    return model, program, prompts, expected


def same_tokens(model: Any, got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two texts are equal, or part where transformers' best two logits tie."""
    if torch.equal(got, expected):
        return True
    at = int((got != expected).nonzero()[0])
    with torch.no_grad():
        logits = model(input_ids=expected[None, :at]).logits[0, -1]
    best = logits.topk(2)
    tied = float(best.values[0] - best.values[1]) <= TIE * float(logits.abs().max())
    return tied and int(got[at]) in best.indices.tolist()


def check(name: str, target: str) -> None:
    """Greedy tokens, one prompt alone and two of different lengths together."""
    model, program, prompts, expected = prepared(name)
    executable = compile(program, Target.parse(target, threads=1))
    alone = generate(executable, prompts[:1], max_new_tokens=NEW, pad_token_id=0)
    assert same_tokens(model, alone[0], expected[0]), (alone[0], expected[0])
    padded, mask = prompts.clone(), torch.ones_like(prompts)
    padded[1, LONG - SHORT :] = prompts[1, :SHORT]
    padded[1, : LONG - SHORT], mask[1, : LONG - SHORT] = 0, 0
    both = generate(executable, padded, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
    assert same_tokens(model, both[0], expected[0]), (both[0], expected[0])
    short = both[1, LONG - SHORT :]
    assert same_tokens(model, short, expected[1]), (short, expected[1])


@pytest.mark.parametrize("name", NAMES)
def test_architecture(name: str) -> None:
    """Logits in the interpreter, then 32 greedy tokens on eager torch and on ONNX Runtime."""
    model, program, prompts, _ = prepared(name)
    with torch.no_grad():
        expected = model(input_ids=prompts).logits
    scale = float(expected.abs().max())
    assert float((reference_logits(program, prompts) - expected).abs().max()) / scale < 1e-4
    row = FOUND.setdefault(name, {"type": ARCHS[name].model_type})
    row["raised"] = _raised(program)
    row["eager"] = row["onnxruntime"] = "no"
    check(name, "eager")
    row["eager"] = "yes"
    check(name, "onnxruntime")
    row["onnxruntime"] = "yes"


def _raised(program: Program) -> str:
    """What the passes made of the graph, as short words."""
    ran = {record.name for record in program.provenance if record.matches}
    words = {
        "raise_norms": "norms",
        "raise_rotary": "rotary",
        "raise_gated_mlp": "gated MLP",
        "fuse_qkv": "packed QKV",
    }
    moe = ["MoE"] if program.function("step").calls(torch.ops.graftwork.moe.default) else []
    return ", ".join([word for name, word in words.items() if name in ran] + moe)


def test_the_table_in_the_docs_is_what_was_found(update: bool) -> None:
    """docs/architectures.md lists what passed above: at least 40 model types, 35 on ONNX."""
    if len(FOUND) < len(ARCHS):
        pytest.skip("the table is made of every result: run the whole file")
    lines = [
        "| configuration | transformers model type | recognised | eager | onnxruntime |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(FOUND.items()):
        cells = (row["type"], row["raised"], row["eager"], row["onnxruntime"])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    head, _, _ = TABLE.read_text().partition("| configuration |")
    if update:
        TABLE.write_text(head + "\n".join(lines) + "\n")
    assert TABLE.read_text() == head + "\n".join(lines) + "\n", "run with --update"
    types = {row["type"] for row in FOUND.values() if row["eager"] == "yes"}
    assert len(types) >= 40
    assert len({r["type"] for r in FOUND.values() if r["onnxruntime"] == "yes"}) >= 35
