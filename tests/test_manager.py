"""The pass manager: order, legality, no silent no-op, verification and contracts."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from tiny import cached_llama, in_int8, tiny_llama

from graftwork.ir import Function, PassError, Program
from graftwork.ir.rewrite.cleanup import sweep
from graftwork.passes import Contract, Effect, Outcome, Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_clover import DraftClover
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.ppd.graph import DraftPpd
from graftwork.passes.drafting.trained import fingerprint, trained_on
from graftwork.passes.drafting.verify_judge import VerifyJudge
from graftwork.passes.engine import base
from graftwork.passes.engine.manager import Step, arrange, run_passes, weakest
from graftwork.passes.engine.validate import Validator, reference_logits
from graftwork.passes.fusing.fuse_gate_up import FuseGateUp
from graftwork.passes.fusing.fuse_qkv import FuseQkv
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits

PROMPTS = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
G = torch.ops.graftwork
CACHED = [Step(InsertKvCache()), Step(PickLogits()), Step(AddArgmax())]


def scale_head(program: Program, factor: float) -> Outcome:
    """Multiply the logits: a change that a contract can promise or not."""
    fn = program.function("step").copy()
    outputs = fn.outputs
    with fn.graph.inserting_before(fn.output_node):
        outputs["logits"] = fn.call(torch.ops.aten.mul.Tensor, outputs["logits"], factor)
    fn.set_outputs(outputs)
    return Outcome(program.with_function(fn), 1)


class Liar(Pass):
    """Says exact, changes the logits."""

    name: ClassVar[str] = "liar"

    def run(self, program: Program) -> Outcome:
        return scale_head(program, 1.5)


class Honest(Liar):
    """The same change, declared."""

    name: ClassVar[str] = "honest"
    contract: ClassVar[Contract] = Contract.APPROXIMATE


class Idle(Pass):
    """Matches nothing."""

    name: ClassVar[str] = "idle"

    def run(self, program: Program) -> Outcome:
        return Outcome(program, 0, "a linear with 3 inputs, but 4 are needed")


class Breaker(Pass):
    """Produces a program whose recorded type is wrong."""

    name: ClassVar[str] = "breaker"

    def run(self, program: Program) -> Outcome:
        fn: Function = program.function("step").copy()
        node = fn.calls(torch.ops.aten.add.Tensor)[0]
        node.meta["type"] = node.meta["type"].with_dtype(torch.int64)
        return Outcome(program.with_function(fn), 1)


def test_order_is_derived_not_given():
    names = [s.pass_.name for s in arrange(CACHED[::-1], frozenset({"canonical"}))]
    assert names == ["insert_kv_cache", "pick_logits", "add_argmax"]


def test_unmet_requirement_names_the_provider():
    with pytest.raises(PassError, match=r"'pick_logits' requires 'cached'.*add insert_kv_cache"):
        arrange([Step(PickLogits())])


def test_a_pass_given_twice_is_refused():
    with pytest.raises(PassError, match="'insert_kv_cache' is given twice"):
        arrange([Step(InsertKvCache()), Step(InsertKvCache())], frozenset({"canonical"}))


def test_circles_are_named():
    class Hen(Idle):
        name: ClassVar[str] = "hen"
        requires: ClassVar[frozenset[str]] = frozenset({"egg"})
        provides: ClassVar[frozenset[str]] = frozenset({"hen"})

    class Egg(Idle):
        name: ClassVar[str] = "egg"
        requires: ClassVar[frozenset[str]] = frozenset({"hen"})
        provides: ClassVar[frozenset[str]] = frozenset({"egg"})

    with pytest.raises(PassError, match="in a circle: hen -> egg"):
        arrange([Step(Hen()), Step(Egg())])


def test_no_silent_no_op():
    with pytest.raises(PassError, match=r"'idle' matched nothing.*3 inputs, but 4 are needed"):
        run_passes(tiny_llama(), [Step(Idle())])
    program, reports = run_passes(tiny_llama(), [Step(Idle(), optional=True)])
    assert reports[0].record.matches == 0
    assert program.provenance[-1].name == "idle"


def test_the_culprit_and_its_predecessor_are_named():
    steps = [Step(InsertKvCache()), Step(Breaker())]
    with pytest.raises(PassError, match=r"'breaker' \(after 'insert_kv_cache'\).*invalid"):
        run_passes(tiny_llama(), steps)


def test_a_broken_promise_is_caught_and_an_honest_one_measured():
    validator = Validator(PROMPTS)
    with pytest.raises(PassError, match="'liar' promises exact but changes logits"):
        run_passes(tiny_llama(), [Step(Liar())], validator=validator)
    _, reports = run_passes(tiny_llama(), [Step(Honest())], validator=validator)
    check = reports[0].check
    assert check is not None
    assert check.error == pytest.approx(0.5, rel=1e-3)
    assert check.agreement == 1.0
    assert check.divergence > 0


def test_exact_passes_validate():
    _, reports = run_passes(tiny_llama(), CACHED, validator=Validator(PROMPTS))
    assert [r.record.name for r in reports] == ["insert_kv_cache", "pick_logits", "add_argmax"]
    assert all(r.check is not None and r.check.error < 1e-5 for r in reports)
    assert reports[-1].check.width_error < 1e-5


def test_passes_do_not_edit_their_input():
    program = tiny_llama()
    before, logits = str(program), reference_logits(program, PROMPTS)
    run_passes(program, CACHED)
    assert str(program) == before
    assert torch.equal(reference_logits(program, PROMPTS), logits)


def test_the_weakest_contract_wins():
    assert weakest([Contract.EXACT, Contract.APPROXIMATE, Contract.LOSSLESS]) is (
        Contract.APPROXIMATE
    )
    assert weakest([]) is Contract.EXACT


def test_a_cached_program_refuses_a_second_cache():
    with pytest.raises(PassError, match=r"matched nothing.*no graftwork\.attention without a"):
        run_passes(cached_llama(), [Step(InsertKvCache())])


class SkipLayers(Pass):
    """layers: whose blocks are left out. As CONTRIBUTING shows a pass."""

    layers: tuple[int, ...] = (1,)

    name: ClassVar[str] = "skip_layers"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.LAYER_SET})

    def run(self, program: Program) -> Outcome:
        fn = program.function("step").copy()
        markers = [n for n in fn.calls(G.hidden.default) if n.kwargs["point"] != "attention"]
        pairs = [(a, b) for a, b in pairwise(markers) if b.kwargs["layer"] in self.layers]
        for above, marker in pairs:
            marker.replace_all_uses_with(above)
        sweep(fn)
        return Outcome(program.with_function(fn), len(pairs))


SKIPPING = [
    *(Step(kind()) for kind in (FuseQkv, FuseGateUp, InsertKvCache, in_int8, PickLogits)),
    *(Step(kind()) for kind in (AddArgmax, FuseResidualNorm)),
]


@pytest.mark.parametrize("skipped", [(1,), (3,), (0, 2)])
def test_layers_that_are_skipped_have_no_cache_and_compute_nothing(skipped):
    """A pass that says that it changes the set of layers runs before all that reads it."""
    program, _ = run_passes(tiny_llama(4), [*SKIPPING, Step(SkipLayers(layers=skipped))])
    kept = set(range(4)) - set(skipped)
    assert {state.layer for state in program.states.values()} == kept
    used = {n.split(".")[1] for n in program.function("step").weights if n.startswith("layers.")}
    assert used == set(map(str, kept))
    assert len(program.function("step").calls(G.attend.default)) == len(kept)


@pytest.mark.parametrize("kind", [DraftMedusa, DraftEagle, DraftClover, DraftPpd, VerifyJudge])
def test_heads_see_the_layers_that_are_left(kind, monkeypatch):
    """They tap and copy them, and heads for the whole model are refused."""
    monkeypatch.setitem(base._PASSES, "skip_layers", SkipLayers)
    drafter = [Step(DraftMedusa())] if kind is VerifyJudge else []
    steps = [*drafter, Step(kind()), *CACHED, Step(AcceptTrees())]
    names = [s.pass_.name for s in arrange([*steps, Step(SkipLayers())], frozenset({"canonical"}))]
    assert names[0] == "skip_layers"
    program, _ = run_passes(tiny_llama(3), [*steps, Step(SkipLayers(layers=(2,)))])
    weights = {n for fn in program.functions.values() for n in fn.weights}
    assert not any(name.startswith("layers.2.") for name in weights)
    whole, _ = run_passes(tiny_llama(3), steps)
    assert trained_on(whole) != trained_on(program)
    assert trained_on(whole) == fingerprint(program)
