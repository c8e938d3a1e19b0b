"""Rows are kept by what a text's first tokens would look at, said again at its end (CItruS)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from handmade import cached_llama, decoded
from selection import one_in
from test_eviction import (
    BLOCK,
    BUDGET,
    LAYERS,
    SHAPE,
    TEXT,
    asked,
    base,
    executable_of,
)
from test_runtime_cached import padded

from graftwork.ir import PassError, Program, verify
from graftwork.ir.plan import DraftRecord, NoDraft
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.runtime import forget, generate

G = torch.ops.graftwork
OPENING, RECENT = 5, 6


def evicting(draft: DraftRecord | None = None, **more: Any) -> Program:
    program = with_plan(AddTopTokens().run(base()).program, draft=draft or NoDraft())
    options: dict[str, Any] = {"method": "opening", "opening": OPENING, "recent": RECENT}
    options |= {"budget": BUDGET, "block": BLOCK, "positions": "cache", **more}
    made = EvictCache(**options).run(program).program
    verify(made)
    return made


class Instructed:
    """Keys and queries are kept as they were before their rotation; the first tokens' queries,
    rotated for the places of the last ones, choose (Bai et al. 2024, section 3.2)."""

    def __init__(self) -> None:
        program = cached_llama(SHAPE)
        fn = program.step.copy()
        outputs, attends = dict(fn.outputs), fn.calls(G.attend.default)
        for layer, attend in enumerate(attends):
            new = attend.args[1].args[1]
            outputs |= {f"raw.{layer}": new.args[0], f"asked.{layer}": attend.args[0].args[0]}
        fn.set_outputs(outputs)
        self.tables = [program.weights[str(n.args[0].target)].load() for n in new.args[1:3]]
        self.scale = float(attends[0].kwargs["scale"])
        self.executable = executable_of(program.with_function(fn))
        self.executable.begin(1, 64)
        self.raw: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
        self.queries: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
        self.dropped = 0

    def feed(self, token: int) -> int:
        rows = len(self.raw[0])
        inputs = {
            "tokens": torch.tensor([[token]]),
            "positions": torch.tensor([[rows]]),
            "past": torch.tensor([rows]),
            "select": torch.tensor([[0]]),
        }
        kinds = [f"{kind}.{n}" for n in range(LAYERS) for kind in ("raw", "asked")]
        found = self.executable.run("step", inputs, ("argmax", *kinds))
        best = int(found["argmax"])
        for layer in range(LAYERS):
            self.raw[layer].append(found[f"raw.{layer}"][0, :, 0].clone())
            if len(self.queries[layer]) < OPENING:
                self.queries[layer].append(found[f"asked.{layer}"][0, :, 0].clone())
        if rows + 1 == BUDGET + BLOCK:
            self.drop()
        return best

    def turned(self, rows: list[torch.Tensor], first: int) -> torch.Tensor:
        """Rows [heads,D] each, rotated for places from `first` on: [heads,rows,D]."""
        cos, sin = (table[first : first + len(rows)][None] for table in self.tables)
        made: torch.Tensor = G.rotary(torch.stack(rows, 1)[None], cos, sin)[0]
        return made

    def drop(self) -> None:
        end = BUDGET + BLOCK
        for layer in range(LAYERS):
            keys = self.turned(self.raw[layer], 0).double()
            queries = self.turned(self.queries[layer], end - OPENING).double()
            values = self.executable.read_rows([f"kv.{layer}.value"], 0, 0, end)
            whole, kept = values[f"kv.{layer}.value"], []
            for group in range(SHAPE.groups):
                score = [0.0] * end
                for head in (2 * group, 2 * group + 1):
                    for n in range(OPENING):
                        seen = keys[group][: end - OPENING + n + 1]
                        weights = torch.softmax(seen @ queries[head, n] * self.scale, 0)
                        for row, weight in enumerate(weights.tolist()):
                            score[row] += weight / (2 * OPENING)
                marks = [round(math.log(max(x, 1e-30)) * 1024) for x in score]
                order = sorted(range(end - RECENT), key=lambda r: (marks[r], r), reverse=True)
                kept.append(sorted([*order[: BUDGET - RECENT], *range(end - RECENT, end)]))
            self.dropped += sum(rows != list(range(BLOCK, end)) for rows in kept)
            self.raw[layer] = [
                torch.stack([self.raw[layer][rows[n]][g] for g, rows in enumerate(kept)])
                for n in range(BUDGET)
            ]
            new = {f"kv.{layer}.key": self.turned(self.raw[layer], 0)}
            new[f"kv.{layer}.value"] = torch.stack([whole[g][rows] for g, rows in enumerate(kept)])
            self.executable.write_rows(0, 0, new)


@pytest.mark.parametrize("backend", one_in(2, ["eager", "onnxruntime"]))
def test_it_keeps_what_the_papers_rule_keeps(backend: str) -> None:
    """Token for token, beyond the model's context."""
    reference = Instructed()
    count = SHAPE.context + 10 - TEXT.shape[1]
    wanted = decoded(reference.feed, TEXT[0].tolist(), count)
    found = generate(executable_of(evicting(), backend), TEXT, **asked(count))
    assert found[0].tolist() == wanted
    assert reference.dropped > 20


@pytest.mark.parametrize("draft", [SuffixDraft(tokens=5), RecyclingDraft(nodes=7)])
def test_drafts_batches_and_calls_change_nothing(draft: DraftRecord) -> None:
    prompts = [TEXT[0].tolist(), TEXT[0, 9:20].tolist(), TEXT[0, 3:53].tolist()]
    plain, fast = executable_of(evicting()), executable_of(evicting(draft))
    ids, mask = padded(prompts)
    more = asked(40, return_dict_in_generate=True)
    found = generate(fast, ids, attention_mask=mask, **more)
    assert found.stats.accepted_tokens > 2
    for row, prompt in zip(found.sequences.tolist(), prompts, strict=True):
        forget(plain)
        wanted = generate(plain, torch.tensor([prompt]), **asked(40))[0].tolist()
        assert row[len(row) - len(wanted) :] == wanted
    # A conversation that goes on has its first tokens' queries still.
    longer = found.sequences[:1]
    again = generate(fast, longer, **more)
    assert again.stats.reused_tokens > 0
    forget(plain)
    assert torch.equal(again.sequences, generate(plain, longer, **asked(40)))


@pytest.mark.long
def test_it_runs_compiled() -> None:
    plain = generate(executable_of(evicting()), TEXT, **asked(20))
    assert torch.equal(generate(executable_of(evicting(), "torch"), TEXT, **asked(20)), plain)


def test_what_would_go_wrong_is_refused() -> None:
    for options in ({"opening": 7}, {"budget": BLOCK, "recent": 5}, {"opening": 9, "recent": 9}):
        with pytest.raises(PassError, match="the queries of so many first tokens are kept when"):
            evicting(**options)
    with pytest.raises(PassError, match="which only positions='cache' tells"):
        evicting(positions="absolute")
