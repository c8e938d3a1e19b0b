"""Drafts as others publish them: what fits is read and written, what does not is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import whole
from safetensors.torch import load_file, save_file
from test_runtime_cached import CHAIN, drafting
from tiny import tiny_llama

from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program
from graftwork.model import Model
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_eagle3 import DraftEagle3
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.jakiro.graph import DraftJakiro
from graftwork.passes.engine.manager import Step, run_passes

HIDDEN, HEADS, GROUPS, DIM, INNER, VOCAB = 32, 4, 2, 8, 64, 32
IDS = torch.tensor([1, 3, 4, 6, 9])
Tensors = dict[str, torch.Tensor]


def target() -> Program:
    """Deep enough for three layers to read: 2, 3 and 4."""
    return tiny_llama(7)


def layer(prefix: str, inputs: int) -> Tensors:
    """A llama layer's weights with the target's shapes, random."""
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, inputs),
        "self_attn.k_proj": (GROUPS * DIM, inputs),
        "self_attn.v_proj": (GROUPS * DIM, inputs),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    found = {n: torch.randn(s) * s[1] ** -0.5 for n, s in shapes.items()}
    found["post_attention_layernorm"] = torch.rand(HIDDEN) + 0.5
    return {f"{prefix}{name}.weight": tensor for name, tensor in found.items()}


def eagle() -> Tensors:
    """EAGLE-1 as published: an embedding table, fc without bias, a layer without input norm."""
    embed = target().weights["embed"].load()
    fc = torch.randn(HIDDEN, 2 * HIDDEN)
    return {"embed_tokens.weight": embed, "fc.weight": fc, **layer("layers.0.", HIDDEN)}


def jakiro() -> Tensors:
    """Jakiro as published: EAGLE's layer with experts in the MLP's place, and fc with bias."""
    found = {n: t for n, t in eagle().items() if ".mlp." not in n}
    parts = {f"experts.{e}.{kind}_proj" for e in range(2) for kind in ("gate", "up", "down")}
    shapes = {**dict.fromkeys(parts, HIDDEN), "gate": 4}
    experts = {
        f"layers.0.mlp_moe.{name}.weight": torch.randn(rows, HIDDEN) * HIDDEN**-0.5
        for name, rows in shapes.items()
    }
    return {**found, **experts, "fc.bias": torch.randn(HIDDEN)}


def eagle3(name: str = "midlayer.") -> Tensors:
    """EAGLE-3 as published: a draft vocabulary, and no embedding table."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)
    norms = {f"{name}{n}.weight": torch.rand(HIDDEN) for n in ("hidden_norm", "input_layernorm")}
    return {
        "d2t": IDS - torch.arange(5),
        "t2d": t2d,
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) * 0.1,
        **layer(name, 2 * HIDDEN),
        **norms,
        "norm.weight": torch.rand(HIDDEN),
        "lm_head.weight": torch.randn(5, HIDDEN),
    }


def hydra() -> Tensors:
    """Hydra++ as published, with two heads of two blocks."""
    tensors = {f"prefix_embeding_layer.{n}": t for n, t in layer("layers.0.", HIDDEN).items()}
    tensors["prefix_embeding_layer.layers.0.input_layernorm.weight"] = torch.rand(HIDDEN)
    tensors["prefix_embeding_layer.norm.weight"] = torch.rand(HIDDEN)
    tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.rand(VOCAB, HIDDEN)
    for head in range(2):
        shapes = {
            f"hydra_mlp.{head}.1.linear": (HIDDEN, HIDDEN * (head + 2)),
            f"hydra_mlp.{head}.1.res_connection": (HIDDEN, HIDDEN * (head + 2)),
            f"hydra_mlp.{head}.3.linear": (HIDDEN, HIDDEN),
            f"hydra_lm_head.{head}.1": (VOCAB, HIDDEN),
        }
        for name, shape in shapes.items():
            tensors[f"{name}.weight"] = torch.randn(shape)
            tensors[f"{name}.bias"] = torch.randn(shape[0])
    return tensors


