"""Draft heads compute what their papers say: equations written out in plain torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import drafting_llama, named, tiny_llama

from graftwork.ir import PassError, Program, run
from graftwork.measuring.tables import recipe_markdown, recipe_panel
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_mlp_speculator import DraftMlpSpeculator
from graftwork.passes.drafting.draft_redrafter import DraftRedrafter
from graftwork.passes.drafting.jakiro import AheadDraft
from graftwork.passes.drafting.jakiro.graph import DraftJakiro
from graftwork.passes.drafting.jakiro.objective import ahead_loss
from graftwork.passes.engine.base import Pass
from graftwork.recipe import Recipe
from graftwork.report import render
from graftwork.training.net import Net, trainable
from graftwork.training.objectives.base import Batch
from graftwork.training.objectives.eagle import cached_loss, noisy

H, V = 32, 32
Tensors = dict[str, torch.Tensor]


def random_weights(kind: type[Pass], **options: Any) -> Tensors:
    """What a pass would train, with random values."""
    made = kind(**options).run(tiny_llama()).program
    shapes = {n: made.weights[n].type.shape for n in trainable(made, made.plan.draft)}
    return {n: torch.randn(shape) * shape[-1] ** -0.5 for n, shape in shapes.items()}


def reading(
    kind: type[Pass],
    folder: Path,
    tensors: Tensors,
    named: Callable[[str], str] = str,
    **options: Any,
) -> Program:
    """The program of a pass that reads these weights."""
    file = {named(name): tensor for name, tensor in tensors.items()}
    save_file(file, folder / "model.safetensors")
    return kind(weights=str(folder), **options).run(tiny_llama()).program


def embedded(program: Program, tokens: torch.Tensor) -> torch.Tensor:
    return program.weights["embed"].load()[tokens]


def final_norm(program: Program, x: torch.Tensor) -> torch.Tensor:
    gain = program.weights["norm"].load()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def silu_block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x + torch.nn.functional.silu(x @ weight.T + bias)


# -- MLP speculator


def published(name: str) -> str:
    """A speculator's weight as it is published: by kind, then by level."""
    level, rest = name.removeprefix("speculator_").split(".", 1)
    kinds = {"embedding": "emb", "project": "proj", "norm": "ln", "head": "head"}
    kind, _, leaf = rest.partition(".")
    return f"speculator.{kinds[kind]}.{level}.{leaf or 'weight'}"


def speculated(w: Tensors, levels: int, state: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits of the last level: z <- GELU(norm(a P z + b E x)), a^2 = 0.5^(1/n), b^2 + ..."""
    a = 0.5 ** (0.5 / levels)
    for level, token in enumerate(tokens):
        name = f"speculator_{level}"
        inner = w[f"{name}.project.weight"].shape[0]
        b = math.sqrt((1 - a * a) * inner / 2)
        x = a * (w[f"{name}.project.weight"] @ state) + b * w[f"{name}.embedding"][token]
        x = x / (x.square().mean() + 1e-6 * a * a).sqrt()
        x = x * w[f"{name}.norm.weight"] + w[f"{name}.norm.bias"]
        state = torch.nn.functional.gelu(x)
    return w[f"{name}.head.weight"] @ state


@pytest.mark.parametrize("named", [str, published], ids=["ours", "published"])
def test_an_mlp_speculator_is_the_published_one(
    named: Callable[[str], str], tmp_path: Path
) -> None:
    options = {"levels": 3, "inner": 12}
    w = random_weights(DraftMlpSpeculator, **options)
    program = reading(DraftMlpSpeculator, tmp_path, w, named, **options)
    hidden, tokens = torch.randn(H), [5, 9, 2]
    state = hidden[None, None]
    for level, token in enumerate(tokens):
        given = {"tokens": torch.tensor([[token]]), "state": state}
        outputs = run(program, f"speculator_{level}", given)
        state = outputs["state"]
        wanted = speculated(w, 3, final_norm(program, hidden), tokens[: level + 1])
        torch.testing.assert_close(outputs["draft_logits"][0, 0], wanted, atol=1e-4, rtol=1e-4)


def test_a_speculators_norm_keeps_the_mean(tmp_path: Path) -> None:
    """By hand: a state of (3, 4), whose root mean square is 3.5355, and a token that says nothing:
    GELU(0.8485) = 0.6805, GELU(1.1314) = 0.9854."""
    w = random_weights(DraftMlpSpeculator, levels=1, inner=2)
    w = {n: torch.zeros_like(t) for n, t in w.items()}
    w["speculator_0.norm.weight"] += 1
    w["speculator_0.project.weight"][0, 0], w["speculator_0.project.weight"][1, 1] = 3.0, 4.0
    program = reading(DraftMlpSpeculator, tmp_path, w, levels=1, inner=2)
    program = program.replace(weights=program.weights.replacing(_constant(program)))
    state = torch.zeros(1, 1, H)
    state[..., :2] = 1.0
    given = {"tokens": torch.tensor([[1]]), "state": state}
    found = run(program, "speculator_0", given)["state"][0, 0]
    torch.testing.assert_close(found, torch.tensor([0.6805, 0.9854]), atol=2e-4, rtol=0)


def _constant(program: Program) -> Any:
    """The final norm's gains, so that a state of two ones and zeros comes out of it as it is."""
    from graftwork.ir import Weight

    return Weight.of("norm", torch.full((H,), (2 / H) ** 0.5))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_predict": 4}, "says n_predict=4, expected 3"),
        ({"scale_input": True}, "says scale_input=True, expected False"),
        ({"tie_weights": True}, "says tie_weights=True, expected False"),
    ],
)
def test_a_speculator_of_another_kind_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    w = random_weights(DraftMlpSpeculator, inner=12)
    with pytest.raises(PassError, match=message):
        reading(DraftMlpSpeculator, tmp_path, w, published, inner=12)


