"""The target's texts in the tokens of a model that has others.

A text is pieces, tokens that write bytes, between special tokens. Its pieces are decoded, and
encoded in the other vocabulary as a whole; when it grows, from the beginning of a word a little
before its end on, because tokens there may be others once more is known of the word. Special
tokens that the other vocabulary lacks are left out, and the tokens that begin every text are its
own. Where a text ends within a character, the pieces of the part that there is are taken as they
are, if both vocabularies have them; else nothing follows until the character is whole.

What a model is fed decides how good its drafts are, never what the target accepts.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...ir import InputError
from ...ir.execution.executable import Executable
from ...ir.plan.translated import TOKENIZER, tokenizer_of
from ...ir.support.spelling import Spelling
from ..cache.conversations import common
from ..feeding.draft import VerifiedStep
from ..memo import Memo
from .committed import CommittedRows

Array: TypeAlias = npt.NDArray[np.int64]

BEHIND, FAR = 24, 200
"""Characters before a text's end that are encoded again at least, and where no word begins between
them, up to which one is looked for."""


class Vocabularies:
    """The target's tokens and a model's own. known: ids of those that both have, i64[V], by the
    target's; -1 where the model lacks one."""

    def __init__(self, ours: Spelling, theirs: Spelling, known: Array) -> None:
        self.ours, self.theirs, self.known = ours, theirs, known

    @classmethod
    def of(cls, executable: Executable, function: str, shared: Sequence[str]) -> Vocabularies:
        """Of a program's target and one of its functions; read once. shared: see
        `TranslatedDraft`. Errors: `InputError` for a program without one of the tokenizers."""
        kept: dict[str, Vocabularies] = executable.scratch(Vocabularies, shared=True)
        if function not in kept:
            program = executable.program
            files = [program.assets.get(name) for name in (TOKENIZER, tokenizer_of(function))]
            if None in files:
                raise InputError(
                    f"{program.name} came without its {TOKENIZER} or {tokenizer_of(function)}, "
                    f"between which its texts are translated for {function}"
                )
            ours, theirs = (Spelling(path) for path in files if path is not None)
            known = np.full(program.info.vocab_size, -1, dtype=np.int64)
            first, second = (program.weights[name].load().numpy() for name in shared)
            known[first] = second
            kept[function] = cls(ours, theirs, known)
        return kept[function]

    def own(self, tokens: Sequence[int]) -> list[int]:
        """The model's ids of the target's tokens, up to the first that it lacks."""
        found: list[int] = self.known[np.array(tokens, dtype=np.int64)].tolist()
        return found[: found.index(-1)] if -1 in found else found


