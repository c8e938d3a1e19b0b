"""The entry: validate a request, run the decode loop, return sequences as transformers does."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir import GraftworkWarning, InputError, ModelInfo
from ..ir.executable import Executable
from ..ir.plan import DecodePlan, untrained
from .asking.options import GenerationOptions, read_options
from .asking.prompts import read_prompts
from .asking.stopping import Stopping
from .asking.streaming import Emitter
from .asking.text import Text
from .loop import DecodeLoop
from .stats import Stats


@dataclass(frozen=True)
class Generated:
    """What `generate` returns with ``return_dict_in_generate=True``. sequences: i64[B,S+N]."""

    sequences: torch.Tensor
    stats: Stats


def check_request(input_ids: torch.Tensor, options: Mapping[str, Any], info: ModelInfo) -> None:
    """Errors: those of `generate` for bad input and options."""
    read_prompts(input_ids, read_options(options, info), info)


@torch.no_grad()
def generate(
    executable: Executable, /, input_ids: torch.Tensor, **options: Any
) -> torch.Tensor | Generated:
    """Continue each prompt as the executable's plan says.

    input_ids: i64[B,S], ragged prompts padded on the left; options: `GenerationOptions`, by
    transformers' keyword names. Returns i64[B,S+N]: the prompts as given, then each sequence's new
    tokens, filled up with the pad token to the longest; on the device of `input_ids`. With
    ``return_dict_in_generate=True`` a `Generated`. Of several threads one generates at a time, the
    others wait. Errors: `InputError` for bad input or options (before anything runs), for a call
    from a streamer or stopping criterion of this executable's own generation, and for logits that
    are NaN; `UnsupportedError` for a program or plan that the runtime cannot carry out. Warns
    (`GraftworkWarning`) of drafters that nobody trained.
    """
    info = executable.program.info
    asked = read_options(options, info)
    texts = read_prompts(input_ids, asked, info)
    pad = _pad(asked, Stopping(asked, info).early and len(texts) > 1, asked.pad(info))
    _remark(executable.program.plan)
    prompts = input_ids.cpu()
    with executable.turn:
        loop = DecodeLoop(executable, texts, asked)
        emitter = None if asked.streamer is None else Emitter(asked.streamer, prompts, pad)
        stats = loop.run(emitter)
        if emitter is not None:
            emitter.end()
    sequences = _assemble(prompts, texts, pad).to(input_ids.device)
    return Generated(sequences, stats) if asked.return_dict_in_generate else sequences


def _remark(plan: DecodePlan) -> None:
    """Warn of weights that know nothing; Python shows the same warning once."""
    if not plan.speculates:
        return
    for record in untrained((plan.draft, plan.length, plan.verify)):
        warnings.warn(
            f"{record.slot}={record.kind} is untrained: its weights know nothing, so drafts are "
            f"chance and cost more than they bring; train them (graftwork train, or graftwork.fit) "
            f"and set the pass's option weights",
            GraftworkWarning,
            stacklevel=2,
        )


def _pad(options: GenerationOptions, needed: bool, pad: int | None) -> int:
    if pad is None and needed:
        raise InputError(
            "sequences of this batch may end at different lengths, and neither pad_token_id nor an "
            "end token is known: give pad_token_id"
        )
    return 0 if pad is None else pad


def _assemble(prompts: torch.Tensor, texts: Sequence[Text], pad: int) -> torch.Tensor:
    """[B,S+N]: prompts with their padding, new tokens, padding to the longest."""
    longest = max(text.generated for text in texts)
    new = torch.full((len(texts), longest), pad, dtype=torch.int64)
    for index, text in enumerate(texts):
        new[index, : text.generated] = torch.tensor(text.tokens[text.prompt :])
    return torch.cat([prompts, new], dim=1)
