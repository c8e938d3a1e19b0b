"""The target's own first layers draft: the same text, and no layer runs twice for a token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from selection import on_backends, one_in
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.backends.torch.executable import TorchExecutable
from graftwork.ir import PassError, Program, Weight, WeightStore
from graftwork.ir.execution.executable import Executable, HeldCall, Widths
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.adapter.graph import DraftAdapter
from graftwork.passes.drafting.exit.graph import DraftExit
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.rounds import Decoding
from graftwork.runtime.rounds.shallow import ShallowRound
from graftwork.runtime.speculate.lengths.goodput import GoodputPolicy
from graftwork.runtime.speculate.lengths.thompson import ThompsonPolicy
from graftwork.training.net import Net, trainable
from graftwork.training.objectives.base import Batch, objective_of

ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
CUT = CutDepth(exits=(1, 3))
INT4, CACHE = QuantizeWeights(bits=4, group=16), named("quantize_cache", bits=8)
DRAFTS: dict[str, tuple[Pass, ...]] = {
    "own head": (DraftExit(exit=3, levels=3), CUT),
    "shared head": (DraftExit(exit=1, levels=4, own_head=False), CUT),
    "confidence": (DraftExit(exit=3), CUT, named("length_confidence", threshold=0.1)),
    "goodput": (DraftExit(exit=1), CUT, named("length_goodput")),
    "after copies": (named("draft_suffix", shortest=1), DraftExit(exit=3, levels=3), CUT),
    "int8": (DraftExit(exit=3, levels=3), CUT, in_int8()),
    "adapter": (DraftAdapter(exit=1, levels=3), CUT),
    "unsure adapter": (DraftAdapter(exit=1), CUT, named("length_confidence", threshold=0.06)),
    "adapter, goodput": (DraftAdapter(exit=3), CUT, named("length_goodput")),
    "layer, thompson": (DraftAdapter(exit=3, copied=True), CUT, named("length_thompson")),
    "adapter after copies": (named("draft_suffix", shortest=1), DraftAdapter(exit=3), CUT),
    "adapter in int8": (DraftAdapter(exit=3, levels=3), CUT, in_int8()),
    "layer in int4": (DraftAdapter(exit=1, levels=3, copied=True), CUT, INT4),
    "cache in int8": (DraftExit(exit=3, levels=3), CUT, CACHE),
    "adapter, caches in int8": (DraftAdapter(exit=3, levels=3), CUT, CACHE),
}


def made(*passes: Pass, start: Program | None = None) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(start or tiny_llama(4), [Step(p) for p in every])[0]


@cache
def compiled(backend: str, which: str = "", drafts: bool = True) -> Executable:
    passes = DRAFTS.get(which, ())
    kept = passes if drafts else tuple(p for p in passes if p.name.startswith("quantize"))
    return compile(made(*kept), Target(backend, "cpu"))


RARE = ("adapter in int8", "layer in int4", "adapter after copies", "shared head", "int8")
RARE += ("unsure adapter", "adapter, goodput", "cache in int8", "adapter, caches in int8")


@pytest.mark.parametrize(
    ("which", "backend"),
    on_backends(DRAFTS, {"own head"}, rare=RARE),
)
def test_the_text_is_the_targets_own(which: str, backend: str) -> None:
    plain, fast = compiled(backend, which, drafts=False), compiled(backend, which)
    for rows in (slice(0, 4), slice(2, 3)):
        ids, mask = PROMPTS[rows], MASK[rows]
        expected = generate(plain, ids, attention_mask=mask, **ASKED)
        found = generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **ASKED)
        assert torch.equal(found.sequences, expected)
        # Goodput may hold, of so short a text, that no draft pays.
        assert found.stats.draft_tokens > 0 or "goodput" in which


class Between(TorchExecutable):
    """Takes the widths that inductor would compile; `fed`: columns of deep calls."""

    def widths(self, function: str) -> Widths:
        plan = self.program.plan
        return Widths(tuple(sorted({*plan.widths, *plan.between, 128})))

    def hold(self, function: str, inputs: Any, fetch: Any) -> HeldCall:
        if function == "step.2":
            self.fed.append(inputs["positions"].shape[1])
        return super().hold(function, inputs, fetch)


@pytest.mark.parametrize("led", one_in(2, [True, False]))
def test_a_draft_that_ends_early_is_verified_in_as_few_columns(
    led: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of static widths the next is taken, and not that of a whole draft."""
    if not led:
        monkeypatch.setattr(ShallowRound, "fits", classmethod(lambda cls, decoding: False))
    fast = Between(compiled("eager", "unsure adapter").program, Target("eager", "cpu"))
    fast.fed = []
    for rows in (slice(0, 4), slice(2, 3)):
        asked = {"attention_mask": MASK[rows], **ASKED}
        expected = generate(compiled("eager"), PROMPTS[rows], **asked)
        assert torch.equal(generate(fast, PROMPTS[rows], **asked), expected)
    most = fast.program.plan.most
    assert most >= 6
    assert set(fast.fed) > {2, 3} and set(fast.fed) <= {1, 2, 3, 5, 7, 1 + most, 128}


