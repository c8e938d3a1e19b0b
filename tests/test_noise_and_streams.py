"""Make Some Noise's trajectories and noise, and the streams of Speculative Streaming, by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from runtime_models import setting
from selection import mostly_long
from test_hidden_transfer import after, stretch, through
from test_tuned_target import CASES
from tiny import MASK, PROMPTS, drafting_llama, named, tiny_llama
from whole_drafters import EAGER, assert_sampled

from graftwork.backends import compile
from graftwork.ir import Weight, run
from graftwork.passes.drafting.noise import NoiseDraft, NoiseProposer, _children
from graftwork.passes.drafting.noise.graph import DraftNoise
from graftwork.passes.drafting.noise.objective import noise_loss, noised, places
from graftwork.passes.drafting.streams.graph import DraftStreams
from graftwork.runtime.feeding.draft import Draft
from graftwork.runtime.generation import generate
from graftwork.runtime.speculate.drafters import grown
from graftwork.training.objectives.base import Batch

V = 32
BEST = named("tree_best_first", nodes=9, depth=3, width=3)
# -- noise in training


def test_noise_comes_from_what_precedes_it_and_leaves_the_rest() -> None:
    tokens = torch.arange(24).reshape(2, 12) + torch.tensor([[0], [100]])
    made = noised(tokens, torch.tensor([4]), 3)
    assert torch.equal(made[:, :4], tokens[:, :4]) and torch.equal(made[:, 7:], tokens[:, 7:])
    for row, text in zip(made[:, 4:7].tolist(), tokens[:, :4].tolist(), strict=True):
        assert set(row) <= set(text)
    assert torch.equal(made, noised(tokens, torch.tensor([4]), 3))


@pytest.mark.parametrize(("width", "count", "share"), [(128, 5, 0.1), (24, 3, 0.5), (8, 3, 0.1)])
def test_rows_of_noise_lie_apart_behind_the_first_token(
    width: int, count: int, share: float
) -> None:
    for seed in range(20):
        tokens = torch.randint(50, (1, width), generator=torch.Generator().manual_seed(seed))
        starts = places(tokens, count, share).tolist()
        assert starts and starts[0] >= 1 and starts[-1] + count < width
        assert all(b - a >= count for a, b in itertools.pairwise(starts))
        assert len(starts) * count <= max(count, width * share + count)
    assert places(torch.ones(1, 4), 3, 0.5).tolist() == []


def test_the_loss_by_hand() -> None:
    """-mean log p of the next token at all places, the k-th token of noise weighed decay^k."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (2, 10), generator=generator)
    logits, clean = (torch.randn(2, 10, 7, generator=generator) for _ in range(2))
    record = NoiseDraft(prompts=2, decay=0.5, noisy=0.2)
    fed: list[torch.Tensor] = []

    def ran(function: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        fed.append(inputs["tokens"])
        return {"logits": logits}

    batch = Batch(tokens, {}, clean)
    loss = noise_loss(record, ran, batch)
    starts = places(tokens, 2, 0.2).tolist()
    assert torch.equal(fed[0], noised(tokens, torch.tensor(starts), 2))
    total, right = 0.0, [0, 0]
    for row in range(2):
        for t in range(10):
            # Behind the text's end, what the target says of the text itself.
            wanted = int(tokens[row, t + 1]) if t < 9 else int(clean[row, 9].argmax())
            k = next((t - start for start in starts if start <= t < start + 2), None)
            weight = 1.0 if k is None else 0.5**k
            total -= weight * float(logits[row, t].log_softmax(-1)[wanted]) / 20
    for k in range(2):
        for start in starts:
            right[k] += int(logits[0, start + k].argmax() == clean[0, start + k].argmax())
    assert math.isclose(float(loss.total), total, rel_tol=1e-5)
    assert loss.hits == pytest.approx([count / len(starts) for count in right])


# -- trajectories


class Noting(NoiseProposer):
    """Notes what was fed behind the text, and what is guessed then."""

    notes: ClassVar[list[tuple[list[int], list[int]]]] = []

    def observe(self, taken: Any) -> None:
        before = self.plans.copy()
        super().observe(taken)
        for index, tokens in enumerate(taken.tokens):
            if not tokens or self.best[index, 0] < 0:
                continue
            path, draft = taken.paths[index], taken.drafts[index]
            depth = draft.depth(path[-1]) if path else 0
            trajectory = before[index, depth : depth + self.many].tolist()
            text = [*self.texts[index].tokens[:-1], *trajectory]
            self.notes.append((text, self.best[index].tolist()))


def test_guesses_are_what_whole_sequences_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, positions and masks: the k-th guess follows the text and k tokens of the trajectory,
    whether these are nodes of the draft or ride along; guesses come back as the next trajectory."""
    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: Noting)
    Noting.notes.clear()
    executable = compile(drafting_llama(DraftNoise(prompts=3, after=3, candidates=4), BEST), EAGER)
    generate(executable, PROMPTS, attention_mask=MASK, max_new_tokens=16, eos_token_id=[])
    assert len(Noting.notes) > 20
    for text, best in Noting.notes:
        fed = torch.tensor([text])
        executable.begin(1, fed.shape[1])
        steps = torch.arange(fed.shape[1])[None]
        inputs = {"tokens": fed, "positions": steps, "past": torch.zeros(1, dtype=torch.int64)}
        outputs = executable.run("step", {**inputs, "select": steps}, ("draft_tokens",))
        known = [token for token in best if token >= 0]  # what was fed of the trajectory
        assert outputs["draft_tokens"][0, -3:, 0].tolist()[: len(known)] == known


def proposer(text: list[int], retrieved: float = 0.5) -> NoiseProposer:
    drafter = DraftNoise(prompts=3, after=2, candidates=4, retrieved=retrieved)
    program = drafting_llama(drafter, BEST)
    made = NoiseProposer(program.plan.draft, setting(compile(program, EAGER)))
    made.begin([text])
    return made


def test_what_followed_the_texts_end_earlier_is_a_candidate() -> None:
    made = proposer([1, 2, 3, 4, 1, 2])
    assert made.tokens[0, :, 0].tolist() == [3, 4, 1]
    assert made.scores[0, :, 0] == pytest.approx([math.log(0.5)] * 3)
    assert (proposer([1, 2, 3, 4, 1, 2], 0.0).tokens == -1).all()
    assert (proposer([1, 2, 3, 4, 5]).tokens == -1).all()


def test_riders_are_what_of_the_trajectories_is_no_node() -> None:
    """Places 1 to 6 behind the text: guesses 10, 11, 12, then noise. The first branch is the
    trajectory's own; it is not fed twice."""
    made = proposer([1, 2, 3])
    made.plans[0] = [10, 11, 12, 20, 21, 22]
    made.tokens[0, :, 0], made.scores[0, :, 0] = [10, 11, 12], math.log(0.9)
    draft = made._ridden(Draft((10, 11, 15), parents=(-1, 0, -1)), 0)
    found = _children(draft)
    fed = [10, 11, 15, *draft.riders]
    for node, depth in ((1, 2), (0, 1)):  # where verification likeliest ends
        at = node
        for token in made.plans[0, depth : depth + 3].tolist():
            at = found[at, token]
            assert fed[at] == token
    assert draft.riders == (12, 20, 21)
    assert made._columns(draft, 1, 0) == [4, 5, 6] and made._columns(draft, 0, 0) == [2, 4, 5]
    assert made._columns(draft, 2, 0) == []
    assert np.unique(draft.follows).size == len(draft.follows)


# -- streams


def test_streams_run_through_the_last_layers_by_hand() -> None:
    """s_k = h + up down h + e_k, and each attends to the text and the streams before it."""
    passed = DraftStreams(prompts=2, last=2, rank=3).run(tiny_llama(4)).program
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn(weight.type.shape, generator=generator) * 0.2
        for name, weight in passed.weights.items()
        if name.startswith("streams")
    }
    program = passed.replace(
        weights=passed.weights.replacing(*(Weight.of(n, t) for n, t in drawn.items()))
    )
    text = [3, 1, 4, 1, 5]
    low = after(1, text)
    node = low[:, -1:]
    moved = node + node @ drawn["streams.down.weight"].T @ drawn["streams.up.weight"].T
    streams = [moved + drawn[f"streams.{k}.name"] for k in range(2)]
    wanted = through(stretch(1, None), torch.cat([low, *streams], 1))[0]
    tokens, steps = torch.tensor([[*text, V, V + 1]]), torch.arange(7)[None]
    found = run(program, "step", {"tokens": tokens, "positions": steps})
    torch.testing.assert_close(found["logits"][0], wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["draft_tokens"][0, -2:, 0], wanted[-2:].argmax(-1))


@pytest.mark.parametrize("name", mostly_long(("make_some_noise", "speculative_streaming"), keep=()))
def test_samples_follow_the_targets_distribution(name: str) -> None:
    assert_sampled(CASES[name])
