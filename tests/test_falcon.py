"""Falcon: a layer whose every call predicts a block of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from recorded import Recorded, calls_of, whole
from test_runtime_cached import PROMPTS, decode, drafting, plainly
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, Weight, parse_program, program_text, run
from graftwork.passes.drafting.falcon import BlockwiseProposer, SemiAutoregressiveDraft
from graftwork.passes.drafting.falcon.graph import DraftFalcon
from graftwork.passes.drafting.falcon.objective import by_blocks, glanced, glancing_loss
from graftwork.runtime.speculate.drafters import grown
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch
from graftwork.training.objectives.eagle import noisy

EAGER = Target("eager", "cpu")
H = 32
PATHS = ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 1))
TREES = {
    "chain": named("tree_chain", depth=6),
    "static": named("tree_static", paths=(*PATHS, (0, 0, 0, 1, 0))),
    "best": named("tree_best_first", nodes=14, depth=5, width=3),
}


def made(tree: str = "static", block: int = 2, start: Program | None = None) -> Program:
    return drafting(DraftFalcon(levels=6, block=block), TREES[tree], start)


# -- drafts


class RecordedBlocks(Recorded, BlockwiseProposer):
    """Notes what it predicts; of a text shorter than a block it knows nothing."""

    blanks = False


def expected(program: Program, text: list[int], path: tuple[int, ...], block: int) -> torch.Tensor:
    """The logits after a text and a path below it, all of it fed at once."""
    hidden = whole(program, "step", text)["hidden.normed"][:, :-1]
    tokens = text[1:]
    for start in range(0, len(path) + 1, block):
        width = len(tokens)
        seen = torch.ones(width, width, dtype=torch.bool).tril()
        for end in range(
            len(text) - 1, width + 1, block
        ):  # the text's last block, and drafted ones
            seen[end - block : end, :end] = True
        outputs = whole(program, "falcon", tokens, hidden=hidden, ancestors=seen[None])
        if len(path) < start + block:
            return outputs["draft_logits"][0, width - block + len(path) - start]
        hidden = torch.cat([hidden, outputs["hidden"][:, -block:]], 1)
        tokens = [*tokens, *path[start : start + block]]
    raise AssertionError


@pytest.mark.parametrize(("tree", "block"), [("chain", 2), ("static", 2), ("best", 3)])
def test_predictions_are_those_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, tree: str, block: int
) -> None:
    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: RecordedBlocks)
    RecordedBlocks.notes = []
    program = made(tree, block)
    result = decode(compile(program, EAGER), PROMPTS, 10)
    assert torch.equal(result.sequences, plainly(compile(program, EAGER), PROMPTS, 10))
    notes = RecordedBlocks.notes
    assert {len(path) for _, path, _ in notes} >= {0, 1, 2, 3, 4}
    assert min(len(text) for text, *_ in notes) == block + 1
    for text, path, logits in notes[::11]:
        wanted = expected(program, text, path, block)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-4, rtol=2e-4)


def test_a_block_takes_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    executable = compile(made("chain"), EAGER)
    calls = calls_of(executable, monkeypatch)
    result = decode(executable, PROMPTS[:1], 13)
    assert result.stats.draft_tokens > 5 * (result.stats.sequence_steps - 2)
    # Six tokens by three calls.
    assert calls.count("falcon") <= 3 * result.stats.sequence_steps


@pytest.mark.parametrize("tree", TREES)
def test_up_to_the_end_of_the_context(tree: str) -> None:
    executable = compile(made(tree, start=tiny_llama(context=40)), EAGER)
    found = decode(executable, PROMPTS[:2], 31).sequences
    assert torch.equal(found, plainly(executable, PROMPTS[:2], 31))


def test_a_prompt_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made in calls of a few; the last block is whole in any case."""
    prompt = [[(i * i + 3) % 32 for i in range(29)]]
    wanted = []
    for most in (None, 4, 5):
        executable = compile(made("chain"), EAGER)
        if most:
            begin = BlockwiseProposer.begin

            def narrow(self: Any, prompts: Any, most: int = most, begin: Any = begin) -> None:
                self.committed.cache.widest = most
                begin(self, prompts)

            monkeypatch.setattr(BlockwiseProposer, "begin", narrow)
        result = decode(executable, prompt, 12)
        wanted.append((result.sequences.tolist(), result.stats.draft_tokens))
        monkeypatch.undo()
    assert wanted[0] == wanted[1] == wanted[2]


# -- equations


def with_weights(program: Program) -> Program:
    """Biases that are not zero."""
    drawn = [
        Weight.of(name, torch.randn(weight.type.shape))
        for name, weight in program.weights.items()
        if ".lstm.bias" in name
    ]
    return program.replace(weights=program.weights.replacing(*drawn))


