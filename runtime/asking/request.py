"""What a call asks for, settled once against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...ir import InputError, Program
from .options import GenerationOptions, read_options
from .prompts import read_prompts
from .stopping import Stopping
from .streaming import Emitter
from .text import Text

ENDLESS = 2**31 - 1
"""Tokens that a text may have whose rows are dropped and turned."""


@dataclass(frozen=True)
class Request:
    """prompts: i64[B,S] on the CPU, as given, each as often as it is continued. texts: the
    sequences without padding, with their limits. stopping: what ends one. pad: the token that fills
    finished ones."""

    prompts: torch.Tensor
    texts: Sequence[Text]
    options: GenerationOptions
    stopping: Stopping
    pad: int

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


def read_request(input_ids: torch.Tensor, keywords: Mapping[str, Any], program: Program) -> Request:
    """What `generate` is asked for. Errors: `InputError` for bad input or options."""
    info = program.info
    if program.plan.cache.endless:  # positions stay in the caches, so texts may leave the context
        info = replace(info, context=ENDLESS)
    options = read_options(keywords, info)
    texts = read_prompts(input_ids, options, info)
    stopping = Stopping(options, info)
    pad = options.pad(info)
    if pad is None and stopping.early and len(texts) > 1:
        raise InputError(
            "sequences of this batch may end at different lengths, and neither pad_token_id nor an "
            "end token is known: give pad_token_id"
        )
    prompts = input_ids.cpu().repeat_interleave(options.num_return_sequences, 0)
    return Request(prompts, texts, options, stopping, 0 if pad is None else pad)
