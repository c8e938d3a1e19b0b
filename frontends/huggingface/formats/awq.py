"""AWQ checkpoints in AutoAWQ's GEMM layout.

A linear layer [N,K] in groups of g input channels is

    qweight i32[K, N/8]      codes q of 4 bits, eight outputs a word
    scales  f16[K/g, N]
    qzeros  i32[K/g, N/8]    zero points z, packed like qweight

and w = scale * (q - z). The nibbles of a word, from the lowest, belong to its outputs 0, 2, 4, 6,
1, 3, 5, 7.
Source: Lin et al., "AWQ" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch

from ....ir import TensorType, UnsupportedError, derivation, derive
from ....ir.ops.numerics import Numeric, pack, unpack
from ...stored_weights import StoredWeight
from .base import Format, Module, Settings, register, settings
from .moves import FLOATS, INT, offsets, sizes, transposed

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output each nibble of a word belongs to."""

_BITS, _EACH = 4, 8


class AwqSettings(Settings):
    """bits, group_size (-1: all channels are one group), version: the layout."""

    bits: Literal[4]
    group_size: int = 128
    version: str = "gemm"


@register
@dataclass(frozen=True)
class Awq(Format):
    """See the module docstring."""

    settings: AwqSettings

    method: ClassVar[str] = "awq"
    mark: ClassVar[str] = "qweight"

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path) -> Self:
        """Errors: see `Format.of`; also for layouts other than GEMM's."""
        # AutoAWQ's own names, which transformers reads, too.
        given = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size"), **config}
        said = settings(AwqSettings, given, folder)
        if said.version.lower() != "gemm":
            raise UnsupportedError(
                f"{folder / 'config.json'}: quantization_config.version: expected gemm, got "
                f"{said.version!r}; save the checkpoint in the GEMM layout"
            )
        return cls(said)

    def parts(self) -> frozenset[str]:
        return frozenset({"qweight", "qzeros", "scales"})

    def stored(self, module: Module) -> StoredWeight:
        scales = module.scales("scales", FLOATS)
        groups, rows = sizes(scales)
        columns = sizes(module.tensor("qweight", INT))[0]
        group = columns if self.settings.group_size == -1 else self.settings.group_size
        module.check_groups(scales, group, columns)
        if rows % _EACH:
            raise module.error("scales", f"expected a multiple of 8 outputs, got {scales.type}")
        codes = module.sized("qweight", INT, columns, rows // _EACH)
        zeros = module.sized("qzeros", INT, groups, rows // _EACH)
        numeric = Numeric(_BITS, group, "affine", scales.type.dtype)
        module.fits(numeric, columns)
        packed, _ = numeric.types(rows, columns)
        type = TensorType(torch.int32, (groups, rows))
        points = derive(f"{module.name}.points", type, awq_points, zeros)
        return StoredWeight(
            numeric,
            derive(f"{module.name}.bits", packed, awq_codes, codes),
            transposed(f"{module.name}.scale", scales),
            offsets(f"{module.name}.offset", scales, points),
        )


@derivation
def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Codes i32[K,N/8] as a bitstream for each output."""
    return pack(_outputs(words).T, _BITS)


@derivation
def awq_points(words: torch.Tensor) -> torch.Tensor:
    """Zero points i32[G,N/8] as i32[G,N]."""
    return _outputs(words).to(torch.int32)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """The values i32[R,N] of words i32[R,N/8], in the order of outputs."""
    nibbles = unpack(words.contiguous().view(torch.uint8), _BITS)
    words_of: torch.Tensor = nibbles.reshape(len(words), -1, _EACH)
    return words_of[..., torch.tensor(ORDER).argsort()].flatten(1)
