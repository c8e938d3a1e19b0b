"""Which models of transformers read pictures in the places of tokens, and how they say so."""

from __future__ import annotations

from typing import Any

from ...ir import ModelInfo
from ...ir.plan import NoSource, Pictures, SourceRecord

PLACED = frozenset({"aya_vision", "cohere2_vision", "internvl", "llava", "mistral3"})
"""Model types whose text sees a picture's rows as it sees tokens: each in its order, and what is
before it."""

TOGETHER = frozenset({"gemma3"})
"""Those in which a picture's rows see each other, too."""

APART = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Those in which a picture's rows have places in time, height and width."""


def pictures_of(config: Any, info: ModelInfo) -> SourceRecord:
    """What a plan says of a model's pictures."""
    names = ("image_token_id", "image_token_index")
    token = next((t for n in names if isinstance(t := getattr(config, n, None), int)), None)
    known = config.model_type in PLACED | TOGETHER | APART
    if not known or token is None or not 0 <= token < info.vocab_size:
        return NoSource()
    text = config.get_text_config(decoder=True)
    axes: tuple[int, ...] = ()
    merged = 1
    if config.model_type in APART:
        axes, merged = _axes(text), int(config.vision_config.spatial_merge_size)
    return Pictures(
        token=token,
        width=int(text.hidden_size),
        most=info.context,
        together=config.model_type in TOGETHER,
        axes=axes,
        merged=merged,
    )


def _axes(text: Any) -> tuple[int, ...]:
    """The axis of each angle: sections of them take turns."""
    sections = text.rope_parameters.get("mrope_section", [16, 24, 24])
    return tuple(place % 3 for place, count in enumerate(sections) for _ in range(count))
