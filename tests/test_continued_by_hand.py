"""Drafters of two parts compute and learn what their papers say: Gumiho and Clover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_methods_by_hand import H, Tensors, V, embedded, random_weights, reading, silu_block
from test_runtime_continued import RecordedContinued, compiled, expected
from tiny import MASK, PROMPTS, drafting_llama, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, run
from graftwork.ir.plan import ContinuedDraft
from graftwork.passes.drafting.draft_clover import DraftClover
from graftwork.passes.drafting.gumiho.graph import DraftGumiho
from graftwork.passes.engine.base import Pass
from graftwork.runtime.generation import generate
from graftwork.runtime.rounds.general import GeneralRound
from graftwork.runtime.speculate.drafters import grown
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch
from graftwork.training.objectives.continued import continued_loss

# -- Gumiho

GUMIHO = {"serial": 2, "layers": 2, "heads": 2, "blocks": 2}


def test_parallel_heads_see_both_serial_steps(tmp_path: Path) -> None:
    """x = SiLU(W_0 [fc([e_1; h_1]); fc([e_2; h_2])] + b_0), then x + SiLU(W x + b), then the
    target's head; its own state is no part of x."""
    w = random_weights(DraftGumiho, **GUMIHO)
    program = reading(DraftGumiho, tmp_path, w, **GUMIHO)
    tokens, hidden = torch.tensor([[[5, 9], [5, 2]]]), torch.randn(1, 2, 2, H)
    found = run(program, "gumiho_heads", {"tokens": tokens, "hidden": hidden})
    e = embedded(program, tokens)
    steps = torch.cat([e, hidden], -1) @ w["gumiho.fc.weight"].T + w["gumiho.fc.bias"]
    for head in range(2):
        kinds = {
            leaf: [w[f"gumiho.mlp.{head}.{n}.linear.{leaf}"] for n in range(3)]
            for leaf in ("weight", "bias")
        }
        assert kinds["weight"][0].shape == (H, 2 * H)
        x = steps.flatten(2) @ kinds["weight"][0].T + kinds["bias"][0]
        x = torch.nn.functional.silu(x)
        for block in (1, 2):
            x = silu_block(x, kinds["weight"][block], kinds["bias"][block])
        torch.testing.assert_close(found["feature"][:, :, head], x, atol=1e-4, rtol=1e-4)
        wanted = x @ program.weights["head"].load().T
        torch.testing.assert_close(found["draft_logits"][:, :, head], wanted, atol=1e-4, rtol=1e-4)


def test_gumiho_is_what_was_published() -> None:
    """Five heads of six blocks behind two layers, of which the second norms what it reads."""
    program = DraftGumiho().run(tiny_llama()).program
    shapes = {n: w.type.shape for n, w in program.weights.items() if n.startswith("gumiho.")}
    heads = {n for n in shapes if n.startswith("gumiho.mlp.") and n.endswith(".weight")}
    assert heads == {f"gumiho.mlp.{i}.{j}.linear.weight" for i in range(5) for j in range(6)}
    assert "gumiho.layers.1.input_layernorm.weight" in shapes
    assert "gumiho.layers.0.input_layernorm.weight" not in shapes


def test_published_gumiho_weights_are_read(tmp_path: Path) -> None:
    """Names as published: without our first part, and the target's table beside them."""
    w = random_weights(DraftGumiho)
    file = {name.removeprefix("gumiho."): tensor for name, tensor in w.items()}
    assert {"fc.bias", "layers.1.mlp.up_proj.weight", "mlp.4.5.linear.bias"} <= set(file)
    file["embed_tokens.weight"] = tiny_llama().weights["embed"].load()
    save_file(file, tmp_path / "model.safetensors")
    program = DraftGumiho(weights=str(tmp_path)).run(tiny_llama()).program
    for name, tensor in w.items():
        assert torch.equal(program.weights[name].load(), tensor)
    save_file({**file, "embed_tokens.weight": torch.randn(V, H)}, tmp_path / "model.safetensors")
    with pytest.raises(PassError, match=r"embedding table embed_tokens\.weight other than"):
        DraftGumiho(weights=str(tmp_path)).run(tiny_llama())


