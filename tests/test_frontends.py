"""What the frontend refuses and leaves alone; test_architectures.py has what it imports."""

from __future__ import annotations

import pytest
import torch
from archs import ARCHS, REFUSED, build, error, logits_of, tokens_and_positions
from selection import mostly_long
from shrunk import shrunk

from graftwork.frontends import import_model
from graftwork.ir import InputError, UnsupportedError


@pytest.mark.parametrize("name", mostly_long(sorted(REFUSED), keep=REFUSED.keys() - {"jetmoe"}))
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


def test_a_mask_for_a_source_hides_nothing_and_harms_nothing() -> None:
    """The decoder of an encoder-decoder makes that mask also where it writes without a source."""
    model = build(shrunk("bart"))
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    assert error(logits_of(import_model(model), ids, positions), want) < 1e-4


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
