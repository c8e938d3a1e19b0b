"""FREE's threshold from a Beta mixture: the fit, the rule, and what a model's texts teach it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_runtime_depth import ByHand
from tiny import PROMPTS, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import Program
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.depth.deferred import DeferredDepth, DeferredPolicy, Learnt
from graftwork.passes.depth.deferred.alignment import LEAST, fitted, threshold
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.memo import learnt as kept_of


def drawn(a: float, b: float, count: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    kind = torch.distributions.Beta(torch.tensor(a).double(), torch.tensor(b).double())
    return kind.sample((count,)).clamp(1e-4, 1 - 1e-4).tolist()


@pytest.mark.parametrize(("a", "b"), [(2.0, 5.0), (0.5, 0.5), (8.0, 2.0), (30.0, 1.0)])
def test_the_fit_has_the_mean_and_variance_of_the_values(a: float, b: float) -> None:
    """Worked out by hand for two values: mean 0.6, variance 0.01, so a + b = 0.24 / 0.01 - 1."""
    found = fitted(torch.tensor([0.5, 0.7], dtype=torch.float64))
    torch.testing.assert_close(torch.stack(found), torch.tensor([13.8, 9.2]).double())
    values = torch.tensor(drawn(a, b, 4000, 0)).double()
    kind = torch.distributions.Beta(*fitted(values))
    torch.testing.assert_close(kind.mean, values.mean())
    torch.testing.assert_close(kind.variance, values.var(unbiased=False))
    assert float(fitted(values)[0]) == pytest.approx(a, rel=0.15)


def test_the_threshold_is_where_the_posterior_begins() -> None:
    right, wrong = drawn(5.0, 2.0, 300, 1), drawn(1.0, 4.0, 200, 2)
    said, shared = right + wrong, [True] * 300 + [False] * 200
    found = [threshold(said, shared, posterior, 0.95) for posterior in (0.1, 0.4, 0.7, 0.95)]
    assert found == sorted(found) and found[0] < found[2]
    # The two kinds count alike, though there are more of one.
    good, bad = (
        torch.distributions.Beta(*fitted(torch.tensor(v).double())) for v in (right, wrong)
    )
    for posterior, got in zip((0.1, 0.4, 0.7, 0.95), found, strict=True):
        places = [0.3 + i * 0.6 / 9 for i in range(10)]
        densities = [
            [float(kind.log_prob(c).exp()) for kind in (good, bad)]
            for c in map(torch.tensor, places)
        ]
        enough = [
            c for c, (x, y) in zip(places, densities, strict=True) if x / (x + y) >= posterior
        ]
        assert got == pytest.approx(enough[0] if enough else 0.9)
    # Too few of a kind tell nothing.
    few = [True] * 300 + [False] * (LEAST - 1)
    assert threshold(right + wrong[: LEAST - 1], few, 0.4, 0.95) == 0.95


@pytest.mark.parametrize(("posterior", "bound"), [(0.99, 0.9), (0.01, 0.3)])
def test_thresholds_stay_between_those_of_the_paper(posterior: float, bound: float) -> None:
    """Predictions of both kinds that are alike are never so sure, and always surer than that."""
    mixed = drawn(2.0, 2.0, 200, 3)
    assert threshold(mixed, [True, False] * 100, posterior, 0.95) == pytest.approx(bound)


def made(**options: Any) -> Program:
    every = (CutDepth(exits=(2,)), named("depth_deferred", exit=2, **options))
    passes = (*every, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(tiny_llama(4), [Step(p) for p in passes])[0]


def learnt(executable: Any) -> Learnt:
    (found,) = kept_of(executable, DeferredPolicy).values()
    return found


def test_predictions_are_compared_with_the_whole_models() -> None:
    """Nobody leaves at first: every token's two predictions are known, and the same as by hand."""
    fast, prompt = compile(made(threshold=1.0, posterior=0.9), Target("eager", "cpu")), PROMPTS[2:3]
    text = generate(fast, prompt, max_new_tokens=14, eos_token_id=[])[0]
    size = prompt.shape[1]
    hand, expected = ByHand(), []
    whole = hand.run(text[:-1].tolist(), 0, range(4)).argmax(-1)[size:]
    hand.run(prompt[0].tolist(), 0, range(2))
    for place in range(size, len(text) - 1):
        said = hand.run([int(text[place])], place, range(2))[-1].argmax()
        expected.append(int(said) == int(whole[place - size]))
    assert learnt(fast).shared == expected and 0 < sum(expected) < len(expected)


def test_what_was_compared_moves_the_threshold() -> None:
    found = Learnt(DeferredDepth(threshold=1.0, posterior=0.5))
    said = [(0.6 + 0.03 * i, 1) for i in range(10)] + [(0.05 + 0.03 * i, 2) for i in range(10)]
    found.compare([said[:15], said[15:]], [[1] * 15, [1] * 5])
    assert found.record.threshold == 1.0  # as long as the text lasts
    found.fit()
    assert 0.3 < found.record.threshold < 0.65
    assert found.record.fixed(0.2, 64).posterior == 0.0


def test_a_model_stops_asking_when_it_has_compared_enough() -> None:
    options = {"threshold": 1.0, "posterior": 0.5, "compared": 60, "pending": 3}
    fast = compile(made(**options), Target("eager", "cpu"))
    for row in range(3):
        asked: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": []}
        generate(fast, PROMPTS[row : row + 1], **asked)
    state = learnt(fast)
    assert 60 <= len(state.sure) <= 64 and not state.learns
    known = len(state.sure)
    generate(fast, PROMPTS[:1], **asked)
    assert len(state.sure) == known
    assert state.record.threshold == threshold(state.sure, state.shared, 0.5, 1.0)


def test_a_text_is_decoded_with_one_threshold() -> None:
    """What a text tells of the threshold counts from the next one on."""
    fast = compile(made(threshold=1.0, posterior=0.5), Target("eager", "cpu"))
    asked: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": []}
    generate(fast, PROMPTS[:1], **asked)
    state = learnt(fast)
    assert min(sum(state.shared), len(state.shared) - sum(state.shared)) >= LEAST
    assert state.record.threshold == 1.0
    wanted = threshold(state.sure, state.shared, 0.5, 1.0)
    generate(fast, PROMPTS[:1], max_new_tokens=1, eos_token_id=[])
    assert state.record.threshold == wanted != 1.0


def test_a_threshold_that_is_given_stays() -> None:
    record = DeferredDepth(posterior=0.9)
    assert record.fixed(0.3, 9) == DeferredDepth(threshold=0.3, tokens=9, posterior=0.0)
    fast = compile(made(threshold=0.05), Target("eager", "cpu"))
    generate(fast, PROMPTS[2:3], max_new_tokens=12, eos_token_id=[])
    assert not learnt(fast).sure
