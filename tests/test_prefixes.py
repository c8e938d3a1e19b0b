"""Conversations and prefixes as users meet them: what a model holds, forgets, saves and loads."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from selection import mostly_long
from test_kept_conversations import MODELS

from graftwork.backends.target import Target
from graftwork.ir import InputError, Program
from graftwork.model import Model, load
from graftwork.runtime.cache.conversations import Conversations
from graftwork.runtime.sealed_files import seal

TEXT = torch.randint(1, 12, (1, 50), generator=torch.Generator().manual_seed(0))
MORE = torch.randint(1, 12, (1, 6), generator=torch.Generator().manual_seed(1))


def model(program: Program, backend: str = "eager") -> Model:
    return Model(program, Target(backend, threads=1), {"name": "test"})


def asked(made: Model, ids: torch.Tensor) -> Any:
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": [], "pad_token_id": 0}
    return made.generate(ids, return_dict_in_generate=True, **options)


def test_a_model_says_what_it_holds_and_forgets_it() -> None:
    made = model(MODELS["plain"]())
    assert made.cache_bytes() == 0
    made.forget()
    first = asked(made, TEXT)
    bytes_now = made.cache_bytes()
    assert bytes_now == made.executable.state_bytes() > 0
    again = torch.cat([first.sequences, MORE], 1)
    # All that was fed: the last token was not.
    assert asked(made, again).stats.reused_tokens == first.sequences.shape[1] - 1
    made.forget()
    assert asked(made, again).stats.reused_tokens == 0


def test_copies_keep_within_their_bound() -> None:
    made = model(MODELS["plain"]())
    kept = Conversations.of(made.executable)
    texts = [TEXT.roll(n, 1) for n in range(4)]
    for text in texts:
        asked(made, text)
    assert len(kept.stored) == 3
    one = kept.stored[0].nbytes
    kept.limit(2 * one)
    assert len(kept.stored) == 2 and kept.nbytes <= 2 * one
    # Held the longest and not used since: gone.
    assert asked(made, texts[0]).stats.reused_tokens == 0
    made.keep(0)
    assert not kept.stored and asked(made, texts[0]).stats.reused_tokens > 0
    with pytest.raises(InputError, match=r"expected megabytes, 0 or more, got -1"):
        made.keep(-1)


def test_scoring_in_between_leaves_a_conversation_alone() -> None:
    made = model(MODELS["plain"]())
    first = asked(made, TEXT)
    made(MORE)
    again = torch.cat([first.sequences, MORE], 1)
    found = asked(made, again)
    assert found.stats.reused_tokens > 50
    assert torch.equal(found.sequences, asked(model(MODELS["plain"]()), again).sequences)


@pytest.mark.parametrize(
    "backend", ["eager", "onnxruntime", pytest.param("torch", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "name", mostly_long(["plain", "eagle", "nested", "snapkv"], ["plain", "nested"])
)
def test_a_prefix_goes_to_a_file_and_comes_back(name: str, backend: str, tmp_path: Path) -> None:
    if backend == "torch" and name != "plain":
        pytest.skip("compiled once: the rows of a draft are read and written by the same code")
    program, path = MODELS[name](), tmp_path / "prefix"
    writer = "eager" if backend == "torch" else backend  # compiling takes a while
    assert model(program, writer).save_prefix(TEXT, path) == 50
    assert [file.name for file in tmp_path.iterdir()] == ["prefix"]
    saved = model(program, "eager").save(tmp_path / "artifact")
    made = load(saved, target=f"{backend}:cpu")
    text = made.load_prefix(path)
    assert torch.equal(text, TEXT)
    for _ in range(2):  # it stays, whatever runs in between
        found = asked(made, torch.cat([text, MORE], 1))
        # The row of a draft's last feature holds the token after it.
        assert 49 <= found.stats.reused_tokens <= 50
        wanted = asked(model(program, "eager"), torch.cat([text, MORE], 1))
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.stats.accepted_tokens == wanted.stats.accepted_tokens
        made.keep(0)
        asked(made, MORE)
    made.forget()
    assert asked(made, torch.cat([text, MORE], 1)).stats.reused_tokens == 0


def test_another_program_refuses_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    model(MODELS["plain"]()).save_prefix(TEXT, path)
    with pytest.raises(InputError, match="saved by another program: its program is"):
        model(MODELS["eagle"]()).load_prefix(path)
    other = MODELS["plain"]()
    weight = other.weights["layers.1.down"]
    bent = type(weight).of(weight.name, weight.load() * 1.001)
    with pytest.raises(InputError, match="saved by another program"):
        model(other.replace(weights=other.weights.replacing(bent))).load_prefix(path)


def test_what_is_no_prefix_is_refused(tmp_path: Path) -> None:
    made = model(MODELS["plain"]())
    with pytest.raises(InputError, match="at least 16 tokens"):
        made.save_prefix(MORE, tmp_path / "short")
    with pytest.raises(InputError, match="a prefix is one text"):
        made.save_prefix(TEXT.repeat(2, 1), tmp_path / "two")
    with pytest.raises(InputError, match=r"cannot write .*prefix"):
        made.save_prefix(TEXT, tmp_path / "nowhere" / "prefix")
    with pytest.raises(InputError, match="missing"):
        made.load_prefix(tmp_path / "missing")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(InputError, match="cannot read"):
        made.load_prefix(tmp_path / "text")
    save_file({"tokens": torch.arange(20)}, tmp_path / "other")
    with pytest.raises(InputError, match="is no saved prefix"):
        made.load_prefix(tmp_path / "other")


Damage = Callable[[dict[str, torch.Tensor], dict[str, str]], object]
KEY = "state.kv.0.key"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a state is missing": (lambda t, m: t.pop(KEY), r"no tensor state\.kv\.0\.key"),
    "short": (
        lambda t, m: t.update({KEY: t[KEY][:, :-1].clone()}),
        r"kv\.0\.key of type f32\[2,49",
    ),
    "dtype": (lambda t, m: t.update({KEY: t[KEY].half()}), r"of type f16\[2,50,8\], expected f32"),
    "not finite": (lambda t, m: t[KEY].fill_(float("nan")), "values that are not finite"),
    "strange": (lambda t, m: t.update({"more": torch.ones(2)}), "belong to nothing: more"),
    "token": (lambda t, m: t["tokens"].fill_(32), "outside the vocabulary of 32"),
    "negative": (lambda t, m: t["tokens"].fill_(-1), "outside the vocabulary of 32"),
    "long": (lambda t, m: t.update({"tokens": torch.ones(999).long()}), "999 tokens; the model's"),
    "float": (lambda t, m: t.update({"tokens": torch.ones(50)}), r"tokens of type f32\[50\]"),
    "rows": (lambda t, m: m.update({"rows": "51"}), "rows='51', expected 1 to 50"),
    "no number": (lambda t, m: m.update({"position": "-1"}), "position='-1', expected 1 to 50"),
    "position": (lambda t, m: m.update({"position": "49"}), "position=49, expected 50"),
    "memo": (lambda t, m: t.update({"memo.rows": torch.tensor(-3)}), r"memo\.rows=-3"),
    "features": (lambda t, m: t.update({"memo.x": torch.ones(3, 5)}), "which no drafter keeps"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_prefix_is_refused(damage: str, tmp_path: Path) -> None:
    made, path = model(MODELS["plain"]()), tmp_path / "prefix"
    made.save_prefix(TEXT, path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        said = dict(file.metadata())
    change, message = DAMAGES[damage]
    change(tensors, said)
    save_file(tensors, path, metadata=said)
    seal(path)
    made.forget()
    with pytest.raises(InputError, match=message):
        made.load_prefix(path)
    assert asked(made, TEXT).stats.reused_tokens == 0


def test_no_bit_of_a_prefix_may_be_another(tmp_path: Path) -> None:
    """Of the header, of what it says besides the tensors, and of the tensors."""
    made, path = model(MODELS["plain"]()), tmp_path / "prefix"
    made.save_prefix(TEXT, path)
    made.forget()
    whole, random = path.read_bytes(), Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*random.sample(range(header), 60), *random.sample(range(header, len(whole)), 20)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(InputError):
            made.load_prefix(path)
    path.write_bytes(whole)
    assert torch.equal(made.load_prefix(path), TEXT)


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
def test_a_prefix_takes_the_place_of_files_alone(kind: str, tmp_path: Path) -> None:
    made, path, other = model(MODELS["plain"]()), tmp_path / "prefix", tmp_path / "other"
    other.write_text("mine")
    make: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "link": lambda p: p.symlink_to(other),
        "device": lambda p: os.mknod(p, 0o600 | stat.S_IFCHR, os.makedev(1, 3)),
        "folder": Path.mkdir,
    }
    try:
        make[kind](path)
    except PermissionError:
        pytest.skip("this user makes no devices")
    before = os.lstat(path)
    with pytest.raises(InputError, match=rf"cannot write {path}: it is a {kind}"):
        made.save_prefix(TEXT, path)
    assert os.path.samestat(os.lstat(path), before) and other.read_text() == "mine"
