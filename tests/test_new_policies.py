"""A new policy is one record and one class: here is one of each kind, and a recipe that uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny import MASK, PROMPTS, cached_llama, tiny_llama

from graftwork.artifact.saved import load, save
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, parse_program, program_text, verify
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan import RECORDS, CacheRecord, DepthRecord, DraftRecord, LengthRecord
from graftwork.ir.plan.base import POLICIES, policy
from graftwork.ir.plan.bounds import Nodes, Share
from graftwork.ir.support.discovery import import_all
from graftwork.passes import Contract, all_passes
from graftwork.passes.engine import base as pass_base
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.asking.text import Text
from graftwork.runtime.cache import CACHES, CachePolicy
from graftwork.runtime.depth import DEPTHS, DepthPolicy
from graftwork.runtime.feeding.feed import Feeder
from graftwork.runtime.speculate.drafters.base import DRAFTERS, ChainDrafter
from graftwork.runtime.speculate.lengths import LENGTHS, LengthPolicy

EAGER = Target.parse("eager")
ASKED: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 16, "eos_token_id": []}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test declares is gone after it."""
    all_passes()
    registries = (DRAFTERS, LENGTHS, DEPTHS, CACHES)
    for registry in registries:
        import_all(registry.package)
    classes = [registry.classes for registry in registries]
    tables: list[dict[Any, Any]] = [RECORDS, POLICIES, pass_base._PASSES, *classes]
    before = [dict(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)


def optimized(*passes: Any) -> tuple[Program, Recipe]:
    """The tiny model under a recipe of these passes, on top of baseline."""
    recipe = Recipe.load({"name": "new", "extends": "baseline", "passes": list(passes)})
    return run_passes(tiny_llama(), recipe.steps)[0], recipe


def test_a_drafter_and_a_length_policy(tmp_path: Path) -> None:
    @policy
    @dataclass(frozen=True)
    class RepeatDraft(DraftRecord):
        """The last token again. tokens: how often."""

        tokens: Nodes = 4
        kind: ClassVar[str] = "repeat"

        @property
        def most(self) -> int:
            return self.tokens

    @DRAFTERS.register(RepeatDraft)
    class RepeatDrafter(ChainDrafter):
        def begin(self, prompts: Sequence[Sequence[int]]) -> None:
            self.levels, self.last = self.record.tokens, [prompt[-1] for prompt in prompts]

        def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
            self.last[index] = new[-1]

        def chain(self, index: int, room: int) -> list[int]:
            return [self.last[index]] * min(room, self.levels)

    @policy
    @dataclass(frozen=True)
    class ShortLength(LengthRecord):
        """No more than this. tokens: of a draft."""

        tokens: Nodes = 1
        kind: ClassVar[str] = "short"

    @LENGTHS.register(ShortLength)
    class ShortPolicy(LengthPolicy):
        def limits(self, rooms: Sequence[int]) -> list[int]:
            return [min(room, self.record.tokens) for room in rooms]

    with pytest.raises(InputError, match=r"option 'tokens': .* less than or equal to 4096"):
        optimized({"draft_repeat": {"tokens": 10**6}})
    with pytest.raises(PassError, match=r"'length_short' requires 'drafts'.*draft_repeat"):
        optimized("length_short")
    program, recipe = optimized({"draft_repeat": {"tokens": 3}}, "length_short")
    assert recipe.contract == "lossless" and program.plan.columns == 3
    save(program, tmp_path / "out", target=EAGER, recipe=recipe.as_dict())
    saved = load(tmp_path / "out").program
    assert saved.plan == program.plan and str(saved.plan.length) == "short(tokens=1)"
    plain = generate(compile(cached_llama(), EAGER), PROMPTS, **ASKED)
    found = generate(compile(saved, EAGER), PROMPTS, **ASKED, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain)
    # A draft a step and sequence, of one token: the length policy is asked.
    assert 0 < found.stats.draft_tokens <= found.stats.sequence_steps
    longer, _ = optimized({"draft_repeat": {"tokens": 3}})
    more = generate(compile(longer, EAGER), PROMPTS, **ASKED, return_dict_in_generate=True)
    assert torch.equal(more.sequences, plain)
    assert more.stats.draft_tokens > 2 * found.stats.draft_tokens


def test_a_depth_policy_and_a_cache_policy() -> None:
    asked: list[str] = []

    @policy
    @dataclass(frozen=True)
    class HalfDepth(DepthRecord):
        """Fewer layers. share: of them."""

        share: Share = 0.5
        kind: ClassVar[str] = "half"
        # It leaves no layer out, and so needs no step that is cut.
        requires: ClassVar[frozenset[str]] = frozenset()
        stops: ClassVar[bool] = False

    @DEPTHS.register(HalfDepth)
    class HalfPolicy(DepthPolicy):
        def begin(self, feeder: Feeder, texts: Sequence[Text]) -> None:
            super().begin(feeder, texts)
            asked.append(f"{self.record.share} of {len(texts)}")

    @policy
    @dataclass(frozen=True)
    class Window(CacheRecord):
        """The last rows alone. rows: the most; half of them stay where there would be more."""

        rows: Nodes = 64
        kind: ClassVar[str] = "window"

    @CACHES.register(Window)
    class WindowPolicy(CachePolicy):
        def __init__(self, record: Window, executable: Executable) -> None:
            super().__init__(record, executable)
            self.most = record.rows

        def room(self, rows: Sequence[int]) -> int:
            return self.record.rows - max(rows)

        def settle(self, texts: Sequence[Text]) -> None:
            (text,) = texts
            if text.rows < self.record.rows:
                return
            asked.append("window")
            kept = torch.arange(text.rows // 2, text.rows)[None]
            self.executable.compact(list(self.executable.program.states), kept)
            text.rows = kept.shape[1]

    program, recipe = optimized("depth_half", {"cache_window": {"rows": 6}})
    assert recipe.contract == Contract.APPROXIMATE.value
    text = program_text(program)
    assert "depth = half(share=0.5)\n" in text and "cache = window(rows=6)\n" in text
    again = parse_program(text, program.weights)
    verify(again)
    assert again.plan == program.plan and program_text(again) == text
    with pytest.raises(PassError, match="cache_window: the plan has a cache policy already: win"):
        all_passes()["cache_window"]().run(program)
    prompt = PROMPTS[2:3]
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": []}
    short = generate(compile(program, EAGER), prompt, **options)
    # 5 rows of the prompt, 15 more: one to the boundary, then three at a time.
    assert asked == ["0.5 of 1", *["window"] * 5]
    wide, _ = optimized("depth_half", {"cache_window": {"rows": 40}})
    long = generate(compile(wide, EAGER), prompt, **options)
    assert asked[6:] == ["0.5 of 1"]
    assert torch.equal(long, generate(compile(cached_llama(), EAGER), prompt, **options))
    assert not torch.equal(short, long)
