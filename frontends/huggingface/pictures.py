"""Which models of transformers read pictures in the places of tokens, and how they say so."""

from __future__ import annotations

from typing import Any

from ...ir import ModelInfo
from ...ir.plan import NoSource, Pictures, SourceRecord

PLACED = frozenset({"aya_vision", "cohere2_vision", "internvl", "llava", "mistral3"})
"""Model types whose text sees a picture's rows as it sees tokens: each in its order, and what is
before it. Elsewhere rows of a picture see each other (gemma3, paligemma), or stand at positions of
their own (qwen2_vl and what follows it): those models read text alone."""


def pictures_of(config: Any, info: ModelInfo) -> SourceRecord:
    """What a plan says of a model's pictures."""
    names = ("image_token_id", "image_token_index")
    token = next((t for n in names if isinstance(t := getattr(config, n, None), int)), None)
    if config.model_type not in PLACED or token is None or not 0 <= token < info.vocab_size:
        return NoSource()
    width = int(config.get_text_config(decoder=True).hidden_size)
    return Pictures(token=token, width=width, most=info.context)
