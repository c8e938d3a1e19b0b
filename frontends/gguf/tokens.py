"""A tokenizer of transformers as the entries of a GGUF file that llama.cpp makes one of.

Three kinds: pairs of bytes (``gpt2``), pairs of characters by score (``llama``) and the likeliest
pieces (``t5``). How the first splits texts before is found in `splits` by its regular expressions.
"""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ir import GraftworkWarning, InputError, ModelInfo, UnsupportedError
from ...ir.support.files import LARGE, read_bytes, read_json
from ...ir.support.names import shown
from ...ir.support.tokenizer import encode, read_tokenizer, refusing
from .splits import GPT2, SPLITS, Split
from .vocabulary import CONTROL, KEY, OWN, ROLES, SPACE, UNKNOWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNUSED, BYTE = 1, 5, 6
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SAMPLING = {
    **{"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "repetition_penalty": "penalty_repeat",
}
"""Options of generation, and what the format calls them."""


def tokenizer_entries(info: ModelInfo, assets: Mapping[str, Path], size: int) -> dict[str, Any]:
    """Entries of a model's tokenizer, chat template and defaults of generation. size: rows of the
    model's table.

    Without a tokenizer.json the file says that it has none (``no_vocab``). Warns
    (`GraftworkWarning`) of what llama.cpp does not do. Errors: `UnsupportedError` for a tokenizer
    of another kind, or of another split of texts, than llama.cpp knows.
    """
    entries: dict[str, Any] = {f"{KEY}.model": "no_vocab"}
    roles: dict[str, int | None] = dict(
        zip(("eos", "eot", "eom"), info.eos, strict=False), bos=info.bos, pad=info.pad
    )
    if (path := assets.get("tokenizer.json")) is not None:
        about, tokenizer = _about(assets), read_tokenizer(path)
        with refusing(f"{path}: expected a tokenizer that llama.cpp has", kind=UnsupportedError):
            made = _Tokens(path, tokenizer, size)
            entries = made.entries()
            roles["unk"] = made.unknown
            entries |= made.around(roles)
        template = about.get("chat_template")
        if (own := assets.get("chat_template.jinja")) is not None:
            template = read_bytes(own, LARGE).decode()
        entries |= {"tokenizer.chat_template": template} if template else {}
    entries |= {f"{KEY}.{ROLES[r]}_token_id": id for r, id in roles.items() if id is not None}
    given = info.defaults.supported
    if given.get("do_sample"):
        named = {
            f"general.sampling.{theirs}": given.get(ours) for ours, theirs in _SAMPLING.items()
        }
        entries |= {name: value for name, value in named.items() if value is not None}
    return entries


def _about(assets: Mapping[str, Path]) -> dict[str, Any]:
    """What is in tokenizer_config.json."""
    path = assets.get("tokenizer_config.json")
    found = {} if path is None else read_json(path)
    return found if isinstance(found, dict) else {}


class _Tokens:
    """A tokenizer and its file. data: what it says of itself, checked and in its latest form.
    words, kinds: by id."""

    def __init__(self, path: Path, tokenizer: Tokenizer, size: int) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.data = data = json.loads(tokenizer.to_str())
        self.model = data["model"]
        self.added = {one["id"]: one for one in data["added_tokens"]}
        vocab = self.model.get("vocab") or {}
        pairs = (
            vocab.items() if isinstance(vocab, dict) else ((w, i) for i, (w, _) in enumerate(vocab))
        )
        by_id = {id: word for word, id in pairs} | {i: t["content"] for i, t in self.added.items()}
        if by_id and max(by_id) >= size:
            raise InputError(
                f"{path} has a token {max(by_id)}, and the model's table {size} rows: expected the "
                f"tokenizer that belongs to the model"
            )
        self.words = [by_id.get(id, f"[PAD{id}]") for id in range(size)]
        self.ids = {word: id for id, word in enumerate(self.words)}
        if len(self.ids) < size:
            raise self.error("two tokens have one text")
        named = self.model.get("unk_token")
        self.unknown: int | None = (
            self.model.get("unk_id") if named is None else self.ids.get(named)
        )
        self.kinds = [NORMAL if id in by_id else UNUSED for id in range(size)]
        for id, token in self.added.items():
            self.kinds[id] = CONTROL if token["special"] else OWN

    def error(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self.path}: {what}, which llama.cpp's tokenizers do not have")

    def entries(self) -> dict[str, Any]:
        """The vocabulary. Errors: `UnsupportedError`."""
        kind = self.model["type"]
        if kind == "BPE":
            kind = "pieces" if self.model.get("byte_fallback") else "bytes"
        whole = "Sequence", "Metaspace"
        makers: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
            "bytes": (self._bytes, ("ByteLevel",)),
            "pieces": (self._pieces, whole),
            "Unigram": (self._likeliest, whole),
        }
        if kind not in makers:
            raise self.error(f"model.type is {shown(kind)}")
        make, decoders = makers[kind]
        if (self.data["decoder"] or {}).get("type") not in decoders:
            raise self.error(f"decoder is {shown(self.data['decoder'])}")
        for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if self.model.get(option):
                raise self.error(f"model.{option} is {shown(self.model[option])}")
        made = make()
        own = {**made, f"{KEY}.tokens": self.words, f"{KEY}.token_type": self.kinds}
        return {f"{KEY}.{name}" if "." not in name else name: v for name, v in own.items()}

    def around(self, roles: dict[str, int | None]) -> dict[str, bool]:
        """Whether texts begin and end with the tokens for that. Errors: `UnsupportedError` for
        others."""
        plain, marked = (encode(self.tokenizer, "a", marked=marked) for marked in (False, True))
        at = next(i for i in range(len(marked)) if marked[i : i + len(plain)] == plain)
        before, behind = marked[:at], marked[at + len(plain) :]
        if before not in ([], [roles["bos"]]) or behind not in ([], [roles.get("eos")]):
            raise self.error(f"texts begin with {before} and end with {behind}")
        return {f"{KEY}.add_bos_token": bool(before), f"{KEY}.add_eos_token": bool(behind)}

    def _bytes(self) -> dict[str, Any]:
        split = Split(tuple(self._patterns()), whole=bool(self.model.get("ignore_merges")))
        names = [
            name
            for name, known in SPLITS.items()
            if (known.patterns, known.whole) == (split.patterns, split.whole)
        ]
        if not names:
            raise self.error(f"texts are split by {shown(split.patterns)}")
        if (normalizer := self.data.get("normalizer")) is not None:
            warnings.warn(
                f"{self.path}: llama.cpp does not change texts before it splits them, as this "
                f"tokenizer does ({shown(normalizer)}): some may have other tokens there",
                GraftworkWarning,
                stacklevel=2,
            )
        merges = [one if isinstance(one, str) else " ".join(one) for one in self.model["merges"]]
        return {"model": "gpt2", "pre": names[0], "merges": merges}

    def _patterns(self) -> Iterator[str]:
        """Regular expressions by which texts are split."""
        given = self.data.get("pre_tokenizer") or {}
        steps = given.get("pretokenizers", [given])
        for step in steps:
            kind = step.get("type")
            if kind == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
                yield step["pattern"].get("Regex") or re.escape(step["pattern"]["String"])
            elif kind == "Digits":
                yield r"\p{N}" if step["individual_digits"] else r"\p{N}+"
            elif kind == "Punctuation" and step["behavior"] == "Contiguous":
                yield r"[\p{P}\$\+<=>\^~\|]+"
            elif kind == "ByteLevel" and not step["add_prefix_space"]:
                yield from (GPT2,) if step["use_regex"] else ()
            else:
                raise self.error(f"pre_tokenizer has the step {shown(step)}")

    def _pieces(self) -> dict[str, Any]:
        """Merges by rank are scores of what they make, if all that make one token follow each
        other."""
        steps = self._steps("normalizer", "normalizers")
        before = any(step["type"] == "Prepend" for step in steps)
        for step in self._steps("pre_tokenizer", "pretokenizers"):
            if step["type"] == "Metaspace":
                before |= step.get("prepend_scheme", "always") != "never"
            elif step["type"] != "Split" or step["pattern"].get("String") != " ":
                raise self.error(f"pre_tokenizer has the step {shown(step)}")
        scores: dict[str, float] = {}
        last = ""
        for rank, merge in enumerate(self.model["merges"]):
            made = "".join(merge.split(" ") if isinstance(merge, str) else merge)
            if made != last and made in scores:
                raise self.error(f"merges of {shown(made)} are not all of one rank")
            scores.setdefault(made, float(-rank))
            last = made
        for id, word in enumerate(self.words):
            if self.kinds[id] == OWN:
                self.words[id] = word.replace(SPACE, " ")
            elif _BYTE.fullmatch(word):
                self.kinds[id] = BYTE
        least = -float(len(self.model["merges"]))
        found = [scores.get(word, 0.0 if len(word) < 2 else least) for word in self.ids]
        return {**self._scored(found, before), "model": "llama", "pre": "default"}

    def _likeliest(self) -> dict[str, Any]:
        steps = self._steps("normalizer", "normalizers")
        tables = [step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"]
        before = any(step["type"] in ("Prepend", "Metaspace") for step in steps) or any(
            step.get("prepend_scheme", "always") != "never"
            for step in self._steps("pre_tokenizer", "pretokenizers")
            if step["type"] == "Metaspace"
        )
        found = [float(score) for _, score in self.model["vocab"]]
        found += [0.0] * (len(self.words) - len(found))
        table = {"precompiled_charsmap": list(base64.b64decode(tables[0]))} if tables else {}
        merged = any(step["type"] == "Replace" and " {2,}" in str(step) for step in steps)
        return {
            **self._scored(found, before),
            **table,
            **{"model": "t5", "pre": "default", "remove_extra_whitespaces": merged},
        }

    def _scored(self, scores: list[float], before: bool) -> dict[str, Any]:
        if self.unknown is not None:
            self.kinds[self.unknown] = UNKNOWN
        return {"scores": scores, "add_space_prefix": before}

    def _steps(self, name: str, inner: str) -> list[dict[str, Any]]:
        given = self.data.get(name)
        return [] if given is None else given.get(inner, [given])
