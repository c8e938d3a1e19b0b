"""Repeated layers become calls of one region."""

from __future__ import annotations

import copy

import torch
import torch.fx
from tiny import cached_llama

from graftwork.backends.torch.compiled import any_size, inductor
from graftwork.backends.torch.emit import emit
from graftwork.backends.torch.regions import LEAST, cut_repeats
from graftwork.ir import TensorType


def traced(function) -> torch.fx.GraphModule:
    return torch.fx.GraphModule({}, torch.fx.Tracer().trace(function))


def regions(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Calls of the piece that is called most, where that is more than once."""
    by_piece: dict[str, list[torch.fx.Node]] = {}
    for node in module.graph.find_nodes(op="call_module"):
        by_piece.setdefault(str(node.target), []).append(node)
    most = max(by_piece.values(), key=len, default=[])
    return most if len(most) > 1 else []


def check(function, count: int, *inputs: torch.Tensor) -> list[torch.fx.Node]:
    """The outlined function still computes the same, with so many calls of a region."""
    module = traced(function)
    want = module(*inputs)
    cut_repeats(module, least=2)
    torch.testing.assert_close(module(*inputs), want, rtol=0, atol=0)
    assert len(regions(module)) == count
    return regions(module)


X = torch.randn(3, generator=torch.Generator().manual_seed(0))


def test_a_chain_of_equal_parts_is_one_region_called_again():
    def chain(x, a, b, c):
        for weight in (a, b, c):
            x = torch.tanh(torch.mul(x, weight)) + x
        return x

    calls = check(chain, 3, X, X + 1, X + 2, X + 3)
    assert all(len(call.args) == 2 for call in calls)


def test_what_a_part_gives_to_the_end_is_a_result():
    def taps(x):
        kept = []
        for _ in range(4):
            x = torch.sin(x) + 1.0
            kept.append(torch.relu(x))
        return (x, *kept)

    check(taps, 4, X)


def test_alternating_parts_are_one_region_of_both():
    def pairs(x):
        for _ in range(3):
            x = torch.sin(torch.mul(x, x))
            x = torch.cos(torch.add(x, 1.0))
        return x

    check(pairs, 3, X)


def test_other_constants_are_other_parts():
    def constants(x):
        for power in range(4):
            x = torch.sin(torch.cos(torch.add(x, float(power))))
        return x

    check(constants, 0, X)


def test_parts_that_read_other_sizes_are_other_parts():
    """Caches with a capacity of their own: what is compiled for one is not run on the other."""

    def two(x, a, b):
        for weight in (a, b):
            x = torch.tanh(torch.mul(x, weight)) + x
        return x

    for sizes, count in (("f32[C]", 2), ("f32[C.2]", 0)):
        module = traced(two)
        _, a, b = (node for node in module.graph.nodes if node.op == "placeholder")
        a.meta["type"], b.meta["type"] = "f32[C]", sizes
        cut_repeats(module, least=2)
        assert len(regions(module)) == count


def test_parts_wired_otherwise_are_not_taken_for_equal():
    def wired(x):
        a = torch.sin(x)
        b = torch.cos(a)
        c = torch.sin(b)
        return torch.cos(a) + c

    check(wired, 0, X)


def test_a_part_never_ends_between_a_tuple_and_its_items():
    def split(x):
        low, high = torch.split(x, 2)
        for _ in range(3):
            low, high = torch.split(torch.cat([torch.sin(high), low]), 2)
        return low + high

    check(split, 3, torch.randn(4))


def test_the_layers_of_a_model_are_outlined():
    program = cached_llama(layers=4)
    step = program.function("step")
    weights = {name: weight.load() for name, weight in program.weights.items()}
    module = emit(step, weights, list(program.states), ("logits",))
    cut_repeats(module)
    assert len(regions(module)) >= 3
    called = {str(call.target) for call in regions(module)}
    left = [
        node
        for name, piece in module.named_children()
        if name not in called
        for node in piece.graph.nodes
        if node.op == "call_function"
    ]
    assert len(left) < 40, "what is left is less than two layers"


def test_small_parts_stay_where_they_fuse():
    module = traced(lambda x: torch.sin(torch.cos(torch.sin(torch.cos(x)))))
    cut_repeats(module)
    assert not regions(module)


def test_parts_of_which_one_reads_a_value_twice_are_no_copies():
    """Torch gives a region once what it reads twice: the other copy then has a value too many."""

    def two(x, a, b):
        for first, second in ((a, a), (a, b)):
            x = torch.tanh(torch.mul(x, first)) + second
        return x

    check(two, 0, X, X + 1, X + 2)


def compiled(count: int, x: str):
    """So many equal layers, compiled; and what they compute."""
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    weights = [graph.placeholder(f"weight_{n}") for n in range(count)]
    value = graph.call_function(torch.exp, (value,))
    for weight in weights:
        for _ in range(LEAST):
            value = graph.call_function(torch.sub, (value, weight))
        value = graph.call_function(torch.tanh, (value,))
    for node in graph.nodes:
        node.meta["type"] = TensorType.parse("f32[4]" if node in weights else x)
    graph.output((value,))
    module = torch.fx.GraphModule({}, graph)
    return inductor(copy.deepcopy(module)), module


def test_layers_whose_tensors_lie_otherwise_do_not_share_code():
    """The compiler is told to check no tensor: another layout would be read as if it were one."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).t()
    for place in range(5):
        weights = [torch.arange(8.0)[:4] / 9] * 4
        if place < 4:
            weights[place] = (torch.arange(8.0) / 7)[::2]
        step, want = compiled(4, "f32[3,4]")
        torch.testing.assert_close(step(x, *weights), want(x, *weights))


def test_pieces_take_what_others_return_of_any_size():
    """Or each length of a prompt would be compiled, or worse, taken for the first one."""
    step, want = compiled(3, "f32[T,4]")
    weights = [torch.arange(4.0) / n for n in (5, 6, 7)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 9, 3):
            x = torch.ones(rows, 4)
            any_size(x, 0)
            torch.testing.assert_close(step(x, *weights), want(x, *weights))