# -- ReDrafter


def test_a_recurrent_drafter_is_the_papers(tmp_path: Path) -> None:
    """s <- SiLU(W e + U s + b), s_0 = 0; [h; s] through x + SiLU(Linear) twice, then 2H -> V."""
    w = random_weights(DraftRedrafter)
    assert w["redrafter.head.weight"].shape == (V, 2 * H)
    assert set(w) == {
        "redrafter.in.weight",
        "redrafter.in.bias",
        "redrafter.state.weight",
        "redrafter.head.weight",
        *(f"redrafter.{n}.linear.{leaf}" for n in range(2) for leaf in ("weight", "bias")),
    }
    program = reading(DraftRedrafter, tmp_path, w)
    hidden, tokens = torch.randn(H), [5, 9, 2]
    h, s, state = final_norm(program, hidden), torch.zeros(H), hidden[None, None]
    for level, token in enumerate(tokens):
        given = {"tokens": torch.tensor([[token]]), "state": state}
        outputs = run(program, "redrafter" if level else "redrafter_0", given)
        state = outputs["state"]
        e = embedded(program, torch.tensor(token))
        s = w["redrafter.in.weight"] @ e + w["redrafter.in.bias"] + w["redrafter.state.weight"] @ s
        s = torch.nn.functional.silu(s)
        x = torch.cat([h, s])
        for n in range(2):
            name = f"redrafter.{n}.linear"
            x = silu_block(x, w[f"{name}.weight"], w[f"{name}.bias"])
        wanted = w["redrafter.head.weight"] @ x
        torch.testing.assert_close(outputs["draft_logits"][0, 0], wanted, atol=1e-4, rtol=1e-4)


def test_an_untrained_recurrent_drafter_says_what_the_target_says_of_h() -> None:
    program = DraftRedrafter().run(tiny_llama()).program
    hidden = torch.randn(H)
    given = {"tokens": torch.tensor([[3]]), "state": hidden[None, None]}
    found = run(program, "redrafter_0", given)["draft_logits"][0, 0]
    wanted = program.weights["head"].load() @ final_norm(program, hidden)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


# -- Jakiro


