"""What is wrong with a GGUF file, or with what is asked of it, by the command line: one message,
before the model is traced or a text begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf_files import write
from typer.testing import CliRunner

from graftwork.cli.commands import app
from graftwork.ir import GraftworkError, InputError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


def failing(*words: str) -> BaseException:
    """How a command fails."""
    ran = CliRunner().invoke(app, list(words))
    assert ran.exit_code != 0 and ran.exception is not None
    return ran.exception


def without(name: bytes) -> Callable[[bytes], bytes]:
    """The file with a tensor called by another name."""
    return lambda raw: raw.replace(name, name[:-1] + b"x")


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a tensor of a layer": (without(b"blk.0.attn_k.weight"), "'blk.0.attn_k.weighx'"),
    "the last norm": (without(b"output_norm.weight"), "'output_norm.weighx'"),
    "the table": (without(b"token_embd.weight"), "holds no table token_embd.weight"),
    "no architecture": (without(b"general.architecture"), "general.architecture: expected one of"),
    "an end": (lambda raw: raw[:-5000], "begins at byte 96768 of a file of 95"),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = FILES[case]
    path = tmp_path / "tiny.gguf"
    write(path, {"": "F16"}, **SIZES)
    path.write_bytes(change(path.read_bytes()))
    monkeypatch.setattr("graftwork.frontends.huggingface.model.traced", None)
    error = failing("generate", str(path), "--prompt", "ab")
    assert isinstance(error, GraftworkError) and message in str(error)


def test_an_absent_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing stands in its place."""
    import gguf

    path = tmp_path / "tiny.gguf"
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tensor",
        lambda self, name, *given, real=gguf.GGUFWriter.add_tensor, **more: (
            None if "attn_k" in name else real(self, name, *given, **more)
        ),
    )
    write(path, {"": "F16"}, **SIZES)
    monkeypatch.setattr("graftwork.frontends.huggingface.model.traced", None)
    error = failing("generate", str(path), "--prompt", "ab")
    assert isinstance(error, GraftworkError)
    assert "blk.0.attn_k.weight" in str(error) or "self_attn.k_proj.weight" in str(error)


def test_a_text_that_the_memory_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the context is: what is asked for counts, and nothing is taken before."""
    path = tmp_path / "tiny.gguf"
    write(path, {"": "F16"}, max_position_embeddings=2**27, **SIZES)
    target = "onnxruntime:cpu:float32"
    command = ("generate", str(path), "--prompt", "ab", "--target", target, "--max-new-tokens")
    monkeypatch.setattr("graftwork.backends.states.free_memory", lambda: 8 << 30)
    error = failing(*command, str(2**26))
    assert isinstance(error, InputError)
    assert "17.2 GB, and 8.6 GB of memory are free: ask for fewer new tokens" in str(error)
    ran = CliRunner().invoke(app, [*command, "4"])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tolerance 1.5", "tolerance=1.5: expected a number between 0 and 1"),
        ("--tolerance 0.001", "3 prompts leave 2 to calibrate on, and a tolerance of 0.001"),
        ("--confidence 0", "confidence=0.0: expected a number between 0 and 1"),
    ],
)
def test_promises_that_nothing_keeps(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused for what they say."""
    path, texts = tmp_path / "tiny.gguf", tmp_path / "texts.txt"
    write(path, {"": "F16"}, **SIZES)
    texts.write_text("ab\ncd\nef\n")
    monkeypatch.setattr("graftwork.optimizing.optimize", None)
    error = failing("calibrate", str(path), "--data", str(texts), *words.split())
    assert isinstance(error, InputError) and message in str(error)
