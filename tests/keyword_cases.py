"""Every keyword of transformers' `generate`, with what graftwork does with it.

``python tests/keyword_cases.py`` prints the table of docs/generate.md; tests/test_keywords.py tries
each row against transformers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

EQUAL, DRAWN, SAME = "equal", "equal draws", "no effect"
BOTH, REFUSED = "refused by both", "refused"
"""Verdicts: the text of transformers; the same where both draw alike; text unchanged, as it is in
transformers, with a warning; an error, as in transformers without code from its Hub; an error."""

VOCAB, END = 24, 16
NEGATIVE = torch.tensor([[4, 7, 11], [20, 3, 6]])
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


@dataclass(frozen=True)
class Case:
    """name: of the keyword. value: one that has an effect. beside: keywords that it needs. ours:
    what graftwork is given where that differs. note: for the table."""

    name: str
    verdict: str
    value: Any = None
    beside: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def keywords(self) -> dict[str, Any]:
        return {self.name: self.value, **self.beside}


class Favour:
    """A processor that favours the token after the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores.scatter_add_(
            1, (input_ids[:, -1:] + 1) % scores.shape[1], torch.full((len(scores), 1), 2.0)
        )
        return scores


def even_after_even(batch_id: int, input_ids: torch.Tensor) -> list[int]:
    """Tokens of the parity of the text's length and the sequence."""
    return list(range((len(input_ids) + batch_id) % 2, VOCAB, 2))


