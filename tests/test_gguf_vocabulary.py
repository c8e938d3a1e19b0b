"""The vocabulary of GGUF files: tokenizers of the file's meaning, special tokens, sampling."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf_files import write  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import graftwork as gw  # noqa: E402
from graftwork.cli.commands import app  # noqa: E402
from graftwork.frontends import import_model  # noqa: E402
from graftwork.frontends.gguf.metadata import Metadata  # noqa: E402
from graftwork.frontends.gguf.reader import GgufFile  # noqa: E402
from graftwork.frontends.gguf.splits import SPLITS  # noqa: E402
from graftwork.frontends.gguf.vocabulary import Vocabulary  # noqa: E402
from graftwork.ir import GraftworkWarning, InputError, UnsupportedError  # noqa: E402
from graftwork.ir.support.tokenizer import decode, read_tokenizer  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
NORMAL, UNKNOWN, CONTROL, OWN, BYTE = 1, 2, 3, 4, 6
WORDS = [
    *("the", "quick", "don't", "I'LL", "HTTPServer", "camelCase", "naïve", "über", "кошка", "猫猫"),
    *(
        "x1",
        "2024",
        "12345678",
        "3.14",
        "{'a': [1, 2]}",
        "==",
        "!=",
        "->",
        "e\u0301",
        "\u0939\u093f",
    ),
    *(
        "\U0001f600",
        "\U0001f469\u200d\U0001f4bb",
        "\ufeff",
        "\x00",
        "\x07",
        "\u00a0",
        "\u3000",
        "٣٤",
    ),
    *(
        "<s>",
        "</s>",
        "<|im_end|>",
        "<own>",
        "#",
        "//",
        "…",
        "「」",
        "\u017f",
        "'\u017f",
        "\u2581",
        "\u0130",
    ),
]
BETWEEN = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "", "", " \n ", "_", "."]


def lines(count: int, seed: int = 0) -> list[str]:
    """Texts of words, digits, marks, other scripts, control characters and spaces."""
    rng = random.Random(seed)
    return [
        "".join(rng.choice(WORDS) + rng.choice(BETWEEN) for _ in range(rng.randrange(1, 9)))
        for _ in range(count)
    ] + ["", " ", "   ", "\n", " a", "a ", "<s>", " <s> <s>", "<own> x", "a  b   c"]


def file_of(path: Path, model: str, tokens: list[str], **entries: Any) -> GgufFile:
    """A file of a vocabulary alone. entries: others of the tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in entries.items():
        if key == "scores":
            writer.add_token_scores(value)
        elif key == "name":
            writer.add_name(value)
        else:
            kind = gguf.GGUFValueType.get_type(value)
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else kind
            writer.add_key_value(f"tokenizer.ggml.{key}", value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


def made(file: GgufFile) -> Tokenizer:
    return Vocabulary.of(file, file.metadata["tokenizer.ggml.tokens"].count).tokenizer()  # type: ignore[union-attr]


def pairs_of_bytes() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary and its merges, learned of the texts here."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<s>", "</s>", "<|im_end|>", "<own>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(lines(400, 1), trainer)
    model = json.loads(learner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


KINDS = [UNKNOWN, CONTROL, CONTROL, CONTROL, OWN]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
def test_bytes_as_transformers_has_them(pre: str, tmp_path: Path) -> None:
    """Where transformers knows how texts are split, tokens are its, and texts come back."""
    tokens, merges = pairs_of_bytes()
    kinds = KINDS + [NORMAL] * (len(tokens) - len(KINDS))
    given = {"merges": merges, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2}
    path = tmp_path / "words.gguf"
    ours = made(file_of(path, "gpt2", tokens, pre=pre, add_bos_token=False, **given))
    theirs = PreTrainedTokenizerFast(gguf_file=path.name, name_or_path=str(path.parent))
    whole = SPLITS[pre].whole  # which transformers passes over
    for text in lines(300):
        found = ours.encode(text).ids
        assert whole or found == theirs.encode(text, add_special_tokens=False), text
        if "<" not in text:
            assert ours.decode(found) == text


PIECES: dict[str, tuple[str, list[str]]] = {
    "bloom": ("a, b12 c", ["a", ",", " b12", " c"]),
    "chatglm-bpe": ("It'S 1234\n", ["It", "'S", " ", "123", "4", "\n"]),
    "dbrx": ("a\n\n b", ["a", "\n\n", " b"]),
    "deepseek-coder": ("a b12\nc", ["a", " b", "1", "2", "\n", "c"]),
    "deepseek-llm": ("a猫b 12.", ["a", "猫", "b", " ", "12", "."]),
    "deepseek-v3": ("don't 1234猫", ["don", "'t", " ", "123", "4", "猫"]),
    "default": ("a+=12345", ["a", "+=", "123", "45"]),
    "exaone": ("a12", ["a", "1", "2"]),
    "exaone-moe": ("a b 1", ["a b", " ", "1"]),
    "falcon": ("a 12345`", ["a", " ", "123", "45", "`"]),
    "glm4": ("12345", ["123", "45"]),
    "gpt-2": ("don't 12345", ["don", "'t", " 12345"]),
    "gpt-4o": ("camelCase's 12", ["camel", "Case's", " ", "12"]),
    "llama-bpe": ("don'T 12345 x", ["don", "'T", " ", "123", "45", " x"]),
    "poro-chat": ("a.b", ["a", ".", "b"]),
    "qwen2": ("a 12_x", ["a", " ", "1", "2", "_x"]),
    "qwen35": ("e\u0301e 1", ["e\u0301e", " ", "1"]),
    "seed-coder": ("==\n\nb", ["==", "\n\n", "b"]),
    "smollm": ("x 12  y", ["x", " ", "1", "2", " ", " y"]),
    "superbpe": ("1234567 a", ["1", "234", "567", " a"]),
    "tekken": ("camelCase 12", ["camel", "Case", " ", "1", "2"]),
    "tiny_aya": ("a1234567", ["a", "1", "234", "567"]),
    "viking": ("a12.", ["a", "1", "2", "."]),
    "bailingmoe": ("don't\n\n1", ["don", "'t", "\n\n", "1"]),
}


def test_every_split_is_shown() -> None:
    shown = {SPLITS[pre] for pre in PIECES}
    assert {pre for pre, split in SPLITS.items() if split not in shown} == set()


@pytest.mark.parametrize("pre", PIECES)
def test_splits(pre: str, tmp_path: Path) -> None:
    """A text's pieces, by hand."""
    text, wanted = PIECES[pre]
    tokens, given = ["a", "b", "ab"], {"merges": ["a b"], "add_bos_token": False}
    split = made(file_of(tmp_path / "words.gguf", "gpt2", tokens, pre=pre, **given))
    spelled = dict(zip(*_spelling(), strict=True))
    found = [piece for piece, _ in split.pre_tokenizer.pre_tokenize_str(text)]
    assert [bytes(spelled[c] for c in piece).decode() for piece in found] == wanted


def _spelling() -> tuple[list[str], list[int]]:
    """The letters that stand for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))], [*plain, *others]


def pieces() -> tuple[list[str], list[float], list[int]]:
    """A vocabulary of pieces with scores, and bytes for what is none."""
    rng = random.Random(3)
    letters = [*sorted({c for word in WORDS[:12] for c in word} | set(".\n")), "\u2581"]
    words = {
        w for word in WORDS[:12] for i in range(len(word)) for w in (word[i : i + 2], word[i:])
    }
    words |= {f"\u2581{w}" for w in words} | {"\u2581\u2581", "\u2581\u2581\u2581"}
    words -= set(letters)
    tokens = ["<unk>", "<s>", "</s>", "<own>", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, OWN] + [BYTE] * 256
    scored = [*sorted(words), *letters]
    order = rng.sample(range(len(scored)), len(scored))
    return (
        tokens + scored,
        [0.0] * len(tokens) + [-1.0 - place for place in order],
        kinds + [NORMAL] * len(scored),
    )


def best_first(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Of two neighbours those are joined whose token has the best score, the left ones first."""
    ids, parts = {token: id for id, token in enumerate(tokens)}, list(text)
    while True:
        joined = [
            (-scores[ids[a + b]], place)
            for place, (a, b) in enumerate(pairwise(parts))
            if a + b in ids
        ]
        if not joined:
            break
        _, place = min(joined)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [
        id
        for part in parts
        for id in ([ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()])
    ]


@pytest.mark.parametrize("spaced", [True, False])
def test_pieces_by_score(spaced: bool, tmp_path: Path) -> None:
    """Tokens are those of joining by score, written as a loop; spaces are marked, before the text
    and after a special token too if the file says so."""
    tokens, scores, kinds = pieces()
    given = {"scores": scores, "token_type": kinds, "add_space_prefix": spaced}
    ours = made(file_of(tmp_path / "pieces.gguf", "llama", tokens, **given))
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, "<own>": 3}
    for text in lines(200):
        wanted, rest = [1], text
        while rest:
            places = {rest.find(word): word for word in special if word in rest}
            at = min(places, default=len(rest))
            part = ("\u2581" if spaced and at else "") + rest[:at].replace(" ", "\u2581")
            wanted += best_first(part, tokens, scores)
            rest = rest[at:]
            if places:
                wanted.append(special[places[at]])
                rest = rest[len(places[at]) :]
        found = ours.encode(text).ids
        assert found == wanted, text
        if "<" not in text and "\u2581" not in text:
            assert decode(ours, found) == text


def test_the_likeliest_pieces(tmp_path: Path) -> None:
    """Of all ways to write a text the one with the greatest sum of scores; a text ends with the
    token for that."""
    tokens = ["<pad>", "</s>", "<unk>", *"\u2581abc", "\u2581a", "ab", "bc", "abc", "\u2581ab"]
    scores = [0.0, 0.0, 0.0, -9.0, -3.0, -3.1, -3.3, -2.0, -4.0, -2.5, -8.0, -3.6]
    given = {"scores": scores, "token_type": [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * 9}
    more = {"add_space_prefix": True, "remove_extra_whitespaces": True}
    ours = made(file_of(tmp_path / "sums.gguf", "t5", tokens, **given, **more))

    def best(text: str) -> tuple[float, list[int]]:
        if not text:
            return 0.0, []
        found = []
        for id, token in enumerate(tokens[3:], 3):
            if text.startswith(token):
                rest, ids = best(text[len(token) :])
                found.append((scores[id] + rest, [id, *ids]))
        return max(found)

    for text in ("abc", "  a   bcab ", "cab abc", "a", "bca  cba"):
        marked = "".join(f"\u2581{word}" for word in text.split())
        assert ours.encode(text).ids == [*best(marked)[1], 1], text
    assert ours.encode("a?").ids == [7, 2, 1]
    assert decode(ours, ours.encode(" ab  c").ids) == "ab c"


def test_tokens_that_take_the_spaces_behind_them(tmp_path: Path) -> None:
    """Those of Phi-3 but for three, as the name of the model says."""
    tokens, scores, kinds = pieces()
    given = {"scores": scores, "token_type": kinds, "add_bos_token": False}
    plain, strips = (
        made(file_of(tmp_path / "p.gguf", "llama", tokens, name=name, **given))
        for name in ("Other", "Phi 3 as phi3")
    )
    assert strips.encode("</s>  1").ids == plain.encode("</s>1").ids
    assert strips.encode("<s>  1").ids == plain.encode("<s>  1").ids != plain.encode("<s>1").ids


ENDS: dict[str, tuple[dict[int, str], dict[str, int], tuple[int, ...]]] = {
    "eos": ({}, {"eos_token_id": 3}, (3,)),
    "none": ({}, {}, ()),
    "of a turn": ({}, {"eos_token_id": 3, "eot_token_id": 5}, (3, 5)),
    "of a message": ({}, {"eos_token_id": 3, "eom_token_id": 6}, (3, 6)),
    "by its text": ({7: "<end_of_turn>"}, {"eos_token_id": 3}, (3, 7)),
    "and by both": ({7: "<|im_end|>"}, {"eos_token_id": 7, "eot_token_id": 7}, (7,)),
    "of a file": ({4: "<|file_sep|>"}, {"eos_token_id": 3, "fim_pad_token_id": 2}, (3, 2, 4)),
    "of a part": ({1: "<|end|>", 2: "<|call|>", 3: "<|return|>"}, {"eos_token_id": 3}, (3, 2)),
    "that is none": ({}, {"eos_token_id": 3, "padding_token_id": 2**32 - 1}, (3,)),
}


@pytest.mark.parametrize("case", ENDS)
def test_tokens_that_end_a_generation(case: str, tmp_path: Path) -> None:
    texts, entries, wanted = ENDS[case]
    tokens = [texts.get(id, chr(97 + id)) for id in range(8)]
    assert Vocabulary.of(file_of(tmp_path / "v.gguf", "gpt2", tokens, **entries), 8).last == wanted


def test_the_end_of_a_turn_ends_a_generation(tmp_path: Path) -> None:
    """It reaches the program, and its files."""
    path = tmp_path / "tiny.gguf"
    sampling = {"temp": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.0, "penalty_repeat": 1.5}
    said = {f"general.sampling.{key}": value for key, value in sampling.items()}
    write(path, {"": "F16"}, metadata={"tokenizer.ggml.eot_token_id": 9, **said}, **SIZES)
    program = import_model(path)
    assert program.info.eos == (2, 9) and program.info.bos == 1
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.5}
    assert program.info.defaults.supported == pytest.approx({"do_sample": True, **given})
    assert "eos_token_id" in program.assets["generation_config.json"].read_text()


def test_sampling() -> None:
    """What has no place is named; cold texts are greedy."""

    def read(**entries: Any) -> dict[str, Any]:
        said = {f"general.sampling.{key}": value for key, value in entries.items()}
        return Metadata(GgufFile(Path("f.gguf"), said, {}, 0, 32)).sampling()

    assert read(temp=0.0, xtc_probability=0.0) == {"do_sample": False}
    with pytest.warns(GraftworkWarning, match=r"general\.sampling\.mirostat=2: .* without that"):
        assert read(top_k=5, mirostat=2) == {"top_k": 5}
    with pytest.raises(InputError, match=r"general\.sampling\.temp: expected a number, got 'hot'"):
        read(temp="hot")


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "an unknown split": (
        lambda raw: raw.replace(b"default", b"another"),
        "tokenizer.ggml.pre: expected one of .*, got 'another'",
    ),
    "an unknown kind": (
        lambda raw: raw.replace(b"gpt2", b"bert"),
        "tokenizer.ggml.model: expected one of gpt2, llama, t5, got 'bert'",
    ),
    "no merges": (
        lambda raw: raw.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"),
        "its tokens are no vocabulary: tokenizer.ggml.merges is missing",
    ),
    "merges of no tokens": (lambda raw: raw.replace(b"a b", b"a\xe9b"), "are no vocabulary"),
}


