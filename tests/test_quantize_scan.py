"""What recurrences read in 8 bits: clusters, steps, and the recipe that is made of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from evidence import evidence_for
from handmade import cached_llama
from test_recurrent import WIDTHS, _in_steps, imported, prompts
from tiny import named, tiny_llama

import graftwork as gw
from graftwork.ir import PassError, Program, run
from graftwork.ir.rewrite.cleanup import sweep
from graftwork.model import Model
from graftwork.passes.engine.feed import empty_inputs
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.validate import reference_logits
from graftwork.passes.numerics.quantize_scan import clustered, clusters

SMALL = {"windows": 2, "length": 64}
"""Of the text that is read."""


def test_clusters_by_hand():
    """Centres begin at 1, 5 and 10, and end at 1.1, 5 and 9.75."""
    labels = clusters(torch.tensor([1.0, 10.0, 1.2, 9.5, 5.0]), 3)
    assert labels.tolist() == [0, 2, 0, 2, 1]
    assert len(clusters(torch.tensor([3.0, 3.0]), 4)) == 2  # fewer sizes than clusters


def test_heads_and_channels_of_a_cluster_share_a_step():
    """Two heads that are small and two that are large, whose channels differ the other way about;
    and of heads with other keys, those that are alike."""
    one = [[1.0, 0.1], [50.0, 8.0], [0.9, 0.2], [60.0, 9.0]]
    wanted = [[1.0, 0.2], [60.0, 9.0], [1.0, 0.2], [60.0, 9.0]]
    largest = torch.tensor([*one, [2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [2.0, 3.0]])
    found = clustered(largest, 2, 2, 2)
    assert found[:4].flatten().tolist() == pytest.approx([x for row in wanted for x in row])
    assert torch.equal(found[4:], largest[4:])
    assert torch.equal(clustered(largest, 1, 1, 1), torch.full((8, 2), 60.0))


@cache
def scanned(name: str, **options: Any) -> Program:
    cached, _ = run_passes(imported(name)[1], gw.Recipe.load("baseline").steps)
    scan = named("quantize_scan", **SMALL, **options)
    return scan.apply(cached, evidence_for(cached)).program


def text(program: Program) -> torch.Tensor:
    """The windows that were read, i64[2,64]."""
    return evidence_for(program).sampled(named("quantize_scan", **SMALL).text, program)


def test_numbers_of_the_text_are_rounded_and_none_is_clipped():
    """Against the same step with what is rounded taken out and rounded here."""
    program = scanned("mamba2")
    x, q, k = (program.weights[f"recurrent.0.{part}.step"].load() for part in "xqk")
    assert x.shape == (8, 8) and q.shape == k.shape == (2, 1, 1)
    assert len(x.unique()) <= 2 * 4 * 4  # of two groups of heads
    fn = program.step.copy()
    rounded = [node.all_input_nodes[0] for node in fn.calls(torch.ops.aten.clamp.default)][:3]
    fn.set_outputs({f"rounded.{n}": node for n, node in enumerate(rounded)})
    sweep(fn)
    watched = program.with_function(fn)
    largest = torch.zeros(3)
    for window in text(program):
        found = run(watched, fn.name, empty_inputs(watched, fn.name, window[None]))
        sizes = [value.abs().max() for value in found.values()]
        largest = torch.maximum(largest, torch.stack(sizes))
    assert largest.tolist() == [127.0] * 3


@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_logits_are_near_those_in_float(name):
    cached, _ = run_passes(imported(name)[1], gw.Recipe.load("baseline").steps)
    ids = text(cached)[:, :24]  # of which nothing is clipped
    want, got = (reference_logits(p, ids, [9, 1, 14]) for p in (cached, scanned(name)))
    error = float((got - want).abs().mean() / want.abs().max())
    assert 1e-6 < error < 0.03
    coarse = reference_logits(scanned(name, heads=1, channels=1), ids, [9, 1, 14])
    assert error <= 1.2 * float((coarse - want).abs().mean() / want.abs().max())


def quamba2(name: str, *passes: Any) -> Program:
    recipe = gw.Recipe.load({"extends": "quamba2", "passes": list(passes)})
    few = ["quantize_weights.group=16", "quantize_scan.windows=2", "quantize_scan.length=64"]
    start = imported(name)[1]
    return run_passes(start, recipe.with_options(few).steps, evidence=evidence_for(start))[0]


def test_the_recipe_gives_the_same_bits_at_every_width_and_drafts_change_no_token():
    plain = quamba2("mamba")
    assert {str(s.type.dtype) for n, s in plain.states.items() if n.endswith("codes")} == {
        "torch.int8"
    }
    ids = torch.randint(3, 128, (2, sum(WIDTHS)), generator=torch.Generator().manual_seed(1))
    want = _in_steps(plain, "onnxruntime", ids, 1)
    assert torch.equal(_in_steps(plain, "onnxruntime", ids, 100), want)
    asked: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": 0}
    drafted = Model(quamba2("mamba", "draft_suffix"), gw.Target(threads=1), {})
    alone = Model(plain, gw.Target(threads=1), {}).generate(prompts("mamba")[0][0], **asked)
    got = drafted.generate(prompts("mamba")[0][0], return_dict_in_generate=True, **asked)
    assert torch.equal(got.sequences, alone) and got.stats.accepted_tokens > 0


def test_models_without_recurrences_are_refused():
    program = cached_llama()
    outcome = named("quantize_scan", **SMALL).apply(program, evidence_for(program))
    assert not outcome.matches and "no recurrence whose values" in outcome.near_miss
    with pytest.raises(PassError, match=r"quantize_scan.*no recurrence whose values"):
        start = tiny_llama(2)
        run_passes(start, gw.Recipe.load("quamba2").steps, evidence=evidence_for(start))
