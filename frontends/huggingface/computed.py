"""Parameters and buffers that checkpoints lack because the model computes them itself.

Marian's sinusoidal positions are such: `save_pretrained` leaves them out, and transformers makes
them anew when it loads a model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_SEEDS = (0, 1)


def computed(twin: Any, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Values for those of these parameters and buffers that checkpoints of the model may lack.

    twin: a model of transformers, its parameters without data. Only what transformers itself
    expects to be missing is looked at, and only what comes out the same with any seed is given:
    a parameter that would be random is none that can be computed.
    """
    patterns = getattr(twin, "_keys_to_ignore_on_load_missing", None) or ()
    exact = set(getattr(twin, "_keys_to_ignore_on_save", None) or ())
    found = {}
    for name in names:
        if name not in exact and not any(re.search(pattern, name) for pattern in patterns):
            continue
        values = [_initialized(twin, name, seed) for seed in _SEEDS]
        if torch.equal(*values):
            found[name] = values[0]
    return found


@torch.no_grad()
def _initialized(twin: Any, name: str, seed: int) -> torch.Tensor:
    """The value that the model's own code gives a parameter or buffer. seed: of what is random."""
    path, _, own = name.rpartition(".")
    module = copy.copy(twin.get_submodule(path))
    module._parameters = {
        key: None if tensor is None else nn.Parameter(_filled(tensor, seed), requires_grad=False)
        for key, tensor in module._parameters.items()
    }
    module._buffers = {
        key: None if tensor is None else _filled(tensor, seed)
        for key, tensor in module._buffers.items()
    }
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        _model_of(twin, path)._init_weights(module)
    made: torch.Tensor = getattr(module, own).detach()
    return made


def _filled(like: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor whose values depend on the seed: what is left of them was not computed."""
    return torch.full(like.shape, seed, dtype=like.dtype)


def _model_of(twin: Any, path: str) -> Any:
    """The innermost model of transformers around a module, which initializes it."""
    while not hasattr(twin.get_submodule(path), "_init_weights"):
        path = path.rpartition(".")[0]
    return twin.get_submodule(path)