def read(make: Any, folder: Path, tensors: Tensors, **options: Any) -> Program:
    """A program whose draft pass reads a folder with these tensors."""
    save_file(tensors, folder / "model.safetensors")
    return run_passes(target(), [Step(make(weights=str(folder), **options))])[0]


READS: list[tuple[Any, Callable[[], Tensors], dict[str, Any], dict[str, str]]] = [
    (
        DraftEagle,
        eagle,
        {"bias": False},
        {
            "eagle.fc.weight": "fc.weight",
            "eagle.layers.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
        },
    ),
    (
        DraftJakiro,
        jakiro,
        {},
        {
            "jakiro.fc.bias": "fc.bias",
            "jakiro.layers.0.mlp_moe.gate.weight": "layers.0.mlp_moe.gate.weight",
            "jakiro.layers.0.mlp_moe.experts.1.down_proj.weight": (
                "layers.0.mlp_moe.experts.1.down_proj.weight"
            ),
        },
    ),
    (
        DraftEagle3,
        eagle3,
        {},
        {
            "eagle3.lm_head.weight": "lm_head.weight",
            "eagle3.midlayer.hidden_norm.weight": "midlayer.hidden_norm.weight",
        },
    ),
    (
        DraftHydra,
        hydra,
        {"heads": 2, "prefix": True, "bias": True},
        {
            "hydra.prefix.mlp.up_proj.weight": "prefix_embeding_layer.layers.0.mlp.up_proj.weight",
            "hydra.1.skip.weight": "hydra_mlp.1.1.res_connection.weight",
            "hydra.1.0.linear.bias": "hydra_mlp.1.3.linear.bias",
            "hydra.1.head.bias": "hydra_lm_head.1.1.bias",
        },
    ),
]


@pytest.mark.parametrize(("make", "tensors", "options", "named"), READS)
def test_published_layouts_are_read(
    make: Any, tensors: Any, options: Any, named: dict[str, str], tmp_path: Path
) -> None:
    given = tensors()
    program = read(make, tmp_path, given, **options)
    assert program.plan.draft.trained
    for ours, theirs in named.items():
        assert torch.equal(program.weights[ours].load(), given[theirs])


def without(tensors: Tensors, name: str) -> Tensors:
    return {n: t for n, t in tensors.items() if n != name}


REFUSED: list[tuple[Any, Callable[[], Tensors], dict[str, Any], str]] = [
    (DraftEagle, eagle, {}, r"has no 'eagle\.fc\.bias'"),
    (
        DraftEagle,
        lambda: {**eagle(), "fc.bias": torch.zeros(HIDDEN)},
        {"bias": False},
        r"has 'fc\.bias' as f32\[32\], for which these options have no place",
    ),
    (
        DraftEagle,
        lambda: {**eagle(), "embed_tokens.weight": torch.randn(40, HIDDEN)},
        {"bias": False},
        r"embed_tokens\.weight as f32\[40,32\], expected f32\[32,32\]",
    ),
    (
        DraftEagle,
        lambda: {**eagle(), "embed_tokens.weight": torch.randn(VOCAB, HIDDEN)},
        {"bias": False},
        "embedding table embed_tokens.weight other than the model's",
    ),
    (
        DraftEagle3,
        lambda: {**eagle3(), "midlayer.mlp.up_proj.weight": torch.zeros(48, HIDDEN)},
        {},
        r"eagle3\.midlayer\.mlp\.up_proj\.weight as f32\[48,32\], expected f32\[64,32\]",
    ),
    (DraftEagle3, lambda: without(eagle3(), "norm.weight"), {}, r"has no 'eagle3\.norm\.weight'"),
    (DraftEagle3, lambda: {**eagle3(), "d2t": IDS[:4]}, {}, "contradicts its d2t"),
    (DraftEagle3, lambda: {**eagle3(), "d2t": IDS + 30}, {}, r"expected rising ids within 0\.\.31"),
    (
        DraftEagle3,
        lambda: {**eagle3(), "t2d": torch.ones(VOCAB, dtype=torch.bool)},
        {},
        r"a t2d \[32\] that contradicts its d2t",
    ),
    (
        DraftEagle3,
        lambda: without(eagle3(), "d2t"),
        {},
        r"lm_head\.weight as f32\[5,32\], expected",
    ),
    (DraftHydra, hydra, {"heads": 2, "prefix": True}, r"has 'hydra_lm_head\.0\.1\.bias'"),
    (DraftHydra, hydra, {"heads": 2, "bias": True}, r"has 'prefix_embeding_layer\.layers\.0\."),
]