@pytest.mark.parametrize("case", LIES)
def test_without_a_tokenizer_a_text_is_refused_before_the_model_is_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning says why; token ids still go in."""
    change, message = LIES[case]
    path = tmp_path / "tiny.gguf"
    write(path, {"": "F16"}, **SIZES)
    path.write_bytes(change(path.read_bytes()))
    with pytest.warns(GraftworkWarning, match=f"{message}.*; pass token ids instead"):
        program = import_model(path)
    assert "tokenizer.json" not in program.assets
    monkeypatch.setattr("graftwork.frontends.gguf.model.import_tensors", None)
    with pytest.warns(GraftworkWarning, match=message):
        ran = CliRunner().invoke(app, ["generate", str(path), "--prompt", "a"])
    assert isinstance(ran.exception, InputError)
    assert "expected a model with a tokenizer.json" in str(ran.exception)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kinds": ({"token_type": [1, 1]}, "token_type has 2 entries for 3 tokens"),
    "an end": ({"eos_token_id": 3}, "eos_token_id: expected a number below 3, .* got 3"),
    "numbers": ({"token_type": ["a", "b", "c"]}, "token_type: expected numbers, an array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_entries_that_do_not_fit(case: str, tmp_path: Path) -> None:
    entries, message = REFUSED[case]
    file = file_of(tmp_path / "v.gguf", "gpt2", ["a", "b", "ab"], **entries)
    with pytest.raises(InputError, match=message):
        Vocabulary.of(file, 3)
    plain = file_of(tmp_path / "v.gguf", "gpt2", ["a", "b", "ab"])
    with pytest.raises(InputError, match=r"has 3 entries, and token_embd\.weight has 4 rows"):
        Vocabulary.of(plain, 4)


UNMADE: dict[str, tuple[str, list[str], dict[str, Any], str]] = {
    "long": ("llama", ["a" * 5000], {"scores": [0.0]}, "5000 characters; expected at most 4096"),
    "no scores": ("llama", ["a", "b", "c"], {}, "scores has 0 entries for 3 tokens"),
    "no pair": ("gpt2", ["a", "b"], {"merges": ["ab"]}, "two texts with a space between, got 'ab'"),
    "twice": ("gpt2", ["a", "a", "c"], {"merges": ["a c"]}, "two tokens have one text"),
    "no begin": (
        *("gpt2", ["a", "b", "ab"], {"merges": ["a b"], "add_bos_token": True}),
        "add_bos_token is true, and it has no such token",
    ),
    "no flag": (
        *("gpt2", ["a", "b", "ab"], {"merges": ["a b"], "add_bos_token": 1}),
        "add_bos_token: expected true or false, got 1",
    ),
}


@pytest.mark.parametrize("case", UNMADE)
def test_vocabularies_that_are_none(case: str, tmp_path: Path) -> None:
    model, tokens, entries, message = UNMADE[case]
    with pytest.raises((InputError, UnsupportedError), match=message):
        made(file_of(tmp_path / "v.gguf", model, tokens, **entries))


def test_the_files_are_what_transformers_reads(tmp_path: Path) -> None:
    """The folder of an artifact is one of a tokenizer, special tokens and template with it."""
    path = tmp_path / "tiny.gguf"
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    write(path, {"": "F16"}, metadata={"tokenizer.chat_template": template}, **SIZES)
    gw.optimize(path, target="eager:cpu:float32").save(tmp_path / "out")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token, theirs.eos_token_id) == ("<s>", 2)
    assert theirs.apply_chat_template([{"role": "user", "content": "!"}], tokenize=False) == "<s>!"
    ours = read_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert theirs.encode("abcd !") == ours.encode("abcd !").ids
