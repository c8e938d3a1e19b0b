"""How a model generates unless it is told otherwise: what its generation_config.json says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import InputError
from .fields import check_fields

NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "stop_strings": (),
    "max_time": (),
    "token_healing": (False,),
    "remove_invalid_values": (False,),
}
"""What of transformers' generation settings changes the text and is not supported, and the values
apart from None at which it asks for nothing."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of a generation by transformers' names, of those that `generate` takes; None: the
    checkpoint does not say.

    unsupported: what else it says that changes the text, as ``name=value``, its names in `NEUTRAL`.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    unsupported: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        strange = [text for text in self.unsupported if text.partition("=")[0] not in NEUTRAL]
        if strange:
            raise InputError(f"unsupported={self.unsupported}: {strange[0]!r} is no such setting")

    @property
    def said(self) -> dict[str, Any]:
        """What the checkpoint says, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}

    @property
    def supported(self) -> dict[str, Any]:
        """What it says that `generate` takes."""
        return {name: value for name, value in self.said.items() if name != "unsupported"}

    def __str__(self) -> str:
        taken = [f"{name}={value}" for name, value in self.supported.items()]
        return ", ".join([*taken, *self.unsupported])
