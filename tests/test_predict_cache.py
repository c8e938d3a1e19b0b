"""Prompts that run through the first layers: predicted rows against plain torch, and texts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from evidence import evidence_for
from test_runtime_cached import padded
from tiny import tiny_llama

from graftwork.backends import Target, compile
from graftwork.backends.onnxruntime.step_limits import refuse_ahead
from graftwork.ir import PassError, Program, UnsupportedError, Weight, run
from graftwork.ir.check.legality import misfit
from graftwork.ir.ops.quantized_cache import stored_rows
from graftwork.ir.plan import Evict
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.caching.predict_cache import Linear, PredictCache, _first, solved
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.feed import empty_inputs
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate

PREDICT = PredictCache(layers=1, windows=4, length=96)
GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": [],
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, 30, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@lru_cache
def plain(*silent: str) -> Program:
    """Three layers; those weights are zero that are named."""
    start = tiny_llama(3)
    zeros = [Weight.of(n, torch.zeros_like(start.weights[n].load())) for n in silent]
    others = {name: w for name, w in start.weights.items() if name not in silent}
    start = start.replace(weights=type(start.weights)().adding(*others.values(), *zeros))
    tail = (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax())
    return run_passes(start, [Step(p) for p in tail])[0]


@lru_cache
def predicted(*silent: str) -> Program:
    program = plain(*silent)
    return PREDICT.apply(program, evidence_for(program)).program


def turned(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rows [G,T,D] turned for the positions 0, 1, ..., in halves; cos, sin [T,D/2]."""
    one, other = rows.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def by_hand(program: Program, ids: list[int]) -> dict[str, torch.Tensor]:
    """Rows of each layer [G,T,D] as plain torch has them: layer 0's, and least squares of those."""
    text = torch.tensor([ids])
    full = run(plain(), "step", empty_inputs(plain(), "step", text))
    weights = {name: weight.load() for name, weight in program.weights.items()}
    cos, sin = (weights[name][: len(ids)] for name in ("cos", "sin"))
    keys, values = full["kv.0.key"][0], full["kv.0.value"][0]
    inputs = torch.cat(
        [turned(keys, cos, -sin).transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)], 1
    )
    rows = {"kv.0.key": keys, "kv.0.value": values}
    for name in ("kv.1.key", "kv.1.value", "kv.2.key", "kv.2.value"):
        state = name if name in program.states else f"{name}.codes"
        made = inputs @ weights[f"{state}.predictor"].T + weights[f"{state}.predictor_bias"]
        if f"{state}.first" in weights:
            made[0] = weights[f"{state}.first"]
        heads = made.reshape(len(ids), len(keys), -1).transpose(0, 1)
        rows[name] = turned(heads, cos, sin) if name.endswith("key") else heads
    return rows


def continued(program: Program, ids: list[int], count: int) -> list[int]:
    """What the whole step says after a prompt whose rows, but the last, are those `by_hand`."""
    rows = by_hand(program, ids)
    states = {}
    for name, state in program.states.items():
        bound = state.type.bind({"B": 1, "C": len(ids) + count})
        states[name] = torch.zeros(bound.shape)
        states[name][0, :, : len(ids) - 1] = rows[name][:, :-1]
    past, token, text = len(ids) - 1, ids[-1], []
    for _ in range(count):
        fed = {
            "tokens": torch.tensor([[token]]),
            "positions": torch.tensor([[past]]),
            "past": torch.tensor([past]),
            "ancestors": torch.ones(1, 1, 1, dtype=torch.bool),
            "select": torch.tensor([[0]]),
        }
        step = program.step
        given = {n: t for n, t in {**states, **fed}.items() if step.has_input(n)}
        made = run(program, "step", given)
        states = {name: made[name] for name in states}
        token, past = int(made["logits"][0, -1].argmax()), past + 1
        text.append(token)
    return text


@pytest.mark.parametrize(
    "backend", ["eager", "onnxruntime", pytest.param("torch", marks=pytest.mark.long)]
)
def test_rows_and_texts_are_those_of_plain_torch(backend: str) -> None:
    """Alone, in a ragged batch, of one token, and twice, so that others lay there before."""
    program = predicted()
    fast = compile(program, Target(backend, threads=1))
    for prompts in ([prompt(40, 1)], [prompt(21, 2), prompt(35, 3), prompt(1, 4), prompt(9, 5)]):
        ids, mask = padded(prompts)
        found = generate(fast, ids, attention_mask=mask, **GREEDY)
        for b, (row, asked) in enumerate(zip(found.sequences.tolist(), prompts, strict=True)):
            assert row[-12:] == continued(program, asked, 12), asked
            before = len(asked) - 1
            if not before:
                continue
            for name, wanted in by_hand(program, asked).items():
                held = fast.read_rows([name], b, 0, before)[name]
                torch.testing.assert_close(held, wanted[:, :-1], rtol=1e-4, atol=1e-4)


