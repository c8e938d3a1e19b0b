"""What every trained drafter must show, whatever its parts: see `test_whole_drafters`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from test_runtime_cached import CHAIN, PROMPTS, decode, plainly
from test_runtime_sampling import assert_distributed, texts_drawn
from tiny import in_int8, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import Program, run
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits

EAGER = Target("eager", "cpu")
SAID, LENGTH = [0, 1, 2, 0], 5


@dataclass(frozen=True)
class Case:
    """A drafter's passes, and a tree that is worth drawing; recipe: the bundled one. behind: passes
    that come when everything else is done."""

    passes: tuple[Pass, ...]
    tree: Pass
    recipe: str
    behind: tuple[Pass, ...] = ()

    def program(self, *more: Pass, tree: Pass | None = None, start: Program | None = None) -> Any:
        """A tiny model that drafts so, as recipes make it. tree: another one."""
        last = (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax(), tree or self.tree)
        steps = [Step(each) for each in (*self.passes, *more, *last, *self.behind)]
        return run_passes(start or tiny_llama(4), steps)[0]

    def model(self) -> Model:
        """One that drafts chains."""
        return Model(self.program(tree=CHAIN), EAGER, {"name": "test"})


def assert_own_text(case: Case, target: str, *, int8: bool = False) -> None:
    """Greedy decoding gives the text of the target without a drafter, alone and in a ragged batch,
    and it drafts."""
    rounding, where = [in_int8()] * int8, Target.parse(target)
    executable = compile(case.program(*rounding), where)
    steps = [*rounding, InsertKvCache(), PickLogits(), AddArgmax()]
    plain = compile(run_passes(tiny_llama(4), [Step(each) for each in steps])[0], where)
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 20)
        assert torch.equal(result.sequences, plainly(plain, prompts, 20))
        assert result.stats.draft_tokens > result.stats.sequence_steps


def sampled_from(case: Case) -> tuple[Program, dict[tuple[int, ...], float]]:
    """A program of four tokens that drafts so, and how likely each continuation of `SAID` is."""
    start = tiny_llama(4, vocab=4)
    every = torch.tensor(list(itertools.product(range(4), repeat=LENGTH)))
    texts = torch.cat([torch.tensor(SAID).expand(len(every), -1), every], 1)
    steps = torch.arange(texts.shape[1]).expand(texts.shape)
    logits = run(start, "step", {"tokens": texts, "positions": steps})["logits"]
    said = logits[:, len(SAID) - 1 : -1].softmax(-1).gather(-1, every[..., None])
    chances = zip(map(tuple, every.tolist()), said.prod(1)[:, 0].tolist(), strict=True)
    return case.program(start=start), dict(chances)


def assert_sampled(case: Case) -> None:
    """Samples follow the target's distribution, with drafts of which some are kept and some not."""
    program, chances = sampled_from(case)
    drawn, accepted, drafted = texts_drawn(
        compile(program, EAGER), SAID, LENGTH, (400, 3), {"eos_token_id": []}
    )
    assert_distributed(drawn, chances)
    assert 0.02 < accepted / drafted < 0.95
