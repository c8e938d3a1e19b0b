"""How far texts go where ropes are scaled, and ropes that change with the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from archs import ARCHS, TOLERANCE, build, error, logits_of, text_config
from selection import one_in

import graftwork as gw
from graftwork.frontends import import_model
from graftwork.frontends.huggingface.lengths import context_of
from graftwork.ir import GraftworkWarning, InputError

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 6.0, 20.0],
    "original_max_position_embeddings": 24,
}
CHANGING: dict[str, dict[str, Any]] = {
    "llama": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "phi3": LONG,
    "phimoe": {**LONG, "short_mscale": 1.2, "long_mscale": 1.5},
}


def scaled(name: str, rope: dict[str, Any]) -> Any:
    """A tiny model with this rope, and a trained length of 64."""
    from dataclasses import replace

    arch = ARCHS[name]
    config = {k: v for k, v in arch.config.items() if k != "partial_rotary_factor"}
    return build(replace(arch, config={**config, **_own(name), "rope_parameters": rope}))


def _own(name: str) -> dict[str, Any]:
    """Phi-3 says in its configuration what counts as short."""
    return {"original_max_position_embeddings": 24} if name == "phi3" else {}


@pytest.mark.parametrize(
    ("kind", "rope", "context"),
    [
        ("qwen2", {"rope_type": "default"}, 64),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0}, 256),
        (
            "qwen2",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            256,
        ),
        ("qwen2", {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ("qwen2", {"rope_type": "linear", "factor": 2.5}, 160),
        ("qwen2", {"rope_type": "dynamic", "factor": 2.0}, 64),
        ("phi3", LONG, 24),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            64,
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            64,
        ),
    ],
)
def test_contexts(kind: str, rope: dict[str, Any], context: int) -> None:
    """As model cards mean them: max_position_embeddings stays what was trained."""
    from transformers import AutoConfig

    given = rope if kind == "gemma3_text" else {"rope_theta": 1e4, **rope}
    config = AutoConfig.for_model(kind, **text_config(**_own(kind), rope_parameters=given))
    assert context_of(config) == context


def test_a_text_beyond_the_trained_length() -> None:
    """Of a rope scaled four times."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    model = scaled("qwen2", {**rope, "original_max_position_embeddings": 64})
    ids = torch.randint(3, 128, (1, 100), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    fast = gw.optimize(model, target="eager:cpu:float32")
    assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("name", one_in(3, CHANGING))
def test_ropes_that_change_are_those_of_short_texts(name: str) -> None:
    """Up to the length at which they change; also of a model that has read a longer text."""
    model = scaled(name, CHANGING[name])
    end = 64 if name == "llama" else 24
    ids = torch.randint(3, 128, (2, end + 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids[:, :end]).logits
        assert error(model(input_ids=ids).logits[:, :end], expected) > 1e-3  # it does change
    with pytest.warns(GraftworkWarning, match=f"changes for texts of more than {end} tokens"):
        program = import_model(model)
    positions = torch.arange(end).expand(2, end)
    assert error(logits_of(program, ids[:, :end], positions), expected) < TOLERANCE
    assert program.info.context == end


def test_longer_texts_are_refused() -> None:
    with pytest.warns(GraftworkWarning, match="longrope"):
        fast = gw.optimize(scaled("phi3", LONG), target="eager:cpu:float32")
    ids = torch.randint(3, 128, (1, 20))
    assert fast.generate(ids, max_new_tokens=4, eos_token_id=None).shape == (1, 24)
    with pytest.raises(InputError, match="exceed the model's context of 24 tokens"):
        fast.generate(ids, max_new_tokens=5)
