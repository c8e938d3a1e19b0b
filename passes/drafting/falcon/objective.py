"""Blocks of features and tokens, learned with some of the answers shown.

Source: Gao et al., "Falcon" (2024), Coupled Sequential Glancing Distillation. The layer predicts a
text once; the more it gets wrong, the more blocks are shown an answer: at their first place the
feature and the token that go in are those `block` places on, which is what the place is to predict,
so that the block's other places learn what to make of it. The loss of the second prediction is
SmoothL1 of features plus 0.1 times that of tokens: the cross entropy against the target's
distribution, and, as the part `hard` of it, the text's own token. As in EAGLE (Li et al., 2024)
features that go in get some noise.
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, objective
from ....training.objectives.eagle import TOKEN_SHARE, noisy
from . import SemiAutoregressiveDraft


@objective(SemiAutoregressiveDraft)
def glancing_loss(record: SemiAutoregressiveDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: by place in the block, without anything shown."""
    assert record.output is not None
    features, block = batch.hidden[record.output], record.block
    wanted = features[:, block:]
    given, text = noisy(features[:, :-1], batch.tokens), batch.tokens[:, 1:]
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
    # Texts end anywhere in a block.
    starts = int(torch.randint(block, (), generator=generator))
    places = (torch.arange(text.shape[1]) + starts) % block
    seen = by_blocks(places).to(text.device).expand(len(text), -1, -1)
    with torch.no_grad():
        first = run(record.function, tokens=text, hidden=given, ancestors=seen)["draft_logits"]
    count = wanted.shape[1]
    right = first[:, : count - 1].argmax(-1) == batch.best[:, block : block + count - 1]
    shown = glanced(right, places, record.glance, generator).to(text.device)
    known = shown[..., None]
    given = torch.cat(
        [torch.where(known, wanted[:, :-1], given[:, : count - 1]), given[:, count - 1 :]], 1
    )
    later = batch.tokens[:, 1 + block :]
    text = torch.cat([torch.where(shown, later, text[:, : count - 1]), text[:, count - 1 :]], 1)
    made = run(record.function, tokens=text, hidden=given, ancestors=seen)
    near = torch.nn.functional.smooth_l1_loss(made["hidden"][:, :count].float(), wanted.float())
    student = made["draft_logits"]
    soft = distilled(student, batch.target(record.aim), block)
    hard = distilled(student, batch.target("text"), block)
    total = near + TOKEN_SHARE * ((1 - record.hard) * soft + record.hard * hard)
    hits = [float(right[0, places[: count - 1] == place].float().mean()) for place in range(block)]
    return Loss(total, hits)


def by_blocks(places: torch.Tensor) -> torch.Tensor:
    """bool[W,W], which columns each sees: all of its block, and of those before. places: i64[W],
    each column's within its block, which the first may have begun before."""
    number = (places == 0).cumsum(0)
    return number <= number[:, None]


def glanced(
    right: torch.Tensor, places: torch.Tensor, share: float, generator: torch.Generator
) -> torch.Tensor:
    """bool[N,W], the places that are shown what they are to predict: of each text `share` as many
    as are wrong, drawn among the first places of blocks. right: bool[N,W]."""
    firsts = (places[: right.shape[1]] == 0).nonzero()[:, 0]
    shown = torch.zeros(right.shape, dtype=torch.bool)
    for index, wrong in enumerate((~right).sum(1).tolist()):
        order = torch.randperm(len(firsts), generator=generator)
        shown[index, firsts[order[: round(share * wrong)]]] = True
    return shown