def gated(x: torch.Tensor, w: Tensors, name: str) -> torch.Tensor:
    """down(SiLU(gate x) * up x)."""
    gate, up = (x @ w[f"{name}.{kind}_proj.weight"].T for kind in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ w[f"{name}.down_proj.weight"].T


def test_experts_agree_on_the_next_token_and_differ_about_the_one_after(tmp_path: Path) -> None:
    """Of a text of one token attention is its value, so all can be written out."""
    w = random_weights(DraftJakiro, inner=6)
    name = "jakiro.layers.0"
    assert w[f"{name}.mlp_moe.gate.weight"].shape == (4, H)
    assert w[f"{name}.mlp_moe.experts.1.gate_proj.weight"].shape == (6, H)
    gain = 1 + torch.randn(H) / 2
    w[f"{name}.post_attention_layernorm.weight"] = gain
    w[f"{name}.mlp_moe.gate.weight"] *= 3
    program = reading(DraftJakiro, tmp_path, w, inner=6)
    batch = torch.tensor([[token] for token in range(V)])
    hidden = torch.randn(V, 1, H)
    zeros = torch.zeros(V, 1, dtype=torch.int64)
    given = {"tokens": batch, "positions": zeros, "hidden": hidden, "select": zeros}
    found = run(program, "jakiro", given)
    x = torch.cat([embedded(program, batch), hidden], -1) @ w["jakiro.fc.weight"].T
    x = x + w["jakiro.fc.bias"]
    value = x @ w[f"{name}.self_attn.v_proj.weight"].T
    # Two heads of the target's four share each value.
    shared = value.reshape(V, 1, 2, 1, 8).expand(V, 1, 2, 2, 8).reshape(V, 1, H)
    x = x + shared @ w[f"{name}.self_attn.o_proj.weight"].T
    n = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain
    gate = n @ w[f"{name}.mlp_moe.gate.weight"].T
    experts = [gated(n, w, f"{name}.mlp_moe.experts.{e}") for e in range(2)]
    p, q = gate[..., :2].softmax(-1), gate[..., 2:].softmax(-1)
    state = x + p[..., :1] * experts[0] + p[..., 1:] * experts[1]
    torch.testing.assert_close(found["hidden"], state, atol=1e-4, rtol=1e-4)
    likelier = q.argmax(-1)
    assert set(likelier.flatten().tolist()) == {0, 1}  # both orders occur
    ahead = x.clone()
    for row in range(V):
        i = int(likelier[row])
        ahead[row] += q[row, :, i] * experts[i][row] - q[row, :, 1 - i] * experts[1 - i][row]
    torch.testing.assert_close(found["ahead"], ahead, atol=1e-4, rtol=1e-4)
    head = program.weights["head"].load()
    torch.testing.assert_close(found["draft_logits"], state @ head.T, atol=1e-3, rtol=1e-4)
    later = run(program, "jakiro_ahead", {"hidden": ahead})["draft_logits"]
    torch.testing.assert_close(later[:, :, 0], ahead @ head.T, atol=1e-3, rtol=1e-4)


def test_both_states_learn_the_features_and_tokens_of_their_places(tmp_path: Path) -> None:
    """SmoothL1 + 0.1 cross entropy of the next place, and half of that a place on."""
    w = random_weights(DraftJakiro, inner=6)
    save_file(w, tmp_path / "model.safetensors")
    tree = named("tree_chain", depth=3)
    program = drafting_llama(DraftJakiro(levels=3, inner=6, weights=str(tmp_path)), tree)
    record = program.plan.draft
    assert isinstance(record, AheadDraft) and record.first.output is not None
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    outputs = net.outputs("step", ("logits", record.first.output), {"tokens": tokens})
    features = outputs[record.first.output]
    batch = Batch(tokens, {record.first.output: features}, outputs["logits"])
    loss = ahead_loss(replace(record, noise=False), net.run, batch)
    made = net.run("jakiro", tokens=tokens[:, 1:], hidden=features[:, :-1])
    wanted, head = torch.zeros(()), program.weights["head"].load()
    for place, name, weight in ((1, "hidden", 1.0), (2, "ahead", 0.5)):
        states = made[name][:, : tokens.shape[1] - place]
        near = torch.nn.functional.smooth_l1_loss(states, features[:, place:])
        chances = (states @ head.T).log_softmax(-1)
        entropy = -(batch.teacher[:, place:] * chances).sum(-1).mean()
        wanted = wanted + weight * (near + 0.1 * entropy)
    torch.testing.assert_close(loss.total, wanted, atol=1e-4, rtol=1e-4)
    assert len(loss.hits) == 2


def test_a_token_samples_a_feature_and_two_states_leave_the_layer(tmp_path: Path) -> None:
    """FSPAD's equations: z = fc([e; h]), x = z + down(silu(gate e) * up norm(z)); after attention
    the MLP's halves make what the head reads, and the feature of the next level."""
    options: dict[str, Any] = {"sampled": True, "apart": True, "inner": 6}
    w = random_weights(DraftEagle, **options)
    layer, fc = "eagle.layers.0", "eagle.fc"
    assert w[f"{layer}.mlp.down_proj.weight"].shape == (2 * H, 6)
    gains = [f"{fc}.post_attention_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
    w |= {gain: 1 + torch.randn(H) / 2 for gain in gains}
    program = reading(DraftEagle, tmp_path, w, lambda name: name.removeprefix("eagle."), **options)
    batch = torch.tensor([[token] for token in range(V)])
    hidden, zeros = torch.randn(V, 1, H), torch.zeros(V, 1, dtype=torch.int64)
    given = {"tokens": batch, "positions": zeros, "hidden": hidden, "select": zeros}
    found = run(program, "eagle", given)

    def normed(x: torch.Tensor, gain: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[gain]

    e = embedded(program, batch)
    z = torch.cat([e, hidden], -1) @ w[f"{fc}.fc.weight"].T + w[f"{fc}.fc.bias"]
    gate = torch.nn.functional.silu(e @ w[f"{fc}.mlp.gate_proj.weight"].T)
    up = normed(z, gains[0]) @ w[f"{fc}.mlp.up_proj.weight"].T
    x = z + (gate * up) @ w[f"{fc}.mlp.down_proj.weight"].T
    value = x @ w[f"{layer}.self_attn.v_proj.weight"].T
    shared = value.reshape(V, 1, 2, 1, 8).expand(V, 1, 2, 2, 8).reshape(V, 1, H)
    x = x + shared @ w[f"{layer}.self_attn.o_proj.weight"].T
    both = gated(normed(x, gains[1]), w, f"{layer}.mlp")
    read, feature = x + both[..., :H], x + both[..., H:]
    torch.testing.assert_close(found["hidden"], feature, atol=1e-4, rtol=1e-4)
    wanted = read @ program.weights["head"].load().T
    torch.testing.assert_close(found["draft_logits"], wanted, atol=1e-3, rtol=1e-4)


def test_features_and_tokens_are_learned_of_states_apart(tmp_path: Path) -> None:
    """Partial alignment: SmoothL1 of the one state, 0.1 times the cross entropy of the other."""
    made = drafting_llama(DraftEagle(sampled=True, apart=True), named("tree_chain", depth=2))
    record, net = made.plan.draft, Net(made, [], torch.device("cpu"))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    outputs = net.outputs("step", ("logits", "hidden.normed"), {"tokens": tokens})
    features = outputs["hidden.normed"]
    batch = Batch(tokens, {"hidden.normed": features}, outputs["logits"])
    loss = cached_loss(record, net.run, batch)  # type: ignore[arg-type]
    given = noisy(features[:, :-1], tokens)
    said = net.run("eagle", tokens=tokens[:, 1:], hidden=given)
    near = torch.nn.functional.smooth_l1_loss(said["hidden"], features[:, 1:])
    chances = said["draft_logits"].log_softmax(-1)
    entropy = -(batch.teacher[:, 1:] * chances).sum(-1).mean()
    torch.testing.assert_close(loss.total, near + 0.1 * entropy, atol=1e-5, rtol=1e-5)
    head = made.weights["head"].load()
    assert not torch.allclose(said["hidden"] @ head.T, said["draft_logits"], atol=1e-2)


def test_states_apart_need_an_mlp() -> None:
    for option in ("sampled", "apart"):
        with pytest.raises(PassError, match="inner=0 leaves no MLP"):
            DraftEagle(inner=0, **{option: True}).run(tiny_llama())


# -- what training asks for


def test_aims_by_hand() -> None:
    """Three tokens of four; the target's own token stands behind the text's last one."""
    logits = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8]]]).log()
    batch = Batch(torch.tensor([[1, 0, 1]]), {}, logits)
    rows = {
        "distribution": [[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8]],
        "text": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        "both": [[0.8, 0.15, 0.05], [0.1, 0.85, 0.05], [0.05, 0.05, 0.9]],
    }
    for aim, wanted in rows.items():
        torch.testing.assert_close(batch.target(aim), torch.tensor([wanted]))  # type: ignore[arg-type]


