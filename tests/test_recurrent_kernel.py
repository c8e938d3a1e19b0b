"""The kernels for steps of recurrences and convolutions: the ops' meanings, and one token's bits
everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftwork.backends.torch.cpu import OWN
from graftwork.ir import InputError
from graftwork.ir.ops.causal_conv import causal_conv_step
from graftwork.ir.ops.recurrent import linear_attention_step as meaning

step, conv_step = OWN["linear_attention_step"], OWN["causal_conv_step"]

SHAPES = [
    pytest.param((1, 4, 2, 8, 16, 12, 1), id="gated delta net"),
    pytest.param((1, 4, 4, 8, 16, 16, 16), id="decay by key"),
    pytest.param((2, 48, 1, 8, 5, 1, 5), id="mamba"),
    pytest.param((2, 33, 1, 3, 1, 1, 1), id="channels alone"),
    pytest.param((2, 8, 2, 70, 6, 8, 1), id="more tokens than a block"),
]


def _operands(shape: tuple[int, ...], *, tree: bool, delta: bool) -> list[Any]:
    batch, heads, groups, width, size, values, decays = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator)

    def unit(*dims: int) -> torch.Tensor:
        return torch.nn.functional.normalize(draw(*dims), dim=-1)

    rows = 4
    ancestors = _tree(batch, width, generator) if tree else None
    return [
        draw(batch, heads, size, values),
        unit(batch, groups, rows, size),
        draw(batch, heads, rows, values),
        -draw(batch, heads, rows, decays).abs(),
        torch.full((batch,), 5),
        torch.tensor([7, 0][:batch]),
        torch.tensor([1, 3][:batch]),
        ancestors,
        draw(batch, groups, width, size),
        unit(batch, groups, width, size),
        draw(batch, heads, width, values),
        -draw(batch, heads, width, decays).abs(),
        torch.rand(batch, heads, width, generator=generator) if delta else None,
    ]


def _tree(batch: int, width: int, generator: torch.Generator) -> torch.Tensor:
    seen = torch.eye(width, dtype=torch.bool)
    for token in range(1, width):
        seen[token] |= seen[int(torch.randint(0, token, (), generator=generator))]
    return seen.expand(batch, width, width).contiguous()


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_computes_the_meaning(shape, tree, delta):
    operands = _operands(shape, tree=tree, delta=delta)
    for got, want in zip(step(*operands), meaning(*operands), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_token_has_the_same_bits_alone_and_among_others(shape):
    """In a chain, in a tree, and folded out of the log."""
    operands = _operands(shape, tree=False, delta=True)
    operands[5], operands[6] = torch.full_like(operands[5], 7), torch.ones_like(operands[6])
    together, *after = step(*operands)
    tree = list(operands)
    tree[7] = torch.ones(shape[3], shape[3]).tril().bool().expand(shape[0], -1, -1).clone()
    tree[7][:, -1, 1:-1] = False  # the last one continues the first
    branched, *_ = step(*tree)
    assert torch.equal(branched[:, :, :-1], together[:, :, :-1])
    states = [*after]
    past = operands[5]
    for token in range(1, 3):
        one = [x[:, :, token : token + 1] for x in operands[8:13]]
        folded, past = past + 1, past + 1
        y, *states = step(*states, folded, past, operands[6], None, *one)
        assert torch.equal(y[:, :, 0], together[:, :, token])


def test_an_operand_that_does_not_fit_is_named():
    operands = _operands((1, 4, 2, 8, 16, 12, 1), tree=False, delta=True)
    operands[9] = operands[9][:, :, :-1]
    with pytest.raises(InputError, match="linear_attention_step: k must be"):
        step(*operands)


CONVOLUTIONS = [(1, 8, 300, 4), (2, 1, 5, 4), (2, 3, 130, 2), (3, 70, 17, 5)]
"""Sequences, tokens, channels and span."""


def _convolution(
    sizes: tuple[int, ...], *, tree: bool, bias: bool = False, logged: int = 4
) -> list[Any]:
    batch, width, channels, span = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def draw(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator)

    return [
        draw(batch, span - 1, channels),
        draw(batch, logged, channels),
        torch.full((batch,), 5),
        torch.tensor([7, 0, 9])[:batch],
        torch.tensor([1, 3, 0])[:batch],
        _tree(batch, width, generator) if tree else None,
        draw(batch, width, channels),
        draw(channels, span),
        draw(channels) if bias else None,
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("sizes", CONVOLUTIONS)
def test_the_kernel_of_convolutions_computes_the_meaning(sizes, tree, bias):
    operands = _convolution(sizes, tree=tree, bias=bias)
    results = zip(conv_step(*operands), causal_conv_step(*operands), strict=True)
    y, want = next(results)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(got, want) for got, want in results)


def test_a_convolved_token_has_the_same_bits_alone_and_among_others():
    """In a chain, and out of the log, with what it read before it began."""
    operands = _convolution((1, 8, 130, 4), tree=False)
    together, *states = conv_step(*operands)
    past = operands[3]
    for token in range(1, 4):
        folded, past = past + 1, past + 1
        x = operands[6][:, token : token + 1]
        y, *states = conv_step(*states, folded, past, operands[4], None, x, *operands[7:])
        assert torch.equal(y[:, 0], together[:, token])


def test_a_convolutions_operand_that_does_not_fit_is_named():
    operands = _convolution((1, 3, 5, 4), tree=False)
    operands[0] = operands[0][:, 1:]
    with pytest.raises(InputError, match="causal_conv_step: history must be"):
        conv_step(*operands)
