"""Tiny random models that write from a source, and sources for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

TYPES = ("bart", "t5", "whisper")
VOCABULARY = 97
_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bart": {
        **_SIZES,
        "max_position_embeddings": 128,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "feed_forward_proj": "gated-gelu",
        "n_positions": 512,
    },
    "whisper": {
        **_SIZES,
        "max_source_positions": 30,
        "max_target_positions": 64,
        "num_mel_bins": 8,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}


def made(name: str, **changes: Any) -> Any:
    """A random model of transformers, with weights that make its texts vary."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    config = AutoConfig.for_model(name, **{**CONFIGS[name], **changes})
    maker: Any = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    model = maker.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(2)
    for path, parameter in model.named_parameters():
        if "relative_attention_bias" in path:
            torch.nn.init.normal_(parameter, std=2.0)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3 if name == "t5" else 1.0)
    return model


@lru_cache(maxsize=8)
def model(name: str) -> Any:
    """The same, made once."""
    return made(name)


def sources(name: str, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sources of a model as its `generate` takes them: of several lengths where they are texts."""
    random = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(count, 8, 60, generator=random)}
    ids = torch.randint(3, VOCABULARY, (count, 19), generator=random)
    if count == 1:
        return {"input_ids": ids}
    lengths = torch.tensor([19, 7, 12, 4])[:count]
    mask = (torch.arange(19) < lengths[:, None]).long()
    pad = CONFIGS[name]["pad_token_id"]
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


def written(reference: Any, given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """What transformers writes; of whisper without what its own `generate` does beside."""
    from transformers import GenerationMixin

    with torch.no_grad():
        return GenerationMixin.generate(reference, **given, **{"do_sample": False, **options})


TOKENS, PLACES = 40, 24
EDITED = {token: token + 1 for token in range(7, TOKENS - 1, 9)}
"""What `copying` writes otherwise than it stands in the source."""


def copying() -> Any:
    """A bart that writes its source token by token, but for those of `EDITED`.

    A token and its place are one number each of a state; the decoder looks where its own place is
    and takes over the token that it finds there.
    """
    from transformers import BartConfig, BartForConditionalGeneration

    size, half = TOKENS + PLACES, {"attention_heads": 1, "ffn_dim": 8, "layers": 1}
    halves = {f"{p}_{name}": n for p in ("encoder", "decoder") for name, n in half.items()}
    sizes = {"vocab_size": TOKENS, "d_model": size, "max_position_embeddings": PLACES}
    config = BartConfig(**{**CONFIGS["bart"], **halves, **sizes})
    model = BartForConditionalGeneration(config).eval()
    places = torch.arange(TOKENS, size)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" not in path:
                parameter.zero_()
        tokens = torch.eye(TOKENS, size)
        model.model.shared.weight.copy_(tokens)
        for half_ in (model.model.encoder, model.model.decoder):
            half_.embed_positions.weight[2:, TOKENS:] = torch.eye(PLACES)
        looking = model.model.decoder.layers[0].encoder_attn
        for projection in (looking.q_proj, looking.k_proj):
            projection.weight[places, places] = 3.0
        for token in range(TOKENS):
            looking.v_proj.weight[EDITED.get(token, token), token] = 1.0
        looking.out_proj.weight[:TOKENS] = 20.0 * tokens
    return model


SMALL: dict[str, Any] = {
    **_SIZES,
    **dict.fromkeys(("hidden_size", "embed_dim"), 32),
    **dict.fromkeys(("decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_experts"), 4),
    **dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id"), None),
    "d_kv": 8,
    "d_ff": 48,
    "n_positions": 128,
    "max_position_embeddings": 128,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
"""What shrinks any configuration that has such a setting."""
MOST_PARAMETERS = 20_000_000


def model_types() -> list[str]:
    """Every type that transformers takes for one that writes a text from a text, and whisper."""
    from transformers.models.auto import modeling_auto

    return sorted({*modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "whisper"})


def shrunk(name: str) -> Any:
    """A tiny random model of a type, as far as its settings have usual names. Errors: whatever the
    type's own code raises, and `ValueError` for one that stays large."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    if name in CONFIGS:
        return made(name)
    usual = AutoConfig.for_model(name)
    known = {key: value for key, value in SMALL.items() if hasattr(usual, key)}
    if "num_encoder_layers" in known and "encoder_layers" not in usual.to_dict():
        known = {key: value for key, value in known.items() if key != "num_hidden_layers"}
    config = AutoConfig.for_model(name, **known)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForSeq2SeqLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size >> 20} million parameters are left of it")
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model