PAPERS = {
    "distribution": """clover gumiho ppd jakiro kangaroo hydra_plus_plus eagle eagle2 eagle3
        eagle_chain fspad falcon mixture_of_attentions hidden_transfer chimera""",
    "text": """layerskip eesd amphista redrafter mlp_speculator s3d medusa hydra blockwise dflash
        pard p_eagle mtp glide clover1""",
}


@pytest.mark.parametrize(
    ("name", "aim"), [(name, aim) for aim, names in PAPERS.items() for name in names.split()]
)
def test_recipes_train_for_what_their_papers_do(name: str, aim: str) -> None:
    """The pass's default, or what the recipe says where papers share a pass."""
    passes = [step.pass_ for step in Recipe.load(name).steps]
    aims = [pass_.aim for pass_ in passes if hasattr(pass_, "aim")]
    # Of a layer that learns to read masks, what that asks is what counts.
    assert aims[-1] == aim
    assert "in equal parts" not in Recipe.load(name).differs


def test_trees_are_as_deep_as_their_papers() -> None:
    """EAGLE-2 draws six levels, EAGLE-3 eight, Gumiho two and five of heads."""
    for name, levels in {"eagle2": 6, "fspad": 6, "eagle3": 8, "gumiho": 7, "jakiro": 6}.items():
        passes = [step.pass_ for step in Recipe.load(name).steps]
        (drafter,) = (pass_ for pass_ in passes if pass_.name.startswith("draft_"))
        (tree,) = (pass_ for pass_ in passes if pass_.name == "tree_best_first")
        drafted = getattr(drafter, "levels", None) or drafter.serial + drafter.heads
        assert drafted == tree.depth == levels


