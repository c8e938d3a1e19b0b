"""Concrete weights and inputs for any program whose `step` the decode loop could drive."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from graftwork.ir import Program, Sym, TensorType, Weight, WeightStore, type_of
from graftwork.ir.plan.inputs import whole_rows
from graftwork.passes.engine.feed import encoded


def random_tensor(name: str, tensor_type: TensorType) -> torch.Tensor:
    """A tensor that depends on the name alone: small normals, or small non-negative integers."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape, dtype = tensor_type.shape, tensor_type.dtype
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 3, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator) * 0.3).to(dtype)


def random_weights(types: Mapping[str, TensorType]) -> WeightStore:
    """A store with a random weight of every name and type."""
    tensors = {name: random_tensor(name, t) for name, t in types.items()}
    return WeightStore({name: Weight.of(name, tensor) for name, tensor in tensors.items()})


def with_random_weights(program: Program) -> Program:
    """The program with data for all its weights."""
    types = {name: weight.type for name, weight in program.weights.items()}
    return program.replace(weights=random_weights(types))


def step_inputs(program: Program, batch: int = 2, width: int = 5) -> dict[str, torch.Tensor]:
    """Inputs of `step` for the first step of `batch` sequences: empty caches, every row selected.

    Programs before and after a pass thus get the same question, whatever inputs the pass added.
    Errors: AssertionError naming an input that is neither a state nor one of the loop's.
    """
    function = program.function("step")
    generator = torch.Generator().manual_seed(0)
    sizes = {"B": batch, "T": width, "S": width, "C": width + 3}
    sizes |= {str(state.capacity): width + 3 for state in program.states.values() if state.grows}
    positions = torch.arange(width).expand(batch, width).contiguous()
    known = {
        "tokens": torch.randint(0, program.info.vocab_size, (batch, width), generator=generator),
        "positions": positions,
        "past": torch.zeros(batch, dtype=torch.int64),
        "ancestors": torch.ones(width, width).tril().bool().expand(batch, width, width),
        "select": positions,
        **whole_rows(batch, width),
        **encoded(program, batch),
    }
    inputs = {}
    for node in function.inputs:
        name, node_type = str(node.target), type_of(node)
        assert name in known or name in program.states, f"do not know what to feed {name}"
        if name in known:
            inputs[name] = known[name]
            continue
        extra = [d for d in node_type.dims if isinstance(d, Sym) and d.symbols - set(sizes)]
        assert not extra, f"do not know the sizes {extra} of {name}"
        bound = node_type.bind(sizes)
        inputs[name] = torch.zeros(bound.shape, dtype=bound.dtype)
    return inputs


def assert_close(after: torch.Tensor, before: torch.Tensor, what: str = "logits") -> None:
    """Equal up to the rounding of their dtype, in proportion to the largest value."""
    assert after.shape == before.shape and after.dtype == before.dtype, what
    if not before.dtype.is_floating_point:
        assert torch.equal(after, before), what
        return
    bound = {torch.float64: 1e-9, torch.float32: 2e-4}.get(before.dtype, 0.05)
    scale = max(float(before.abs().max()), 1e-3)
    error = float((after.double() - before.double()).abs().max()) / scale
    assert error <= bound, f"{what} differ by {error:.2e} of their scale, allowed {bound:.0e}"
