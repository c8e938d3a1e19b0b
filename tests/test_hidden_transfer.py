"""Hidden Transfer: pseudo states are made of a token's state within the target."""

from __future__ import annotations

import pytest
import torch
from recorded import whole
from tiny import drafting_llama, named, tiny_llama

from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, Weight, run
from graftwork.model import Model
from graftwork.passes.drafting.grafts import Graft
from graftwork.passes.drafting.hidden_transfer.graph import DraftHiddenTransfer
from graftwork.passes.drafting.ppd.graph import DraftPpd
from graftwork.passes.engine.manager import Step, run_passes

G = torch.ops.graftwork
V = 32
TEXT = [3, 1, 4, 1, 5]


def mapped(program: Program) -> Program:
    """Random maps."""
    drawn = [
        Weight.of(name, torch.randn(weight.type.shape) * 0.2)
        for name, weight in program.weights.items()
        if name.startswith("hidden_transfer")
    ]
    return program.replace(weights=program.weights.replacing(*drawn))


def made(*layers: int, prompts: int = 2) -> Program:
    return mapped(DraftHiddenTransfer(layers=layers, prompts=prompts).run(tiny_llama(4)).program)


def stretch(first: int, last: int | None) -> Program:
    """Function "x": states after layer `first` to those after layer `last`, or to logits."""
    graft = Graft(tiny_llama(4), "test", "x")
    start = graft.blocks[first]
    given = {start: graft.input("hidden", graft.hidden)}
    given[graft.step.input("positions")] = graft.input("positions", dtype=torch.int64)
    end = graft.step.outputs["logits"] if last is None else graft.blocks[last]
    out = graft.copy(given, end)
    graft.fn.retype()
    return graft.done({"y": graft.unmarked(out)})


def after(layer: int, tokens: list[int]) -> torch.Tensor:
    """The states [1,T,H] of a text after a layer of the target."""
    graft = Graft(tiny_llama(4), "test", "none")
    name = graft.tap(layer)
    program = graft.program.with_function(graft.step)
    steps = torch.arange(len(tokens))[None]
    return run(program, "step", {"tokens": torch.tensor([tokens]), "positions": steps})[name]


def through(program: Program, hidden: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(hidden.shape[1])[None]
    return run(program, "x", {"hidden": hidden, "positions": steps})["y"]


def predicted(program: Program, text: list[int]) -> torch.Tensor:
    """f[2,V], what two pseudo states made after layers 1 and 2 say, layer by layer."""
    w = [program.weights[f"hidden_transfer.{place}.weight"].load() for place in range(2)]
    low, high = after(1, text), after(2, text)
    one = torch.cat([low, low[:, -1:] @ w[0].T], 1)
    one = through(stretch(1, 2), one)  # the text's states, and the first pseudo state's
    torch.testing.assert_close(one[:, :-1], high)
    both = torch.cat([one, high[:, -1:] @ w[1].T], 1)
    return through(stretch(2, None), both)[0, -2:]


def test_pseudo_states_go_through_the_layers_that_are_left() -> None:
    program = made(1, 2)
    tokens = torch.tensor([[*TEXT, V, V + 1]])
    steps = torch.arange(7)[None]
    found = run(program, "step", {"tokens": tokens, "positions": steps})
    wanted = predicted(program, TEXT)
    torch.testing.assert_close(found["logits"][0, -2:], wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["draft_tokens"][0, -2:, 0], wanted.argmax(-1))
    # The text is as it was, to the bit: no token sees them.
    plain = run(tiny_llama(4), "step", {"tokens": tokens[:, :5], "positions": steps[:, :5]})
    alone = run(program, "step", {"tokens": tokens[:, :5], "positions": steps[:, :5]})
    assert torch.equal(alone["logits"], plain["logits"])
    torch.testing.assert_close(found["logits"][:, :5], plain["logits"])


def test_each_node_of_a_tree_has_its_own() -> None:
    """Two siblings behind a text, and pseudo states behind each."""
    passes = DraftHiddenTransfer(layers=(1, 2), prompts=2), named("tree_chain", depth=2)
    program = drafting_llama_of_four(*passes)
    tokens = [*TEXT, 8, 9, V, V + 1, V, V + 1]
    seen = torch.ones(11, 11, dtype=torch.bool).tril()
    seen[6, 5] = False  # the second sibling does not continue the first
    seen[7:, 5:] = False
    for row, sibling in ((7, 5), (8, 5), (9, 6), (10, 6)):
        seen[row, [sibling, *range(row - (row - 7) % 2, row + 1)]] = True
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 5, 6, 7, 6, 7]])
    given = {"positions": positions, "ancestors": seen[None]}
    found = whole(program, "step", tokens, **given)["logits"][0]
    for place, sibling in ((7, 8), (9, 9)):
        wanted = predicted(program, [*TEXT, sibling])
        torch.testing.assert_close(found[place : place + 2], wanted, atol=1e-4, rtol=1e-4)


