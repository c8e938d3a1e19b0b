"""Beam search: of each prompt, the continuations that are likeliest as a whole.

The `num_beams` best texts so far are decoded side by side. Of all tokens that may follow any of
them, those stay whose texts have the largest sum of log probabilities; a text that has ended is
kept by that sum divided by its length to the power of `length_penalty`. The order of all of it, and
with it texts and scores, are those of transformers' `generate` (5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ...ir import InputError
from ...ir.plan import DecodePlan
from .checks import bad_logits
from .options import GenerationOptions
from .stopping import Stopping
from .text import Text

NEVER = -1e9
"""The score of what must not be chosen; finite, as sums of it must be."""


@dataclass(frozen=True)
class Found:
    """A text that has ended. tokens: the new ones. beams: in which place of the batch the text was
    that each of them was chosen behind. score: see `Search`."""

    tokens: list[int]
    beams: list[int]
    score: float = NEVER


@dataclass(frozen=True)
class Step:
    """What a step decided of all beams: whose text each goes on from, and by which token; done: by
    prompt, whether its search is over."""

    parents: list[int]
    tokens: list[int]
    done: list[bool]


@dataclass
class Search:
    """The search behind some prompts. texts: `num_beams` of each prompt, which others advance.

    running: f32[P,K], sums of log probabilities of what the texts have gained, best first. scores:
    f32[P,K], of the best texts that have ended, by sum / length ** `length_penalty`; ended:
    bool[P,K], which of these there are. open: bool[P], where running ones may still be better.
    beams: of each text, by token, the place in the batch of the text that it was chosen behind.
    """

    texts: Sequence[Text]
    options: GenerationOptions
    stopping: Stopping
    beams: list[list[int]] = field(default_factory=list)
    found: list[list[Found]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.width = self.options.num_beams
        prompts = len(self.texts) // self.width
        # Enough that `width` are left to go on if all others have ended.
        self.kept = max(2, 1 + len(self.stopping.eos)) * self.width
        self.running = torch.zeros(prompts, self.width)
        self.running[:, 1:] = NEVER  # the first texts of a prompt are all the same
        self.scores = torch.full((prompts, self.width), NEVER)
        self.ended = torch.zeros(prompts, self.width, dtype=torch.bool)
        self.open = torch.ones(prompts, dtype=torch.bool)
        self.top = torch.arange(self.kept) < self.width
        self.beams = [[] for _ in self.texts]
        self.found = [[Found([], [])] * self.width for _ in range(prompts)]

    @property
    def hopeless(self) -> frozenset[int]:
        """Texts with a token that the scores before it forbade: there were too few others."""
        return frozenset(self.running.flatten().isneginf().nonzero().flatten().tolist())

    @property
    def best(self) -> list[Found]:
        """What is returned: of each prompt its `num_return_sequences` best texts, best first."""
        count = self.options.num_return_sequences
        return [found for prompt in self.found for found in prompt[:count]]

    def advance(self, log_probs: torch.Tensor) -> Step:
        """Choose among the tokens behind all texts: log_probs f32[P*K,V], processed."""
        options, width = self.options, self.width
        prompts, vocabulary = len(self.running), log_probs.shape[-1]
        sums = log_probs.view(prompts, width, -1) + self.running[:, :, None]
        best, places = self._candidates(sums.reshape(prompts, -1))
        parents, tokens = places // vocabulary, places % vocabulary
        hits = torch.tensor(
            [self._hits(p, *each) for p, each in enumerate(zip(parents, tokens, strict=True))]
        )
        going, order = (best + hits * NEVER).topk(width)
        length = 1 + max(text.generated for text in self.texts)
        self._keep(best, parents, tokens, hits, length)
        self.running = going
        chosen = parents.gather(1, order) + width * torch.arange(prompts)[:, None]
        made = Step(chosen.flatten().tolist(), tokens.gather(1, order).flatten().tolist(), [])
        self.beams = [[*self.beams[parent], parent] for parent in made.parents]
        most = max(text.limit - text.prompt for text in self.texts)
        ahead = options.early_stopping == "never" and options.length_penalty > 0.0
        possible = going[:, :1] / (most if ahead else length) ** options.length_penalty
        worst = torch.where(self.ended, self.scores.min(1, keepdim=True).values, NEVER)
        self.open &= (possible > worst).any(1)
        over = ~self.open | self._full | hits.all(1)
        return replace(made, done=over.tolist())

    @property
    def _full(self) -> torch.Tensor:
        """bool[P], of which prompts as many texts have ended as there are beams, and no more are
        wanted."""
        return self.ended.all(1) & (self.options.early_stopping is True)

    def _candidates(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best sums [P,K*V], or some drawn by them, and their places. Errors: `InputError` for
        a vocabulary that is too small."""
        if sums.shape[1] < self.kept:
            raise InputError(
                f"num_beams={self.width}: {self.kept} candidates are compared, and so many tokens "
                f"do not follow {self.width} texts: give fewer end tokens"
            )
        if not bool(sums.amax(1).isfinite().all()):
            raise bad_logits()
        if not self.options.do_sample:
            return sums.topk(self.kept)
        places = sums.softmax(-1).multinomial(self.kept, generator=self.options.random())
        return sums.gather(1, places), places

    def _hits(self, prompt: int, parents: torch.Tensor, tokens: torch.Tensor) -> list[bool]:
        """Whether the texts that candidates make end with them."""
        first, found = prompt * self.width, []
        if self.texts[first].done:
            return [True] * len(tokens)
        for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
            text = self.texts[first + parent]
            found.append(self.stopping.ends(replace(text, tokens=[*text.tokens, token])))
        return found

    def _keep(
        self,
        sums: torch.Tensor,
        parents: torch.Tensor,
        tokens: torch.Tensor,
        hits: torch.Tensor,
        length: int,
    ) -> None:
        """Take texts that have ended among the best, if they are better than earlier ones."""
        ended = hits & self.top
        made = sums / length**self.options.length_penalty
        made += (self._full | ~self.open)[:, None] * NEVER
        made += ~ended * NEVER
        self.scores, order = torch.cat([self.scores, made], 1).topk(self.width)
        self.ended = torch.cat([self.ended, ended], 1).gather(1, order)
        for prompt, places in enumerate(order.tolist()):
            if self.texts[prompt * self.width].done:
                continue
            known = self.found[prompt]
            self.found[prompt] = [
                replace(known[place], score=score)
                if place < self.width
                else self._made(prompt, parents, tokens, place - self.width, score)
                for place, score in zip(places, self.scores[prompt].tolist(), strict=True)
            ]

    def _made(
        self, prompt: int, parents: torch.Tensor, tokens: torch.Tensor, place: int, score: float
    ) -> Found:
        parent = prompt * self.width + int(parents[prompt, place])
        text = self.texts[parent]
        new = [*text.tokens[text.prompt :], int(tokens[prompt, place])]
        return Found(new, [*self.beams[parent], parent], score)


def check_beams(options: GenerationOptions, plan: DecodePlan) -> None:
    """Errors: `InputError` for options and plans that a search over several texts cannot have."""
    asked = f"num_beams={options.num_beams}"
    if options.num_return_sequences > options.num_beams:
        raise InputError(
            f"num_return_sequences={options.num_return_sequences}: expected at most {asked}"
        )
    if options.streamer is not None:
        raise InputError(f"streamer: {asked} decides on texts when all end; give num_beams=1")
    if plan.depth.stops:
        raise InputError(
            f"{asked}: the recipe's depth={plan.depth.brief} keeps from step to step what it has "
            f"left out of each text, which beams exchange; give num_beams=1, or take a recipe that "
            f"runs all layers"
        )
    if not plan.verify.lone:
        raise InputError(
            f"{asked}: the recipe's verify={plan.verify.brief} decides by what another model says, "
            f"and beams by the target's scores; give num_beams=1, or take a recipe without it"
        )
