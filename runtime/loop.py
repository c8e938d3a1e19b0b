"""The decode loop: rounds of steps, until every sequence is done."""

from __future__ import annotations

from functools import partial

from ..ir import UnsupportedError
from ..ir.check.legality import unmet
from ..ir.execution.executable import Executable
from .asking.request import Request
from .edits import edits, put_together
from .rounds import ROUNDS, Decoding
from .shared import shared_request
from .stats import Stats


def decode(executable: Executable, request: Request) -> Stats:
    """Decode until every text of the request is done; the texts grow in place.

    Errors: `UnsupportedError` for a plan, or a program, that the loop cannot carry out;
    `InputError` for logits that are NaN.
    """
    if fault := unmet(executable.program):
        lacks = f"; the program lacks a pass that provides {fact!r}" if (fact := fault[1]) else ""
        raise UnsupportedError(f"{fault[0]}{lacks}")
    prepared = executable.preparing
    decoding = Decoding(executable, request)
    edited = [put_together(executable, e, partial(_decoded, executable)) for e in edits(decoding)]
    shared = shared_request(decoding)
    before = Stats() if shared is None else decode(executable, shared)
    stats = _finished(decoding)
    if before.prefill_seconds:
        stats.shared_tokens = stats.reused_tokens - before.reused_tokens
        stats.reused_tokens = before.reused_tokens
        stats.prefill_seconds += before.prefill_seconds
    for other in edited:
        stats.turned_tokens += other.turned_tokens
        stats.reused_tokens += other.reused_tokens
        stats.prefill_seconds += other.prefill_seconds
    stats.preparing_seconds = executable.preparing - prepared
    return stats


def _decoded(executable: Executable, request: Request) -> Stats:
    """Carry out a request as it is."""
    return _finished(Decoding(executable, request))


def _finished(decoding: Decoding) -> Stats:
    stats = run(decoding)
    decoding.finish()
    return stats


def run(decoding: Decoding) -> Stats:
    """Carry out a generation; what it cost."""
    decoding.start()
    stats, feeder, texts = decoding.stats, decoding.feeder, decoding.texts
    first = sum(text.generated for text in decoding.own)
    start, inside = decoding.clock(), feeder.seconds - feeder.executable.preparing
    rounds = [round_(decoding) for round_ in ROUNDS if round_.fits(decoding)]
    while decoding.live:
        decoding.retire()
        decoding.cache.settle(texts)
        chosen, most = next((r, n) for r in rounds if (n := r.wants()) != 0)
        chosen.run(most)
    stats.decode_seconds = decoding.clock() - start
    stats.executable_seconds = feeder.seconds - feeder.executable.preparing - inside
    stats.new_tokens = sum(text.generated for text in decoding.own)
    stats.decoded_tokens = stats.new_tokens - first
    return stats
