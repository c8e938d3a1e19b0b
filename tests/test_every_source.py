"""Every model type of transformers that writes a text from another: the same tokens, or a reason.

``pytest tests/test_every_source.py -m "long or sweep" --update`` rewrites docs/sources.md's table,
which the last test compares with what this run found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from selection import rarely
from source_models import model_types, shrunk, sources, written

import graftwork as gw
from graftwork.ir import UnsupportedError

TABLE = Path(__file__).parent.parent / "docs" / "sources.md"
HEAD = "| model type | eager | onnxruntime |"
FOUND: dict[str, tuple[str, str]] = {}
"""By model type: what came of it on eager torch, and on ONNX Runtime."""


@pytest.mark.parametrize("name", rarely(model_types(), every=9))
def test_the_same_tokens_or_a_reason(name: str) -> None:
    """Greedy tokens from three sources of different lengths are transformers', on two targets."""
    given = sources("whisper" if name == "whisper" else "bart", 3)
    try:
        model = shrunk(name)
        model.generation_config.num_beams = 1
        want = written(model, given, max_new_tokens=12, num_beams=1)
    except Exception as fault:  # shrinking knows names, not what models demand of each other
        FOUND[name] = (f"not built here ({type(fault).__name__})", "")
        return
    for target in ("eager", "onnxruntime"):
        try:
            fast = gw.optimize(model, target=target)
        except UnsupportedError as fault:
            FOUND[name] = (f"refused: {_short(fault)}", "refused")
            return
        got = fast.generate(**given, max_new_tokens=12)
        assert torch.equal(got, want), (target, got, want)
    FOUND[name] = ("yes", "yes")


def _short(error: BaseException) -> str:
    """An error in a cell of the table, without torch's own words, which change from run to run."""
    text = " ".join(str(error).split()).partition("; UserError")[0]
    return text.replace("|", "/").replace("<", "(").replace(">", ")")[:160]


@pytest.mark.sweep
def test_the_table_in_the_docs_is_what_was_found(update: bool) -> None:
    """docs/sources.md lists every type."""
    if len(FOUND) < len(model_types()):
        pytest.skip("the table is made of every result: run the whole file")
    lines = [HEAD, "|---|---|---|"]
    lines += [f"| {name} | {eager} | {onnx} |" for name, (eager, onnx) in sorted(FOUND.items())]
    head, _, _ = TABLE.read_text().partition(HEAD)
    if update:
        TABLE.write_text(head + "\n".join(lines) + "\n")
    assert TABLE.read_text() == head + "\n".join(lines) + "\n", "run with --update"