def test_cells_are_the_first_steps_of_an_lstm() -> None:
    """And of a text of one token attention is its value, so that all can be written out."""
    program = with_weights(DraftFalcon(block=2).run(tiny_llama()).program)
    w = {name: program.weights[name].load() for name in program.weights if "falcon" in name}
    lstm = torch.nn.LSTM(2 * H, H, num_layers=2, batch_first=True)
    with torch.no_grad():
        for index in range(2):
            getattr(lstm, f"weight_ih_l{index}").copy_(w[f"falcon.lstm.weight_ih_l{index}"])
            getattr(lstm, f"bias_ih_l{index}").copy_(w[f"falcon.lstm.bias_l{index}"])
            getattr(lstm, f"bias_hh_l{index}").zero_()
    tokens, zeros = torch.arange(32)[:, None], torch.zeros(32, 1, dtype=torch.int64)
    hidden = torch.randn(32, 1, H)
    given = {"tokens": tokens, "positions": zeros, "hidden": hidden, "select": zeros}
    found = run(program, "falcon", given)
    e = program.weights["embed"].load()[tokens]
    x = lstm(torch.cat([e, hidden], -1))[0].detach()
    layer = "falcon.layers.0"
    value = x @ w[f"{layer}.self_attn.v_proj.weight"].T
    shared = value.reshape(32, 1, 2, 1, 8).expand(32, 1, 2, 2, 8).reshape(32, 1, H)
    x = x + shared @ w[f"{layer}.self_attn.o_proj.weight"].T
    n = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gate = torch.nn.functional.silu(n @ w[f"{layer}.mlp.gate_proj.weight"].T)
    x = x + (gate * (n @ w[f"{layer}.mlp.up_proj.weight"].T)) @ w[f"{layer}.mlp.down_proj.weight"].T
    torch.testing.assert_close(found["hidden"], x, atol=1e-4, rtol=1e-4)
    head = program.weights["head"].load()
    torch.testing.assert_close(found["draft_logits"], x @ head.T, atol=1e-3, rtol=1e-4)


def test_blocks_see_themselves_and_what_precedes_them() -> None:
    """Blocks of two; the text begins in the middle of one."""
    wanted = [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert by_blocks(torch.tensor([1, 0, 1, 0, 1])).int().tolist() == wanted


def test_as_much_is_shown_as_is_wrong() -> None:
    places = torch.arange(12) % 3
    right = torch.tensor([[True] * 12, [False] * 12, [True] * 6 + [False] * 6])
    shown = glanced(right, places, 0.3, torch.Generator().manual_seed(0))
    assert shown.sum(1).tolist() == [0, 4, 2]  # of four blocks at most
    assert not shown[:, places > 0].any()


def test_the_loss_by_hand() -> None:
    program = made("chain")
    record = program.plan.draft
    assert isinstance(record, SemiAutoregressiveDraft)
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.randint(0, 32, (1, 12), generator=torch.Generator().manual_seed(3))
    outputs = net.outputs("step", ("logits", "hidden.normed"), {"tokens": tokens})
    features = outputs["hidden.normed"]
    batch = Batch(tokens, {"hidden.normed": features}, outputs["logits"])
    fed: list[dict[str, torch.Tensor]] = []

    def noting(function: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        fed.append(inputs)
        return net.run(function, **inputs)

    loss = glancing_loss(replace(record, glance=0.5), noting, batch)
    plain, shown = fed
    given = noisy(features[:, :-1], tokens)
    assert torch.equal(plain["hidden"], given) and torch.equal(plain["tokens"], tokens[:, 1:])
    changed = (shown["hidden"] != given).any(-1)[0].nonzero()[:, 0].tolist()
    assert changed  # both the feature and the token of the place that is predicted there
    for place in changed:
        assert torch.equal(shown["hidden"][0, place], features[0, place + 2])
        assert shown["tokens"][0, place] == tokens[0, place + 3]
    made_ = net.run("falcon", **shown)
    near = torch.nn.functional.smooth_l1_loss(made_["hidden"][:, :10], features[:, 2:])
    chances = made_["draft_logits"][:, :10].log_softmax(-1)
    soft = -(batch.teacher[:, 2:] * chances).sum(-1).mean()
    following = [*tokens[0, 3:].tolist(), int(batch.best[0, -1])]
    hard = -chances[0, torch.arange(10), following].mean()
    wanted = near + 0.1 * (0.9 * soft + 0.1 * hard)
    torch.testing.assert_close(loss.total, wanted, atol=1e-5, rtol=1e-5)
    assert len(loss.hits) == 2


# -- what is refused


def test_blocks_that_are_none() -> None:
    with pytest.raises(Exception, match="greater than or equal to 2"):
        DraftFalcon(block=1)
    with pytest.raises((InputError, PassError), match="levels=2 is less than the block=3"):
        DraftFalcon(levels=2, block=3).run(tiny_llama())


def test_plans_read_back_and_need_trees() -> None:
    program = made("chain")
    assert parse_program(program_text(program)).plan == program.plan
    tree = named("tree_chain", depth=3)
    from graftwork.passes.caching.insert_kv_cache import InsertKvCache
    from graftwork.passes.engine.manager import Step, run_passes

    passes = (DraftFalcon(), InsertKvCache(), tree)
    with pytest.raises(PassError, match="function falcon that takes ancestors"):
        run_passes(tiny_llama(), [Step(each) for each in passes])
    assert np.isfinite(program.plan.draft.levels)
