"""The text path of models that also see: imported as what it is, from memory and from a folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from archs import text_config
from selection import mostly_long
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import graftwork as gw

TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MIXED = {
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3": (
        AutoModelForCausalLM,
        {
            "text_config": text_config(**MIXED),
            "vision_config": TOWER,
            "mm_tokens_per_image": 4,
            "image_token_index": 127 + 5,
        },
    ),
    "llava": (
        AutoModelForImageTextToText,
        {
            "text_config": text_config(model_type="llama"),
            "vision_config": {"model_type": "clip_vision_model", **TOWER},
        },
    ),
    "qwen2_5_vl": (
        AutoModelForImageTextToText,
        {
            "text_config": text_config(rope_parameters=SECTIONS),
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 32,
            },
        },
    ),
}
IDS = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(1))


def _model(name: str) -> Any:
    made, config = CASES[name]
    model = made.from_config(AutoConfig.for_model(name, **config)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(noise * scale + float(parameter.dim() == 1))
    return model


@pytest.mark.parametrize("name", mostly_long(CASES, keep=("llava",)))
def test_text_alone_is_what_transformers_makes_of_it(name, tmp_path):
    model = _model(name)
    plain = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(IDS, do_sample=False, **plain)
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        fast = gw.optimize(source, target="eager")
        assert torch.equal(fast.generate(IDS, **plain), expected)
        assert fast.program.info.vocab_size == 128 and fast.program.info.context == 64