def test_where_rows_follow_from_the_first_layers_nothing_changes() -> None:
    """Layers that add nothing leave rows that are linear maps of the first layer's."""
    silent = [f"layers.{n}.{part}" for n in (0, 1) for part in ("o", "down")]
    whole = plain(*silent)
    outcome = PREDICT.apply(whole, evidence_for(whole))
    (remark,) = outcome.remarks
    left = [float(word) for word in remark.replace(",", "").split() if word[0].isdigit()]
    assert len(left) == 4 and max(left) < 0.01
    ids = torch.tensor([prompt(50, 6)])
    wanted = generate(compile(whole, Target("eager")), ids, **GREEDY).sequences
    assert torch.equal(
        generate(compile(outcome.program, Target("eager")), ids, **GREEDY).sequences, wanted
    )


def test_maps_are_the_least_squares_of_torch() -> None:
    made = torch.Generator().manual_seed(0)
    inputs, rows = (torch.randn(200, n, generator=made).double() for n in (6, 4))
    (found,) = solved(inputs, [rows])
    ones = torch.cat([inputs, torch.ones(200, 1).double()], 1)
    wanted = torch.linalg.lstsq(ones, rows).solution.float()
    torch.testing.assert_close(found.weight, wanted[:-1].T, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.bias, wanted[-1], rtol=1e-3, atol=1e-4)
    assert 0.8 < found.left < 1


def test_a_text_s_first_token_gets_what_is_nearer() -> None:
    """Where attention rests that has nowhere to go, no map of the others' rows holds."""
    linear = Linear(torch.eye(3), torch.zeros(3), 0.0)
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    resting = torch.tensor([9.0, -9.0, 0.0]) + 0.01 * inputs
    torch.testing.assert_close(_first(resting, inputs, linear), resting.mean(0))
    assert _first(inputs + 0.01, inputs, linear) is None  # the map makes these
    assert _first(resting[:1], inputs[:1], linear) is None  # one says nothing of others


def test_some_first_rows_are_means_here_and_others_are_made_by_maps() -> None:
    weights = predicted().weights
    firsts = [name for name in weights if name.endswith(".first")]
    assert firsts and set(firsts) <= predicted().function("predict").weights


@pytest.mark.parametrize(("layers", "count"), [(0.4, 1), (0.67, 2), (2, 2)])
def test_layers_are_a_number_or_a_share(layers: float, count: int) -> None:
    made = PredictCache(layers=layers, windows=2, length=96)
    assert made._checked(plain()) == count


def test_drafts_and_conversations_say_the_same() -> None:
    program = predicted()
    drafting = with_plan(program, draft=SuffixDraft(tokens=4))
    ids = [*prompt(20, 7), *prompt(20, 7), *prompt(20, 7)[:8]]
    fast = compile(drafting, Target("eager"))
    first = generate(fast, torch.tensor([ids]), **GREEDY)
    assert first.sequences[0].tolist()[-12:] == continued(program, ids, 12)
    again = generate(fast, torch.tensor([ids]), **GREEDY)
    assert torch.equal(first.sequences, again.sequences)


def test_what_reads_prompts_is_refused() -> None:
    plan = predicted().plan
    assert misfit(plan) is None
    for draft in (RecyclingDraft(),):
        fault = misfit(replace(plan, draft=draft))
        assert fault is not None and "runs prompts through predict" in fault, draft
    fault = misfit(replace(plan, cache=Evict()))
    assert fault is not None and "leave one of the two out" in fault


def test_refusals() -> None:
    evict = EvictCache(method="window", budget=16, block=8).run(plain()).program
    with pytest.raises(PassError, match="has cache=evict"):
        PREDICT.apply(evict, evidence_for(evict))
    with pytest.raises(PassError, match="run through 3 of 3 layers"):
        PredictCache(layers=3, windows=4, length=96).apply(plain(), evidence_for(plain()))
    with pytest.raises(PassError, match=r"layers=1\.5: prompts would run through 1 of 3 layers"):
        PredictCache(layers=1.5, windows=4, length=96).apply(plain(), evidence_for(plain()))
    with pytest.raises(PassError, match="32 inputs: set windows"):
        PredictCache(layers=1, windows=1, length=16).apply(plain(), evidence_for(plain()))
    with pytest.raises(PassError, match="alone, and no function 'predict'"):
        PREDICT.apply(predicted(), evidence_for(predicted()))


def test_exports_refuse_it_and_name_what_they_can() -> None:
    with pytest.raises(UnsupportedError, match="through predict up to their last token"):
        refuse_ahead(predicted())


def test_rows_of_few_bits_are_predicted_and_stored_as_the_step_stores_them() -> None:
    stored = QuantizeCache(bits=8).run(plain()).program
    program = PREDICT.apply(stored, evidence_for(stored)).program
    ids = prompt(40, 8)
    fast = compile(program, Target("eager"))
    generate(fast, torch.tensor([ids]), **GREEDY)
    wanted = by_hand(program, ids)["kv.2.value"][:, :-1]
    names = ["kv.2.value.codes", "kv.2.value.steps"]
    rows = fast.read_rows(names, 0, 0, len(ids) - 1)
    held = stored_rows(*(rows[name][None] for name in names), bits=8, turned=True)[0]
    torch.testing.assert_close(held, wanted, rtol=0.03, atol=0.03)
