"""Native kernels for weights of few bits: the bits that were meant, on every processor."""

from __future__ import annotations

from itertools import product

import pytest
import quantized
import torch
from conftest import PROCESSORS, flags_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selection import one_in

from graftwork.backends import cached_library, tiles
from graftwork.backends.torch import native_quantized as native
from graftwork.backends.torch.compiled import inductor
from graftwork.backends.torch.replay import Replay, record
from graftwork.ir import InputError

everywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Kernels of one processor serve all examples."""


def linear(x: torch.Tensor, w: quantized.Weight) -> torch.Tensor:
    return native.quantized_linear(x, *w.in_tiles(), *w.sizes, w.span)


@everywhere
@given(quantized.weights, st.sampled_from((1, 2, 3, 5, 7, 8, 9, 16, 21)))
def test_products_have_the_bits_of_their_meaning(processor, w, count):
    """Rounded by row, and in spans."""
    x = quantized.rows(count, count, w.q.shape[1])
    for span in (0, *w.spans[:2], *w.spans[-1:]):
        of = w._replace(span=span)
        assert torch.equal(linear(x, of), quantized.linear(x, of)), span


@everywhere
@given(quantized.weights)
def test_tiles_hold_the_numbers(processor, w):
    packed = w.in_tiles()[0]
    kept, group, outputs = w.sizes
    found = quantized.from_tiles(packed, kept, group, outputs)
    absorbed = kept != w.bits or (kept == 8 and w.codebook is not None)
    assert torch.equal(found, w.codebook.long()[w.q] + 128 if absorbed else w.q)


@pytest.mark.parametrize("kind", quantized.KINDS)
@pytest.mark.parametrize("bits", quantized.BITS)
def test_every_number_of_rows_and_every_kind_of_weight(bits, kind, processor):
    """Of extreme weights, too, which may add up to more than sixteen bits hold."""
    w = quantized.weight(bits, 33, 64, 3, bits, kind)
    for count in (*range(1, 10), 70):
        x = quantized.rows(count, count, w.q.shape[1])
        assert torch.equal(linear(x, w), quantized.linear(x, w)), count


@pytest.mark.parametrize("bits", quantized.BITS)
def test_a_group_may_be_the_whole_row(bits, processor):
    w = quantized.weight(1, 17, 4096, 1, bits, "symmetric", bias=True)
    for count in (3, 20):
        x = torch.ones(count, 4096)
        x[1] = -1
        assert torch.equal(linear(x, w), quantized.linear(x, w))


@pytest.mark.parametrize(("bits", "kind"), one_in(2, product(quantized.BITS, quantized.KINDS)))
def test_many_rows_have_the_bits_of_few(bits, kind, processor):
    """Which are multiplied another way: of the largest numbers, too, and in groups that fill no
    block, or several of what sixteen bits hold."""
    threads = torch.get_num_threads()
    try:
        for group, groups, span in ((1, 24, 0), (20, 3, 60), (130, 2, 0), (1040, 1, 208)):
            w = quantized.weight(bits, 33, group, groups, bits, kind, half=True, bias=True)
            w = w._replace(span=span if w.q.shape[1] % (span or 1) == 0 else 0)
            x = quantized.rows(group, 45, w.q.shape[1])
            x[1] = 1
            want = quantized.linear(x, w)
            for number, count in ((1, 45), (2, 45), (2, 31), (3, 17), (1, 16), (1, 15)):
                torch.set_num_threads(number)
                assert torch.equal(linear(x[:count], w), want[:count])
            for first in range(0, 45, 4):
                assert torch.equal(linear(x[first : first + 4], w), want[first : first + 4])
    finally:
        torch.set_num_threads(threads)


def test_a_rows_bits_do_not_depend_on_the_others_or_on_threads(processor):
    threads = torch.get_num_threads()
    try:
        for bits, kind, span in (
            *((4, "offset", 0), (8, "symmetric", 0), (3, "codebook", 0)),
            *((4, "offset", 32), (8, "symmetric", 16), (3, "codebook", 64)),
        ):
            w = quantized.weight(2, 150, 32, 4, bits, kind, half=True)._replace(span=span)
            x = torch.randn(64, w.q.shape[1])
            whole = linear(x, w)
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                assert torch.equal(linear(x, w), whole)
                for first, last in ((0, 1), (5, 7), (3, 10), (63, 64), (13, 50)):
                    assert torch.equal(linear(x[first:last], w), whole[first:last])
    finally:
        torch.set_num_threads(threads)


def float_linear(x: torch.Tensor, w: quantized.Weight) -> torch.Tensor:
    return native.float_linear(x, *w.table_in_tiles(), w.bias, *w.table_sizes)


@everywhere
@given(quantized.weights, st.sampled_from((1, 2, 3, 5, 7, 8, 9, 16, 21)))
def test_float_rows_are_multiplied_with_the_values(processor, w, count):
    x = quantized.rows(count, count, w.q.shape[1])
    values = quantized.table(w).double()
    want = x.double() @ values.T
    # Stored numbers are multiplied, not values: of those the zero is taken off afterwards.
    size = x.double().abs() @ (values.abs() + quantized.zeros(w).double()).T
    found = float_linear(x, w._replace(bias=None))
    assert ((found - want).abs() <= 2e-6 * size).all()
    if w.bias is not None:
        assert torch.equal(float_linear(x, w), found + w.bias)


@pytest.mark.parametrize("kind", quantized.KINDS)
@pytest.mark.parametrize("bits", quantized.BITS)
@pytest.mark.parametrize(
    "processors",
    [PROCESSORS[:2], pytest.param(PROCESSORS, marks=pytest.mark.long)],
    ids=["two", "all"],
)
def test_float_rows_have_the_same_bits_among_others_with_threads_and_everywhere(
    processors, bits, kind
):
    """Of groups that fill blocks, and of some that do not."""
    threads, before = torch.get_num_threads(), cached_library.FLAGS
    found = []
    try:
        for flags in [flags_for(processor) for processor in processors]:
            cached_library.FLAGS = flags
            cached_library.library.cache_clear()
            for group in (32, 20):
                w = quantized.weight(bits, 70, group, 4, bits, kind, half=True)
                x = quantized.rows(1, 21, w.q.shape[1])
                whole = float_linear(x, w)
                found.append(whole)
                for number in (1, 2):
                    torch.set_num_threads(number)
                    for first, last in ((0, 1), (5, 7), (3, 10), (20, 21), (8, 21)):
                        assert torch.equal(float_linear(x[first:last], w), whole[first:last])
    finally:
        torch.set_num_threads(threads)
        cached_library.FLAGS = before
        cached_library.library.cache_clear()
    for place, whole in enumerate(found):
        assert torch.equal(whole, found[place % 2])


def test_float_rows_check_their_operands():
    w = quantized.weight(0, 20, 16, 2, 4, "offset")
    packed, scale, offset, _ = w.table_in_tiles()
    x = torch.zeros(2, 32)
    for wrong, reason in (
        ((x[:, :16], packed, scale, offset, None, None, *w.table_sizes), "packed"),
        ((x, packed, scale[:1], offset, None, None, *w.table_sizes), "scale"),
        ((x, packed, scale, offset, torch.zeros(16), None, *w.table_sizes), "no offset"),
        ((x, packed, scale, None, torch.zeros(4), None, *w.table_sizes), "codebook"),
        ((x, packed, scale, offset, None, torch.zeros(3), *w.table_sizes), "bias"),
        ((x, packed, scale, offset, None, None, 5, 16, 20), "bits"),
    ):
        with pytest.raises(InputError, match=reason):
            native.float_linear(*wrong)


def test_halves_are_rounded_to_even_and_rows_of_zeros_give_the_bias(processor):
    w = quantized.weight(0, 8, 8, 1, 8, "symmetric", bias=True)
    ones = torch.full((8, 8), 128) + torch.eye(8, dtype=torch.int64)
    w = w._replace(q=ones, packed=quantized.stream(ones, 8), scale=torch.ones(8, 1))
    x = torch.zeros(2, 8)
    x[1] = torch.arange(8) + 0.5
    x[1, 7] = 127
    result = linear(x, w._replace(bias=None))
    assert result[1].tolist() == [0, 2, 2, 4, 4, 6, 6, 127] and result[0].eq(0).all()
    assert torch.equal(linear(x, w)[0], w.bias)


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_gives_no_numbers_and_spoils_no_other(wrong, processor):
    w = quantized.weight(0, 20, 16, 2, 4, "offset")
    x = quantized.rows(0, 4, 32)
    want = linear(x, w)
    x[2, 5] = wrong
    result = linear(x, w)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3]], want[[0, 1, 3]])


def test_values_too_small_for_a_scale_stay_in_their_range(processor):
    """The smallest number there is, times 190, is 190 steps of a scale that is the smallest."""
    w = quantized.weight(0, 16, 16, 1, 2, "symmetric")
    x = torch.full((1, 16), 2.0**-149) * 190
    ones = x.sign() * 127
    steps = linear(ones, w._replace(scale=torch.ones(16, 1)))
    assert torch.equal(linear(x, w._replace(scale=torch.ones(16, 1))), steps * 2.0**-149)


@everywhere
@given(quantized.weights, st.integers(0, 30))
def test_rows_of_a_table(processor, w, count):
    ids = torch.randint(0, len(w.q), (count, 2), generator=torch.Generator().manual_seed(count))
    operands = *w.table_in_tiles(), *w.table_sizes
    assert torch.equal(native.quantized_embedding(ids, *operands), quantized.table(w)[ids])


def test_ids_outside_a_table_are_refused():
    w = quantized.weight(0, 5, 8, 2, 4, "symmetric")
    for wrong in (-1, 5, 1 << 62):
        with pytest.raises(InputError, match=f"{wrong} lies outside 0..4"):
            ids = torch.tensor([0, wrong])
            native.quantized_embedding(ids, *w.table_in_tiles(), *w.table_sizes)


def test_halves_of_every_value_are_widened_exactly(processor):
    """All that are finite, subnormal ones among them."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()][:, None]
    q = torch.full((len(every), 2), 9)
    w = quantized.weight(0, 1, 2, 1, 4, "symmetric")
    w = w._replace(q=q, packed=quantized.stream(q, 4), scale=every)
    ids = torch.arange(len(every))
    found = native.quantized_embedding(ids, *w.table_in_tiles(), *w.table_sizes)
    assert torch.equal(found, every.float().expand(-1, 2))
    products = linear(torch.full((1, 2), 127.0), w)
    assert torch.equal(products[0], every.float()[:, 0] * 254)


