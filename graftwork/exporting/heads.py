"""Export of trained draft heads in layouts of other engines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from ..ir import InputError, Program, type_of
from ..ir.plan import DraftRecord, HeadsDraft
from ..ir.support.scratch import replacing
from ..passes.drafting.draft_vocabulary import OFFSETS, draft_ids

Draft = TypeVar("Draft", bound=DraftRecord)

_BLOCK = re.compile(r"medusa\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"medusa\.(\d+)\.(\d+)\.weight")


def export_vllm_medusa(program: Program, folder: Path) -> Path:
    """Write Medusa heads for vLLM: config.json and model.safetensors with
    ``blocks.{head}.layers.{layer}.{weight,bias}`` and ``lm_heads.{head}.weight``; of a draft
    vocabulary also ``token_map``, the ids i64[D] of the heads' rows, and ``truncated_vocab_size``.
    Errors: `InputError` without trained Medusa heads, or if they share the target's language-model
    head, which the layout cannot represent."""
    draft = find_draft(program, HeadsDraft, "Medusa heads are heads(...)")
    if not draft.trained:
        raise InputError("the heads are untrained; train them first (graftwork train)")
    tensors: dict[str, torch.Tensor] = {}
    layers = 0
    for name, weight in program.weights.items():
        if block := _BLOCK.fullmatch(name):
            head, layer, part = block.groups()
            layers = max(layers, int(layer) + 1)
            tensors[f"blocks.{head}.layers.{layer}.{part}"] = weight.load()
        elif head_ := _HEAD.fullmatch(name):
            tensors[f"lm_heads.{head_[1]}.weight"] = weight.load()
        elif name == f"medusa{OFFSETS}":
            tensors["token_map"] = draft_ids(weight.load())
    if not any(name.startswith("lm_heads") for name in tensors):
        raise InputError(
            "the heads share the target's language-model head; vLLM's layout needs one each "
            "(draft_medusa.own_head=true)"
        )
    hidden = type_of(program.step.outputs["hidden"]).dims[-1]
    # Without num_attention_heads, which marks a transformer's configuration.
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": int(str(hidden)),
        "vocab_size": program.info.vocab_size,
        "truncated_vocab_size": len(tensors.get("token_map", range(program.info.vocab_size))),
        "num_heads": draft.levels,
        "num_hidden_layers": layers,
        "medusa_fc_bias": True,
        "max_paths": 64,
    }
    return write_heads(folder, config, tensors)


def find_draft(program: Program, kind: type[Draft], hint: str) -> Draft:
    """The program's first drafter of a type. Errors: `InputError` with the hint."""
    found = [draft for draft in program.plan.draft.trains if isinstance(draft, kind)]
    if not found:
        raise InputError(f"the program drafts with {program.plan.draft}; {hint}")
    return found[0]


def write_heads(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
) -> Path:
    """Write the folder atomically."""
    with replacing(folder) as part:
        (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(dict(tensors), part / "model.safetensors", metadata={"format": "pt"})
    return folder
