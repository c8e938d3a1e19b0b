"""A segment reads its step's rows in one kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as oir
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime_helpers import without_own_attention
from tiny import tiny_llama

from graftwork.backends.onnxruntime.emit import IR_VERSION, OWN
from graftwork.backends.onnxruntime.fed_rows import read_fed_rows
from graftwork.backends.onnxruntime.lower import lower
from graftwork.backends.onnxruntime.ops import ort_read_rows
from graftwork.backends.onnxruntime.session import register_own_ops
from graftwork.ir import Function, Program, Sym, TensorType
from graftwork.ir.ops.select import cache_read
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.pick_logits import PickLogits

A = torch.ops.aten
G = torch.ops.graftwork
LARGE = 2**63 - 1


def read(
    cache: torch.Tensor, past: torch.Tensor, columns: torch.Tensor, *, chosen: int
) -> torch.Tensor:
    """What one node returns."""
    feeds = {"cache": cache, "past": past, "columns": columns}
    values = {
        name: oir.val(name, dtype=oir.tensor(t.numpy()).dtype, shape=[None] * t.dim())
        for name, t in feeds.items()
    }
    made = oir.node("ReadRows", list(values.values()), {"chosen": chosen}, domain=OWN)
    made.outputs[0].name, made.outputs[0].dtype = "out", oir.DataType.FLOAT
    opsets = {"": 24, OWN: 1}
    graph = oir.Graph(
        list(values.values()), made.outputs, nodes=[made], opset_imports=opsets, name="one"
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    register_own_ops(options)
    data = oir.to_proto(oir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    arrays: dict[str, Any] = {name: np.ascontiguousarray(t) for name, t in feeds.items()}
    return torch.from_numpy(session.run(None, arrays)[0])


@given(
    st.integers(0, 99),
    st.sampled_from((1, 3)),
    st.sampled_from((1, 2, 9)),
    st.sampled_from((9, 20)),
    st.sampled_from((1, 7, 64)),
)
def test_rows_are_those_that_the_ops_mean(seed, batch, width, rows, wide):
    random = torch.Generator().manual_seed(seed)
    cache = torch.randn(batch, 1, rows, wide, generator=random)
    past = torch.randint(0, rows - width + 1, (batch,), generator=random)
    columns = torch.randint(0, width, (batch, width), generator=random)
    assert torch.equal(read(cache, past, columns, chosen=1), cache_read(cache, past, columns))
    fed = read(cache, past, columns, chosen=0)
    assert torch.equal(fed, ort_read_rows(cache, past, columns))
    assert torch.equal(fed[0], cache[0, 0, past[0] : past[0] + width])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cache": torch.zeros(2, 8, 4)}, "cache must be"),
        ({"cache": torch.zeros(2, 2, 8, 4)}, "cache must be"),
        ({"past": torch.zeros(3, dtype=torch.int64)}, "past must be"),
        ({"past": torch.tensor([0, -1])}, "past must be in"),
        ({"past": torch.tensor([LARGE, 0])}, "past must be in"),
        ({"past": torch.tensor([0, 6])}, "a row is not in the cache"),
        ({"columns": torch.zeros(1, 3, dtype=torch.int64)}, "columns must be"),
        ({"columns": torch.zeros(6, dtype=torch.int64)}, "columns must be"),
        ({"columns": torch.full((2, 3), 8), "chosen": 1}, "a row is not in the cache"),
        ({"columns": torch.full((2, 3), LARGE), "chosen": 1}, "a row is not in the cache"),
        ({"columns": torch.full((2, 3), -LARGE), "chosen": 1}, "a row is not in the cache"),
    ],
)
def test_rows_that_are_not_there_are_refused(changes, says):
    whole: dict[str, Any] = {
        "cache": torch.zeros(2, 1, 8, 4),
        "past": torch.tensor([0, 5]),
        "columns": torch.zeros(2, 3, dtype=torch.int64),
        "chosen": 0,
    }
    assert read(**whole).shape == (2, 3, 4)
    with pytest.raises(Exception, match=says):
        read(**whole | changes)


def reading(start: int = 0, step: int = 1, like: str = "i64[B,T]") -> Function:
    """A function that reads the rows start, start + step, ... of a step."""
    fn = Function("f")
    stream = fn.add_input("stream", TensorType.parse("f32[B,1,C,8]"))
    past = fn.add_input("past", TensorType.parse("i64[B]"))
    fn.add_input("positions", TensorType.parse(like))
    end = Sym("T") * step + start
    count = fn.call(A.arange.start_step, start, end, step, dtype=torch.int64)
    columns = fn.call(
        A.expand.default, fn.call(A.unsqueeze.default, count, 0), [Sym("B"), Sym("T")]
    )
    fn.set_outputs({"rows": fn.call(G.cache_read.default, stream, past, columns)})
    return fn


def test_reads_of_a_steps_rows_become_one_op():
    fn = reading()
    assert read_fed_rows(fn) == 1
    (made,) = fn.calls(G.ort_read_rows.default)
    assert made.args[2] is fn.input("positions") and fn.outputs["rows"] is made


@pytest.mark.parametrize(
    "how", [{"start": 1}, {"step": 2}, {"like": "i64[B,S]"}, {"like": "i64[1,T]"}]
)
def test_reads_of_other_rows_stay(how):
    assert read_fed_rows(reading(**how)) == 0


def cut_program() -> Program:
    """A tiny model, cut behind each layer."""
    passes = InsertKvCache(), PickLogits(), CutDepth(every=1)
    return run_passes(tiny_llama(), [Step(p) for p in passes])[0]


def test_a_segment_begins_with_one_read():
    program = cut_program()
    part = lower(program, program.plan.step.parts[1], "own", native=True)
    fn = part.function(program.plan.step.parts[1])
    assert len(fn.calls(G.ort_read_rows.default)) == 1
    assert not fn.calls(G.cache_read.default, A.arange.start_step)


def test_without_the_kernels_the_rows_are_read_by_other_ops(monkeypatch):
    program = cut_program()
    without_own_attention(monkeypatch)
    part = lower(program, program.plan.step.parts[1], "chain", native=True)
    fn = part.function(program.plan.step.parts[1])
    assert fn.calls(G.cache_read.default) and not fn.calls(G.ort_read_rows.default)
