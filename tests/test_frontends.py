"""Every architecture in the table imports, and computes what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from archs import ARCHS, REFUSED, Arch, build, imported

from graftwork.frontends import import_model
from graftwork.ir import (
    InputError,
    Program,
    Sym,
    TensorType,
    UnsupportedError,
    run,
    site_of,
    type_of,
)

G = torch.ops.graftwork
TOLERANCE = 1e-4
"""Largest difference of float32 logits, as a share of their scale."""


def tokens_and_positions(batch: int = 2, tokens: int = 11, first: int = 0) -> Any:
    """Random token ids and consecutive positions, i64[B,T] each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (batch, tokens), generator=generator)
    return ids, torch.arange(first, first + tokens).expand(batch, tokens)


def logits_of(program: Program, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The step's logits in the reference interpreter."""
    return run(program, "step", {"tokens": ids, "positions": positions})["logits"]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the scale of the expected values."""
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", sorted(ARCHS))
def test_architecture(name: str) -> None:
    """Logits, dynamic sizes, one attention a layer, experts, markers and sites."""
    model, program = imported(name)
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert error(logits_of(program, ids, positions), expected) < TOLERANCE
    shorter = logits_of(program, ids[:1, :7], positions[:1, :7])
    assert error(shorter, expected[:1, :7]) < TOLERANCE
    _check_structure(program, ARCHS[name])
    _check_options(program, name)
    if name in LEARNED or name in ROTARY:
        _check_positions(model, program, learned=name in LEARNED)


def _check_structure(program: Program, arch: Arch) -> None:
    step = program.function("step")
    attentions = step.calls(G.attention.default)
    heads = 2 if arch.model_type == "diffllama" else 1
    assert [node.kwargs["layer"] for node in attentions] == list(range(arch.blocks * heads))
    assert len(step.calls(G.moe.default)) == arch.experts
    points = ["block"] if arch.parallel else ["attention", "block"]
    expected = [(block, point) for block in range(arch.blocks) for point in points]
    markers = step.calls(G.hidden.default)
    placed = [(node.kwargs["layer"], node.kwargs["point"]) for node in markers]
    assert placed == [(-1, "embedding"), *expected]
    for node in attentions:
        site = site_of(node)
        assert site.module and site.layer is not None and site.line.startswith("modeling_")
    logits = type_of(step.outputs["logits"])
    assert logits == TensorType(torch.float32, (Sym("B"), Sym("T"), 128))
    assert step.symbols() == {"B", "T"}
    assert program.stage == "traced" and program.info.vocab_size == 128


def _check_positions(model: Any, program: Program, learned: bool) -> None:
    """Tokens at positions 5, 6, ... get the logits that transformers gives them there."""
    ids, positions = tokens_and_positions(first=5)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits
    assert error(logits_of(program, ids, positions), expected) < TOLERANCE
    moved = logits_of(program, ids, positions - 5)
    assert (error(moved, expected) > 100 * TOLERANCE) == learned


def _check_options(program: Program, name: str) -> None:
    """Windows, scales, soft caps, sinks, slopes and grouped heads reach the op."""
    attentions = program.function("step").calls(G.attention.default)
    first = attentions[0]
    if name in WINDOWS:
        assert [node.kwargs.get("window") for node in attentions] == WINDOWS[name]
    if name in GROUPS:
        heads = [type_of(arg).dims[1] for arg in first.args[:3]]  # type: ignore[arg-type]
        assert heads == [4, GROUPS[name], GROUPS[name]]
    for option, value in OPTIONS.get(name, {}).items():
        assert first.kwargs[option] == pytest.approx(value)
    names = [str(arg.target) for arg in first.args[3:] if isinstance(arg, torch.fx.Node)]
    assert names == EXTRA.get(name, [])


LEARNED = ("biogpt", "ctrl", "gpt2", "gpt_neo", "openai-gpt", "opt", "xglm")
"""Models with absolute positions, where a wrong position shows even if all are shifted alike."""

ROTARY = ("cohere", "gptj", "llama")

WINDOWS = {
    "gemma3_text": [5, None],
    "gpt_neo": [None, 5],
    "mistral": [5, 5],
    "phimoe": [5, 5],
    "qwen2": [None, 5],
    "qwen2_moe": [5, None],
}
"""They come from the masks that a model would build, not from how its configuration spells them."""

GROUPS = {"falcon": 2, "falcon-multi-query": 1, "gpt_bigcode": 1, "llama": 2}
"""Key heads (of four query heads)."""

OPTIONS = {
    "bloom": {"scale": 8**-0.5},
    "gemma2": {"softcap": 2.0, "scale": 12**-0.5},
    "granite": {"scale": 0.3},
    "xglm": {"scale": 1.0},
}

EXTRA = {
    "bloom": ["alibi.0"],
    "falcon-alibi": ["alibi.0"],
    "gpt_oss": ["model.layers.0.self_attn.sinks"],
    "mpt": ["alibi.0"],
}
"""Names of sinks and slopes."""


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(name: str) -> None:
    """Errors name the module, and the op or the option, that is not supported."""
    arch, reason = REFUSED[name]
    with pytest.raises(UnsupportedError, match=reason):
        import_model(build(arch))


def test_encoders_are_refused() -> None:
    """A model whose tokens see later ones is no causal language model."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
    )
    with pytest.raises(UnsupportedError, match="bidirectional_mask_function"):
        import_model(BertForMaskedLM(config))


def test_a_model_without_weights() -> None:
    """A model on the meta device has nothing to import."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", **ARCHS["gpt2"].config)
        )
    with pytest.raises(InputError, match="meta device"):
        import_model(model)


def test_the_model_is_left_alone() -> None:
    """Importing neither changes the model nor copies its weights."""
    model = build(ARCHS["mistral"]).train()
    implementation = model.config._attn_implementation
    program = import_model(model)
    assert model.training and model.config._attn_implementation == implementation
    assert not any("Fake" in type(p.data).__name__ for p in model.parameters())
    held = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    loaded = program.weights["model.layers.0.mlp.up_proj.weight"].load()
    assert loaded.data_ptr() == held.data_ptr()
