"""Keywords of `generate` as a type, which editors complete and mypy checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from .options import Streamer

Hooks = Callable[..., Any] | Sequence[Callable[..., Any]]


class GenerateOptions(TypedDict, total=False):
    """The prompts under their names, a configuration, and the fields of `GenerationOptions`, which
    says what each does. None: as if it were not given."""

    input_ids: torch.Tensor | str | Sequence[str] | Sequence[Sequence[int]] | None
    inputs: torch.Tensor | str | Sequence[str] | Sequence[Sequence[int]] | None
    input_features: torch.Tensor | None
    generation_config: Any
    bos_token_id: int | None

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    max_time: float | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    num_return_sequences: int | None
    first_finish: bool | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | str | None
    generator: torch.Generator | None
    seed: int | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], Sequence[int]] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    watermarking_config: Any
    logits_processor: Hooks | None
    guidance_scale: float | None
    guidance_plausible: float | None
    guidance_uncertain: float | None
    negative_prompt_ids: torch.Tensor | None
    negative_prompt_attention_mask: torch.Tensor | None
    json_schema: str | Mapping[str, Any] | bool | None
    regex: str | None
    grammar: str | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    stop: Sequence[Sequence[int]] | None
    stop_strings: str | Sequence[str] | None
    tokenizer: Any
    stopping_criteria: Hooks | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    decoder_input_ids: torch.Tensor | None
    decoder_start_token_id: int | None
    decoder_attention_mask: torch.Tensor | None
    language: str | Sequence[str] | None
    task: str | None
    inputs_embeds: torch.Tensor | None
    image_embeds: torch.Tensor | None
    image_grid_thw: torch.Tensor | None
    streamer: Streamer | None
    return_dict_in_generate: bool | None
    output_scores: bool | None
    output_logits: bool | None