def test_siblings_get_continuations_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What follows the two candidates of the last serial level differs, is what the functions say
    of whole sequences, and the text stays the target's."""
    w = random_weights(DraftGumiho, **GUMIHO)
    w["gumiho.fc.weight"][:, :H] *= 30
    w = {n: 2 * t if ".mlp.0." in n or ".mlp.1." in n else t for n, t in w.items()}
    save_file(w, tmp_path / "model.safetensors")
    tree = named("tree_static", paths=((0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0)))
    program = drafting_llama(DraftGumiho(weights=str(tmp_path), **GUMIHO), tree)
    drafts: list[list[int]] = []
    propose = GeneralRound.propose

    def noting(this: GeneralRound) -> Any:
        made = propose(this)
        drafts.extend(list(draft.tokens) for draft in made if len(draft.tokens) == 5)
        return made

    monkeypatch.setattr(GeneralRound, "propose", noting)
    find, found = grown.PROPOSERS.find, {"continued": RecordedContinued}
    monkeypatch.setattr(
        grown.PROPOSERS, "find", lambda record: found.get(record.kind) or find(record)
    )
    RecordedContinued.notes = []
    options = {"max_new_tokens": 20, "eos_token_id": [], "attention_mask": MASK}
    text = generate(compile(program, Target("eager", "cpu")), PROMPTS, **options)
    assert torch.equal(text, generate(compiled("eager"), PROMPTS, **options))
    assert len(drafts) > 20
    assert sum(tokens[3] != tokens[4] for tokens in drafts) > len(drafts) / 4
    deep = [note for note in RecordedContinued.notes if len(note[1]) == 2]
    assert len(deep) > 20
    for said, path, logits in deep[::9]:
        wanted = expected(program, said, path)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=1e-2, rtol=1e-3)


