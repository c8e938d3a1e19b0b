"""Puts emitted models on disk: one file of weights, written one tensor at a time.

Several models (the same function for chains, trees, batches) share one `WeightFile`; a weight that
two of them use is written once. ONNX Runtime maps the file, so weights that it does not repack cost
no anonymous memory.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as oir

from ...ir import Weight
from ..pages import Trimmer
from .emit import DTYPES, Emitted, raw_view

INLINE = 1024
"""Weights up to this many bytes go into the model file, where ONNX Runtime can fold them."""

OWNER = "graph"
"""Key of a value's meta under which the graph stands that is to hold its weight, if not the
outermost."""

LARGE = 1 << 20
"""From this size on, tensors start on a boundary that every system can map."""

PAGE = 1 << 16


class WeightFile:
    """Weights laid end to end in one file, found again by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[str, tuple[int, int]] = {}
        self.end = 0
        self.trimmer = Trimmer()
        path.touch()

    def place(self, weight: Weight) -> tuple[int, int]:
        """(offset, length) in bytes of a weight, written now if it is not in the file yet."""
        if weight.name not in self.places:
            self.places[weight.name] = self._write(weight)
        return self.places[weight.name]

    def _write(self, weight: Weight) -> tuple[int, int]:
        tensor = weight.load()
        align = PAGE if tensor.nbytes >= LARGE else 64
        offset = -(-self.end // align) * align
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(memoryview(raw_view(tensor)))
        self.end = offset + tensor.nbytes
        self.trimmer.note(tensor.nbytes)
        return offset, tensor.nbytes


def store(emitted: Emitted, path: Path, weights: WeightFile) -> None:
    """Write a model to `path`, next to its weight file.

    Errors: `OSError` if the disk is full.
    """
    for value, weight in emitted.pending:
        value.const_value = _tensor(weight, value, path, weights)
        owner: oir.Graph = value.meta.get(OWNER, emitted.model.graph)
        owner.register_initializer(value)
    oir.save(emitted.model, path)


def _tensor(
    weight: Weight, value: oir.Value, path: Path, weights: WeightFile
) -> oir.TensorProtocol:
    name = value.name or weight.name
    dtype, shape = DTYPES[weight.type.dtype], oir.Shape(weight.type.shape)
    if value.dtype == oir.DataType.UINT4 and value.shape is not None:
        dtype, shape = value.dtype, value.shape  # two of a byte's nibbles each
    elif weight.type.nbytes <= INLINE:
        return oir.tensor_adapters.TorchTensor(weight.load(), name=name)
    offset, length = weights.place(weight)
    location = weights.path.relative_to(path.parent)
    return oir.ExternalTensor(
        location, offset, length, dtype, shape=shape, name=name, base_dir=path.parent
    )
