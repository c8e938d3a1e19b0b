"""Every causal language model type of the installed transformers: the same tokens, or a reason.

Each is shrunk to a tiny random model (`shrunk`). Nothing may crash, and nothing may be wrong.
Every eighth one is looked at in each long run, the others before a release.
``pytest tests/test_every_model.py -m "long or sweep" --update`` rewrites docs/models.md's table,
which the last test compares with what this run found.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import build, error, logits_of, tokens_and_positions
from selection import rarely
from shrunk import model_types, shrunk
from test_architectures import same_tokens

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.frontends import import_model
from graftwork.ir import Defaults, Program, UnsupportedError
from graftwork.passes.engine.manager import run_passes
from graftwork.runtime.generation import generate

TABLE = Path(__file__).parent.parent / "docs" / "models.md"
NEW, MOST = 12, 20_000_000
FOUND: dict[str, tuple[str, str]] = {}
"""By model type: what came of it on eager torch, and on ONNX Runtime."""


@pytest.mark.parametrize("name", rarely(model_types(), every=16))
def test_the_same_tokens_or_a_reason(name: str) -> None:
    """Logits in the interpreter, and greedy tokens on two targets, are transformers'."""
    try:
        model = _built(name)
    except Exception as fault:  # shrinking knows names, not what models demand of each other
        FOUND[name] = (f"not built here ({type(fault).__name__})", "")
        return
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    try:
        program = import_model(model)
        cached, _ = run_passes(program, gw.Recipe.load("baseline").steps)
    except UnsupportedError as fault:
        FOUND[name] = (f"refused: {_short(fault)}", "refused")
        return
    program = program.replace(info=replace(program.info, defaults=Defaults()))
    cached = cached.replace(info=replace(cached.info, defaults=Defaults()))
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    assert error(logits_of(program, ids, positions), want) < 1e-4
    text = _greedy(model, ids[:1])
    _check(model, cached, "eager", ids[:1], text)
    FOUND[name] = ("yes", "")
    try:
        _check(model, cached, "onnxruntime", ids[:1], text)
    except UnsupportedError as fault:
        FOUND[name] = ("yes", f"refused: {_short(fault)}")
        return
    FOUND[name] = ("yes", "yes")


def _built(name: str) -> Any:
    """The tiny model, which transformers itself can run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = shrunk(name)
    with torch.device("meta"):
        config = AutoConfig.for_model(arch.model_type, **arch.config)
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"{size >> 20} million parameters are left of it")
    model = build(arch)
    with torch.no_grad():
        model(input_ids=tokens_and_positions()[0], use_cache=False)
    return model


@torch.no_grad()
def _greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    for _ in range(NEW):
        logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


def _check(
    model: Any, program: Program, target: str, ids: torch.Tensor, text: torch.Tensor
) -> None:
    executable = compile(program, Target.parse(target, threads=1))
    got = generate(executable, ids, max_new_tokens=NEW, pad_token_id=0)
    assert same_tokens(model, got[0], text[0]), (target, got[0], text[0])


def _short(error: BaseException) -> str:
    """An error in a cell of the table."""
    text = " ".join(str(error).split()).replace("|", "/").replace("<", "(").replace(">", ")")
    return (text or type(error).__name__)[:160]


@pytest.mark.sweep
def test_the_table_in_the_docs_is_what_was_found(update: bool) -> None:
    """docs/models.md lists every type; most that can be built run on both."""
    if len(FOUND) < len(model_types()):
        pytest.skip("the table is made of every result: run the whole file")
    lines = ["| model type | eager | onnxruntime |", "|---|---|---|"]
    lines += [f"| {name} | {eager} | {onnx} |" for name, (eager, onnx) in sorted(FOUND.items())]
    eager = sum(found[0] == "yes" for found in FOUND.values())
    onnx = sum(found[1] == "yes" for found in FOUND.values())
    refused = sum(found[0].startswith("refused") for found in FOUND.values())
    lines[:0] = [
        f"Of {len(FOUND)} types {eager} run on eager torch and {onnx} on ONNX Runtime, {refused} "
        f"are refused, and {len(FOUND) - eager - refused} could not be built this small.",
        "",
    ]
    head, _, _ = TABLE.read_text().partition("Of ")
    if update:
        TABLE.write_text(head + "\n".join(lines) + "\n")
    assert TABLE.read_text() == head + "\n".join(lines) + "\n", "run with --update"
