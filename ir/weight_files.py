"""Weights in files: opened once, checked, and read when they are used."""

from __future__ import annotations

import os
from collections.abc import KeysView
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

import torch

from .support.errors import InputError
from .support.files import open_regular, stamp_of
from .types import TensorType
from .weights import Weight, derivation, derive, option


class SourceFile:
    """A file of weights. stamp: of the opened file, see `stamp_of`."""

    path: Path
    stamp: tuple[int, ...]

    def text_fields(self) -> dict[str, Any]:
        """Path and stamp."""
        return {"path": os.path.abspath(self.path), "stamp": self.stamp}

    @classmethod
    def from_text(cls, path: str, stamp: tuple[int, ...]) -> Self:
        """Open the file. Errors: `InputError` if its stamp differs."""
        file = cls.open(Path(path))
        if file.stamp != stamp:
            raise InputError(f"{path} has changed")
        return file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the file. Errors: `InputError`."""
        raise NotImplementedError


@option
class SafetensorsFile(SourceFile):
    """An open safetensors file; replacing the file on disk does not affect it.

    opened: an open handle, kept open. Each tensor is mapped separately, so that the pages of a
    released tensor leave memory.
    """

    def __init__(self, path: Path, opened: BufferedReader | None = None) -> None:
        self.path = path
        self._file = open_regular(path) if opened is None else opened
        self.stamp = stamp_of(os.fstat(self._file.fileno()))
        # On Linux an open file has a path of its own.
        own = Path(f"/proc/self/fd/{self._file.fileno()}")
        self._where = str(own if own.exists() else path)
        self._handle = _mapped(self._where)
        self._names = dict.fromkeys(self._handle.keys())

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """See `open_safetensors`."""
        return open_safetensors(path)

    def keys(self) -> KeysView[str]:
        """Names of its tensors."""
        return self._names.keys()

    def raw(self) -> BufferedReader:
        """The file from its beginning, as bytes. Errors: `OSError`."""
        return open_regular(self._where)

    def metadata(self) -> dict[str, str]:
        """The metadata of its header."""
        return dict(self._handle.metadata() or {})

    def type_of(self, key: str) -> TensorType:
        """A tensor's type. Errors: `InputError` for a dtype that is not supported."""
        dtype = SAFETENSORS_DTYPES.get(self.dtype_name(key))
        if dtype is None:
            raise InputError(
                f"{self.path}: tensor {key!r} has dtype {self.dtype_name(key)}, not supported"
            )
        return TensorType(dtype, self.shape(key))

    def dtype_name(self, key: str) -> str:
        """A tensor's dtype as safetensors names it."""
        return str(self._handle.get_slice(key).get_dtype())

    def shape(self, key: str) -> tuple[int, ...]:
        """A tensor's dims."""
        return tuple(self._handle.get_slice(key).get_shape())

    def tensor(self, key: str) -> torch.Tensor:
        """A memory-mapped tensor."""
        with _mapped(self._where) as mapping:
            tensor: torch.Tensor = mapping.get_tensor(key)
        return tensor


def _mapped(path: str) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


@lru_cache(maxsize=64)
def _open(path: str, stamp: tuple[int, ...]) -> SafetensorsFile:
    return SafetensorsFile(Path(path))


def open_safetensors(path: Path, opened: BufferedReader | None = None) -> SafetensorsFile:
    """Open a safetensors file; reuses the open file while it does not change. opened: see
    `SafetensorsFile`. Errors: `InputError` if it is missing, truncated or not safetensors."""
    try:
        if opened is not None:
            return SafetensorsFile(path, opened)
        return _open(str(path), stamp_of(path.stat()))
    except Exception as error:  # the library's error type is not public
        raise InputError(
            f"cannot read weights from {path}: {error}; if it is damaged, fetch it again"
        ) from error


def from_safetensors(path: Path | SafetensorsFile, key: str, name: str | None = None) -> Weight:
    """A weight that is read from a safetensors file when loaded. Errors: `InputError` naming the
    file, and the key if it is missing."""
    file = path if isinstance(path, SafetensorsFile) else open_safetensors(path)
    if key not in file.keys():  # noqa: SIM118  (the file is not a mapping)
        raise InputError(f"{file.path} holds no tensor {key!r}")
    return derive(name or key, file.type_of(key), stored_tensor, file=file, key=key)


@derivation
def stored_tensor(*, file: SafetensorsFile, key: str) -> torch.Tensor:
    """A tensor of a file."""
    return file.tensor(key)


SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
