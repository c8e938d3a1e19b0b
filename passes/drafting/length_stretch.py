"""End drafts where a stretch of the text ends, such as a line or a paragraph.

Before::

    decode {
      draft = cached(function="draft", levels=128, ...)
    }

After (until="\\n\\n")::

    decode {
      draft = cached(function="draft", levels=128, ...)
      length = stretch(most=128, ends=(2, 216, 1116))
    }

`ends` are the tokens that write `until`, alone or among others, and those that end a text; where it
is written by two tokens of which neither holds it, the stretch goes on. Refuses a program without a
tokenizer, a text that no token writes, and a plan with another length policy.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import StretchLength
from ...ir.plan.bounds import MOST_NODES
from ...ir.plan.translated import TOKENIZER
from ...ir.support.tokenizer import read_tokenizer
from ..engine.base import Effect, Outcome
from ..engine.plan_edits import with_record
from ..policies import RecordPass, builds


@builds(StretchLength)
class LengthStretch(RecordPass):
    """until: the text that a stretch ends with. The rest: see the record."""

    until: Annotated[str, Field(min_length=1, max_length=64)] = "\n\n"

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        path = program.assets.get(TOKENIZER)
        if path is None:
            raise PassError(
                f"{self.name}: expected a tokenizer, which says what tokens write "
                f"{self.until!r}; {program.name} came without a {TOKENIZER}"
            )
        tokenizer, size = read_tokenizer(path), program.info.vocab_size
        known = sorted(id for id in tokenizer.get_vocab().values() if id < size)
        texts = tokenizer.decode_batch([[id] for id in known], skip_special_tokens=False)
        found = [id for id, text in zip(known, texts, strict=True) if self.until in text]
        if not found:
            raise PassError(
                f"{self.name}: expected a text that some token writes, got until={self.until!r}, "
                f"which the tokenizer of {program.name} writes by several"
            )
        ends = tuple(sorted({*found, *program.info.eos}))
        if len(ends) > MOST_NODES:
            raise PassError(
                f"{self.name}: {len(ends):,} tokens write {self.until!r}: expected {MOST_NODES:,} "
                f"at most; give a longer text"
            )
        return Outcome(with_record(program, self.name, self.made(ends=ends)), 1)
