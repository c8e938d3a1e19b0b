"""Raising on real traces: how much is recognised in models of every kind, and that results stay."""

from __future__ import annotations

import pytest
import torch
from archs import imported
from selection import mostly_long
from tiny import tiny_llama

from graftwork.frontends import import_model
from graftwork.ir import Program, run, verify
from graftwork.ir.rewrite.rules import Rule
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.fusing.tabulate_positions import TabulatePositions
from graftwork.passes.raising.canonicalize import Canonicalize
from graftwork.passes.raising.raise_activations import RULES, RaiseActivations
from graftwork.passes.raising.raise_gated_mlp import RaiseGatedMlp
from graftwork.passes.raising.raise_norms import RaiseNorms
from graftwork.passes.raising.raise_rotary import RaiseRotary

A, G = torch.ops.aten, torch.ops.graftwork

# norms, rotations, gated products, tables, in two layers
EXPECTED = {
    "llama": (5, 4, 2, 2),
    "cohere": (7, 4, 2, 2),  # norms with a gain for each head, neighbouring channels
    "deepseek_v3": (9, 4, 2, 2),  # one rotated key for all heads, channels regrouped
    "gemma3_text": (13, 4, 2, 4),  # gains of 1 + weight, two frequencies
    "glm": (5, 4, 2, 2),  # half of the channels, neighbours
    "gpt2": (5, 0, 0, 0),
    "gptj": (3, 4, 0, 4),  # heads and steps trade places after the rotation; a buffer a layer
    "nanochat": (10, 4, 0, 2),  # no gains, rotated backwards
    "stablelm": (15, 4, 2, 2),  # a norm for each head
}
LEFT = (A.rsqrt.default, A.mean.dim, A.cos.default, A.sin.default, A.neg.default)


def raised(program: Program) -> Program:
    """The program after all raising passes, verified after each."""
    passes = (RaiseActivations(), RaiseNorms(), RaiseRotary(), RaiseGatedMlp())
    steps = [Step(p, optional=True) for p in (*passes, TabulatePositions(), Canonicalize())]
    return run_passes(program, steps)[0]


def logits(program: Program) -> torch.Tensor:
    """Logits of random tokens at positions 3 .. 13."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 128, (2, 11), generator=generator)
    positions = torch.arange(3, 14).expand(2, 11).contiguous()
    return run(program, "step", {"tokens": tokens, "positions": positions})["logits"].double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the scale of the expected values."""
    return float((found - expected).abs().max() / expected.abs().max())


COMMON = ("llama", "cohere", "deepseek_v3", "gemma3_text", "gpt2", "gptj")


@pytest.mark.parametrize("name", mostly_long(EXPECTED, keep=COMMON))
def test_everything_is_recognised(name: str) -> None:
    _, before = imported(name)
    after = raised(before)
    assert after.stage == "canonical"
    fn = after.function("step")
    learned = fn.calls(A.embedding.default)
    norms = len(fn.calls(G.rms_norm.default, G.layer_norm.default))
    tables = len([w for w in after.weights if w.startswith("positions.")])
    found = norms, len(fn.calls(G.rotary.default)), len(fn.calls(G.glu.default)), tables
    assert found == EXPECTED[name]
    assert len(learned) == 1 + tables + (name == "gpt2")
    assert not fn.calls(*LEFT)
    assert error(logits(after), logits(before)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox"])
def test_half_precision(name: str) -> None:
    """Casts to float32 and back are taken in; the result is as near to float32 as it was."""
    model, exact = imported(name)
    precise = logits(exact)
    before = import_model(model, torch.bfloat16)
    after = raised(before)
    fn = after.function("step")
    assert len(fn.calls(G.rms_norm.default, G.layer_norm.default)) == 5
    assert len(fn.calls(G.rotary.default)) == 4
    assert not fn.calls(A._to_copy.default, *LEFT)
    verify(after)
    assert error(logits(after), precise) < 1.5 * error(logits(before), precise) + 1e-3


def test_activations_that_are_not_there_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are only traced where an op that they need is in the graph, and they have it."""
    for rule in RULES:
        ops = {node.target for node in rule.traced(torch.float32).graph.nodes}
        assert rule.needs in ops, rule.name
    monkeypatch.setattr(Rule, "traced", lambda rule, dtype: pytest.fail(f"{rule.name} is traced"))
    outcome = RaiseActivations().run(tiny_llama())
    assert not outcome.matches and "no rule applies to the ops" in str(outcome.near_miss)
