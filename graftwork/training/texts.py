"""Text to train drafters on: the user's, and what the target itself writes.

Drafts are verified on text that the target generates. So a share of the windows is continued by
the target, and a model that has a chat template also asks itself: what it samples behind the
template's opening of a user's turn is a question (Xu et al., "Magpie: Alignment Data Synthesis from
Scratch by Prompting Aligned LLMs with Nothing", 2024), which it answers as it continues texts.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch

from ..chat.files import has_template
from ..data.corpus import Windows, drawn_at, own_text
from ..ir import InputError
from ..ir.execution.executable import Planned
from ..ir.support.tokenizer import encode
from ..runtime.generation import generate

if TYPE_CHECKING:
    from ..model import Model

ASKED = 64
"""Maximum tokens of a question that the model asks itself."""

BLANK = "{{question}}"
"""Stands where a question goes when the opening of a user's turn is looked for."""

Texts = tuple[torch.Tensor, torch.Tensor]
"""Windows i64[N,T], and i64[N], the index of the last token that the target did not write."""


class Author:
    """Writes windows of T tokens, each batch determined by its number and the seed.

    model: writes, without drafts. windows: of the user's text. own: share of windows that the model
    continues; of a model with a chat template half of these are conversations. temperature: of what
    it writes (0: greedy).
    """

    def __init__(
        self, model: Model, windows: Windows, own: float, temperature: float, seed: int
    ) -> None:
        self.model, self.windows, self.own, self.seed = model, windows, own, seed
        self.temperature = temperature

    def write(self, number: int, count: int) -> Texts:
        """Batch `number` of `count` windows."""
        windows, width = self.windows(number, count), self.windows.width
        own = round(count * self.own)
        talks = own // 2 if self.opening else 0
        seed = self.seed + number
        parts, firsts = [windows[own:]], [torch.zeros(count - own, dtype=torch.int64)]
        if own > talks:
            # Prompts of various lengths, so that heads are trained at all positions.
            prompts = windows[: own - talks, : max(1, width // 8 * (2 + number % 4))]
            write = partial(undrafted, self.model)
            parts.insert(0, own_text(write, prompts, width, self.temperature, seed))
            firsts.insert(0, torch.full((own - talks,), prompts.shape[1] - 1))
        if talks:
            tokens, starts = self._conversations(talks, width, seed)
            parts.insert(0, tokens)
            firsts.insert(0, starts)
        return torch.cat(parts), torch.cat(firsts)

    @cached_property
    def opening(self) -> list[int]:
        """What stands before a user's words in the model's chat template; empty without one that
        shows them."""
        if not has_template(self.model.program):
            return []
        try:
            asked = [{"role": "user", "content": BLANK}]
            text = str(self.model.apply_chat_template(asked, tokenize=False))
            before, blank, _ = text.partition(BLANK)
            return (
                encode(self.model.tokenizer.backend_tokenizer, before, marked=False)
                if blank
                else []
            )
        except InputError:  # a template that asks for more, or no tokenizer
            return []

    def _conversations(self, count: int, width: int, seed: int) -> Texts:
        """Questions and answers, cut to the width; and where each question ends."""
        ends = set(self.model.program.info.eos)
        openings = torch.tensor([self.opening] * count)
        asked = undrafted(
            self.model,
            openings,
            max_new_tokens=max(1, min(ASKED, width // 4)),
            seed=seed,
            **drawn_at(1.0),
        )
        prompts = []
        for row in asked[:, len(self.opening) :].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row))
            question = self.model.tokenizer.decode(row[:end]).strip() or "?"
            prompt = self.model.apply_chat_template([{"role": "user", "content": question}])
            assert not isinstance(prompt, str)
            prompts.append(prompt[: width - 1])
        longest, shortest = max(map(len, prompts)), min(map(len, prompts))
        ids = torch.zeros(count, longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        written = undrafted(
            self.model,
            ids,
            attention_mask=mask,
            max_new_tokens=width - shortest,
            eos_token_id=[],
            seed=seed,
            **drawn_at(self.temperature),
        )
        rows = [row[longest - len(prompt) :] for row, prompt in zip(written, prompts, strict=True)]
        starts = torch.tensor([len(prompt) - 1 for prompt in prompts])
        return torch.stack([row[:width] for row in rows]), starts


def undrafted(model: Model, prompts: torch.Tensor, **options: Any) -> torch.Tensor:
    """What a model makes of prompts i64[N,P] without drafts."""
    plain = Planned(model.executable, model.program.plan.undrafted())
    return cast(torch.Tensor, generate(plain, prompts, pad_token_id=0, **options))
