"""What a GGUF file holds: its metadata, and where its tensors lie.

    u32 magic, u32 version, u64 tensors, u64 entries
    each entry:  string key, u32 type, value
    each tensor: string name, u32 axes, u64 size of each (the fastest first), u32 type, u64 offset
    padding, and then the tensors' blocks

Files come from outside: every count, length and offset is held against the file's size before it is
followed, and nothing but the header is read. Of arrays (of which tokenizers have long ones) only
short ones of numbers are kept; `GgufFile.array` reads the others.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...ir import InputError
from ...ir.support.files import open_regular, stamp_of
from ...ir.support.names import shown
from ...ir.weight_files import SourceFile
from ...ir.weights import option

MAGIC, VERSIONS = 0x46554747, (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
_AXES, _LONGEST, _KEPT = 4, 2**20, 2**14


@dataclass(frozen=True)
class Passed:
    """An array that was passed over: of strings, or long. kind: of its values. start: the byte at
    which they start."""

    count: int
    kind: int = field(default=_STRING, compare=False)
    start: int = field(default=0, compare=False)


Value = int | float | bool | str | tuple[int | float, ...] | Passed


@option
@dataclass(frozen=True)
class Entry:
    """A tensor of a file. dims: as torch has them. kind: the number of its block type. start: the
    byte at which it starts."""

    name: str
    dims: tuple[int, ...]
    kind: int
    start: int


@option
@dataclass(frozen=True)
class GgufFile(SourceFile):
    """A file's metadata and tensors. alignment: of what every tensor's first byte is a multiple.
    parts: of a model in several files, the one that holds each tensor; none in a whole file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Entry]
    size: int
    alignment: int
    stamp: tuple[int, ...] = ()
    parts: Mapping[str, GgufFile] = field(default_factory=dict)

    @classmethod
    def whole(cls, path: Path) -> GgufFile:
        """A model's file, with the others of it if it is the first of several.

        Errors: `InputError` for another part than the first, and for parts that are missing or do
        not belong together; and as `open`.
        """
        first = cls.open(path)
        count = first.metadata.get("split.count", 1)
        if count in (0, 1):
            return first
        named = re.fullmatch(r"(.*)-00001-of-([0-9]{5})\.gguf", path.name)
        if named is None or first.metadata.get("split.no") != 0 or int(named[2]) != count:
            raise InputError(
                f"{path} is one of {shown(count)} parts of a model (split.count): expected the "
                f"first, called NAME-00001-of-{count:05}.gguf"
                if type(count) is int
                else f"{path}: split.count: expected a number, got {shown(count)}"
            )
        tensors, owners = dict(first.tensors), dict.fromkeys(first.tensors, first)
        for number in range(1, int(named[2])):
            name = f"{named[1]}-{number + 1:05}-of-{named[2]}.gguf"
            part = cls.open(path.with_name(name))
            said = tuple(part.metadata.get(f"split.{key}") for key in ("no", "count"))
            if said != (number, count) or tensors.keys() & part.tensors.keys():
                raise InputError(f"{part.path} is not part {number + 1} of {path}; fetch it again")
            tensors |= part.tensors
            owners |= dict.fromkeys(part.tensors, part)
        wanted = first.metadata.get("split.tensors.count", len(tensors))
        if wanted != len(tensors):
            raise InputError(
                f"{path}: its {count} parts hold {len(tensors)} tensors, and split.tensors.count "
                f"is {shown(wanted)}; fetch them again"
            )
        return replace(first, tensors=tensors, parts=owners)

    def owner(self, tensor: str) -> GgufFile:
        """The file that holds a tensor."""
        return self.parts.get(tensor, self)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Errors: `InputError` for what is no GGUF file, or a damaged one."""
        try:
            with open_regular(path) as file:
                stat = os.fstat(file.fileno())
                if stat.st_size == 0:
                    raise InputError(f"{path} is empty; expected a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    read = _Header(path, mapped, stat.st_size).read()
                    return replace(read, stamp=stamp_of(stat))
        except (OSError, struct.error, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}; fetch it again") from error

    def array(self, key: str, *, texts: bool = False) -> list[Any] | None:
        """An array of the metadata: numbers, or bytes if `texts`; None if there is none. Errors:
        `InputError` for an entry of another kind."""
        found = self.metadata.get(key)
        if found is None:
            return None
        if isinstance(found, tuple) and (not texts or not found):
            return list(found)
        if not isinstance(found, Passed) or texts is not (found.kind == _STRING):
            raise InputError(
                f"{self.path}: {key}: expected {'texts' if texts else 'numbers'}, an array of them"
            )
        with open_regular(self.path) as file:
            if not texts:
                code = _SCALARS[found.kind]
                file.seek(found.start)
                data = file.read(found.count * struct.calcsize("<" + code))
                return list(struct.unpack(f"<{found.count}{code}", data))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return list(_texts(mapped, found))

    def rows(self, entry: Entry, width: int) -> torch.Tensor:
        """A tensor's bytes u8[R,width], a row of its values each. Errors: as `pieces`."""
        (whole,) = self.pieces(entry, width, prod(entry.dims[:-1]))
        return whole

    def pieces(self, entry: Entry, width: int, most: int) -> Iterator[torch.Tensor]:
        """The same, `most` rows at a time. Errors: `InputError` if the file ends before it does: it
        was longer when its places were checked."""
        total = prod(entry.dims[:-1])
        with open_regular(self.path) as file:
            for first in range(0, total, most):
                count = min(most, total - first) * width
                data = np.fromfile(file, np.uint8, count, offset=0 if first else entry.start)
                if len(data) != count:
                    raise InputError(f"{self.path} became shorter while it was read")
                yield torch.from_numpy(data).reshape(-1, width)