@pytest.mark.long
def test_compiled_code_calls_the_kernels():
    w = quantized.weight(0, 20, 16, 2, 4, "offset", bias=True)
    operands, x = (*w.in_tiles(), *w.sizes), quantized.rows(0, 3, 32)

    def step(x: torch.Tensor) -> torch.Tensor:
        return native.quantized_linear(x * 2, *operands)

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x), step(x))
    assert torch.equal(compiled(x.mT.contiguous().mT), step(x))


class Step(torch.nn.Module):
    """Rows of a table, and a product with them."""

    def __init__(self, table: quantized.Weight, w: quantized.Weight) -> None:
        super().__init__()
        self.table = *table.table_in_tiles(), *table.table_sizes
        self.operands, self.sizes = w.in_tiles(), w.sizes

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = native.quantized_embedding(ids, *self.table)
        return (native.quantized_linear(x * 2, *self.operands, *self.sizes) + 1,)


@pytest.mark.long
def test_the_kernels_of_a_step_are_recorded_and_replayed():
    table = quantized.weight(0, 50, 16, 4, 3, "offset")
    step = inductor(
        torch.fx.symbolic_trace(Step(table, quantized.weight(1, 20, 32, 2, 4, "offset")))
    )
    ids = torch.tensor([[1, 7, 30]])
    step(ids)
    results, recording = record(step, [ids], [])
    assert recording is not None
    kernels = native.quantized_embedding_kernel, native.product_kernel
    recorded = {address for address, _ in recording.calls}
    assert {kernel.address for kernel in kernels} <= recorded
    replay = Replay(recording, [ids, *step.weights])
    ids.copy_(torch.tensor([[49, 0, 2]]))
    replay()
    assert torch.equal(replay.results[0], step(ids)[0])
    assert not torch.equal(replay.results[0], results[0])


