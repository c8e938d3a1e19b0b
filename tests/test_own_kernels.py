"""Kernels that ops declare: torch's and ONNX Runtime's ops follow from the declaration."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_own_attention import node

from graftwork.backends.onnxruntime.own_ops import described, node_name
from graftwork.backends.own_kernels import entries, own_ops, zero_of
from graftwork.backends.torch.cpu import OWN
from graftwork.ir import InputError, ops
from graftwork.ir.ops import Native, OpDef

OPS = own_ops()


def on_onnxruntime(op: OpDef, arguments: Any, options: Any) -> list[torch.Tensor]:
    given = dict(zip(op.declared.names, op.declared.bound(*arguments, **options), strict=True))
    zeros = zero_of(op)
    how = {name: given.pop(name) or zero for name, zero in zeros.items()}
    return node(node_name(op), given, **how)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_kernel_gives_the_meaning_and_the_same_bits_on_both_backends(op):
    for arguments, options in op.samples():
        got, want = OWN[op.name](*arguments, **options), op.meaning(*arguments, **options)
        got, want = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (got, want))
        for mine, meant in zip(got, want, strict=True):
            torch.testing.assert_close(mine, meant, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, on_onnxruntime(op, arguments, options), got))


def test_a_kernel_that_would_be_told_too_little_is_refused(monkeypatch):
    (op,) = (op for op in OPS if op.name == "causal_conv_step")
    less = dataclasses.replace(op, native=Native("BTDN"))
    monkeypatch.setitem(ops._OPS, op.name, less)
    with pytest.raises(InputError, match=r"has \d+ members.* results and the sizes 'BTDN'"):
        entries.__wrapped__(op.name)


def test_a_declaration_that_the_library_cannot_read_is_found_when_it_is_written():
    (op,) = (op for op in OPS if op.name == "attend")
    odd = dataclasses.replace(op.declared, items=(*op.declared.items, "N = B - T"))
    with pytest.raises(AssertionError, match=r"'N = B - T'.* has no form in C\+\+"):
        described(dataclasses.replace(op, declared=odd))