class Translated:
    """One text of the target's in a model's own tokens.

    ids: these. rest: bytes at the end that are no whole character. ready: whether `ids` says all
    of the text. text: since the last special token. said: the target's tokens of that.
    """

    def __init__(self, words: Vocabularies, prompt: Sequence[int]) -> None:
        self.words, self.ids = words, list(words.theirs.begins)
        self.rest, self.skipped, self.tail, self.same = b"", b"", 0, 0
        self.said = list[int]()
        begins = words.ours.begins
        begun = bool(begins) and list(prompt[: len(begins)]) == begins
        self._open(words.theirs.prefix)
        self.skipped = words.ours.prefix.encode()
        self.extend(prompt[len(begins) :] if begun else prompt)

    def extend(self, tokens: Sequence[int]) -> int:
        """The text goes on; how many of the model's tokens are as they were, at least."""
        end, gained, ours = len(self.text), False, self.words.ours
        del self.ids[len(self.ids) - self.tail :]
        self.same, self.tail = len(self.ids), 0
        for token in tokens:
            if ours.special(token):
                if gained:
                    self._encode(end)
                self.ids += self.words.own([token])
                self._open("")
                end, gained = 0, False
                continue
            self.said.append(token)
            self.rest += ours.bytes_of(token)
            if self.skipped:
                self.rest, self.skipped = self.rest.removeprefix(self.skipped), b""
            gained = True
        if gained:
            self._encode(end)
        self._tail()
        return self.same

    def _open(self, prefix: str) -> None:
        """A piece of text begins behind the tokens that there are."""
        self.text, self.rest, self.said = prefix, b"", []
        self.first, self.starts, self.tail = len(self.ids), list[int](), 0
        self.ready, self.skipped = True, b""

    def _encode(self, end: int) -> None:
        """Take the whole characters of `rest` into the text; encode it anew from a word on that
        begins well before `end`, where it had ended."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text += decoder.decode(self.rest)
        self.rest = decoder.getstate()[0]
        place = word_before(self.text, self.starts, end)
        start = self.starts[place] if place else 0
        ids, starts = self.words.theirs.encode(self.text[start:])
        held = self.first + place
        self.same = min(self.same, held + common(self.ids[held:], ids, len(ids)))
        self.ids[held:] = ids
        self.starts[place:] = [start + own for own in starts]

    def _tail(self) -> None:
        """Add the tokens of `rest`, if it is whole tokens that both vocabularies have."""
        found, left = list[int](), len(self.rest)
        for token in reversed(self.said):
            if left <= 0:
                break
            found.insert(0, token)
            left -= len(self.words.ours.bytes_of(token))
        own = self.words.own(found) if found else []
        self.ready = left == 0 and len(own) == len(found)
        if self.ready:
            self.ids += own
            self.tail = len(own)


def word_before(text: str, starts: Sequence[int], end: int) -> int:
    """The token from which a text that had ended at character `end` is encoded anew: where a word
    begins `BEHIND` characters before, or some token does, where none is `FAR` characters back.

    >>> word_before("one two three four five", [0, 3, 7, 13, 18], 9 + BEHIND)
    2
    """
    for place in range(len(starts) - 1, 0, -1):
        start = starts[place]
        if start > end - BEHIND or start == starts[place - 1]:
            continue
        if end - start > FAR or (text[start] == " " and not text[start - 1].isspace()):
            return place
    return 0


class TranslatedRows(CommittedRows):
    """`CommittedRows` of a model with other tokens than the target's. texts, rows and known count
    its own. words: both vocabularies."""

    def __init__(self, executable: Executable, function: str, words: Vocabularies, *, limit: int):
        super().__init__(executable, function, None, limit=limit)
        self.words = words

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.written = [Translated(self.words, prompt) for prompt in prompts]
        super().begin([one.ids for one in self.written])

    def observe(self, taken: VerifiedStep) -> None:
        for index, tokens in enumerate(taken.tokens):
            self.alive[index] = self.alive[index] and bool(tokens)
            if not tokens:
                continue
            written = self.written[index]
            same = written.extend(tokens)
            self.texts[index], self.known[index] = written.ids, len(written.ids)
            # The last token is fed again where nothing is new: what follows it is asked for.
            self.rows[index] = max(min(self.rows[index], same, len(written.ids) - 1), 0)

    def keep(self, index: int, fed: int) -> Memo:
        """rows: i64, how many are made. own: i64[N], the tokens that they stand for."""
        rows = self.rows[index]
        return {"rows": torch.tensor(rows), "own": torch.tensor(self.texts[index][:rows])}

    def resume(self, index: int, memo: Memo, count: int) -> None:
        self.rows[index] = rows = same_rows(memo, self.texts[index], count)
        self.known[index] = max(rows, min(count, len(self.texts[index]) - 1))

    @property
    def lacking(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        ready = np.array([one.ready for one in self.written], dtype=np.bool_)
        return np.logical_or(super().lacking, ~ready)


def same_rows(memo: Mapping[str, torch.Tensor], ids: Sequence[int], count: int) -> int:
    """Rows of an earlier text that hold good for one with these tokens, of whose caches the first
    `count` rows are kept; of nothing, none. The last token's is made anew."""
    if not memo:
        return 0
    return common(memo["own"].tolist(), ids, min(count, max(len(ids) - 1, 0)))
