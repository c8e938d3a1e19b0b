"""Caches of 4 and 8 bits: what rows become, on every backend, and what composes with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime_helpers import without_own_attention
from test_own_attention import KINDS, as_attributes, node, step, written
from tiny import in_int8

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.backends.onnxruntime.ops import ort_attend_quantized
from graftwork.backends.torch import cpu
from graftwork.cli.demo import demo_folder
from graftwork.ir import PassError, Program
from graftwork.ir.ops.quantized_cache import (
    attend_quantized,
    hadamard,
    quantize_rows,
    stored_values,
)
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.engine.validate import reference_logits


def test_a_row_by_hand():
    """Least -1 and largest 2 in 4 bits: a step of 0.2, halves to even, the second half on top."""
    x = torch.tensor([-1.0, 2.0, 0.0, 0.5]).reshape(1, 1, 1, 4)
    codes, steps = quantize_rows(x, bits=4, turned=False)
    assert steps.flatten().tolist() == pytest.approx([0.2, -1.0])
    assert codes.flatten().tolist() == [0 | 5 << 4, 15 | 8 << 4]  # 7.5 is no exact half in floats
    assert stored_values(codes, steps, 4).flatten().tolist() == pytest.approx([-1, 2, 0, 0.6])


def test_a_row_that_is_all_one_number_is_kept():
    x = torch.full((1, 1, 1, 8), -3.25)
    for bits in (4, 8):
        codes, steps = quantize_rows(x, bits=bits, turned=False)
        assert torch.equal(stored_values(codes, steps, bits), x)


def test_the_hadamard_matrix_is_orthogonal_and_its_own_inverse():
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    torch.testing.assert_close(hadamard(torch.eye(4)), signs / 2)
    x = torch.randn(3, 64)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    assert hadamard(64 * torch.eye(64))[0].abs().max() == pytest.approx(math.sqrt(64))


@given(
    st.integers(0, 99),
    st.sampled_from((4, 8)),
    st.sampled_from(((2, False), (6, False), (16, True), (24, False), (64, True), (128, True))),
)
def test_kernels_store_rows_as_the_op_says(seed, bits, kind):
    width, turned = kind
    x = torch.randn(2, 3, 5, width, generator=torch.Generator().manual_seed(seed)) * 3
    got = cpu.OWN["quantize_rows"](x, bits=bits, turned=turned)
    want = quantize_rows(x, bits=bits, turned=turned)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def stored_step(seed: int, bits: int, kind: str, wide: int = 16) -> tuple[Any, dict[str, Any]]:
    """Operands of a step over a stored cache."""
    of, options = step(seed, 3, 5, 37, 16, wide, kind)
    how = {"bits": bits, "turned": seed % 2 == 0}
    for name in ("past_key", "past_value"):
        of[name], of[f"{name}_steps"] = quantize_rows(of[name], **how)
    return of, options | how


CASES = st.tuples(st.integers(0, 99), st.sampled_from((4, 8)), st.sampled_from(KINDS))


@given(CASES, st.sampled_from((16, 64)))
def test_a_step_means_what_the_op_says_on_both_backends(case, wide):
    of, options = stored_step(*case, wide)
    got = node("CachedQuantizedAttention", of, **as_attributes(options))
    order = (
        *("query", "key", "value", "past_key", "past_value", "past_key_steps"),
        *("past_value_steps", "past", "positions", "cos", "sin", "ancestors", "sinks", "slopes"),
    )
    want = ort_attend_quantized(*(of.get(n) for n in order), heads=4, groups=2, **options)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    for new, old in zip(got[1:], want[1:], strict=True):
        assert torch.equal(written(of, new), written(of, old))


@given(CASES)
def test_a_sequence_has_the_same_bits_alone_and_in_a_larger_cache(case):
    of, options = stored_step(*case)
    whole = node("CachedQuantizedAttention", of, **as_attributes(options))[0]
    shared = ("cos", "sin", "sinks", "slopes")
    for b in range(3):
        alone = {n: t if n in shared else t[b : b + 1] for n, t in of.items() if t is not None}
        for name in ("past_key", "past_value", "past_key_steps", "past_value_steps"):
            alone[name] = torch.nn.functional.pad(alone[name], (0, 0, 0, 29), value=7)
        got = node("CachedQuantizedAttention", alone, **as_attributes(options), threads=1)[0]
        assert torch.equal(got[0], whole[b])


@given(CASES)
def test_torchs_kernel_attends_as_the_op_says(case):
    seed, bits, kind = case
    random = torch.Generator().manual_seed(seed)
    turned = seed % 2 == 0
    q = torch.randn(2, 4, 3, 16, generator=random)
    rows = [torch.randn(2, 2, 21, 16, generator=random) for _ in "kv"]
    stored = [part for x in rows for part in quantize_rows(x, bits=bits, turned=turned)]
    mask = torch.rand(2, 1, 3, 21, generator=random) < 0.5
    mask[..., 0] = True
    more = torch.randn(2, 4, 3, 21, generator=random), torch.randn(4, generator=random)
    how = {"bits": bits, "turned": turned, "scale": 0.25, "softcap": 2.0 if "cap" in kind else None}
    given_ = (q, *stored, mask, *(more if "sinks" in kind else (None, None)))
    got = cpu.OWN["attend_quantized"](*given_, **how)
    torch.testing.assert_close(got, attend_quantized(*given_, **how), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "sizes", "says"),
    [
        ({"past_key": torch.zeros(3, 2, 37, 8, dtype=torch.uint8)}, {}, "query must be"),
        ({"past_key_steps": torch.zeros(3, 2, 37, 1)}, {}, "past_key_steps must be"),
        ({"past_value_steps": torch.zeros(3, 2, 36, 2)}, {}, "past_value_steps must be"),
        ({"past_value": torch.zeros(3, 2, 37, 12, dtype=torch.uint8)}, {}, "power of two"),
        ({"past": torch.tensor([0, 33, 0])}, {}, "index 37 of a row lies outside 0..36"),
        ({}, {"bits": 3}, "bits must be"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(changes, sizes, says):
    of, options = stored_step(0, 8, "")
    whole = {"operands": of | changes, **as_attributes(options), **sizes}
    with pytest.raises(Exception, match=says):
        node("CachedQuantizedAttention", **whole)


def stored(shape: Shape | None = None, *, int8: bool = True, **options: Any) -> Program:
    program = cached_llama(shape)
    program = in_int8().run(program).program if int8 else program
    return QuantizeCache(**options).run(program).program


def logits(program: Program, tokens: torch.Tensor, widths: list[int], target: str) -> torch.Tensor:
    """Logits [B,T,V], fed by `widths`."""
    made = compile(program, Target.parse(target))
    batch, past, found = len(tokens), 0, []
    made.begin(batch, 40)
    made.reserve(40)
    for width in widths:
        where = torch.full((batch,), past)
        inputs = {
            "tokens": tokens[:, past : past + width],
            "positions": where[:, None] + torch.arange(width),
            "past": where,
            "select": torch.arange(width).expand(batch, width),
        }
        found.append(made.run("step", inputs, ["logits"])["logits"].clone())
        past += width
    return torch.cat(found, 1)


TOKENS = torch.randint(0, 61, (3, 20), generator=torch.Generator().manual_seed(0))
SHAPES = [Shape(), Shape(window=3, sinks=True), Shape(slopes=True, rotary=0), Shape(value_dim=32)]


@pytest.mark.parametrize("target", ["eager", "onnxruntime"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "window", "slopes", "wide"])
def test_backends_mean_what_the_interpreter_says(shape, bits, target):
    program = stored(shape, int8=False, bits=bits)
    want = reference_logits(program, TOKENS)
    got = logits(program, TOKENS, [6, 1, 1, 8, 1, 3], target)
    # A last bit may move a number to the next code.
    assert float((got - want).abs().mean() / want.abs().max()) < 2e-3


def test_without_own_kernels_the_ops_meaning_runs(monkeypatch):
    without_own_attention(monkeypatch)
    program = stored(int8=False, bits=4)
    want = reference_logits(program, TOKENS)
    got = logits(program, TOKENS, [6, 14], "onnxruntime")
    assert float((got - want).abs().mean() / want.abs().max()) < 2e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_texts_have_the_same_bits_at_every_width_and_in_batches(bits):
    program = stored(bits=bits)
    alone = torch.cat([logits(program, row[None], [20], "onnxruntime") for row in TOKENS])
    for widths in ([1] * 20, [6, 1, 1, 8, 1, 3]):
        assert torch.equal(logits(program, TOKENS, widths, "onnxruntime"), alone)


def test_eight_bits_are_near_the_full_cache_and_four_less():
    full = logits(cached_llama(), TOKENS, [20], "eager")
    errors = [
        float((logits(stored(int8=False, bits=b), TOKENS, [20], "eager") - full).abs().mean())
        for b in (8, 4)
    ]
    assert errors[0] < 0.01 * float(full.abs().max()) and errors[0] * 4 < errors[1]


def test_caches_that_lose_rows_are_quantized_first():
    evicting = EvictCache(budget=16, block=16).run(cached_llama()).program
    with pytest.raises(PassError, match="put quantize_cache before it"):
        QuantizeCache().run(evicting)


def test_rows_of_an_odd_width_are_refused():
    with pytest.raises(PassError, match="a power of two"):
        QuantizeCache().run(cached_llama(Shape(dim=12)))
    assert QuantizeCache(turned=False).run(cached_llama(Shape(dim=12))).matches == 4


@pytest.mark.long
def test_bytes_are_told_and_few():
    tokens = torch.arange(2, 40)[None]
    sizes = {}
    for recipe in ("baseline", "kv_int8", "kv_int4"):
        fast = gw.optimize(str(demo_folder()), recipe, target="onnxruntime")
        fast.generate(tokens, max_new_tokens=4, do_sample=False)
        sizes[recipe] = fast.cache_bytes()
    wide = fast.program.states["kv.0.key.codes"].type.dims[3] * 2  # 4 bits a number
    assert sizes["kv_int8"] / sizes["baseline"] == pytest.approx((wide + 8) / (4 * wide))
    assert sizes["kv_int4"] / sizes["baseline"] == pytest.approx((wide / 2 + 8) / (4 * wide))


def stored_demo(base: str) -> gw.Model:
    four = {"pass": "quantize_cache", "options": {"bits": 4}}
    recipe = {"title": "four", "contract": "approximate", "extends": base, "passes": [four]}
    return gw.optimize(str(demo_folder()), recipe, target="onnxruntime")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize("base", ["copyspec", "recycling", "eagle_chain"])
def test_drafts_change_no_token_of_a_stored_target(base):
    tokens = torch.arange(3, 43)[None] % 17
    want = stored_demo("baseline").generate(tokens, max_new_tokens=24, do_sample=False)
    got = stored_demo(base).generate(tokens, max_new_tokens=24, do_sample=False)
    assert torch.equal(got, want)


@pytest.mark.long
def test_conversations_go_on_from_stored_rows():
    tokens = torch.arange(3, 43)[None] % 17
    fast = stored_demo("baseline")
    first = fast.generate(tokens, max_new_tokens=8, do_sample=False)
    more = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    second = fast.generate(first, **more)
    assert second.stats.reused_tokens > 40
    fast.forget()
    assert torch.equal(fast.generate(first, **more).sequences, second.sequences)
