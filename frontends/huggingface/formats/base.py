"""What a format of quantized checkpoints is: where it keeps a layer's bits, and what they mean.

A checkpoint says in its config.json (`quantization_config`) which method made it. One file here
knows one method: which tensors of a module are its, and how they become a `StoredWeight`. Nothing
else knows formats; a new one is a file with a class, registered by its decorator.

Tensors come from outside. Everything small (scales, zero points, orders) is looked at when the
checkpoint is opened, so that what is wrong is said then, with the file and the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from ....ir import InputError, UnsupportedError, Weight
from ....ir.ops.numerics import Numeric
from ....ir.support.discovery import import_all
from ....ir.weight_files import from_safetensors, open_safetensors
from ...stored_weights import StoredWeight
from .moves import sizes


class Settings(BaseModel):
    """What a method says in config.json; what it says besides does not change what bits mean."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


@dataclass(frozen=True)
class Module:
    """The tensors of one module of a checkpoint. files: where each is, by its name in there."""

    folder: Path
    name: str
    files: Mapping[str, Path]

    def has(self, part: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return part in self.files

    def tensor(self, part: str, dtypes: tuple[torch.dtype, ...], rank: int = 2) -> Weight:
        """A tensor of the module. Errors: `InputError` if it is missing or no such tensor."""
        self._known(part)
        weight = from_safetensors(self.files[part], f"{self.name}.{part}")
        if weight.type.dtype not in dtypes or len(weight.type.dims) != rank:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(part, f"expected {wanted} with {rank} axes, got {weight.type}")
        return weight

    def sized(self, part: str, dtypes: tuple[torch.dtype, ...], *dims: int) -> Weight:
        """The same, of exactly these dims."""
        weight = self.tensor(part, dtypes, len(dims))
        if weight.type.dims != dims:
            shape = ",".join(map(str, dims))
            raise self.error(part, f"expected [{shape}], got {weight.type}")
        return weight

    def type_name(self, part: str) -> str:
        """What the file calls a tensor's dtype, which may be none that programs have."""
        self._known(part)
        return open_safetensors(self.files[part]).dtype_name(f"{self.name}.{part}")

    def rank(self, part: str) -> int:
        """How many axes a tensor has."""
        self._known(part)
        return len(open_safetensors(self.files[part]).shape(f"{self.name}.{part}"))

    def scales(self, part: str, dtypes: tuple[torch.dtype, ...], rank: int = 2) -> Weight:
        """Scales f16 or f32 (bfloat16 becomes f32), all of them finite."""
        weight = self.tensor(part, dtypes, rank)
        if not torch.isfinite(weight.load().float()).all():
            raise self.error(part, "expected finite numbers, got NaN or infinity among them")
        return weight if weight.type.dtype == torch.float16 else weight.cast(torch.float32)

    def fits(self, numeric: Numeric, columns: int) -> None:
        """Errors: `UnsupportedError` for rows that the op cannot store so."""
        if why := numeric.refusal(columns):
            raise UnsupportedError(f"{self.folder}: {self.name} cannot be kept in its bits: {why}")

    def check_groups(self, scales: Weight, group: int, columns: int) -> None:
        """Errors: `InputError` for scales [G,N] of other groups than the columns have."""
        if group < 1 or sizes(scales)[0] * group != columns:
            raise self.error(
                "scales",
                f"expected {columns / max(group, 1):g} groups of {group} for {columns} input "
                f"channels, got {scales.type}",
            )

    def _known(self, part: str) -> None:
        if part not in self.files:
            raise InputError(
                f"{self.folder}: {self.name} has {', '.join(sorted(self.files))}, but no tensor "
                f"{self.name}.{part}; fetch the checkpoint again"
            )

    def error(self, part: str, what: str) -> InputError:
        """What is wrong with a tensor, with its file."""
        file = self.files.get(part, self.folder)
        return InputError(f"{file}: tensor {self.name}.{part}: {what}")


class Format(ABC):
    """How one method keeps weights in a checkpoint.

    method: the `quant_method` of config.json. mark: the tensor by which a quantized module is
    known.
    """

    method: ClassVar[str]
    mark: ClassVar[str]

    @classmethod
    @abstractmethod
    def of(cls, config: Mapping[str, Any], folder: Path) -> Self:
        """The format as config.json describes it. Errors: `InputError` for settings that are none,
        `UnsupportedError` for those that are not read."""

    @abstractmethod
    def parts(self) -> frozenset[str]:
        """Names, within a module, of all tensors that say what its weight is."""

    @abstractmethod
    def stored(self, module: Module) -> StoredWeight | Weight:
        """A module's weight, kept in its bits; or as floats, where they cannot be kept.

        Errors: `InputError` naming the file and the tensor whose shape, dtype or values are not
        what the configuration says.
        """


_FORMATS: dict[str, type[Format]] = {}
S = TypeVar("S", bound=Settings)
F = TypeVar("F", bound=type[Format])


def register(kind: F) -> F:
    """Make a format known by its method."""
    _FORMATS[kind.method] = kind
    return kind


def format_of(config: Any, folder: Path) -> Format:
    """The format that a `quantization_config` describes.

    Errors: `UnsupportedError` for a method that none reads, and as `Format.of`.
    """
    if not isinstance(config, Mapping):
        config = config.to_dict() if hasattr(config, "to_dict") else {}
    method = str(config.get("quant_method") or "").lower()
    import_all(__package__)
    if method not in _FORMATS:
        raise UnsupportedError(
            f"{folder}: config.json says that the checkpoint is quantized by {method or 'nobody'} "
            f"(quantization_config.quant_method); expected one of {', '.join(sorted(_FORMATS))}. "
            f"Import the original and quantize it with a recipe"
        )
    return _FORMATS[method].of(config, folder)


def settings(kind: type[S], config: Mapping[str, Any], folder: Path) -> S:
    """A method's settings. Errors: `InputError` naming the first that is none."""
    try:
        return kind.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["quantization_config", *map(str, first["loc"])])
        raise InputError(
            f"{folder / 'config.json'}: {where}: {first['msg']}, got {first['input']!r}"
        ) from error


def read(
    format: Format, folder: Path, files: Mapping[str, Path]
) -> tuple[dict[str, Callable[[], Weight]], dict[str, StoredWeight]]:
    """What a quantized checkpoint holds: every tensor as a float one, by its name in the original,
    and those that are kept in their bits.

    files: the file of each tensor. Errors: as `Format.stored`.
    """
    parts = format.parts()
    modules = {
        name.removesuffix(f".{format.mark}") for name in files if name.endswith(f".{format.mark}")
    }
    found: dict[str, Callable[[], Weight]] = {}
    stored: dict[str, StoredWeight] = {}
    for name, file in files.items():
        owner, part = _owner(name, parts)
        if owner not in modules:
            found[name] = partial(from_safetensors, file, name)
        elif part == format.mark:
            of_it = {p: files[f"{owner}.{p}"] for p in parts if f"{owner}.{p}" in files}
            weight, target = format.stored(Module(folder, owner, of_it)), f"{owner}.weight"
            if isinstance(weight, StoredWeight):
                stored[target] = weight
                weight = weight.values(target)
            found[target] = partial(weight.renamed, target)
    return found, stored


def _owner(name: str, parts: frozenset[str]) -> tuple[str, str]:
    """The module and the part that a tensor's name says it is; parts may have dots."""
    for part in parts:
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return "", name