@pytest.mark.parametrize("which", ["shared head", "unsure adapter", "layer, thompson"])
def test_a_round_of_its_own_drafts_what_general_steps_draft(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    steps = ShallowRound._steps
    monkeypatch.setattr(ShallowRound, "_steps", lambda *args: ran.append(n := steps(*args)) or n)
    counts = []
    for fits in (True, False):
        if not fits:
            monkeypatch.setattr(ShallowRound, "fits", classmethod(lambda cls, decoding: False))
        made = [
            generate(
                compiled("eager", which),
                PROMPTS[rows],
                attention_mask=MASK[rows],
                return_dict_in_generate=True,
                **{**ASKED, "max_new_tokens": 12},
            ).stats
            for rows in (slice(0, 4), slice(2, 3))
        ]
        counts.append([(s.steps, s.draft_tokens, s.accepted_tokens) for s in made])
    assert counts[0] == counts[1]
    assert sum(ran) == sum(steps for steps, _, _ in counts[0])


def agreeing() -> Program:
    """A model whose last layer adds nothing, so that an exit before it says what the model says."""
    program = tiny_llama(4)
    nothing = {"layers.3.o", "layers.3.down"}
    weights = {
        name: Weight.of(name, torch.zeros_like(old.load())) if name in nothing else old
        for name, old in program.weights.items()
    }
    return program.replace(weights=WeightStore(weights))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_an_exit_that_agrees_is_accepted_whole(backend: str) -> None:
    passes = (DraftExit(exit=3, levels=3, own_head=False), CutDepth(exits=(3,)))
    fast = compile(made(*passes, start=agreeing()), Target(backend, "cpu"))
    plain = compile(made(start=agreeing()), Target(backend, "cpu"))
    asked = {**ASKED, "max_new_tokens": 25}  # the prompts' own, and six steps of four
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, generate(plain, PROMPTS, attention_mask=MASK, **asked))
    assert found.stats.accepted_per_step == 4.0
    assert found.stats.steps == 6


def adapted(*passes: Pass, mlp: bool = False) -> Executable:
    """A model whose last layer has an MLP or none, and an adapter that is this layer if there is
    one (a copied one is from the start)."""
    program, layer, own = made(*passes), "layers.3.", "adapter."
    names = {f"{own}self_attn.{part}_proj.weight": layer + part for part in "qkvo"}
    names[f"{own}input_layernorm.weight"] = f"{layer}norm1"
    weights = {
        name: Weight.of(name, program.weights[names[name]].load()) if name in names else old
        for name, old in program.weights.items()
    }
    down = f"{layer}down"
    if not mlp:
        weights[down] = Weight.of(down, torch.zeros_like(weights[down].load()))
    return compile(program.replace(weights=WeightStore(weights)), Target("eager", "cpu"))


ADAPTER = (DraftAdapter(exit=3, levels=3), CutDepth(exits=(3,)))


@pytest.mark.parametrize("mlp", [False, True])
def test_an_adapter_that_is_the_last_layer_is_accepted_whole(mlp: bool) -> None:
    """So its cache holds what the target's does, whatever was drafted and accepted before."""
    draft = (DraftAdapter(exit=3, levels=3, copied=mlp), CutDepth(exits=(3,)))
    asked = {**ASKED, "max_new_tokens": 25}  # the prompts' own, and six steps of four
    fast, plain = adapted(*draft, mlp=mlp), adapted(mlp=mlp)
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, generate(plain, PROMPTS, attention_mask=MASK, **asked))
    assert found.stats.accepted_per_step == 4.0 and found.stats.steps == 6


def test_an_adapter_learns_what_the_target_says_next() -> None:
    """One that is the last layer is right everywhere; the target's weights are not trained."""
    program = adapted(*ADAPTER).program
    names = trainable(program, program.plan.draft)
    assert {name.split(".")[1] for name in names} == {"input_layernorm", "norm", "self_attn"}
    net = Net(program, names, torch.device("cpu"))
    tokens = torch.arange(3, 27).reshape(2, 12)
    said = net.run(None, tokens=tokens)
    batch = Batch(tokens, {"hidden.2": said["hidden.2"]}, said["logits"].detach())
    # Where it says what it is to say nothing is left to learn: half of the best token is more.
    draft = replace(program.plan.draft, aim="both")
    loss = objective_of(draft)(draft, net.run, batch)
    assert loss.hits == [1.0]
    loss.total.backward()
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in net.parameters)
    turned = Batch(tokens, {"hidden.2": said["hidden.2"].flip(1)}, batch.logits)
    assert objective_of(program.plan.draft)(program.plan.draft, net.run, turned).hits[0] < 0.5


def test_an_adapter_catches_up_on_what_others_drafted() -> None:
    """Every draft of its own is accepted; copies are of no use and end after their first token."""
    fast = adapted(named("draft_suffix", shortest=1, longest=1, tokens=2), *ADAPTER)
    seen: list[tuple[int, int]] = []
    verify = Decoding.verify

    def noted(self: Decoding, outputs: Any, drafts: Any, columns: Any) -> Any:
        step = verify(self, outputs, drafts, columns)
        seen.extend((len(d.tokens), len(p)) for d, p in zip(step.drafts, step.paths, strict=True))
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoding, "verify", noted)
        generate(fast, PROMPTS[2:3], **{**ASKED, "max_new_tokens": 60})
    own = [taken for made, taken in seen if made == 3]
    copied = [taken for made, taken in seen if 0 < made < 3]
    assert len(own) >= 5 and set(own) == {3}
    assert copied and min(copied) == 0


