"""EAGLE-3: the text stays the target's, drafts are what whole sequences give, training teaches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from recorded import whole
from test_runtime_cached import (
    BEST,
    CHAIN,
    PROMPTS,
    WIDE,
    RecordedCached,
    decode,
    drafting,
    plainly,
)
from test_runtime_sampling import assert_distributed
from test_training import TEXT, taught
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import Program
from graftwork.model import Model
from graftwork.passes.drafting.draft_eagle3 import DraftEagle3
from graftwork.passes.drafting.draft_vocabulary import chosen_by
from graftwork.passes.engine.base import Pass
from graftwork.runtime import generate
from graftwork.training import fit
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch
from graftwork.training.objectives.eagle import rolled_out

EAGER = Target("eager", "cpu")
FEW = {"steps": 2, "batch": 2, "window": 16, "own": 0.0}


SOME = torch.tensor([1, 3, 4, 6, 9])
"""The tokens that drafters know here."""


def knowing(program: Program, ids: torch.Tensor = SOME) -> Program:
    """With these tokens as the draft vocabulary."""
    return chosen_by(program, torch.bincount(ids, minlength=program.info.vocab_size))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_the_text_is_the_targets_own(backend: str) -> None:
    executable = compile(drafting(DraftEagle3(), BEST), Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 10)
        assert torch.equal(result.sequences, plainly(executable, prompts, 10))
        assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


def expected(program: Program, text: list[int], path: Sequence[int]) -> torch.Tensor:
    """EAGLE-3's logits after a text and a path below it."""
    draft = program.plan.draft
    features = whole(program, "step", text)[draft.output][:, :-1]
    states = whole(program, draft.entry, text[1:], hidden=features)["hidden"]
    for length in range(len(path) + 1):
        tokens = [*text[1:], *path[:length]]
        outputs = whole(program, draft.function, tokens, hidden=states)
        states = torch.cat([states, outputs["hidden"][:, -1:]], 1)
    return outputs["draft_logits"][0, -1]


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_drafts_are_what_whole_sequences_give(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    from graftwork.runtime.speculate.drafters import grown

    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: RecordedCached)
    RecordedCached.notes = []
    draft = DraftEagle3(vocabulary=5, norm_before_residual=True, layers=(1, 2))
    program = knowing(drafting(draft, WIDE))
    decode(compile(program, Target.parse(backend)), [PROMPTS[0], PROMPTS[1]], 6)
    assert {len(path) for _, path, _ in RecordedCached.notes} == {0, 1, 2}
    for text, path, logits in RecordedCached.notes[::11]:
        wanted = expected(program, text, path)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-4, rtol=2e-4)


def test_only_the_draft_vocabulary_is_proposed() -> None:
    program = knowing(drafting(DraftEagle3(vocabulary=5), BEST))
    found = whole(program, "eagle3", [5, 6], hidden=torch.randn(1, 2, 32))
    assert set(found["draft_tokens"].flatten().tolist()) == {1, 3, 4, 6, 9}
    probs = found["draft_logits"].softmax(-1)[0, 0]
    assert set(probs.nonzero().flatten().tolist()) == {1, 3, 4, 6, 9}
    scores = probs[found["draft_tokens"][0, 0]].log()
    torch.testing.assert_close(found["draft_scores"][0, 0], scores)
    # They are the rows of the target's own head.
    ours = program.weights["eagle3.lm_head.weight"].load()
    assert torch.equal(ours, program.weights["head"].load()[[1, 3, 4, 6, 9]])


def test_samples_follow_the_targets_distribution() -> None:
    """With a draft that cannot say some of what the target says."""
    vocab = 6
    start = tiny_llama(vocab=vocab, seed=3)
    program = drafting(DraftEagle3(vocabulary=4), named("tree_sampled", widths=(2, 1)), start)
    program = knowing(program, torch.tensor([1, 2, 4, 5]))
    executable = compile(program, EAGER)
    exact = {}
    for tokens in itertools.product(range(vocab), repeat=3):
        logits = whole(program, "step", [3, *tokens])["logits"][0]
        exact[tokens] = float(logits.softmax(-1)[[0, 1, 2], list(tokens)].prod())
    drawn: Counter = Counter()
    kept = 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        result = generate(
            executable,
            torch.full((250, 1), 3),
            max_new_tokens=3,
            do_sample=True,
            top_k=0,
            eos_token_id=[],
            generator=generator,
            return_dict_in_generate=True,
        )
        drawn.update(map(tuple, result.sequences[:, 1:].tolist()))
        kept += result.stats.accepted_tokens
    assert_distributed(drawn, exact)
    assert kept > 100


# -- training


def modelled(draft: Pass, start: Program | None = None) -> Model:
    return Model(drafting(draft, CHAIN, start), EAGER, {"name": "test"})


def test_training_rolls_out_what_drafting_does() -> None:
    """Every level's logits at every place are those of a draft with that text and path."""
    program = knowing(drafting(DraftEagle3(vocabulary=5), CHAIN))
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.tensor([TEXT[1][:8]])
    draft = program.plan.draft
    outputs = net.outputs("step", ("logits", draft.output), {"tokens": tokens})
    seen: list[torch.Tensor] = []

    def run(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        found = net.run(function, **inputs)
        seen.extend([found["draft_logits"]] if "draft_logits" in found else [])
        return found

    known = net.known_of(draft)
    assert known is not None and torch.equal(known, SOME)
    hidden, logits = {draft.output: outputs[draft.output]}, outputs["logits"]
    chosen = logits.argmax(-1)
    batch = Batch(tokens, hidden, logits[..., known], known=known, chosen=chosen)
    loss = rolled_out(draft, run, batch, outputs[draft.output][:, :-1])
    assert len(seen) == len(loss.hits) == 3 and bool(loss.total.isfinite())
    row = tokens[0].tolist()
    for level, logits in enumerate(seen):
        assert logits.shape[1] == 7 - level
        for place in (0, 5 - level):
            text, path = row[: place + 2], row[place + 2 : place + 2 + level]
            wanted = expected(program, text, path)
            torch.testing.assert_close(logits[0, place], wanted[known], atol=1e-4, rtol=1e-4)


def test_training_teaches_and_leaves_the_target_alone(tmp_path: Path) -> None:
    model = modelled(DraftEagle3(levels=3))
    fitted, hits = taught(model, tmp_path, 40)
    assert len(fitted.hits) == 3 and min(fitted.hits) > max(hits) + 0.2
    ids = torch.tensor([TEXT[0][:9], TEXT[3][4:13]])
    plain = generate(model.executable, ids, max_new_tokens=12, eos_token_id=[])
    assert torch.equal(fitted.model.generate(ids, max_new_tokens=12, eos_token_id=[]), plain)


def test_what_was_trained_comes_back(tmp_path: Path) -> None:
    """With its draft vocabulary, also where training goes on."""
    model = modelled(DraftEagle3(vocabulary=5))
    fitted = fit(model, TEXT, out=tmp_path / "a", **FEW)
    again = modelled(DraftEagle3(weights=str(tmp_path / "a")))
    assert again.program.plan.draft.trained
    for name, weight in fitted.model.program.weights.items():
        assert torch.equal(weight.load(), again.program.weights[name].load()), name
    more = fit(model, TEXT, out=tmp_path / "a", resume=True, **{**FEW, "steps": 3})
    assert more.steps == 3
