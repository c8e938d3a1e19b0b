"""Turned residual streams: the same logits, without channels that stand out."""

from __future__ import annotations

import pytest
import torch
from archs import imported
from selection import mostly_long
from test_raising import error, raised
from test_shard_tensors import feeds, logits_of
from tiny import MASK, PROMPTS, tiny_llama

from graftwork.backends import Target, compile
from graftwork.ir import PassError, Program, run
from graftwork.passes.drafting.trained import trained_on
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.numerics.rotate_hidden import RotateHidden, turned
from graftwork.recipe import Recipe
from graftwork.runtime import generate

TURNED = ["llama", "qwen2", "qwen3", "gemma", "phi3", "granite"]
REFUSED = {
    "gpt2": "embedding.default. is added to",
    "olmo2": "linear.default. reads the residual stream",
    "mixtral": "reshape.default. is added to",
}


@pytest.mark.parametrize("name", mostly_long(TURNED, keep=("qwen3", "gemma")))
def test_logits_stay_and_the_stream_turns(name: str) -> None:
    whole = raised(imported(name)[1])
    outcome = RotateHidden().run(whole)
    assert outcome.matches >= 9
    assert error(logits_of(outcome.program), logits_of(whole)) < 1e-5
    before, after = (stream(program) for program in (whole, outcome.program))
    torch.testing.assert_close(after, turned(before, 0), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after, atol=0.1)


def stream(program: Program) -> torch.Tensor:
    """What the second layer reads."""
    fn = program.step.copy()
    mark = [n for n in fn.calls(torch.ops.graftwork.hidden.default) if n.kwargs["layer"] == 0][-1]
    fn.set_outputs({**fn.outputs, "stream": mark})
    return run(program.replace(functions={"step": fn}), "step", feeds())["stream"]


@pytest.mark.parametrize("width", [64, 24, 7, 384])
def test_the_matrix_is_orthogonal(width: int) -> None:
    matrix = turned(torch.eye(width), 3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width), atol=1e-5, rtol=0)
    assert not torch.allclose(matrix, turned(torch.eye(width), 4))


def test_no_channel_stands_out() -> None:
    """A channel a hundred times as large as the others is spread over all."""
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    rows[:, 17] *= 100
    peak = (rows.abs().amax(-1) / rows.pow(2).mean(-1).sqrt()).mean()
    spread = turned(rows, 0)
    assert peak > 10
    assert (spread.abs().amax(-1) / spread.pow(2).mean(-1).sqrt()).mean() < 4


@pytest.mark.parametrize("name", mostly_long(REFUSED, keep=REFUSED.keys() - {"olmo2"}))
def test_other_streams_are_refused(name: str) -> None:
    with pytest.raises(PassError, match=f"rotate_hidden: .*{REFUSED[name]}"):
        RotateHidden().run(raised(imported(name)[1]))


def test_heads_of_the_model_do_not_fit() -> None:
    """They know its states as they were."""
    drafted = {"title": "turned", "contract": "lossless", "extends": "medusa"}
    recipes = [Recipe.load({**drafted, "passes": some}) for some in ([], ["rotate_hidden"])]
    whole, made = (run_passes(tiny_llama(), recipe.steps)[0] for recipe in recipes)
    assert trained_on(made) != trained_on(whole)
    texts = [
        generate(compile(p, Target.parse("eager")), PROMPTS, attention_mask=MASK, max_new_tokens=8)
        for p in (whole, made)
    ]
    assert torch.equal(*texts)