def test_an_adapter_goes_on_from_an_earlier_call() -> None:
    fast = adapted(*ADAPTER)
    first = generate(fast, PROMPTS[2:3], **{**ASKED, "max_new_tokens": 12})
    more = torch.cat([first, torch.tensor([[3, 1]])], 1)
    asked = {**ASKED, "max_new_tokens": 13}
    found = generate(fast, more, return_dict_in_generate=True, **asked)
    assert found.stats.reused_tokens > 8
    assert found.stats.accepted_per_step == 4.0


def test_no_layer_runs_twice_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of n drafted tokens: n + 1 calls of the first layers on a token each, and one of the
    others on all of them."""
    passes = (DraftExit(exit=3, levels=3, own_head=False), CutDepth(exits=(3,)))
    fast = compile(made(*passes, start=agreeing()), Target("eager", "cpu"))
    calls: Counter[tuple[str, int]] = Counter()
    run = fast.run

    def counted(function: str, inputs: Any, fetch: Any) -> Any:
        if "positions" in inputs and "past" in inputs:
            calls[function, inputs["positions"].shape[1]] += 1
        return run(function, inputs, fetch)

    monkeypatch.setattr(fast, "run", counted)
    generate(fast, PROMPTS[2:3], **{**ASKED, "max_new_tokens": 25})
    steps = 6
    assert calls["step.0", 1] == 4 * steps and calls["step.1", 4] == steps
    prompt = PROMPTS.shape[1]
    assert set(calls) == {("step.0", 1), ("step.1", 4), ("step.0", prompt), ("step.1", prompt)}


def test_what_is_done_once_is_no_part_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies hear neither of compiling, for a draft nor for a step."""
    passes = (DraftExit(exit=1, own_head=False), CUT, named("length_thompson"))
    fast = compile(made(*passes), Target("eager", "cpu"))
    run, seen, heard = fast.run, set[str](), list[float]()

    def preparing(function: str, inputs: Any, fetch: Any) -> Any:
        fast.preparing += 1000.0 * (function not in seen)
        seen.add(function)
        return run(function, inputs, fetch)

    monkeypatch.setattr(fast, "run", preparing)
    monkeypatch.setattr(ThompsonPolicy, "observe", lambda self, taken, *s: heard.extend(s))
    generate(fast, PROMPTS[2:3], **ASKED)
    # It is taken off; nobody has really waited for it.
    assert min(heard) < -900 and max(heard) < 100


@pytest.mark.measured
def test_a_rest_runs_the_whole_step_where_weights_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GoodputPolicy, "rest", lambda self: 8)
    fast = compile(made(*DRAFTS["adapter, goodput"]), Target("eager", "cpu"))
    ran: Counter[str] = Counter()
    run = fast.run

    def counted(function: str, inputs: Any, fetch: Any) -> Any:
        if "tokens" in inputs and inputs["tokens"].shape[1] == 1:
            ran[function] += 1
        return run(function, inputs, fetch)

    monkeypatch.setattr(fast, "run", counted)
    asked = {**ASKED, "max_new_tokens": 9}
    found = generate(fast, PROMPTS[2:3], **asked)
    assert torch.equal(found, generate(compiled("eager"), PROMPTS[2:3], **asked))
    assert ran == {"step": 8}


@pytest.mark.parametrize("kind", one_in(2, ["adapter", "own head"]))
def test_sampled_texts_keep_their_distribution(kind: str) -> None:
    """Rejection sampling against the exit's own distribution, over many short texts."""
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "eos_token_id": []}
    ids = PROMPTS[2:3].expand(400, -1)
    counts = []
    for which in ("", kind):
        texts = generate(compiled("eager", which), ids, seed=11, temperature=0.7, **asked)
        counts.append(torch.bincount(texts[:, -1], minlength=32).double())
    plain, fast = counts
    often = (plain + fast) >= 10
    chi = ((plain - fast) ** 2 / (plain + fast).clamp(min=1))[often].sum()
    free = int(often.sum()) - 1
    assert free >= 5 and chi < free + 4 * (2 * free) ** 0.5


def test_the_step_must_be_cut_where_the_draft_ends() -> None:
    with pytest.raises(PassError, match=r"needs a step that is cut after 3 layers.*cut_depth"):
        made(DraftExit(exit=3))
    with pytest.raises(PassError, match=r"cut after 2 layers; it is cut after 1, 3"):
        made(DraftExit(exit=2), CUT)
    with pytest.raises(PassError, match="layer"):
        made(DraftExit(exit=7), CUT)
    with pytest.raises(PassError, match="one node a level"):
        made(DraftExit(exit=3), CUT, AcceptTrees(), named("tree_best_first"))