@pytest.mark.parametrize(("make", "tensors", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    make: Any, tensors: Any, options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PassError, match=message):
        read(make, tmp_path, tensors(), **options)


def test_pickles_are_refused_and_conversion_explained(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(
            PassError, match=r"pickle.*save_file.*torch\.load\('pytorch_model\.bin'"
        ):
            DraftEagle3(weights=str(path)).run(target())


def test_a_config_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    config = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PassError, match="says norm_before_residual=True, expected False"):
        read(DraftEagle3, tmp_path, eagle3("layers.0."))
    assert read(DraftEagle3, tmp_path, eagle3("layers.0."), norm_before_residual=True)
    (tmp_path / "config.json").write_text(json.dumps(config | {"fc_norm": True}))
    with pytest.raises(PassError, match="says fc_norm=True, expected False"):
        read(DraftEagle3, tmp_path, eagle3("layers.0."), norm_before_residual=True)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(
        PassError, match=r"config\.json is no configuration: expected a JSON object"
    ):
        read(DraftEagle3, tmp_path, eagle3("layers.0."))


# -- EAGLE-3 by its paper, in plain torch


def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def by_hand(w: Tensors, embedded: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Draft logits [T,5] from embeddings [T,H] of tokens and the features before them [T,3H]."""
    width, own = len(embedded), {n.removeprefix("midlayer."): t for n, t in w.items()}
    h = taps @ w["fc.weight"].T
    e, n = rms(embedded, own["input_layernorm.weight"]), rms(h, own["hidden_norm.weight"])
    x = torch.cat([e, n], -1)
    angle = torch.arange(width)[:, None] * 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))

    def heads(kind: str) -> torch.Tensor:
        return (x @ own[f"self_attn.{kind}_proj.weight"].T).view(width, -1, DIM).transpose(0, 1)

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat([-second, first], -1) * sin

    q, k = turned(heads("q")), turned(heads("k")).repeat_interleave(HEADS // GROUPS, 0)
    v = heads("v").repeat_interleave(HEADS // GROUPS, 0)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + y.transpose(0, 1).reshape(width, -1) @ own["self_attn.o_proj.weight"].T
    n = rms(h, own["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(n @ own["mlp.gate_proj.weight"].T)
    h = h + (gate * (n @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return rms(h, w["norm.weight"]) @ w["lm_head.weight"].T


def test_a_published_draft_computes_what_its_paper_says(tmp_path: Path) -> None:
    given = eagle3()
    program = read(DraftEagle3, tmp_path, given)
    tokens, taps = [5, 6, 7, 3, 1], torch.randn(1, 5, 3 * HIDDEN)
    states = whole(program, "eagle3_entry", tokens, hidden=taps)["hidden"]
    found = whole(program, "eagle3", tokens, hidden=states)
    wanted = by_hand(given, program.weights["embed"].load()[tokens], taps[0])
    torch.testing.assert_close(found["draft_logits"][0][:, IDS], wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["draft_tokens"][0, :, 0], IDS[wanted.argmax(-1)])


# -- export


def exported(folder: Path, **options: Any) -> Path:
    save_file(eagle3(), folder / "model.safetensors")
    program = drafting(DraftEagle3(weights=str(folder), **options), CHAIN, target())
    model = Model(program, Target("eager", "cpu"), {})
    return model.export_speculators(folder / "out", str(folder / "target"))


def test_speculators_folder(tmp_path: Path) -> None:
    folder = exported(tmp_path, norm_before_residual=True, levels=4)
    given, tensors = eagle3(), load_file(folder / "model.safetensors")
    assert {n.replace("midlayer", "layers.0") for n in given} | {"embed_tokens.weight"} == set(
        tensors
    )
    kept = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["layers.0.mlp.up_proj.weight"], kept["midlayer.mlp.up_proj.weight"])
    assert torch.equal(tensors["d2t"], kept["d2t"]) and torch.equal(tensors["t2d"], kept["t2d"])
    config = json.loads((folder / "config.json").read_text())
    assert config["norm_before_residual"] is True and config["draft_vocab_size"] == 5
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    shown = config["transformer_layer_config"]
    assert (shown["rope_theta"], shown["head_dim"], shown["num_key_value_heads"]) == (100, 8, 2)
    assert (shown["intermediate_size"], shown["vocab_size"]) == (INNER, VOCAB)
    # What was written is read again.
    again = DraftEagle3(weights=str(folder), norm_before_residual=True).run(target()).program
    ours = again.weights["eagle3.midlayer.mlp.up_proj.weight"].load()
    assert torch.equal(ours, kept["midlayer.mlp.up_proj.weight"])


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    for draft, message in (
        (DraftEagle3(), "untrained"),
        (DraftEagle(), "expected an EAGLE-3 draft"),
        (DraftHydra(), "EAGLE-3 drafts are cached"),
    ):
        model = Model(drafting(draft, CHAIN), Target("eager", "cpu"), {})
        with pytest.raises(InputError, match=message):
            model.export_speculators(tmp_path / "no")


@pytest.mark.parametrize("normed", [False, True])
def test_the_speculators_library_computes_the_same(tmp_path: Path, normed: bool) -> None:
    """The folder loads there, and its layer gives our logits."""
    library = pytest.importorskip("speculators", reason="speculators is not installed")
    folder = exported(tmp_path, norm_before_residual=normed)
    verifier = tmp_path / "target"
    verifier.mkdir()
    shown = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    (verifier / "config.json").write_text(json.dumps(shown | {"num_hidden_layers": 7}))
    names = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
    own = {f"{n}.weight": target().weights[w].load() for n, w in names.items()}
    save_file(own, verifier / "model.safetensors")
    theirs = library.SpeculatorModel.from_pretrained(str(folder))
    assert theirs.config.norm_before_residual is normed
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    tokens, taps = torch.tensor([[5, 6, 7, 3, 1]]), torch.randn(1, 5, 3 * HIDDEN)
    mask = torch.full((1, 1, 5, 5), -1e9).triu(1)
    with torch.no_grad():
        states = theirs.fc(taps)
        angles = theirs.rotary_emb(states, torch.arange(5)[None])
        both = torch.cat([theirs.embed_tokens(tokens), states], -1)
        x = theirs.layers[0](both, attention_mask=mask, position_embeddings=angles)
        wanted = theirs.lm_head(theirs.norm(x))
    program = read(
        DraftEagle3,
        tmp_path,
        load_file(tmp_path / "model.safetensors"),
        norm_before_residual=normed,
    )
    states = whole(program, "eagle3_entry", tokens[0].tolist(), hidden=taps)["hidden"]
    found = whole(program, "eagle3", tokens[0].tolist(), hidden=states)["draft_logits"]
    torch.testing.assert_close(found[..., IDS], wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(theirs.d2t + torch.arange(5), IDS)
