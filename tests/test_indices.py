"""Indices that lie outside what they look up are errors on every target, and end no process."""

from __future__ import annotations

import pytest
import torch
from tiny import cached_llama

from graftwork.backends import Target, compile
from graftwork.backends.torch import cpu
from graftwork.ir import InputError, Program, Weight, verify

A = torch.ops.aten
TARGETS = ("eager", "torch:cpu:float32", "onnxruntime:cpu:float32")


@pytest.fixture(scope="module")
def program() -> Program:
    return cached_llama(context=512, dim=8)


@pytest.fixture(autouse=True)
def two_threads():
    """What a team's thread throws nobody catches."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def fed(width: int, last: int) -> dict[str, torch.Tensor]:
    """A step whose last token is another one."""
    tokens, every = torch.full((1, width), 3), torch.arange(width)[None].clone()
    tokens[0, -1] = last
    past = torch.zeros(1, dtype=torch.int64)
    return {"tokens": tokens, "positions": every.clone(), "past": past, "select": every}


@pytest.mark.parametrize("width", [1, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize("target", TARGETS)
def test_a_token_outside_the_vocabulary_is_an_error(target, width, program):
    executable = compile(program, Target.parse(target))
    executable.begin(1, width)
    executable.reserve(width)
    with pytest.raises(InputError, match=r"step: .*expected indices"):
        executable.run("step", fed(width, 99), ("logits",))
    given = fed(width, 4)
    want = executable.run("step", given, ("logits",))["logits"].clone()
    assert want.isfinite().all()
    call = executable.hold("step", given, ("logits",))
    for _ in range(4):
        assert torch.equal(call()["logits"], want)
    given["tokens"][0, -1] = 99
    with pytest.raises(InputError, match="expected indices"):
        call()
    given["tokens"][0, -1] = 4
    assert torch.equal(call()["logits"], want)


def looked_up(program: Program, values: list[int], op: str) -> Program:
    """The program with rows of the logits' table picked by a constant, added to its logits."""
    fn = program.function("step").copy()
    index = Weight.of("index", torch.tensor(values))
    with fn.graph.inserting_before(fn.output_node):
        table, rows = fn.weight(program.weights["embed"]), fn.weight(index)
        calls = {
            "embedding": lambda: fn.call(A.embedding.default, table, rows),
            "index": lambda: fn.call(A.index.Tensor, table, [rows]),
            "index_select": lambda: fn.call(A.index_select.default, table, 0, rows),
        }
        total = fn.call(A.sum.dim_IntList, calls[op](), [0], False)
        narrow = fn.call(A.slice.Tensor, total, 0, 0, 32)
        logits = fn.call(A.add.Tensor, fn.outputs["logits"], narrow)
        fn.set_outputs(fn.outputs | {"logits": logits})
    changed = program.with_function(fn, weights=program.weights.adding(index))
    verify(changed)
    return changed


@pytest.mark.parametrize("op", ["embedding", "index", "index_select"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_constant_index_outside_is_refused_before_anything_runs(target, op, program):
    with pytest.raises(InputError, match=r"step: %.* looks up @index.* index 32; .* 32 rows"):
        compile(looked_up(program, [0, 32, 1, 2], op), Target.parse(target))
    least = -33 if op == "index" else -1
    with pytest.raises(InputError, match=f"index {least}; "):
        compile(looked_up(program, [0, least, 1, 2], op), Target.parse(target))
    compile(looked_up(program, [0, 31, 1, 2], op), Target.parse(target))


def test_rows_that_look_up_mean_what_torch_means_and_refuse_what_is_outside():
    table, index = torch.randn(5, 3), torch.tensor([[4, 0], [2, 1]])
    assert torch.equal(cpu.embedding(table, index), table[index])
    assert torch.equal(cpu.index(table, [index.int()]), table[index])
    assert torch.equal(cpu.index(table, [None, torch.tensor([-1, 0])]), table[:, [-1, 0]])
    assert torch.equal(cpu.index(table, [table > 0]), table[table > 0])
    row = cpu.CPU_ROWS
    assert torch.equal(row[A.gather.default](table, 0, index), table.gather(0, index))
    assert torch.equal(row[A.index_select.default](table, 1, index[1]), table[:, index[1]])
    ones = torch.ones(2, 2)
    want = table.scatter(0, index, ones)
    assert torch.equal(row[A.scatter.src](table, 0, index, ones), want)
    assert torch.equal(row[A.scatter.value](table, 0, index, 1.0), want)
    want = table.scatter_add(0, index, ones)
    assert torch.equal(row[A.scatter_add.default](table, 0, index, ones), want)
    assert torch.equal(row[A.scatter_reduce.two](table, 0, index, ones, "sum"), want)
    want = table.index_put([torch.tensor([4, 1])], ones[0, 0])
    assert torch.equal(cpu.index_put(table, [torch.tensor([-1, 1])], ones[0, 0]), want)
    none = index[:0]
    assert cpu.embedding(table, none).shape == (0, 2, 3)
    for least, most, function in (
        (-1, 5, lambda i: cpu.embedding(table, i)),
        (-6, 5, lambda i: cpu.index(table, [i])),
        (-6, 5, lambda i: cpu.index_put(table, [i], ones[0, 0])),
        (-1, 5, lambda i: row[A.gather.default](table, 0, i)),
        (-1, 3, lambda i: row[A.index_select.default](table, 1, i[0])),
        (-1, 5, lambda i: row[A.scatter.src](table, 0, i, ones)),
        (-1, 5, lambda i: row[A.scatter.value](table, 0, i, 1.0)),
        (-1, 5, lambda i: row[A.scatter_add.default](table, 0, i, ones)),
        (-1, 5, lambda i: row[A.scatter_reduce.two](table, 0, i, ones, "sum")),
    ):
        for strange in (least, most):
            with pytest.raises(InputError, match=f"index {strange} lies outside"):
                function(torch.tensor([[strange]]))
