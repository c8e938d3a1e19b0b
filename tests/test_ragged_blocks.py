"""Prompts that end where a block does, in batches with longer ones: nothing that the block still
needs may be written over while the others are read."""

from __future__ import annotations

from typing import Any

import pytest
from handmade import Shape, cached_llama
from selection import one_in
from test_edits import said, text
from tiny import in_int8

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.quantize_old_rows import QuantizeOldRows
from graftwork.passes.caching.read_chunks import ReadChunks
from graftwork.passes.engine.base import Pass

KINDS: dict[str, Pass] = {
    "queries of a block": EvictCache(method="snapkv", budget=24, block=8, recent=6),
    "sums": EvictCache(method="h2o", budget=24, block=8),
    "budgets of layers": EvictCache(method="h2o", budget=24, block=8, recent=6, layers="pyramid"),
    "the latest rows": EvictCache(method="window", budget=24, block=8, positions="cache"),
    "rows before their codes": QuantizeOldRows(bits=4, group=8, residual=16, block=8),
    "landmarks": ReadChunks(rows=8, chunk=4, block=8),
}


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_a_prompt_may_end_with_a_block_while_others_go_on(kind: str) -> None:
    program = KINDS[kind].run(in_int8().run(cached_llama(Shape(context=256))).program).program
    prompts = [text(1, 32), text(2, 75), text(3, 40), text(4, 31)]
    executable: Any = compile(program, Target("eager"))
    wanted = [said(compile(program, Target("eager")), p, tokens=20)[0][0] for p in prompts]
    assert said(executable, *prompts, tokens=20)[0] == wanted
