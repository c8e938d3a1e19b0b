"""The vocabulary of a GGUF file: its special tokens, and a tokenizer made of it.

The tokenizer is one of the `tokenizers` library with the meaning that llama.cpp gives the file's
metadata: ``tokenizer.ggml.model`` names the algorithm (`_MODELS`) and ``tokenizer.ggml.pre`` how
texts are split before (`splits`). Tokens that are marked as control, unknown or the user's own stay
whole in a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ir import InputError, UnsupportedError
from ...ir.support.names import shown
from ...ir.support.tokenizer import refusing
from .reader import GgufFile, Value
from .splits import SPLITS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEY = "tokenizer.ggml"
UNKNOWN, CONTROL, OWN = 2, 3, 4
_NONE = 2**32 - 1
SPACE = "\u2581"
_LONGEST = 4096

ROLES = {
    **{"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "eot": "eot", "eom": "eom"},
    **{"fim_pad": "fim_pad", "fim_rep": "fim_rep", "fim_sep": "fim_sep"},
}
"""Special tokens, and what the format calls them."""

_MISSING = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "t5": {"eos": 1, "unk": 2, "pad": 0}}
"""Special tokens of files that do not name them, by ``tokenizer.ggml.model``."""

_LAST = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *(
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|fim_pad|>",
    ),
    *("<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
}
"""Texts of tokens that end a generation, whatever the metadata says of them."""


@dataclass(frozen=True)
class Vocabulary:
    """texts: of the tokens. kinds: see ``tokenizer.ggml.token_type``. special: tokens by role.
    last: those that end a generation, the main one first."""

    file: GgufFile
    texts: list[bytes]
    kinds: list[int]
    special: dict[str, int | None]
    last: tuple[int, ...]

    @classmethod
    def of(cls, file: GgufFile, size: int) -> Vocabulary:
        """size: rows of the model's table. Errors: `InputError` for entries that do not fit it or
        each other."""
        texts = file.array(f"{KEY}.tokens", texts=True)
        if texts is not None and len(texts) != size:
            raise InputError(
                f"{file.path}: {KEY}.tokens has {len(texts)} entries, and token_embd.weight has "
                f"{size} rows; fetch the file again"
            )
        texts = [text or b"[EMPTY_%d]" % id for id, text in enumerate(texts or ())]
        kinds = file.array(f"{KEY}.token_type") or [1] * len(texts)
        if len(kinds) < len(texts):
            raise InputError(
                f"{file.path}: {KEY}.token_type has {len(kinds)} entries for {len(texts)} tokens"
            )
        special = _special(file, size)
        ends = {id: text.decode() for id, text in enumerate(texts) if text in _LAST_BYTES}
        for id in ends:
            kinds[id] = CONTROL
        said = set(ends.values())
        if "<|end|>" in said and "<|call|>" in said and "<|return|>" in said:  # of a part, there
            ends = {id: text for id, text in ends.items() if text != "<|end|>"}
        named = [special[role] for role in ROLES if role not in ("bos", "pad", "unk")]
        last = tuple(dict.fromkeys(id for id in (*named, *ends) if id is not None))
        return cls(file, texts, kinds, special, last)

    def text(self, role: str) -> str | None:
        """A special token's text."""
        id = self.special[role]
        return None if id is None or id >= len(self.texts) else self.texts[id].decode()

    def flag(self, name: str, default: bool) -> bool:
        """An entry that is true or false. Errors: `InputError`."""
        found = self.file.metadata.get(f"{KEY}.{name}", default)
        if not isinstance(found, bool):
            raise InputError(
                f"{self.file.path}: {KEY}.{name}: expected true or false, got {shown(found)}"
            )
        return found

    def tokenizer(self) -> Tokenizer:
        """Errors: `InputError` for a damaged vocabulary, `UnsupportedError` for one of another
        kind."""
        from tokenizers import AddedToken
        from tokenizers.processors import TemplateProcessing

        with refusing(f"{self.file.path}: its tokens are no vocabulary"):
            words = [text.decode() for text in self.texts]
            if len(set(words)) != len(words):
                raise ValueError("two tokens have one text")
            if (most := max(map(len, words), default=0)) > _LONGEST:
                raise ValueError(f"a token has {most} characters; expected at most {_LONGEST}")
            made: Tokenizer
            made, begins, ends = _named(self.file, "model", _MODELS)(self, words)
            added = []
            for word, kind in zip(words, self.kinds, strict=False):
                if kind in (UNKNOWN, CONTROL, OWN):
                    plain = {"normalized": False, "special": kind != OWN}
                    strips = self._strips and word not in ("<unk>", "<s>", "<|endoftext|>")
                    added.append(AddedToken(word, rstrip=strips, **plain))
            made.add_tokens(added)
            marks: dict[str, int] = {}
            around = {"bos": self.flag("add_bos_token", begins), "eos": False}
            around["eos"] = self.flag("add_eos_token", ends)
            for role in (role for role, wanted in around.items() if wanted):
                text, id = self.text(role), self.special[role]
                if text is None or id is None:
                    raise ValueError(f"{KEY}.add_{role}_token is true, and it has no such token")
                marks[text] = id
            if marks:
                parts = [self.text(r) if around[r] else None for r in around]
                single = [part for part in (parts[0], "$A", parts[1]) if part is not None]
                made.post_processor = TemplateProcessing(
                    single=single, special_tokens=list(marks.items())
                )
        return made

    def files(self) -> dict[str, str]:
        """The tokenizer's files, as transformers and others read them. Errors: as `tokenizer`."""
        made = self.tokenizer()
        about = {f"{role}_token": self.text(role) for role in ("bos", "eos", "unk", "pad")}
        files = {
            "tokenizer.json": made.to_str(),
            "tokenizer_config.json": json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "clean_up_tokenization_spaces": False,
                    "model_input_names": ["input_ids", "attention_mask"],
                    **{name: text for name, text in about.items() if text is not None},
                },
                indent=2,
            ),
        }
        if template := self.file.metadata.get("tokenizer.chat_template"):
            files["chat_template.jinja"] = str(template)
        return files

    @property
    def _strips(self) -> bool:
        """Whether special tokens take the spaces behind them, as those of Phi-3 do."""
        name = str(self.file.metadata.get("general.name", "")).lower()
        return "phi-3" in name or "phi3" in name


