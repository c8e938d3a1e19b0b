"""The first Clover computes and learns what its description says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_continued_by_hand import heard, noting, taught
from test_methods_by_hand import H, Tensors, embedded, random_weights, reading, silu_block
from tiny import tiny_llama

from graftwork.ir import Function, PassError, run
from graftwork.ir.plan import RecurrentDraft
from graftwork.passes.drafting.draft_clover1 import DraftClover1
from graftwork.training.objectives.recurrent import recurrent_loss


def said(w: Tensors, head: torch.Tensor, level: int, h: torch.Tensor) -> torch.Tensor:
    """Logits of a state: the head's own block, the norm of all heads, the target's head."""
    name = f"clover1.{level}.0.linear"
    x = silu_block(h, w[f"{name}.weight"], w[f"{name}.bias"])
    return head @ (x * (x.square().mean() + 1e-6).rsqrt() * w["clover1.norm.norm"])


def test_heads_hear_one_token_more_each(tmp_path: Path) -> None:
    """h <- h + v(e) cos(q(norm(h)), k(e)) by one block for all levels; h goes on as it is."""
    w = random_weights(DraftClover1, heads=3)
    program = reading(DraftClover1, tmp_path, w, heads=3)
    draft = program.plan.draft
    assert isinstance(draft, RecurrentDraft) and draft.entry == "clover1_entry"
    state = torch.randn(1, 1, H)
    h, head = state[0, 0], program.weights["head"].load()
    for level, token in enumerate((5, 9, 2)):
        given = {"tokens": torch.tensor([[token]]), "state": state}
        found = run(program, draft.functions[level], given)
        h = heard(w, "clover1.decoder", h, embedded(program, torch.tensor(token)), 4)
        torch.testing.assert_close(found["state"][0, 0], h, atol=1e-4, rtol=1e-4)
        wanted = said(w, head, level, h)
        torch.testing.assert_close(found["draft_logits"][0, 0], wanted, atol=1e-4, rtol=1e-4)
        state = found["state"]


def test_the_entry_is_a_copy_of_the_last_layer() -> None:
    """Untrained: it makes of states before the last layer what that makes of them."""
    program = DraftClover1().run(tiny_llama(2)).program
    step = program.step.copy()
    first = step.calls(torch.ops.graftwork.hidden.default)
    blocks = {n.kwargs["layer"]: n for n in first if n.kwargs["point"] == "block"}
    step.set_outputs({**step.outputs, "before": blocks[0]})
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    given = {"tokens": tokens, "positions": torch.arange(5)[None]}
    made = run(program.with_function(step), "step", given)
    found = run(program, "clover1_entry", {**given, "hidden": made["before"]})
    torch.testing.assert_close(found["hidden"], made["hidden"], atol=1e-5, rtol=1e-5)


def test_a_training_step_by_hand(tmp_path: Path) -> None:
    """Cross entropy to the text's token at each level, all levels alike."""
    program, batch, net = taught(DraftClover1, tmp_path, heads=3)
    seen: list[Tensors] = []
    loss = recurrent_loss(program.plan.draft, noting(net, seen), batch)
    entry, *levels = seen
    w = {name: weight.load() for name, weight in program.weights.items()}
    head, states = program.weights["head"].load(), entry["hidden"][0]
    text, wanted = batch.tokens[0].tolist(), torch.zeros(())
    texts = [*text, int(batch.best[0, -1])]
    for level in range(len(levels)):
        missed = []
        for place in range(len(text) - 1 - level):
            h = states[place]
            for token in text[place + 1 : place + 2 + level]:
                h = heard(w, "clover1.decoder", h, embedded(program, torch.tensor(token)), 4)
            chances = said(w, head, level, h).log_softmax(-1)
            missed.append(-chances[texts[place + 2 + level]])
        wanted = wanted + torch.stack(missed).mean()
    torch.testing.assert_close(loss.total, wanted, atol=1e-3, rtol=1e-4)
    assert len(loss.hits) == 3


def test_a_step_without_layers_to_copy_is_refused() -> None:
    program = tiny_llama()
    step: Function = program.step.copy()
    for node in step.calls(torch.ops.graftwork.hidden.default)[:-1]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        step.graph.erase_node(node)
    with pytest.raises(PassError, match=r"draft_clover1: step has no .* before and after"):
        DraftClover1().run(program.with_function(step))
