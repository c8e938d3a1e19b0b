"""Which of transformers' classes makes a model, and its instances without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import UnsupportedError
from ...ir.support.tokenizer import refusing
from ..trace import parameters_without_data


@dataclass(frozen=True)
class Family:
    """what: its models, in messages. auto: the class of transformers that makes one of a
    configuration; "": the one that writes text. both_ways: whether tokens may see later ones.
    scores: whether it gives texts scores, and no logits of words."""

    what: str
    auto: str
    both_ways: bool = False
    scores: bool = False


LANGUAGE = Family("language model", "")
MASKED = Family("masked language model", "AutoModelForMaskedLM", both_ways=True)
TOKEN_SCORES = Family("model that scores tokens", "AutoModelForTokenClassification", scores=True)
TEXT_SCORES = Family("model that scores texts", "AutoModelForSequenceClassification", scores=True)


def instantiate(
    config: Any, dtype: torch.dtype, mode: FakeTensorMode, family: Family = LANGUAGE
) -> Any:
    """The model of a configuration, its parameters without data and not tied yet.

    Errors: `UnsupportedError`.
    """
    import transformers
    from transformers.initialization import no_init_weights

    made = getattr(transformers, family.auto or _writes(config))
    said = f"transformers makes no {family.what} of this configuration of {config.model_type}"
    unable = refusing(said, kind=UnsupportedError)
    with unable, parameters_without_data(mode), no_init_weights():
        return made.from_config(config, dtype=dtype, trust_remote_code=False).eval()


def _writes(config: Any) -> str:
    """The class that makes the model of a configuration that writes text."""
    if getattr(config, "is_encoder_decoder", False):
        texts = _is_in("AutoModelForSeq2SeqLM", config)
        return "AutoModelForSeq2SeqLM" if texts else "AutoModelForSpeechSeq2Seq"
    causal, pictures = "AutoModelForCausalLM", "AutoModelForImageTextToText"
    # Of a model that reads pictures the text path is what is traced.
    return pictures if _is_in(pictures, config) and not _is_in(causal, config) else causal


def _is_in(auto: str, config: Any) -> bool:
    import transformers

    return type(config) in getattr(transformers, auto)._model_mapping