def drafting_llama_of_four(*passes: object) -> Program:
    from graftwork.passes.caching.insert_kv_cache import InsertKvCache
    from graftwork.passes.stepping.accept_trees import AcceptTrees
    from graftwork.passes.stepping.add_argmax import AddArgmax
    from graftwork.passes.stepping.pick_logits import PickLogits

    steps = [*passes, InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax()]
    return mapped(run_passes(tiny_llama(4), [Step(step) for step in steps])[0])  # type: ignore[arg-type]


def test_the_nearest_token_that_is_none_of_them() -> None:
    x = torch.arange(5.0).reshape(1, 5, 1)
    own = torch.tensor([[True, True, False, True, False]])
    assert G.followed_rows(x, own, None).flatten().tolist() == [0, 1, 1, 3, 3]
    seen = torch.eye(5, dtype=torch.bool)[None]
    seen[0, 2, 0] = seen[0, 4, [0, 1]] = True
    assert G.followed_rows(x, own, seen).flatten().tolist() == [0, 1, 0, 3, 1]


def test_maps_are_placed_by_depth_and_start_as_copies() -> None:
    program = DraftHiddenTransfer().run(tiny_llama(9)).program
    nodes = program.step.calls(G.followed_rows.default)
    markers = [
        node for node in program.step.calls(G.hidden.default) if node.kwargs["point"] == "block"
    ]
    fed = [int(m.kwargs["layer"]) for m in markers if "where" in m.all_input_nodes[0].name]
    assert len(nodes) == 3 and fed == [5, 6, 7]
    for place in range(3):
        weight = program.weights[f"hidden_transfer.{place}.weight"].load()
        assert torch.equal(weight, torch.eye(32))


@pytest.mark.parametrize("layers", [(1, 2), (2, 1, 3), (1, 2, 4), (1, 2, 3, 3)])
def test_layers_that_do_not_fit(layers: tuple[int, ...]) -> None:
    with pytest.raises(PassError, match=r"expected 3 layers for prompts=3, ascending, of 0, 1, 2"):
        DraftHiddenTransfer(layers=layers).run(tiny_llama(4))


def test_a_step_that_drafts_already() -> None:
    with pytest.raises(PassError, match="the step drafts already"):
        run_passes(tiny_llama(), [Step(DraftPpd()), Step(DraftHiddenTransfer())])


def test_a_step_without_ancestors() -> None:
    from graftwork.passes.caching.insert_kv_cache import InsertKvCache

    steps = [Step(DraftHiddenTransfer()), Step(InsertKvCache())]
    with pytest.raises(PassError, match=r"takes ancestors; add accept_trees"):
        run_passes(tiny_llama(), steps)


def test_what_is_trained_is_the_maps() -> None:
    from graftwork.training.net import trainable

    program = drafting_llama(DraftHiddenTransfer(layers=(0, 1, 1)), named("tree_chain", depth=3))
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    found = trainable(model.program, model.program.plan.draft)
    assert found == [f"hidden_transfer.{place}.weight" for place in range(3)]
