"""Picking rows out of outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def gathered(values: torch.Tensor, places: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows of [B,M,...] by i64[B,N]: a copy.

    By numpy where it can: torch shares even a few rows out among threads, which wait a millisecond
    for a core while the threads of a model that has just run still spin on it.
    """
    rows = np.arange(len(places))[:, None]
    if values.is_cpu and values.dtype != torch.bfloat16:
        found: Any = values.numpy()[rows, places]
        return torch.from_numpy(found)
    columns = torch.from_numpy(places.copy()).to(values.device)
    return values[torch.from_numpy(rows).to(values.device), columns]