def third(input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
    """Stops at a length that ends with a 3."""
    return torch.full((len(input_ids),), input_ids.shape[1] % 10 == 3)


SAMPLED = {"do_sample": True}
FOUND = {"return_dict_in_generate": True}
STEPS = "the target and the recipe say how steps run"
DRAFTS = "the recipe drafts, and changes no text"
BEAMS = "of groups of beams alone"
MODEL = "what the model is, the model says"

CASES = [
    Case("inputs", EQUAL, torch.tensor(PROMPTS), note="another name of input_ids"),
    Case("input_ids", EQUAL, torch.tensor(PROMPTS), note="also texts, and lists of any lengths"),
    Case(
        "attention_mask",
        EQUAL,
        torch.tensor([[0, 0] + [1] * 6, [1] * 8]),
        note="padding on the right is moved to the left",
    ),
    Case("max_new_tokens", EQUAL, 11),
    Case("max_length", EQUAL, 15),
    Case("min_new_tokens", EQUAL, 20),
    Case("min_length", EQUAL, 28, note="counts padding, as max_length does"),
    Case("max_time", EQUAL, 1000.0, note="after it no step begins"),
    Case("stop_strings", EQUAL, "h", note="with tokenizer=, or the model's own"),
    Case("tokenizer", EQUAL, None, {"stop_strings": ["h"]}),
    Case("eos_token_id", EQUAL, [14, 20]),
    Case("pad_token_id", EQUAL, 12, note="leading ones are padding; transformers leaves out all"),
    Case("do_sample", DRAWN, True),
    Case("temperature", DRAWN, 0.4, SAMPLED),
    Case("top_k", DRAWN, 3, SAMPLED),
    Case("top_p", DRAWN, 0.5, SAMPLED),
    Case("min_p", DRAWN, 0.2, SAMPLED),
    Case("top_h", DRAWN, 0.3, SAMPLED),
    Case("typical_p", DRAWN, 0.4, SAMPLED),
    Case("epsilon_cutoff", DRAWN, 0.05, SAMPLED),
    Case("eta_cutoff", DRAWN, 0.3, SAMPLED),
    Case("num_return_sequences", DRAWN, 3, SAMPLED),
    Case("num_beams", EQUAL, 4, note="the target decodes alone, without drafts"),
    Case("length_penalty", EQUAL, -2.0, {"num_beams": 3}),
    Case("early_stopping", EQUAL, True, {"num_beams": 3, "num_return_sequences": 2}),
    Case("repetition_penalty", EQUAL, 1.5),
    Case("encoder_repetition_penalty", EQUAL, 1.8),
    Case("no_repeat_ngram_size", EQUAL, 2),
    Case("encoder_no_repeat_ngram_size", EQUAL, 1),
    Case("bad_words_ids", EQUAL, [[14], [23, 7], [7, 15, 23]]),
    Case("sequence_bias", EQUAL, {(6,): -3.0, (7, 15): -9.0, (23, 1): 6.0}),
    Case("suppress_tokens", EQUAL, [8, 1]),
    Case("begin_suppress_tokens", EQUAL, [1, 7]),
    Case("forced_bos_token_id", EQUAL, 7, {"inputs": torch.tensor([[3], [4]])}),
    Case("forced_eos_token_id", EQUAL, 5),
    Case("prefix_allowed_tokens_fn", EQUAL, even_after_even),
    Case("exponential_decay_length_penalty", EQUAL, (2, 1.6)),
    Case("remove_invalid_values", EQUAL, True),
    Case("renormalize_logits", EQUAL, True),
    Case(
        "watermarking_config",
        EQUAL,
        {"bias": 4.0, "seeding_scheme": "lefthash"},
        note="SynthID's is refused: its state depends on how often it is asked",
    ),
    Case("guidance_scale", EQUAL, 2.5, note="the second text is a row of the batch"),
    Case("negative_prompt_ids", EQUAL, NEGATIVE, {"guidance_scale": 1.5}),
    Case(
        "negative_prompt_attention_mask",
        EQUAL,
        torch.ones_like(NEGATIVE),
        {"guidance_scale": 1.5, "negative_prompt_ids": NEGATIVE},
        note="padding does not count; transformers leaves its places free",
    ),
    Case(
        "position_ids",
        EQUAL,
        torch.arange(8).repeat(2, 1),
        note="those that follow from attention_mask; others are refused",
    ),
    Case("logits_processor", EQUAL, [Favour()], note="functions of their arguments, see above"),
    Case("stopping_criteria", EQUAL, [third], note="called with one sequence, scores None"),
    Case("streamer", EQUAL, note="as transformers for one sequence; several are handed on, too"),
    Case("generation_config", EQUAL, {"repetition_penalty": 1.5, "max_new_tokens": 9}),
    Case("return_dict_in_generate", EQUAL, True, note="also .stats; no caches"),
    Case("output_scores", EQUAL, True, FOUND, note="0 for finished sequences"),
    Case("output_logits", EQUAL, True, FOUND, note="0 for finished sequences"),
    Case("bos_token_id", EQUAL, 3, {"inputs": None}, note="a call without a prompt begins with it"),
    Case("decoder_input_ids", EQUAL, note="of models that read a source"),
    Case("decoder_start_token_id", EQUAL, note="of models that read a source"),
    Case("decoder_attention_mask", EQUAL, note="of models that read a source; ones"),
    Case("input_features", EQUAL, note="of models that read speech"),
    Case("inputs_embeds", EQUAL, note="prompts as rows, with input_ids or without"),
    *[
        Case(n, SAME, v, note=STEPS)
        for n, v in [
            ("use_cache", False),
            ("cache_implementation", "static"),
            ("max_cache_len", 40),
            ("prefill_chunk_size", 4),
            ("disable_compile", True),
            ("low_memory", True),
            ("synced_gpus", True),
            ("logits_to_keep", 1),
            ("cache_config", {"backend": "quanto"}),
            ("compile_config", {"mode": "default"}),
            ("continuous_batching_config", {"block_size": 32}),
        ]
    ],
    *[
        Case(n, SAME, v, note=DRAFTS)
        for n, v in [
            ("prompt_lookup_num_tokens", 3),
            ("max_matching_ngram_size", 2),
            ("num_assistant_tokens", 7),
            ("num_assistant_tokens_schedule", "heuristic"),
            ("assistant_confidence_threshold", 0.2),
            ("assistant_lookbehind", 5),
            ("target_lookbehind", 5),
            ("is_assistant", True),
            ("assistant_ensemble_weight", 0.5),
            ("assistant_early_exit", 1),
            ("speculation_type", "dflash"),
            ("use_mtp", True),
        ]
    ],
    Case("diversity_penalty", SAME, 0.5, note=BEAMS),
    *[
        Case(n, SAME, v, note=MODEL)
        for n, v in [
            ("transformers_version", "5"),
            ("_from_model_config", True),
        ]
    ],
    Case("trust_remote_code", SAME, False, note="remote code never runs"),
    Case("num_beam_groups", BOTH, 2, {"num_beams": 4}),
    Case("constraints", BOTH, [3]),
    Case("force_words_ids", BOTH, [[3]]),
    Case("penalty_alpha", BOTH, 0.6, {"top_k": 4}),
    Case("dola_layers", BOTH, "high"),
    *[
        Case(n, REFUSED, v)
        for n, v in [
            ("token_healing", True),
            ("output_attentions", True),
            ("output_hidden_states", True),
            ("assistant_model", object()),
            ("assistant_tokenizer", object()),
            ("custom_generate", "x/y"),
            ("past_key_values", object()),
            ("encoder_outputs", object()),
            ("pixel_values", torch.zeros(1)),
        ]
    ],
]

OF_MODELS = frozenset(
    {
        *("input_ids", "attention_mask", "inputs_embeds", "position_ids", "past_key_values"),
        *("decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "logits_to_keep"),
        *("input_features", "pixel_values", "tokenizer", "assistant_tokenizer"),
        "trust_remote_code",
    }
)
"""Keywords that `generate` hands on to models and decoding methods, by the names of most."""


def all_keywords() -> set[str]:
    """Those of transformers that are installed."""
    from transformers import GenerationConfig, GenerationMixin

    signature = inspect.signature(GenerationMixin.generate).parameters.keys()
    return {*vars(GenerationConfig()), *signature, *OF_MODELS} - {"self", "kwargs"}


def table() -> str:
    """The table of docs/generate.md."""
    from graftwork.runtime.asking.other_keywords import INSTEAD

    rows = ["| keyword | what becomes of it | |", "|---|---|---|"]
    for case in CASES:
        note = f"use {INSTEAD[case.name]}" if case.verdict in (BOTH, REFUSED) else case.note
        rows.append(f"| `{case.name}` | {case.verdict} | {note} |")
    counts = {
        verdict: sum(c.verdict == verdict for c in CASES)
        for verdict in (EQUAL, DRAWN, SAME, BOTH, REFUSED)
    }
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "\n".join([f"{len(CASES)} keywords: {total}.", "", *rows])


if __name__ == "__main__":
    print(table())
