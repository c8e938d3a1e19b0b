"""Another device's memory, as far as a CPU can show it: what is used too late is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from tiny import MASK, PROMPTS

from graftwork.backends import compile
from graftwork.backends.staging import Staging
from graftwork.backends.target import Target
from graftwork.ir import Program
from graftwork.runtime import generate

ASKED: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": []}


class Poisoned(Staging):
    """Outputs are gone once they were asked for, and inputs once the session has run."""

    def upload(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().upload(inputs)
        self.host.fill_(0xFF)

    def download(self, fetch: Collection[str]) -> dict[str, torch.Tensor]:
        found = super().download(fetch)
        for output in self.outputs.values():
            output.fill_(-1)
        return found


def texts(program: Program, target: Target) -> list[Any]:
    """A batch, one text, one that goes on from it, and a sampled one."""
    executable = compile(program, target)
    many = generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
    one = generate(executable, PROMPTS[2:3], **ASKED)
    longer = generate(executable, one, **ASKED)
    sampled = generate(executable, PROMPTS[2:3], **{**ASKED, "do_sample": True, "seed": 3})
    return [found.tolist() for found in (many, one, longer, sampled)]