def test_levels_weigh_what_their_papers_say() -> None:
    """The published training adds all levels up; Clover's weigh 0.7^i, Medusa's 0.8^i."""
    weights = {"redrafter": 1.0, "mlp_speculator": 1.0, "hydra": 1.0, "hydra_plus_plus": 1.0}
    weights |= {"clover1": 1.0, "chimera": 1.0, "clover": 0.7}
    weights |= {"medusa": 0.8, "ppd": 0.8, "gumiho": 0.8, "eagle3": 0.8}
    for name, decay in weights.items():
        (found,) = (step.pass_ for step in Recipe.load(name).steps if hasattr(step.pass_, "decay"))
        assert found.decay == decay


# -- what recipes say of their sources


def test_recipes_cite_what_they_build_and_say_where_they_differ() -> None:
    assert "Clover-2" in Recipe.load("clover").paper
    assert "LLM.int8" not in Recipe.load("int8").paper
    assert "EMQ" not in Recipe.load("mixed_precision").paper
    for name, words in (
        ("adakv", "the largest of 7"),
        ("awq", "AutoAWQ"),
        ("calm", "a tenth that falls"),
        ("medusa_typical", "its best token alone"),
        ("contrastive", "first token"),
        ("free", "0.4 in the paper"),
        ("h2o", "by their mean attention"),
        ("kvquant", "half precision"),
        ("olive", "groups of 32 share a scale"),
        ("snapkv", "rounded to 1/1024"),
        ("tidaldecode", "rounded to 1/1024"),
        ("unified_skipping", "tunes one for each speed-up"),
        ("redrafter", "beam"),
        ("gumiho", "full tree attention"),
        ("int8", "a scale for 32 values"),
    ):
        recipe = Recipe.load(name)
        assert words in recipe.differs
        assert Recipe.load(recipe.as_dict()).differs == recipe.differs
        assert f"differs: {recipe.differs[:30]}" in render(recipe_panel(recipe), 200)
        assert f"; differs: {recipe.differs} |" in recipe_markdown([recipe])
    assert "heads that share keys" not in Recipe.load("shadowkv").differs  # the paper's own choice
    for name in ("tidaldecode", "double_sparsity"):
        assert "heads that share keys pick together" in Recipe.load(name).differs
    assert Recipe.load("baseline").differs == ""
