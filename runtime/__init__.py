"""The decode loop: drives a compiled program to generate text.

One loop serves every method (`loop.run`)::

    prefill   the prompts, in chunks; their last logits give each sequence's first token
    until every sequence is done:
        draft     the plan's drafter guesses up to k tokens a sequence (plain decoding: none)
        step      feed [last committed token, draft tokens...] as i64[B,T] after `past` cache rows
        verify    the plan's verifier keeps a prefix of the draft and adds one token of the target
        commit    append, look for an end, tell the drafter and the streamer what was kept

What holds throughout:

- **No padding enters a cache.** Left padding is removed; each sequence has its own `past`.
- **A cache row is forgotten by not counting it.** A step writes T rows after `past`; the next
  step's `past` covers the accepted ones, and the rest is overwritten. While a sequence is decoded
  its cache holds a row for every token but the last one, so `past` is the text's length minus one.
- **Garbage comes last.** Sequences with shorter drafts, and widths larger than asked for, leave
  columns that are not needed. They stand after the valid ones, which a causal step cannot see.
- **Finished sequences** keep their place in the batch, are fed filler from row 0 and draft nothing.
- **Rows outlive a call** (`cache/conversations.py`): a prompt that begins as an earlier text feeds
  the rest only. Every part of a plan says from where it can go on (`memo.Resumes`).
- **Host work is small**: token lists, written into memory that is bound to the model
  (`Executable.hold`) and read from where it puts its outputs; a greedy step fetches
  `argmax` and moves no logits. `Stats.host_overhead` says what a step costs outside the
  executable.
- **Plain decoding** (nothing is ever drafted, the argmax is the choice) takes the same steps in a
  loop of its own, `rounds/plain.py`, which does nothing else.

Folders: `asking/` validates a request and ends its sequences; `feeding/` turns token lists into
inputs of a compiled width and reads what comes back; `speculate/`, `depth/` and `cache/` hold one
policy a file, found by the plan record that it carries out; `rounds/` holds ways to run steps;
`serving/` decodes requests together that come and go.
"""

from typing import TYPE_CHECKING

from ..ir.support.lazy import names_of

if TYPE_CHECKING:
    from .api import *  # noqa: F403
else:
    __getattr__ = names_of(f"{__name__}.api")
