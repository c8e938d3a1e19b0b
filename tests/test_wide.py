"""bfloat16 on CUDA: what its provider has no kernels for is computed in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as oir
import pytest
import torch
from every_recipe import CASES, FLOAT32, program_of

from graftwork.backends.onnxruntime.emit import emit
from graftwork.backends.onnxruntime.lower import lower
from graftwork.backends.onnxruntime.wide import NARROW, Types, widen
from graftwork.ir import Function, PassError, TensorType, WeightStore

A = torch.ops.aten
BF16 = oir.DataType.BFLOAT16


def op_on(target: Any, *args: Any, type: str = "bf16[B,8]") -> oir.Model:
    """The ONNX graph of one call on a value."""
    fn = Function("f")
    result = fn.call(target, fn.add_input("x", TensorType.parse(type)), *args)
    found = result.meta["type"]
    outs = [fn.item(result, i) for i in range(len(found))] if isinstance(found, tuple) else [result]
    fn.set_outputs({f"y{i}": node for i, node in enumerate(outs)})
    return emit(fn, WeightStore()).model


def types_in(model: oir.Model) -> dict[str, list[int]]:
    """Element types of what each narrow op takes and gives, by ONNX's own inference."""
    inferred = onnx.shape_inference.infer_shapes(oir.to_proto(model), strict_mode=False)
    graph = inferred.graph
    values = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info)}
    values |= {v.name: v.type.tensor_type.elem_type for v in graph.output}
    values |= {w.name: w.data_type for w in graph.initializer}
    return {
        node.name: [values.get(name, 0) for name in (*node.input, *node.output) if name]
        for node in graph.node
        if node.op_type in NARROW and not node.domain
    }


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (A.argmax.default, (-1,)),
        (A.amax.default, ([-1],)),
        (A.topk.default, (3,)),
        (A.logsumexp.default, ([-1],)),
        (A.log.default, ()),
        (A.mean.dim, ([-1],)),
        (A.cos.default, ()),
        (A.rsqrt.default, ()),
    ],
)
def test_ops_without_a_kernel_compute_in_float32(target: Any, args: Any) -> None:
    model = op_on(target, *args)
    assert any(BF16 in types for types in types_in(model).values())
    assert widen(model.graph)
    onnx.checker.check_model(oir.to_proto(model))
    assert all(BF16 not in types for types in types_in(model).values())


def test_other_types_stay() -> None:
    for type in ("i64[B,8]", "f32[B,8]"):
        model = op_on(A.amax.default, [-1], type=type)
        before = oir.to_proto(model).SerializeToString()
        assert widen(model.graph) == 0 and oir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("name", CASES)
def test_no_recipe_asks_cuda_for_a_kernel_that_is_not_there(name: str, tmp_path: Path) -> None:
    if name in FLOAT32:
        with pytest.raises(PassError, match="need float32"):
            program_of(name, tmp_path, dtype=torch.bfloat16)
        return
    program = program_of(name, tmp_path, dtype=torch.bfloat16)
    for function in program.functions:
        for variant in ("chain", "tree", "batch"):
            lowered = lower(program, function, variant)
            model = emit(lowered.function(function), lowered.weights).model
            widen(model.graph)
            types = Types(model.graph)
            for node in model.graph:
                taken = [types.of(value) for value in node.inputs if value is not None]
                given = types.of_outputs(node)
                if node.op_type in NARROW and not node.domain:
                    assert not {BF16, None} & {*taken, *given}, node
