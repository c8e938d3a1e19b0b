"""Drafts by a model of the same family whose vocabulary is padded to another size."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from recorded import whole
from test_runtime_cached import CHAIN, PROMPTS, decode, drafting, plainly
from test_runtime_sampling import assert_distributed
from tiny import tiny_llama
from tokenizers import Tokenizer, models

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, Weight, WeightStore, type_of
from graftwork.passes.drafting.draft_model import DraftModel

DRAFT = DraftModel(model="other", levels=3, candidates=4)


def beside(target: int, guest: int) -> Program:
    """A tiny model beside one that is the same for the tokens that both have."""
    wide = tiny_llama(vocab=max(target, guest))
    start, other = (_cut(wide, size) for size in (target, guest))
    return start.replace(guests={"other": other})


def _cut(wide: Program, size: int) -> Program:
    """The first tokens of a model."""
    program = tiny_llama(vocab=size)
    rows = {name: weight.type.dims[0] for name, weight in program.weights.items()}
    cut = {n: Weight.of(n, wide.weights[n].load()[: int(str(rows[n]))].clone()) for n in rows}
    return program.replace(weights=WeightStore(cut))


@pytest.mark.parametrize("sizes", [(32, 40), (40, 32)], ids=["cut", "padded"])
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_the_text_is_the_targets_own_and_drafted_well(backend: str, sizes: tuple[int, int]) -> None:
    """What lies beyond the target's tokens is cut; tokens that the draft lacks are never drafted,
    and a text may hold them."""
    program = drafting(DRAFT, CHAIN, beside(*sizes))
    assert type_of(program.function("draft").outputs["draft_logits"]).dims[-1] == sizes[0]
    executable = compile(program, Target.parse(backend))
    prompts = [*PROMPTS, [3, sizes[0] - 1, 5]]
    result = decode(executable, prompts, 25)
    assert torch.equal(result.sequences, plainly(executable, prompts, 25))
    assert result.stats.accepted_tokens > 0.5 * result.stats.sequence_steps


@pytest.mark.parametrize("sizes", [(5, 6), (6, 5)], ids=["cut", "padded"])
def test_samples_follow_the_targets_distribution(sizes: tuple[int, int]) -> None:
    made = drafting(DRAFT, CHAIN, beside(*sizes))
    executable = compile(made, Target.parse("eager"))
    exact = {}
    for tokens in itertools.product(range(sizes[0]), repeat=3):
        logits = whole(made, "step", [3, *tokens])["logits"][0]
        exact[tokens] = float(logits.softmax(-1)[[0, 1, 2], list(tokens)].prod())
    generator = torch.Generator().manual_seed(1)
    result = decode(executable, [[3]] * 600, 3, do_sample=True, top_k=0, generator=generator)
    assert_distributed(Counter(map(tuple, result.sequences[:, 1:].tolist())), exact)
    assert result.stats.accepted_tokens > 0


def written(path: Path, *tokens: str) -> Path:
    Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="a")).save(str(path))
    return path


def test_tokens_are_compared_and_not_how_texts_are_cut(tmp_path: Path) -> None:
    """The draft reads ids: what both have must be the same, and one may have more."""
    start = beside(32, 40)
    ours = written(tmp_path / "ours.json", "a", "b")

    def take(*tokens: str, draft: DraftModel = DRAFT) -> int:
        guest = start.guests["other"]
        theirs = guest.replace(assets={"tokenizer.json": written(tmp_path / "t.json", *tokens)})
        target = start.replace(assets={"tokenizer.json": ours}, guests={"other": theirs})
        return draft.run(target).matches

    assert take("a", "b") == take("a", "b", "c") == take("a") == 1
    with pytest.raises(PassError, match=r"tokenizers of tiny and tiny differ, .* decoder None"):
        take("a", "c", "b")
    same = DRAFT.model_copy(update={"vocabulary": "same"})
    with pytest.raises(PassError, match=r"tokenizers .* differ .*: 1 is 'b' and 'c'"):
        take("a", "c", "b", draft=same)
