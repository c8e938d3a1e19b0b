"""Functions of scores [R,V] that change what may be chosen, with transformers' meaning."""

from __future__ import annotations

import torch

NOTHING = float("-inf")


def penalize_repetition(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Seen tokens' scores divided by `penalty` where positive, multiplied where negative.

    scores f32[R,V]; seen bool[R,V]. Source: Keskar et al., "CTRL" (2019).
    """
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, penalized, scores)


def keep_top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Scores [R,V] with all below the row's `count`-th largest at -inf; ties with it stay.

    Source: Fan et al., "Hierarchical Neural Story Generation" (2018).
    """
    if count >= scores.shape[-1]:
        return scores
    bound = scores.topk(count).values[:, -1:]
    return scores.masked_fill(scores < bound, NOTHING)


def keep_top_p(scores: torch.Tensor, mass: float, least: int = 1) -> torch.Tensor:
    """Scores [R,V] with the least likely tokens, together at most 1 - mass, at -inf.

    The `least` most likely tokens always stay. Source: Holtzman et al., "The Curious Case of Neural
    Text Degeneration" (2020).
    """
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1)
    dropped = below <= 1 - mass
    dropped[:, -least:] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), NOTHING)


def keep_min_p(scores: torch.Tensor, share: float, least: int = 1) -> torch.Tensor:
    """Scores [R,V] with tokens less likely than `share` of the row's likeliest at -inf.

    The `least` most likely tokens always stay. Source: Nguyen et al., "Turning Up the Heat: Min-p
    Sampling" (2024).
    """
    chances = scores.softmax(-1)
    dropped = chances < share * chances.amax(-1, keepdim=True)
    if least > 1:
        dropped = dropped.scatter(-1, scores.topk(least).indices, value=False)
    return scores.masked_fill(dropped, NOTHING)
