"""States of recurrences in 8 bits: what they become, on every backend, and what composes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from archs import Arch, build
from onnxruntime_helpers import without_own_attention
from recurrent_archs import _PURE
from selection import mostly_long, one_in
from test_recurrent import WIDTHS, _in_steps, _run, imported, prompts
from test_recurrent_kernel import SHAPES, _operands
from tiny import named

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.backends.onnxruntime import recurrent_states
from graftwork.backends.torch.cpu import OWN
from graftwork.ir import InputError, Program, UnsupportedError
from graftwork.ir.ops.rounded_state import linear_attention_step_int8 as meaning
from graftwork.ir.ops.rounded_state import rounded
from graftwork.passes.engine.manager import run_passes

I8 = torch.int8
step_int8 = OWN["linear_attention_step_int8"]


def _held(operands: list[Any]) -> list[Any]:
    """Operands of `linear_attention_step` with their state in 8 bits."""
    codes, scale = rounded(operands[0])
    return [codes.to(I8), scale, *operands[1:]]


def test_a_step_by_hand():
    """A head of two keys and one value: a token that stays, one after it, and another beside that.

    The state 127 * 0.5, -20 * 0.5 halves to 31.75, -5; the first token adds 2 * (1, 3) and leaves
    33.75, 1. Its scale is 33.75 / 127, in which 1 is 3.76 steps: 4 of them are gone on from.
    """
    codes, scale = torch.tensor([127, -20], dtype=I8), torch.tensor([0.5])
    q, k = torch.tensor([[1.0, 1.0]] * 3), torch.tensor([[1.0, 3.0], [0.0, 1.0], [1.0, 0.0]])
    v, g = torch.tensor([2.0, 1.0, 5.0]), torch.tensor([0.5, 1.0, 0.25]).log()
    seen = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    log, one = torch.zeros(1, 1, 2, 1), torch.tensor([1])
    five = torch.tensor([5])
    for step in (meaning, step_int8):
        y, new, scales, keys, values, decays = step(
            *(codes.reshape(1, 1, 2, 1), scale.reshape(1, 1, 1), log.expand(1, 1, 2, 2), log, log),
            *(five, five, one, seen[None], q[None, None], k[None, None]),
            *(v.reshape(1, 1, 3, 1), g.reshape(1, 1, 3, 1)),
        )
        unit = 33.75 / 127
        second, third = 33.75 + 4 * unit + 1, 0.25 * (33.75 + 4 * unit) + 5
        assert y.flatten().tolist() == pytest.approx([34.75, second, third])
        assert new.flatten().tolist() == [127, 4]
        assert scales.flatten().tolist() == pytest.approx([unit])
        # The third token is kept: it is the log's first row then, and is folded.
        kept = (x.flip(2).contiguous() for x in (keys, values, decays))
        nothing, none = torch.zeros(1, 1, 1, 1), torch.tensor([0])
        after = step(
            *(new, scales, *kept, five + 1, five + 2, none, None),
            *(nothing.expand(1, 1, 1, 2), nothing.expand(1, 1, 1, 2), nothing, nothing),
        )
        largest = 0.25 * 33.75 + 5
        assert after[1].flatten().tolist() == [127, round(unit / (largest / 127))]
        assert after[2].flatten().tolist() == pytest.approx([largest / 127])


def _by_token(operands: list[Any]) -> list[torch.Tensor]:
    """What tokens of a chain read [B,H,T,V], and the state [B,H,K,V] that the certain ones leave:
    one sequence, head and token after the other."""
    codes, scale, keys, values, decays, folded, past, certain, _, q, k, v, g, beta = operands
    batch, heads, width, wide = v.shape
    read = torch.zeros(batch, heads, width, wide)
    left = torch.zeros(batch, heads, k.shape[3], wide)
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        group = h * k.shape[1] // heads
        state = codes[b, h].float() * scale[b, h] if past[b] > 0 else torch.zeros(left.shape[2:])
        for row in range(int(past[b] - folded[b]) if past[b] > 0 else 0):
            state = decays[b, h, row].exp()[:, None] * state
            state = _rounded(state + torch.outer(keys[b, group, row], values[b, h, row]))
        left[b, h] = state
        for t in range(width):
            state = g[b, h, t].exp()[:, None] * state
            added = v[b, h, t]
            if beta is not None:
                added = beta[b, h, t] * (added - k[b, group, t] @ state)
            state = state + torch.outer(k[b, group, t], added)
            read[b, h, t] = q[b, group, t] @ state
            state = _rounded(state)
            left[b, h] = state if t < certain[b] else left[b, h]
    return [read, left]


def _rounded(state: torch.Tensor) -> torch.Tensor:
    steps = state.abs().max(0).values / 127
    return torch.where(steps > 0, torch.round(state / steps) * steps, 0.0)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_is_rounded_after_every_token(shape, delta):
    operands = _held(_operands(shape, tree=False, delta=delta))
    read, left = _by_token(operands)
    for step in (meaning, step_int8):
        y, codes, scale, *_ = step(*operands)
        torch.testing.assert_close(y, read, rtol=1e-4, atol=1e-4)
        # A last bit may move a number to the next code.
        apart = (codes * scale[:, :, None] - left).abs() / scale.clamp(min=1e-9)[:, :, None]
        assert apart.max() < 1.01 and (apart > 0.01).float().mean() < 1e-3


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_computes_the_meaning_of_trees(shape, delta):
    operands = _held(_operands(shape, tree=True, delta=delta))
    for got, want in zip(step_int8(*operands), meaning(*operands), strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_token_has_the_same_bits_alone_and_among_others(shape):
    """In a chain, in a tree, and folded out of the log."""
    operands = _held(_operands(shape, tree=False, delta=True))
    operands[6], operands[7] = torch.full_like(operands[6], 7), torch.ones_like(operands[7])
    together, *states = step_int8(*operands)
    tree = list(operands)
    tree[8] = torch.ones(shape[3], shape[3]).tril().bool().expand(shape[0], -1, -1).clone()
    tree[8][:, -1, 1:-1] = False  # the last one continues the first
    branched, *after = step_int8(*tree)
    assert torch.equal(branched[:, :, :-1], together[:, :, :-1])
    assert all(map(torch.equal, after[:2], states[:2]))
    past = operands[6]
    for token in range(1, 3):
        one = [x[:, :, token : token + 1] for x in operands[9:14]]
        folded, past = past + 1, past + 1
        y, *states = step_int8(*states, folded, past, operands[7], None, *one)
        assert torch.equal(y[:, :, 0], together[:, :, token])


@pytest.mark.parametrize("step", [meaning, step_int8])
def test_nothing_is_rounded_again_where_no_row_is_folded(step):
    operands = _held(_operands(SHAPES[0].values[0], tree=False, delta=True))
    operands[1] = operands[1] * 1.0000123  # scales that nothing would give again to the last bit
    operands[6], operands[7] = operands[5], torch.zeros_like(operands[7])
    _, codes, scale, *_ = step(*operands)
    assert torch.equal(codes, operands[0]) and torch.equal(scale, operands[1])


def test_an_operand_that_does_not_fit_is_named():
    operands = _held(_operands(SHAPES[0].values[0], tree=False, delta=True))
    wrong = [operands[0], operands[1][:, :, 1:], *operands[2:]]
    for step in (meaning, step_int8):
        with pytest.raises(InputError, match="linear_attention_step_int8: scale must be"):
            step(*wrong)


def recipe(base: str) -> dict[str, Any]:
    return {
        **{"title": "states in 8 bits", "contract": "approximate", "extends": base},
        "passes": ["quantize_state"],
    }


def rounded_program(name: str, base: str) -> Program:
    return run_passes(imported(name)[1], gw.Recipe.load(recipe(base)).steps)[0]


@pytest.mark.parametrize(
    "name", mostly_long(("mamba2", "qwen3_next", "falcon_mamba"), keep=("mamba2",))
)
def test_tokens_have_the_same_bits_at_every_width(name):
    """With products whose rows are exact; what was taken back leaves no trace."""
    program = rounded_program(name, "int8")
    ids = torch.randint(3, 128, (2, sum(WIDTHS)), generator=torch.Generator().manual_seed(1))
    want = _in_steps(program, "onnxruntime", ids, 1)
    for certain in (3, 100):
        assert torch.equal(_in_steps(program, "onnxruntime", ids, certain), want)
    alone = _in_steps(program, "onnxruntime", ids[1:], 1)
    assert torch.equal(alone[0], want[1])


@pytest.mark.parametrize("name", one_in(2, ["mamba2", "qwen3_next"]))
def test_backends_agree_and_are_near_the_state_in_float(name):
    ids = torch.randint(3, 128, (1, sum(WIDTHS)), generator=torch.Generator().manual_seed(1))
    program = rounded_program(name, "baseline")
    plain, _ = run_passes(imported(name)[1], gw.Recipe.load("baseline").steps)
    want = _in_steps(program, "eager", ids, 1)
    got = _in_steps(program, "onnxruntime", ids, 100)
    size = want.abs().max()
    # A last bit may move a number to the next code.
    assert (got - want).abs().mean() < 1e-4 * size
    error = (_in_steps(plain, "eager", ids, 1) - want).abs().mean() / size
    assert 1e-5 < error < 0.01


def test_a_path_of_a_tree_is_committed():
    """After a tree, the states are those of the path that is kept, to the bit."""
    program = rounded_program("mamba2", "int8_copyspec")
    program = named("accept_trees").run(program).program
    executable = compile(program, Target.parse("onnxruntime", threads=1))
    seen = torch.eye(4, dtype=torch.bool)
    for node, parent in enumerate([-1, 0, 0, 2]):  # 7 -> (11, 12 -> 13)
        seen[node] |= seen[parent] if parent >= 0 else seen[node]
    tree = torch.tensor([[7, 11, 12, 13]])
    inputs = {
        **{"tokens": tree, "positions": 4 + seen.sum(1)[None] - 1, "past": torch.tensor([4])},
        **{"certain": torch.tensor([1]), "select": torch.arange(4)[None], "ancestors": seen[None]},
    }
    given = {name: x for name, x in inputs.items() if program.step.has_input(name)}
    logged = [name for name, state in program.states.items() if state.capacity == "W"]

    def begin() -> None:
        executable.begin(1, 64)
        executable.reserve(64)
        executable.reserve(8, "W")
        _run(executable, torch.tensor([[5, 9, 17, 33]]), 0, 4)

    begin()
    logits = executable.run("step", given, ("logits",))["logits"].clone()
    executable.commit(logged, torch.tensor([0]), torch.tensor([[1, 2]]))
    got = [logits[:, [0, 2, 3]], _run(executable, torch.tensor([[21]]), 7, 1)]
    begin()
    text = torch.tensor([[7, 12, 13, 21]])
    want = torch.cat([_run(executable, text[:, [i]], 4 + i, 1) for i in range(4)], 1)
    assert torch.equal(torch.cat(got, 1), want)


def texts(name: str, base: str, target: str) -> tuple[torch.Tensor, Any]:
    """Texts of three prompts in a ragged batch, that of the first alone being the same; and its
    statistics."""
    given, _ = prompts(name)
    fast = gw.optimize(imported(name)[0], recipe(base), target=target)
    plain: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": 0}
    alone = fast.generate(given[0], return_dict_in_generate=True, **plain)
    length = given[0].shape[1]
    ids = torch.zeros(len(given), length, dtype=torch.long)
    for row, text in enumerate(given):
        ids[row, length - text.shape[1] :] = text
    both = fast.generate(ids, attention_mask=(ids != 0).long(), **plain)
    assert torch.equal(both[:1], alone.sequences)
    return both, alone.stats


@pytest.mark.parametrize(
    ("name", "base", "target"),
    [
        ("mamba", "recycling", "onnxruntime"),
        pytest.param("falcon_h1", "recycling", "onnxruntime", marks=pytest.mark.long),
        pytest.param("mamba", "copyspec", "eager", marks=pytest.mark.long),
        pytest.param("qwen3_5_text", "copyspec", "onnxruntime", marks=pytest.mark.long),
        pytest.param("mamba", "copyspec", "torch", marks=pytest.mark.sweep),
        pytest.param("mamba2", "recycling", "torch", marks=pytest.mark.sweep),
    ],
)
def test_drafts_change_no_token_of_the_same_target(name, base, target):
    want, _ = texts(name, "baseline", target)
    got, stats = texts(name, base, target)
    assert torch.equal(got, want)
    if name in ("mamba", "falcon_h1"):
        assert stats.accepted_tokens > 0


WIDE = {**_PURE, "num_heads": 24, "head_dim": 64, "hidden_size": 768, "n_groups": 1}
WIDE |= {"state_size": 128, "chunk_size": 4, "num_hidden_layers": 1, "expand": 2}


def test_states_take_less_than_a_third_of_the_memory():
    """With heads as Mamba-2 has them, of 130 million parameters in 24 such layers."""
    model, sizes = build(Arch("mamba2", WIDE)), []
    for chosen in ("baseline", recipe("baseline")):
        fast = gw.optimize(model, chosen, target="onnxruntime")
        fast.generate(torch.tensor([[5, 9, 17]]), max_new_tokens=4, pad_token_id=0)
        sizes.append(fast.cache_bytes())
    assert sizes[1] <= 0.3 * sizes[0]
    assert not [n for n, s in fast.program.states.items() if n.endswith(".state")]


def test_without_own_kernels_onnxruntime_refuses(monkeypatch):
    without_own_attention(monkeypatch)
    monkeypatch.setattr(recurrent_states, "own_attention_available", lambda: "not here")
    with pytest.raises(UnsupportedError, match=r"states in 8 bits.*not here.*another target"):
        gw.optimize(imported("mamba2")[0], recipe("baseline"), target="onnxruntime")