_LAST_BYTES = {text.encode() for text in _LAST}

Made = tuple[Any, bool, bool]
"""A tokenizer, and whether texts begin and end with the tokens for that if the file does not say.
"""


def _special(file: GgufFile, size: int) -> dict[str, int | None]:
    missing = _MISSING.get(str(file.metadata.get(f"{KEY}.model")), {})
    found: dict[str, int | None] = {}
    for role, theirs in ROLES.items():
        key = f"{KEY}.{theirs}_token_id"
        given = file.metadata.get(key, missing.get(role))
        if given in (None, _NONE, -1):
            found[role] = None
        elif type(given) is int and (0 <= given < size or key not in file.metadata):
            found[role] = given if given < size else None
        else:
            raise InputError(
                f"{file.path}: {key}: expected a number below {size}, which is a token, got "
                f"{shown(given)}"
            )
    return found


def _named(file: GgufFile, key: str, known: dict[str, Any]) -> Any:
    """What an entry names. Errors: `UnsupportedError` for what is not known."""
    name: Value | None = file.metadata.get(f"{KEY}.{key}")
    if name not in known:
        raise UnsupportedError(
            f"{file.path}: {KEY}.{key}: expected one of {', '.join(sorted(known))}, got "
            f"{'nothing' if name is None else shown(name)}"
        )
    return known[str(name)]


def _byte_level(vocabulary: Vocabulary, words: list[str]) -> Made:
    """Pairs of bytes, in pieces of the text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    file = vocabulary.file
    split = SPLITS["default"]
    if f"{KEY}.pre" in file.metadata:
        split = _named(file, "pre", SPLITS)
    merges = file.array(f"{KEY}.merges", texts=True)
    if merges is None:
        raise ValueError(f"{KEY}.merges is missing")
    pairs = [_pair(merge.decode()) for merge in merges]
    ids = {word: id for id, word in enumerate(words)}
    made = Tokenizer(models.BPE(ids, pairs, ignore_merges=split.whole))
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made, split.begins, False


def _pair(merge: str) -> tuple[str, str]:
    """The two sides of a merge, of which the first may begin with a space."""
    place = merge.find(" ", 1)
    if place < 0:
        raise ValueError(f"{KEY}.merges: expected two texts with a space between, got {merge!r}")
    return merge[:place], merge[place + 1 :]


def _pieces(vocabulary: Vocabulary, words: list[str]) -> Made:
    """Pairs of characters, those first whose token has the best score; what is no token is spelled
    in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _scores(vocabulary, words)
    ids = {word: id for id, word in enumerate(words)}
    whole = (UNKNOWN, CONTROL, OWN)
    made_of = [word for word, k in zip(words, vocabulary.kinds, strict=False) if k not in whole]
    pairs = [
        (word[:at], word[at:])
        for word in sorted(made_of, key=lambda word: -scores[ids[word]])
        for at in range(1, len(word))
        if word[:at] in ids and word[at:] in ids
    ]
    unknown = vocabulary.text("unk")
    made = Tokenizer(models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before = vocabulary.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if before else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undone: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*undone, *([decoders.Strip(" ", 1, 0)] if before else [])])
    return made, True, False


def _likeliest(vocabulary: Vocabulary, words: list[str]) -> Made:
    """The tokens whose scores have the greatest sum."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    scores = _scores(vocabulary, words)
    model = models.Unigram(list(zip(words, scores, strict=False)), vocabulary.special["unk"], False)
    made = Tokenizer(model)
    table = bytes(n & 255 for n in vocabulary.file.array(f"{KEY}.precompiled_charsmap") or ())
    steps: list[Any] = [normalizers.Precompiled(table)] if table else []
    merged = vocabulary.flag("remove_extra_whitespaces", False)
    if merged:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    if merged or vocabulary.flag("add_space_prefix", False):
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    made.decoder = decoders.Metaspace(SPACE, "always")
    return made, False, True


def _scores(vocabulary: Vocabulary, words: list[str]) -> list[float]:
    scores = vocabulary.file.array(f"{KEY}.scores")
    if scores is None or len(scores) < len(words):
        raise ValueError(f"{KEY}.scores has {len(scores or ())} entries for {len(words)} tokens")
    return scores


_MODELS: dict[str, Callable[[Vocabulary, list[str]], Made]] = {
    "gpt2": _byte_level,
    "llama": _pieces,
    "t5": _likeliest,
}
