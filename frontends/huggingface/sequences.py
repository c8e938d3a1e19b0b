"""Models that write from a source: encoder and decoder are traced apart and joined (see `source`).

The encoder is traced over tokens, or over features of a fixed size; the decoder with what the
encoder returns as one input more. Attention to a source comes out of transformers' registries like
any other, see `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import ModelInfo, Program, Sym, TensorType, UnsupportedError, Weight, type_of
from ...ir.plan import Encoded
from ..importer import INPUTS
from ..source import SOURCE, build_with_source
from .tracing import import_traced


class _TokenEncoder(nn.Module):
    """Token ids [B,T] of a source to its states [B,T,H]."""

    inputs = INPUTS

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        """States."""
        encoder = self.model.get_encoder()
        given = {"input_ids": tokens}
        if _numbers_by_ids(encoder):
            given = {"inputs_embeds": encoder.embed_tokens(tokens)}
        return encoder(**given, return_dict=True).last_hidden_state


class _FeatureEncoder(nn.Module):
    """Features [B,M,F] of a sound to its states [B,N,H]."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        encoder = model.get_encoder()
        strides = encoder.conv1.stride[0] * encoder.conv2.stride[0]
        frames = int(model.config.max_source_positions) * strides
        sizes = (Sym("B"), int(model.config.num_mel_bins), frames)
        self.inputs = {"features": TensorType(dtype, sizes)}

    def forward(self, features: torch.Tensor) -> Any:
        """States."""
        return self.model.get_encoder()(features, return_dict=True).last_hidden_state


class _Decoder(nn.Module):
    """Token ids [B,T] and the source's states [B,N,H] to logits [B,T,V]."""

    def __init__(self, model: Any, source: TensorType) -> None:
        super().__init__()
        self.model = model
        self.inputs = {**INPUTS, SOURCE: source}

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, source: torch.Tensor) -> Any:
        """Logits."""
        from transformers.modeling_outputs import BaseModelOutput

        made = BaseModelOutput(last_hidden_state=source)
        given, decoder = {"decoder_input_ids": tokens}, self.model.get_decoder()
        if _numbers_by_ids(decoder):
            given = {"decoder_inputs_embeds": decoder.embed_tokens(tokens)}
        out = self.model(**given, encoder_outputs=made, use_cache=False, return_dict=True)
        return out.logits


def _numbers_by_ids(half: nn.Module) -> bool:
    """Whether an encoder or decoder numbers tokens by which of them are padding. There is none in
    what programs read: with embeddings in their place it counts on from the first."""
    return any(hasattr(m, "create_position_ids_from_input_ids") for m in half.modules())


def traced_pair(
    twin: Any,
    mode: FakeTensorMode,
    weight_of: Callable[[str], Weight],
    info: ModelInfo,
    opening: Mapping[str, Any],
    assets: Mapping[str, Path],
) -> Program:
    """The program of a model without data that has an encoder and a decoder, ready to be traced.

    weight_of: see `import_traced`; opening: what the plan says of how texts begin. Errors:
    `UnsupportedError`.
    """
    known: dict[str, Weight] = {}

    def once(name: str) -> Weight:
        if name not in known:
            known[name] = weight_of(name)
        return known[name]

    wrapper, plan = _encoder(twin, info)
    encode = import_traced(
        wrapper, mode, plan.most, once, outputs=(SOURCE,), name=plan.function, reads_source=True
    )
    states = type_of(encode.fn.outputs[SOURCE])
    rows = TensorType(states.dtype, (Sym("B"), Sym("N"), states.dims[-1]))
    step = import_traced(_Decoder(twin, rows), mode, info.context, once, reads_source=True)
    kind, plan = twin.config.model_type, replace(plan, **opening)
    return build_with_source(kind, encode, step, info, plan, assets)


def _encoder(twin: Any, info: ModelInfo) -> tuple[Any, Encoded]:
    """What is traced of an encoder, and what the plan says of its source."""
    given = twin.main_input_name
    if given == "input_ids":
        return _TokenEncoder(twin), Encoded(most=info.context)
    encoder = twin.get_encoder()
    if given != "input_features" or not (hasattr(encoder, "conv1") and hasattr(encoder, "conv2")):
        raise UnsupportedError(
            f"cannot import {twin.config.model_type}: its encoder reads {given}; expected "
            "input_ids, or input_features of a fixed size as whisper's"
        )
    most = int(twin.config.max_source_positions)
    return _FeatureEncoder(twin, encoder.conv1.weight.dtype), Encoded(most=most)
