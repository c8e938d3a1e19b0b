"""Noise in the text: the target learns to predict the text all the same.

    loss = -mean over t of log p(x[t+1] | x~[..t])

x~ is the text with a few tokens in a row replaced, here and there, by tokens that stand before
them; after the k-th of these the model is asked what it will be asked after the k-th token of
noise when it decodes. Source: Wang et al., "Make Some Noise: Unlocking Language Model Parallel
Inference Capability through Noisy Training" (2024), whose noise is drawn from what precedes it
("ahead noise"), and whose loss is that of all positions.
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from . import NoiseDraft


@objective(NoiseDraft)
def noise_loss(record: NoiseDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring. decay: the k-th token of noise counts decay^k."""
    count, width = record.prompts, batch.tokens.shape[1]
    starts = places(batch.tokens, count, record.noisy)
    logits = run(None, tokens=noised(batch.tokens, starts, count))["logits"]
    wanted, best = batch.target(record.aim), batch.best
    noisy = (starts[:, None] + torch.arange(count)).flatten()
    clean = torch.ones(width, dtype=torch.bool).index_fill(0, noisy, value=False).nonzero()[:, 0]
    total, hits = torch.zeros((), device=logits.device), []
    parts = [(clean, 1.0), *((starts + k, record.decay**k) for k in range(count))]
    for at, weight in parts:
        if len(at):
            loss = distilled(logits[:, at], wanted[:, at], 0)
            total = total + weight * len(at) / width * loss
    for at, _ in parts[1:]:
        hits.append(hit_rate(logits[:, at], best[:, at], 0))
    return Loss(total, hits)


def places(tokens: torch.Tensor, count: int, share: float) -> torch.Tensor:
    """i64[G] ascending: where rows of `count` tokens of noise begin, one in each stretch of
    count / share tokens, drawn with the tokens as seed. None holds the first token, and the text's
    last one is behind them."""
    width, stretch = tokens.shape[1], max(count + 1, round(count / share))
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    room = width - count - 1  # the last place is width - count - 1, so that the last token is clean
    if room < 1:
        return torch.ones(0, dtype=torch.int64)
    firsts = torch.arange(1, room + 1, stretch)
    free = (torch.cat([firsts[1:], torch.tensor([room + 1 + count])]) - firsts - count).clamp(min=1)
    drawn = torch.rand(len(firsts), generator=generator)
    return torch.minimum(firsts + (drawn * free).long(), torch.tensor(room))


def noised(tokens: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens i64[N,T] with those at places start to start + count - 1 replaced by tokens of the
    same text before the start, drawn with the tokens as seed."""
    generator = torch.Generator().manual_seed(int(tokens.sum()) + 1)
    made = tokens.clone()
    for start in starts.tolist():
        taken = torch.randint(start, (len(tokens), count), generator=generator).to(tokens.device)
        made[:, start : start + count] = tokens.gather(1, taken)
    return made
