"""Code that comes in a checkpoint folder never runs, and nobody is asked whether it may."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from gguf_files import write
from selection import one_in

import graftwork as gw
from graftwork.frontends import import_model
from graftwork.ir import UnsupportedError
from graftwork.measuring.bench import Transformers

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import pathlib
pathlib.Path({ran!r}).write_text("ran")
from transformers import LlamaConfig as Own, LlamaForCausalLM as Made, LlamaTokenizer as Read
"""
CLASSES = {
    "AutoConfig": "own.Own",
    "AutoModelForCausalLM": "own.Made",
    "AutoModelForSeq2SeqLM": "own.Made",
    "AutoTokenizer": ["own.Read", "own.Read"],
    "AutoProcessor": "own.Read",
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What the code would write, where whoever is asked says yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return tmp_path / "ran"


def folder(place: Path, ran: Path, model_type: str) -> Path:
    """A checkpoint with code of its own for every class."""
    build(ARCHS["llama"]).save_pretrained(place)
    (place / "own.py").write_text(CODE.format(ran=str(ran)))
    for name in ("config.json", "tokenizer_config.json", "processor_config.json"):
        said = json.loads((place / name).read_text()) if (place / name).exists() else {}
        said |= {"model_type": model_type, "auto_map": CLASSES}
        (place / name).write_text(json.dumps(said))
    return place


def exits(place: Path) -> Any:
    text = torch.randint(3, 128, (20, 40)).tolist()
    return gw.train_exits(place, text, out=place.parent / "out", steps=1, window=8, batch=1)


WAYS: dict[str, Callable[[Path], Any]] = {
    "import": import_model,
    "against": lambda place: Transformers(place, torch.float32),
    "exits": exits,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_type_that_only_the_folder_knows_is_refused(way: str, ran: Path, tmp_path: Path) -> None:
    place = folder(tmp_path / "m", ran, "own")
    with pytest.raises(UnsupportedError, match=r"config\.json: .*custom code"):
        WAYS[way](place)
    assert not ran.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_known_type_is_read_by_transformers_own_code(way: str, ran: Path, tmp_path: Path) -> None:
    """Whatever auto_map says beside it."""
    place = folder(tmp_path / "m", ran, "llama")
    WAYS[way](place)
    assert not ran.exists() and sys.stdin.read(2) == "y\n"


@pytest.mark.parametrize("name", one_in(2, ["attn_implementation", "experts_implementation"]))
def test_kernels_that_a_folder_names_are_not_fetched(name: str, ran: Path, tmp_path: Path) -> None:
    """transformers would take them from the hub and run them."""
    place = folder(tmp_path / "m", ran, "llama")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, name: "somebody/kernel"}))
    assert import_model(place).info.vocab_size == 128
    Transformers(place, torch.float32)


def test_what_lies_beside_a_gguf_is_not_run(ran: Path, tmp_path: Path) -> None:
    """Its tokenizer and configuration are its own."""
    place = folder(tmp_path / "m", ran, "own")
    write(place / "model.gguf", {"": "F16"})
    assert import_model(place / "model.gguf").info.vocab_size == 128
    assert not ran.exists() and sys.stdin.read(2) == "y\n"


def test_every_call_says_so() -> None:
    """All that the project loads by transformers' Auto classes."""
    folders = ("graftwork", "frontends", "passes", "runtime", "benchmarks", "docs", "examples")
    seen = 0
    for path in (path for name in folders for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            if owner == "GenerationConfig":
                continue  # has no code
            seen += 1
            said = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert said.get("trust_remote_code") == "False", f"{path}:{node.lineno}: {owner}"
    assert seen > 3
