"""How ops run in training."""

from __future__ import annotations

import torch

from graftwork.ir.ops import all_ops
from graftwork.training.net import TRAINED

QUANTIZED = torch.ops.graftwork.quantized_linear.default


def test_products_of_few_bits_are_those_of_the_meaning_and_have_gradients() -> None:
    """Up to float error; by their input as if it had not been rounded."""
    op, seen = all_ops()["quantized_linear"], 0
    for args, options in op.samples():
        x = args[0].float().requires_grad_()
        found = TRAINED[QUANTIZED](x, *args[1:], **options)
        wanted = op.meaning(args[0].float(), *args[1:], **options)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        (slope,) = torch.autograd.grad(found.sum(), x)
        plain = TRAINED[QUANTIZED](x, *args[1:], **{**options, "rounded": False})
        (other,) = torch.autograd.grad(plain.sum(), x)
        torch.testing.assert_close(slope, other)
        seen += 1
    assert seen > 5
