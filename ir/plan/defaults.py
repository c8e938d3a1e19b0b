"""How a model generates unless it is told otherwise: what its generation_config.json says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..support.errors import InputError
from ..support.fields import check_fields

NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
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
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "assistant_ensemble_weight": (),
    "cache_implementation": (
        *("dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked", "offloaded"),
        *("offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked", "paged"),
    ),
}
"""What of transformers' generation settings changes the text and is no field of `Defaults`, and the
values apart from None at which it asks for nothing. `generate` obeys some of them and refuses the
others; exports refuse all."""

WITHOUT_EFFECT = frozenset(
    {
        *("low_memory", "renormalize_logits"),
        # Of drafts, which change no text.
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("speculation_type", "use_mtp"),
        # How transformers runs steps, and what it returns beside the text.
        *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config"),
        *("disable_compile", "continuous_batching_config", "return_dict_in_generate"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        # What the model is, which its configuration says, too.
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("transformers_version", "_from_model_config"),
    }
)
"""The rest of transformers' generation settings: they leave the text of a checkpoint as it is."""

OF_BEAMS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
"""Settings that only beam search looks at, which `num_beams` asks for."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of a generation by transformers' names, of those that `generate` takes; None: the
    checkpoint does not say.

    unsupported: what else it says that changes the text, as ``name=value`` (a literal of Python),
    its names in `NEUTRAL`.
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