def spoilt(**changes: object) -> list[object]:
    """Operands of a product, some of them others."""
    w = quantized.weight(0, 20, 16, 2, 4, "offset", bias=True)
    packed, scale, offset, table, bias = w.in_tiles()
    given = {"x": torch.randn(3, 32), "packed": packed, "scale": scale, "offset": offset}
    given |= {"table": table, "bias": bias, "bits": 4, "group": 16, "outputs": 20}
    return list((given | changes).values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": torch.randn(3, 33)}, "33 columns in groups of 16"),
        ({"x": torch.randn(3, 0)}, "0 columns"),
        ({"x": torch.randn(3, 32).double()}, r"x must be f32"),
        ({"packed": torch.zeros(2, 2, 127, dtype=torch.uint8)}, r"packed must be u8\[T,G,B\]"),
        ({"packed": torch.zeros(1, 2, 128, dtype=torch.uint8)}, "packed"),
        ({"packed": torch.zeros(2, 2, 128, dtype=torch.int8)}, "packed"),
        ({"scale": torch.zeros(2, 2, 15)}, "scale"),
        ({"scale": torch.zeros(2, 1, 16)}, "scale"),
        ({"scale": torch.zeros(2, 2, 16).bfloat16()}, "scale"),
        ({"offset": torch.zeros(2, 2, 16).double()}, "offset"),
        ({"table": torch.zeros(16, dtype=torch.int8)}, "a table goes with"),
        ({"table": torch.zeros(15, dtype=torch.int8), "offset": None}, "table must be"),
        ({"bias": torch.zeros(19)}, "bias"),
        ({"bits": 5}, "bits"),
        ({"bits": 3}, "packed"),
        ({"bits": 0}, "bits"),
        ({"group": 0}, "groups of 0"),
        ({"group": -16}, "groups of -16"),
        ({"group": 32}, "packed"),
        ({"outputs": 33}, "packed"),
        ({"outputs": 16}, "packed"),
        ({"outputs": -5}, "no -5 outputs"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, says):
    with pytest.raises(InputError, match=says):
        native.quantized_linear(*spoilt(**changes))


def test_what_cannot_be_packed_is_refused():
    w = quantized.weight(0, 4, 8, 2, 4, "symmetric")
    for changes, says in (
        ({"bits": 5}, "bits"),
        ({"bits": 3}, "groups of 8"),
        ({"group": 7}, "groups of 7"),
        ({"group": 1 << 17}, "131072"),
        ({"codebook": torch.full((16,), 0.5)}, "whole numbers"),
        ({"codebook": torch.full((16,), 128.0)}, "whole numbers"),
        ({"codebook": torch.zeros(8)}, "has 16 values"),
    ):
        given = {"bits": 4, "group": 8, "codebook": None} | changes
        with pytest.raises(InputError, match=says):
            tiles.tile_values(w.packed, **given)
            tiles.tile_table(given["codebook"], bits=given["bits"])
    with pytest.raises(InputError, match="packed weights are its values"):
        tiles.tile_table(torch.zeros(256), bits=8)
    with pytest.raises(InputError, match="u8"):
        tiles.tile_values(w.packed.to(torch.int8), bits=4, group=8)
