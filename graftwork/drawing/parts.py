"""How many bytes of weights each part of a model has."""

from __future__ import annotations

import re
from collections import defaultdict

from ..ir import Program

LEAST = 0.005
"""Parts of a smaller share are one."""
_LAYERED = re.compile(r"(?:^|\.)[0-9]+\.([^.]+)")


def weights_by_part(program: Program) -> dict[str, int]:
    """Bytes by part, the largest first: of weights of layers what stands behind the layer's number
    (``layers: mlp``), of others their names without the last word."""
    sizes: dict[str, int] = defaultdict(int)
    for weight in program.weights.values():
        sizes[_part(weight.name)] += weight.type.nbytes
    total = sum(sizes.values())
    small = [part for part, size in sizes.items() if size < LEAST * total]
    rest = sum(sizes.pop(part) for part in small)
    found = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    return {**found, "smaller parts": rest} if small else found


def _part(name: str) -> str:
    """
    >>> _part("model.layers.3.mlp.down_proj.weight"), _part("model.embed_tokens.weight")
    ('layers: mlp', 'model.embed_tokens')
    """
    layered = _LAYERED.search(name)
    if layered is not None and name.split(".")[0] in ("model", "layers", "transformer", "blk"):
        return f"layers: {layered[1]}"
    return name.rpartition(".")[0] or name