def test_parallel_heads_learn_on_the_states_that_they_are_used_on(tmp_path: Path) -> None:
    """In training, too, they see the states of both levels, the second one the drafter's own."""
    w = random_weights(DraftGumiho, **GUMIHO)
    save_file(w, tmp_path / "model.safetensors")
    tree = named("tree_static", paths=((0,), (0, 0), (0, 0, 0)))
    program = drafting_llama(DraftGumiho(weights=str(tmp_path), **GUMIHO), tree)
    record = program.plan.draft
    assert isinstance(record, ContinuedDraft)
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    outputs = net.outputs("step", ("logits", record.first.output), {"tokens": tokens})
    seen: dict[str, torch.Tensor] = {}

    def noting(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if function == "gumiho_heads":
            seen.update(inputs, **net.run(function, **inputs))
        return net.run(function, **inputs)

    batch = Batch(tokens, {record.first.output: outputs[record.first.output]}, outputs["logits"])
    loss = continued_loss(replace(record, noise=False), noting, batch)
    assert len(loss.hits) == 2 + 2 and bool(loss.total.isfinite())
    text = tokens[0].tolist()
    assert seen["tokens"].tolist() == [[[a, b] for a, b in pairwise(text[2:])]]
    for place in range(5):
        path = tuple(text[place + 2 : place + 4])
        wanted = expected(program, text[: place + 2], path)
        found = seen["draft_logits"][0, place, 0]
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_gumihos_loss_by_hand(tmp_path: Path) -> None:
    """SmoothL1 on what a head reads plus 0.1 times the cross entropy against the target's
    distribution: serial levels at 1 and 0.8, head k at 0.8^(k + 1) / 9."""
    program, batch, net = taught(DraftGumiho, tmp_path, **GUMIHO)
    record = replace(program.plan.draft, noise=False)
    seen: list[Tensors] = []
    loss = continued_loss(record, noting(net, seen), batch)
    # The second call has fed the places of the first one, too.
    count = batch.tokens.shape[1] - 2
    serial = [seen[0]["hidden"], seen[1]["hidden"][:, -count:]]
    heads = list(seen[2]["feature"].unbind(2))
    wanted, head = torch.zeros(()), program.weights["head"].load()
    weights = [1.0, 0.8, 0.8 / 9, 0.8**2 / 9]
    for level, (read, weight) in enumerate(zip([*serial, *heads], weights, strict=True)):
        wanted = wanted + weight * by_level(batch, read, 1 + level, head, token=0.1, feature=1.0)
    torch.testing.assert_close(loss.total, wanted, atol=1e-4, rtol=1e-4)


def taught(kind: type[Pass], folder: Path, **options: Any) -> tuple[Program, Batch, Net]:
    """A program with random weights for a pass, a batch of a text, and what runs its functions."""
    save_file(random_weights(kind, **options), folder / "model.safetensors")
    tree = named("tree_chain", depth=2)
    program = drafting_llama(kind(weights=str(folder), **options), tree)
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    taps = [name for name in program.step.outputs if name.startswith("hidden")]
    outputs = net.outputs("step", ("logits", *taps), {"tokens": tokens})
    return program, Batch(tokens, {n: outputs[n] for n in taps}, outputs["logits"]), net


def noting(net: Net, seen: list[Tensors]) -> Callable[..., Tensors]:
    def noted(function: str, **inputs: torch.Tensor) -> Tensors:
        seen.append(net.run(function, **inputs))
        return seen[-1]

    return noted


def by_level(
    batch: Batch, read: torch.Tensor, shift: int, head: torch.Tensor, token: float, feature: float
) -> torch.Tensor:
    """A level's loss, of what the target's head reads."""
    wanted = batch.hidden["hidden.normed"][:, shift:]
    read = read[:, : wanted.shape[1]]
    near = torch.nn.functional.smooth_l1_loss(read, wanted)
    chances = (read @ head.T).log_softmax(-1)
    entropy = -(batch.teacher[:, shift:] * chances).sum(-1).mean()
    return feature * near + token * entropy


# -- Clover


def heard(w: Tensors, name: str, x: torch.Tensor, e: torch.Tensor, heads: int) -> torch.Tensor:
    """x and, head by head, v(e) cos(q(norm(x)), k(e))."""
    gain = w[f"{name}.norm.weight"]
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain

    def split(kind: str, source: torch.Tensor) -> torch.Tensor:
        y = source @ w[f"{name}.{kind}.weight"].T + w[f"{name}.{kind}.bias"]
        return y.unflatten(-1, (heads, -1))

    q, k, v = split("q", normed), split("k", e), split("v", e)
    gate = torch.nn.functional.cosine_similarity(q, k, dim=-1)[..., None]
    return x + (v * gate).flatten(-2)


def test_clovers_later_heads_share_a_block_and_a_projector(tmp_path: Path) -> None:
    """h <- h + v(e) cos(q(norm(h)), k(e)) goes on; norm(W [h; e]) goes to the target's head."""
    w = random_weights(DraftClover, heads=4, layers=1)
    program = reading(DraftClover, tmp_path, w, heads=4, layers=1)
    draft = program.plan.draft
    assert isinstance(draft, ContinuedDraft) and draft.then.functions == ("clover_later",)
    assert draft.then.levels == 3
    state = torch.randn(1, 1, H)
    h = state[0, 0]
    for token in (5, 9, 2):
        given = {"tokens": torch.tensor([[token]]), "state": state}
        found = run(program, "clover_later", given)
        e = embedded(program, torch.tensor(token))
        h = heard(w, "clover.later", h, e, 4)
        torch.testing.assert_close(found["state"][0, 0], h, atol=1e-4, rtol=1e-4)
        x = w["clover.later.projector.weight"] @ torch.cat([h, e])
        x = x + w["clover.later.projector.bias"]
        x = x * (x.square().mean() + 1e-6).rsqrt() * w["clover.head_norm.norm"]
        torch.testing.assert_close(found["feature"][0, 0], x, atol=1e-4, rtol=1e-4)
        wanted = program.weights["head"].load() @ x
        torch.testing.assert_close(found["draft_logits"][0, 0], wanted, atol=1e-4, rtol=1e-4)
        state = found["state"]


def test_clovers_first_head_hands_on_the_state_before_its_projector(tmp_path: Path) -> None:
    """norm(layers(heard)) is the state, norm(P state + b) what the target's head reads."""
    w = random_weights(DraftClover, heads=2, layers=1)
    # Layers that add nothing, so that all can be written out.
    w = {n: t * 0 if ".layers.0." in n and n.endswith((".o", ".down")) else t for n, t in w.items()}
    program = reading(DraftClover, tmp_path, w, heads=2, layers=1)
    hidden, zeros = torch.randn(1, 1, H), torch.zeros(1, 1, dtype=torch.int64)
    given = {"tokens": zeros + 7, "positions": zeros, "hidden": hidden, "select": zeros}
    found = run(program, "clover", given)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[name]

    h = heard(w, "clover.first", hidden[0, 0], embedded(program, torch.tensor(7)), 4)
    state = normed(h, "clover.norm.norm")
    torch.testing.assert_close(found["hidden"][0, 0], state, atol=1e-4, rtol=1e-4)
    x = w["clover.first.projector.weight"] @ state + w["clover.first.projector.bias"]
    x = normed(x, "clover.head_norm.norm")
    wanted = program.weights["head"].load() @ x
    torch.testing.assert_close(found["draft_logits"][0, 0], wanted, atol=1e-4, rtol=1e-4)


def test_clovers_loss_by_hand(tmp_path: Path) -> None:
    """Level i at 0.7^i: the cross entropy against the target's distribution and 10 times the
    SmoothL1 distance of what its head reads from what the target's does."""
    program, batch, net = taught(DraftClover, tmp_path, heads=3, layers=1)
    seen: list[Tensors] = []
    loss = continued_loss(program.plan.draft, noting(net, seen), batch)
    assert len(seen) == 3
    wanted, head = torch.zeros(()), program.weights["head"].load()
    for level, made in enumerate(seen):
        read = by_level(batch, made["feature"], 1 + level, head, token=1.0, feature=10.0)
        wanted = wanted + 0.7**level * read
    torch.testing.assert_close(loss.total, wanted, atol=1e-3, rtol=1e-4)
