"""What a call asks for, settled once against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...ir import InputError, Program
from ...ir.plan import Encoded
from .image_embeds import PlacedRows, read_pictures
from .input_ids import read_prompts
from .options import GenerationOptions, read_options
from .sources import Sources, read_sources, takes_features
from .speech import openings
from .stopping import Stopping
from .streaming import Emitter
from .text import Text

ENDLESS = 2**31 - 1
"""Tokens that a text may have whose rows are dropped and turned."""


@dataclass(frozen=True)
class Request:
    """prompts: i64[B,S] on the CPU, as given, each as often as it is continued. texts: the
    sequences without padding, with their limits. stopping: what ends one. pad: the token that fills
    finished ones. sources: what the texts are written from, where the model reads that first.
    pictures: of each text, where some have any."""

    prompts: torch.Tensor
    texts: Sequence[Text]
    options: GenerationOptions
    stopping: Stopping
    pad: int
    sources: Sources | None = None
    pictures: Sequence[PlacedRows] = ()

    def emitter(self) -> Emitter | None:
        """Who hands tokens to the streamer, if there is one; it is shown the prompts at once."""
        streamer = self.options.streamer
        return None if streamer is None else Emitter(streamer, self.prompts, self.pad)

    def sequences(self) -> torch.Tensor:
        """i64[B,S+N]: prompts with their padding, new tokens, padding to the longest."""
        longest = max(text.generated for text in self.texts)
        new = torch.full((len(self.texts), longest), self.pad, dtype=torch.int64)
        for index, text in enumerate(self.texts):
            new[index, : text.generated] = torch.tensor(text.tokens[text.prompt :])
        return torch.cat([self.prompts, new], dim=1)


def read_request(
    input_ids: torch.Tensor,
    keywords: Mapping[str, Any],
    program: Program,
    heard: Sequence[str] = (),
) -> Request:
    """What `generate` is asked for. heard: the languages of the sources, where the call does not
    say them. Errors: `InputError` for bad input or options."""
    info = program.info
    if program.plan.cache.endless:  # positions stay in the caches, so texts may leave the context
        info = replace(info, context=ENDLESS)
    options = read_options(keywords, info)
    sources = None
    if program.plan.source.encoder is not None:
        sources = read_sources(input_ids, options.attention_mask, program)
        input_ids = _beginnings(options, len(sources.tokens), program, heard)
        options = replace(options, attention_mask=torch.ones_like(input_ids))
        sources = sources.repeated(options.num_return_sequences)
    else:
        for name in ("decoder_input_ids", "language", "task"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"{name}: {program.name} reads no source; its prompts are input_ids"
                )
    texts = read_prompts(input_ids, options, info)
    pictures = read_pictures(options, texts, program)
    if sources is not None:
        for text, tokens in zip(texts, sources.tokens, strict=True):
            text.source = tokens
    _force_first(texts, options)
    stopping = Stopping(options, info)
    pad = options.pad(info)
    if pad is None and stopping.early and len(texts) > 1:
        raise InputError(
            "sequences of this batch may end at different lengths, and neither pad_token_id nor an "
            "end token is known: give pad_token_id"
        )
    prompts = input_ids.cpu().repeat_interleave(options.num_return_sequences, 0)
    return Request(prompts, texts, options, stopping, 0 if pad is None else pad, sources, pictures)


def _beginnings(
    options: GenerationOptions, batch: int, program: Program, heard: Sequence[str]
) -> torch.Tensor:
    """What the texts begin with, i64[B,S]: what the plan says, unless a call says otherwise."""
    plan, given = program.plan.source, options.decoder_input_ids
    assert isinstance(plan, Encoded)
    if given is None:
        return torch.tensor(openings(options, batch, plan, heard))
    if options.language is not None or options.task is not None:
        raise InputError("both decoder_input_ids and a language or task are given; give one")
    if given.dtype != torch.int64 or given.dim() != 2 or len(given) != batch or not given.numel():
        raise InputError(
            f"decoder_input_ids: expected i64[{batch},S], one row a source, got {given.dtype} of "
            f"shape {list(given.shape)}"
        )
    given = given.cpu()
    # As transformers: texts always begin with the token that starts them.
    begun = takes_features(program) or bool((given[:, 0] == plan.start[0]).any())
    return given if begun else torch.cat([torch.tensor([plan.start] * batch), given], 1)


def _force_first(texts: Sequence[Text], options: GenerationOptions) -> None:
    """A text of one token goes on with `forced_bos_token_id`; the step is not asked."""
    first, last = options.forced_bos_token_id, options.forced_eos_token_id
    for text in texts:
        if first is not None and len(text.tokens) == 1:
            text.done = text.limit == 2
            text.tokens.append(last if text.done and last is not None else first)
