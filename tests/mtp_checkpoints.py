"""Tiny checkpoints with a multi-token-prediction layer, in each family's layout.

A model of one layer more is made, and its last layer is that block: what transformers saves of it
is what a checkpoint holds, under other names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from archs import ARCHS, text_config
from recurrent_archs import RECURRENT
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING as _MASKS
from transformers.modeling_layers import MtpLayer

LAYERS = 2
"""Of the model proper."""


@dataclass(frozen=True)
class Family:
    """config: of the model proper. more: what differs for the model of one layer more. block: what
    the block's names begin with in the checkpoint. parts: names of norms and projection. rename: a
    part of the block's names, and what it is called. said: what config.json says of the layer."""

    config: dict[str, Any]
    block: str
    parts: dict[str, str]
    more: dict[str, Any] = field(default_factory=dict)
    rename: tuple[str, str] = ("", "")
    said: dict[str, Any] = field(default_factory=dict)


_NUMBERED = {
    "enorm": f"model.layers.{LAYERS}.enorm",
    "hnorm": f"model.layers.{LAYERS}.hnorm",
    "eh_proj": f"model.layers.{LAYERS}.eh_proj",
    "post_norm": f"model.layers.{LAYERS}.shared_head.norm",
}
_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}
_FULL = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
_NEXTN = {"num_nextn_predict_layers": 1}


def _families() -> dict[str, Family]:
    layers = f"model.layers.{LAYERS}."
    qwen = {"more": _FULL, "said": {"mtp_num_hidden_layers": 1}}
    return {
        "deepseek_v3": Family(ARCHS["deepseek_v3"].config, layers, _NUMBERED, said=_NEXTN),
        "glm4_moe": Family(ARCHS["glm4_moe"].config, layers, _NUMBERED, said=_NEXTN),
        "qwen3_next": Family(RECURRENT["qwen3_next"].config, "mtp.layers.0.", _QWEN, **qwen),
        "qwen3_5_text": Family(RECURRENT["qwen3_5_text"].config, "mtp.layers.0.", _QWEN, **qwen),
        "mimo_v2_flash": Family(
            text_config(
                head_dim=8,
                v_head_dim=6,
                sliding_window=5,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                layer_types=["full_attention", "sliding_attention"],
                mlp_layer_types=["dense", "sparse"],
            ),
            "model.mtp.layers.0.",
            {
                "enorm": "model.mtp.layers.0.enorm",
                "hnorm": "model.mtp.layers.0.hnorm",
                "eh_proj": "model.mtp.layers.0.eh_proj",
                "post_norm": "model.mtp.layers.0.final_layernorm",
            },
            more={
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                "mlp_layer_types": ["dense", "sparse", "dense"],
            },
            rename=("post_attention_layernorm", "pre_mlp_layernorm"),
        ),
        "ernie4_5_moe": Family(
            ARCHS["ernie4_5_moe"].config,
            "model.mtp_block.0.",
            {
                "enorm": "model.mtp_emb_norm.0",
                "hnorm": "model.mtp_hidden_norm.0",
                "eh_proj": "model.mtp_linear_proj.0",
            },
            more={"moe_layer_end_index": LAYERS - 1},
            said=_NEXTN,
        ),
    }


FAMILIES = _families()
"""By model type."""


@dataclass(frozen=True)
class Made:
    """model: the one of one layer more. layer: transformers' own class of such a layer."""

    model: Any
    layer: MtpLayer

    def logits(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What follows: tokens i64[B,T], each beside the state before it, f32[B,T,H]."""
        base, config = self.model.model, self.model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        embedded = base.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1])[None]
        mask = _MASKS[kinds[-1]](
            config=config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        nested = isinstance(next(iter((config.rope_parameters or {"": 0}).values())), dict)
        angles = base.rotary_emb(embedded, positions, *[kinds[-1]] * nested)
        made = self.layer(embedded, hidden, angles, mask, positions, None)
        return self.model.lm_head(made)


def made(family: str) -> Made:
    """A model of the family with random weights, large enough for every part to count."""
    given = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {**given.config, **given.more, "num_hidden_layers": LAYERS + 1}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes), attn_implementation="eager"
    ).eval()
    block, norm = model.model.layers[-1], type(model.model.norm)
    layer = MtpLayer(model.config, type(block), norm, LAYERS, "post_norm" in given.parts).eval()
    layer.mtp_block = block
    for parameter in (*model.parameters(), *layer.parameters()):
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data = torch.randn_like(parameter) * scale + (parameter.dim() == 1) * 0.8
    return Made(model, layer)


def taught(family: str, steps: int) -> Made:
    """`made`, and model and layer trained together on texts whose tokens rise by a fixed step."""
    one = made(family)
    config = one.model.config
    config.use_cache, main = False, one.model.model.layers[:LAYERS]
    weights = [*one.model.parameters(), *one.layer.parameters()]
    adam = torch.optim.Adam(dict.fromkeys(weights), lr=3e-3)
    every, one.model.model.layers = one.model.model.layers, main
    for _ in range(steps):
        tokens = rising(16, 20)
        hidden = one.model.model(tokens).last_hidden_state
        said, ahead = one.model.lm_head(hidden), one.logits(tokens[:, 1:], hidden[:, :-1])
        loss = _missed(said[:, 2:-1], tokens[:, 3:]) + _missed(ahead[:, 1:-1], tokens[:, 3:])
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    one.model.model.layers = every
    return one


def rising(count: int, length: int) -> torch.Tensor:
    """Texts i64[count,length] of 100 tokens, each rising by a step from 1 to 5."""
    steps = torch.randint(1, 6, (count, 1)) * torch.arange(length)
    return 3 + (torch.randint(0, 100, (count, 1)) + steps) % 100


def _missed(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def write(folder: Path, family: str, one: Made | None = None) -> Made:
    """A checkpoint of the family, of what `made` makes unless given."""
    given, one = FAMILIES[family], one or made(family)
    model, layer = one.model, one.layer
    model.save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    last = f"model.layers.{LAYERS}."
    tensors = {re.sub(f"^{re.escape(last)}", given.block, name): t for name, t in held.items()}
    if given.rename[0]:
        old, new = (given.block + part for part in given.rename)
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    for name, path in given.parts.items():
        tensors[f"{path}.weight"] = getattr(layer, name).weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    proper = AutoConfig.for_model(family, **given.config, **given.said)
    proper.architectures = model.config.architectures
    proper.dtype = torch.float32
    proper.save_pretrained(folder)
    return one
