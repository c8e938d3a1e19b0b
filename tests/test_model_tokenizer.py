"""`Model.tokenizer` does what transformers' tokenizer of the same folder does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import cached_llama

from graftwork.backends.target import Target
from graftwork.chat.tokenizer import Tokenizer
from graftwork.cli.demo import demo_folder
from graftwork.data.prompts import as_prompts
from graftwork.ir import InputError
from graftwork.model import Model

TEXTS = ("def f(x):\n    return x + 1\n", "import os", "")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "def f(x):"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's tokenizer, with a chat template."""
    made = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(demo_folder() / "tokenizer.json", made)
    said = json.loads((demo_folder() / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps({**said, "padding_side": "left"}))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    program = cached_llama()
    info = replace(program.info, vocab_size=2048)
    assets = {path.name: path for path in folder.iterdir()}
    return Model(program.replace(assets=assets, info=info), Target("eager"), {}).tokenizer


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def test_texts_are_encoded_as_by_transformers(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text) == ours.encode(text).ids
        assert len(ours.encode(text).tokens) == len(ours.encode(text))
        assert ours(text) == dict(theirs(text, return_token_type_ids=False))
    asked = {"padding": True, "return_tensors": "pt"}
    mine, other = ours(TEXTS[:2], **asked), theirs(list(TEXTS[:2]), **asked)
    assert torch.equal(mine.input_ids, other["input_ids"])
    assert torch.equal(mine.to("cpu").attention_mask, other["attention_mask"])
    assert torch.equal(
        ours.encode("import os", return_tensors="pt"),
        theirs.encode("import os", return_tensors="pt"),
    )


def test_ids_of_all_kinds_are_decoded(ours: Tokenizer, theirs: Any) -> None:
    ids = ours.encode(TEXTS[0])
    row = torch.tensor([*ids, ours.eos_token_id])
    for given in (row, row.numpy(), row.tolist(), tuple(row.tolist())):
        assert ours.decode(given) == TEXTS[0]
        assert ours.decode(given, skip_special_tokens=False) == theirs.decode(given)
    assert ours.decode(ids[0]) == theirs.decode(ids[0])
    both = torch.stack([row, row])
    assert ours.decode(both) == ours.batch_decode(both) == [TEXTS[0]] * 2
    assert ours.batch_decode(both) == theirs.batch_decode(both, skip_special_tokens=True)


def test_messages_go_through_the_template_as_in_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert ours.chat_template == theirs.chat_template
    for begun in (False, True):
        asked = {"add_generation_prompt": begun}
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, **asked)
        assert ours.apply_chat_template(MESSAGES, tokenize=False, **asked) == text
        for kind in (None, "pt"):
            mine = ours.apply_chat_template(MESSAGES, return_tensors=kind, **asked)
            other = theirs.apply_chat_template(MESSAGES, return_tensors=kind, **asked)
            assert np.array_equal(mine["input_ids"], other["input_ids"])
            assert np.array_equal(mine.attention_mask, other["attention_mask"])
        assert (
            ours.apply_chat_template(MESSAGES, return_dict=False, **asked)
            == mine["input_ids"].flatten().tolist()
        )


def test_special_tokens_have_names(ours: Tokenizer, theirs: Any) -> None:
    assert ours.special_tokens_map
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert ours.convert_tokens_to_ids(ours.eos_token) == theirs.eos_token_id
    assert ours.convert_ids_to_tokens([0, 5]) == theirs.convert_ids_to_tokens([0, 5])
    assert ours.id_to_token(5) == ours.backend_tokenizer.id_to_token(5)
    with pytest.raises(AttributeError, match="no_such"):
        _ = ours.no_such


def test_the_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large vocabularies take seconds."""
    program = cached_llama()
    info = replace(program.info, vocab_size=2048)
    model = Model(
        program.replace(assets={"tokenizer.json": folder / "tokenizer.json"}, info=info),
        Target("eager"),
        {},
    )
    assert as_prompts("import os", model.program, model._tokenizer)[0].tolist() == [
        model.tokenizer.encode("import os")
    ]
    monkeypatch.setattr("graftwork.ir.support.tokenizer.read_bytes", None)  # not again
    asked: dict[str, Any] = {}
    assert model._prompts(["import os", "import sys"], asked).shape[0] == 2


@pytest.mark.parametrize("ids", ["text", {}, None, [1.5], [[1], 2], [-1], [True], torch.ones(2)])
def test_what_are_no_ids_is_refused(ids: Any, ours: Tokenizer) -> None:
    with pytest.raises(InputError, match="decode: expected token ids"):
        ours.decode(ids)


def test_what_is_no_text_or_tensor_is_refused(ours: Tokenizer) -> None:
    with pytest.raises(InputError, match="encode: expected a text, got 3"):
        ours.encode(3)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="half a character"):
        ours.encode("a\ud800")
    with pytest.raises(InputError, match="add padding=True"):
        ours(TEXTS[:2], return_tensors="pt")
    with pytest.raises(InputError, match='expected "pt" or None'):
        ours("a", return_tensors="np")  # type: ignore[arg-type]
