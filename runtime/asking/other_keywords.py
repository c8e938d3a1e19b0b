"""Keywords of transformers that are no options here: what asks for nothing, what changes no text,
and what is refused, by name and with what to use instead."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence

import torch

from ...ir import GraftworkWarning, InputError, TensorType
from ...ir.plan.defaults import NEUTRAL, OF_BEAMS, WITHOUT_EFFECT

GROUPS = "num_beam_groups"
"""What asks for something only beside `num_beams`."""

IDLE: dict[str, tuple[object, ...]] = {
    **NEUTRAL,
    "use_cache": (True,),
    "synced_gpus": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "trust_remote_code": (False,),
    "logits_to_keep": (0, 1),
}
"""Values at which these ask for nothing."""

FACTS = frozenset({"transformers_version", "_from_model_config", "bos_token_id"})
"""Keywords that ask for nothing whatever they say: a generation config has them of itself."""

STEPS = WITHOUT_EFFECT - FACTS - {"output_attentions", "output_hidden_states"}
STEPS |= {
    *OF_BEAMS,
    "synced_gpus",
    "logits_to_keep",
    "cache_implementation",
    "assistant_ensemble_weight",
}
"""Keywords that leave transformers' text as it is: of how it runs steps and drafts, which the
target and the recipe decide here, and of groups of beams, where there are no beams."""

INSTEAD = {
    "inputs": "input_ids, the first argument",
    "assistant_model": "a recipe with a drafter",
    "assistant_tokenizer": "a recipe with a drafter",
    "input_features": "input_ids: the model's source is a text",
    "return_timestamps": "decoder_input_ids, without the token that turns timestamps off",
    "encoder_outputs": "the source itself",
    "pixel_values": "image_embeds: what the model's tower makes of them, one row an image token "
    "(transformers' get_image_features)",
    "past_key_values": "the whole text as input_ids: what earlier calls have run is not run again",
    "token_healing": "a prompt that ends with a whole word",
    GROUPS: "num_beams with do_sample=True, whose candidates are drawn",
    "penalty_alpha": "the recipe contrastive, which contrasts with a weak model",
    "dola_layers": "the recipe dola, whose option contrast_layers.layers is what this says",
    "constraints": "regex, grammar or json_schema",
    "force_words_ids": "regex, grammar or json_schema",
    "custom_generate": "logits_processor and stopping_criteria",
    "output_attentions": "the model itself, in transformers",
    "output_hidden_states": "the model itself, in transformers",
    "max_tokens": "max_new_tokens",
}


def refuse(name: str, value: object, supported: Sequence[str], *, beams: bool = False) -> None:
    """Take a keyword that is no option: without a word if it asks for nothing, with a warning if it
    changes no text. beams: whether the call searches by several texts. Errors: `InputError` for all
    others."""
    plain = isinstance(value, bool | int | float | str)
    if value is None or name in FACTS or (plain and value in IDLE.get(name, ())):
        return
    shown = TensorType.of(value) if isinstance(value, torch.Tensor) else repr(value)
    shown = shown if "\n" not in str(shown) else type(value).__name__
    if name in STEPS and value != "quantized" and not (beams and name == GROUPS):
        warnings.warn(
            f"{name}={shown} changes no text, and nothing here: how steps run is decided by the "
            f"target and the recipe",
            GraftworkWarning,
            stacklevel=5,
        )
        return
    close = difflib.get_close_matches(name, supported, n=1)
    instead = INSTEAD.get(name, close[0] if close else None)
    raise InputError(
        f"generate does not support {name}={shown}"
        + (f"; nearest: {instead}" if instead else "")
        + f". Supported: {', '.join(supported)}"
    )