def _texts(data: mmap.mmap, array: Passed) -> Iterator[bytes]:
    """The texts of an array whose lengths were checked when it was passed over."""
    read, place = struct.Struct("<Q").unpack_from, array.start
    for _ in range(array.count):
        (length,) = read(data, place)
        yield data[place + 8 : place + 8 + length]
        place += 8 + length


class _Header:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.place = path, data, size, 0

    def read(self) -> GgufFile:
        magic, version = self.scalars("II")
        if magic != MAGIC:
            raise InputError(f"{self.path} is no GGUF file: it does not start with GGUF")
        if version not in VERSIONS:
            raise InputError(f"{self.path} has GGUF version {version}; expected 2 or 3")
        tensors, entries = self.scalars("QQ")
        metadata: dict[str, Value] = {}
        for _ in range(self.at_most(entries, 12, "entries")):
            key, value = self.text(), self.value(*self.scalars("I"))
            if key in metadata:
                raise self.error(f"two entries are called {shown(key)}")
            metadata[key] = value
        found = [self.entry() for _ in range(self.at_most(tensors, 24, "tensors"))]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment: expected a power of two, got {shown(alignment)}")
        base = -(-self.place // alignment) * alignment
        named = {e.name: Entry(e.name, e.dims, e.kind, base + e.start) for e in found}
        if len(named) != len(found):
            raise self.error("two tensors have one name")
        return GgufFile(self.path, metadata, named, self.size, alignment)

    def entry(self) -> Entry:
        name = self.text()
        (axes,) = self.scalars("I")
        if not 1 <= axes <= _AXES:
            raise self.error(f"tensor {shown(name)} has {axes} axes; expected 1 to {_AXES}")
        dims = self.scalars("Q" * axes)
        kind, start = self.scalars("IQ")
        if not all(0 < dim < 2**40 for dim in dims):
            raise self.error(f"tensor {shown(name)} has the size {dims}")
        if start >= self.size:
            raise self.error(
                f"tensor {shown(name)} begins at byte {start} of a file of {self.size} bytes"
            )
        return Entry(name, tuple(int(dim) for dim in reversed(dims)), int(kind), int(start))

    def value(self, kind: int) -> Value:
        """A value of the metadata."""
        if kind in _SCALARS:
            found: Value = self.scalars(_SCALARS[kind])[0]
            return found
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.error(f"an entry has the type {kind}, which does not exist")
        of, count = self.scalars("IQ")
        start = self.place
        if of == _STRING:
            for _ in range(self.at_most(count, 8, "texts of an array")):
                self.skip(self.scalars("Q")[0], 1)
            return Passed(count, of, start)
        if of not in _SCALARS:
            raise self.error(f"an array of the type {of} is not supported")
        self.at_most(count, struct.calcsize("<" + _SCALARS[of]), "values")
        if count <= _KEPT:
            return self.scalars(_SCALARS[of] * count)
        self.skip(count, struct.calcsize("<" + _SCALARS[of]))
        return Passed(count, of, start)

    def text(self) -> str:
        (length,) = self.scalars("Q")
        start = self.place
        self.skip(length, 1)
        if length > _LONGEST:  # names are short, and chat templates shorter than that
            return ""
        return self.data[start : self.place].decode()

    def scalars(self, code: str) -> tuple[int, ...]:
        found: tuple[int, ...] = struct.unpack_from("<" + code, self.data, self.place)
        self.place += struct.calcsize("<" + code)
        return found

    def skip(self, count: int, size: int) -> None:
        self.place += self.at_most(count, size, "values") * size

    def at_most(self, count: int, size: int, what: str) -> int:
        """The count, if so many things of at least `size` bytes can follow."""
        if count > (self.size - self.place) // size:
            raise self.error(f"{count} {what} are announced, more than the file has bytes for")
        return count

    def error(self, what: str) -> InputError:
        return InputError(f"{self.path}: {what}, before byte {self.place}; fetch it again")
