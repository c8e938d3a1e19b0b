"""Tokenizer files: what they encode is whole, and what cannot be read or encoded is our error."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import cached_llama
from tokenizers import Tokenizer

from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.data.prompts import read_prompts
from graftwork.ir import InputError, PassError, Program
from graftwork.ir.support.memory import give_back
from graftwork.ir.support.tokenizer import GARBAGE, check_length, decode, encode, read_tokenizer
from graftwork.model import Model
from graftwork.passes.drafting.corpus.graph import DraftCorpus

TEXT = "def f(x):\n    return x + 1\n\n\ndef g(y):\n    return f(y) * 2\n"
FILE = demo_folder() / "tokenizer.json"


def with_tokenizer(path: Path) -> Program:
    program = cached_llama()
    info = replace(program.info, vocab_size=2048)
    return program.replace(assets={"tokenizer.json": path}, info=info)


def cutting(path: Path) -> Path:
    """The demo's tokenizer as it is saved after a batch was cut to 16 tokens and padded to them."""
    tokenizer = Tokenizer.from_file(str(FILE))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))
    assert len(Tokenizer.from_file(str(path)).encode("def").ids) == 16
    return path


def test_what_a_file_remembers_of_batches_changes_no_prompt(tmp_path: Path) -> None:
    """A tokenizer.json with truncation and padding encodes as transformers does by default."""
    transformers = pytest.importorskip("transformers")
    path = cutting(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    program = with_tokenizer(path)
    for text in (TEXT, "def"):
        wanted = theirs(text)["input_ids"]
        assert encode(read_tokenizer(path), text) == wanted
        assert read_prompts([text], program) == [wanted]
        assert Model(program, Target("eager"), {}).tokenizer.encode(text).ids == wanted


def test_a_line_of_text_is_one_prompt(tmp_path: Path) -> None:
    """Form feeds and Unicode's other separators are characters of it."""
    path = tmp_path / "prompts.txt"
    path.write_text("a\x0cb\u2028c\r\n\nd\n", "utf-8")
    tokenizer = read_tokenizer(FILE)
    wanted = [encode(tokenizer, text) for text in ("a\x0cb\u2028c", "d")]
    assert read_prompts(path, with_tokenizer(FILE)) == wanted


PANICS: dict[str, dict[str, Any]] = {
    "read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "encoded": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "marked": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}
"""Changes of a tokenizer at which the library panics, which is no `Exception`."""


@pytest.mark.parametrize("case", PANICS)
def test_panics_of_the_library_are_our_errors(case: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(FILE.read_text()), **PANICS[case]}))
    program = with_tokenizer(path)
    with pytest.raises(InputError, match=r"tokenizer\.json|cannot encode 'def'"):
        read_prompts(["def"], program)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("def")
    if case != "marked":  # a corpus is read without marks
        with pytest.raises(PassError, match=r"draft_corpus: (cannot read|the tokenizer cannot)"):
            DraftCorpus(path=str(corpus)).run(program)


def test_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graftwork.ir.support.tokenizer.read_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_tokenizer(FILE)


def test_a_text_far_beyond_the_context_is_refused_before_it_is_encoded() -> None:
    """Encoding a hundred megabytes takes minutes, and gigabytes."""
    tokenizer, most = read_tokenizer(FILE), 16
    check_length(tokenizer, "a" * 64 * most, most)
    longest = max(map(len, tokenizer.get_vocab()))
    text = "a" * (max(64, longest) * most + 1)
    with pytest.raises(InputError, match=rf"has {len(text)} characters.*context is 16: shorten"):
        check_length(tokenizer, text, most)
    with pytest.raises(InputError, match="characters, which are"):
        Model(with_tokenizer(FILE), Target("eager"), {}).generate("a" * 10**7)


def test_tokens_of_no_text_are_refused() -> None:
    tokenizer = read_tokenizer(FILE)
    assert decode(tokenizer, encode(tokenizer, TEXT)) == TEXT
    with pytest.raises(InputError, match="cannot decode 1 tokens"):
        decode(tokenizer, [2**40])


def resident() -> int:
    """Bytes of this process' memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of GNU alone gives memory back")
def test_what_reading_a_large_tokenizer_leaves_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocabulary = {f"token-of-some-length-{i}": i for i in range(280_000)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "token-of-some-length-0"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    assert path.stat().st_size > GARBAGE
    del vocabulary, model
    gc.collect()
    give_back()
    read = read_tokenizer(path)
    left = resident()
    give_back()
    assert left - resident() < 4 << 20
    assert read.token_to_id("token-of-some-length-9") == 9
