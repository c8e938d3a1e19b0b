"""Weights of draft heads that were trained before, from the file that training leaves."""

from __future__ import annotations

from pathlib import Path

from ..ir import InputError, PassError, Program, Weight
from ..ir.fingerprint import fingerprint
from ..ir.weights import from_safetensors, open_safetensors

FILE = "heads.safetensors"
FILES = (FILE, "medusa_lm_head.safetensors", "model.safetensors")
"""Names of heads files in a folder: what training writes, and what others publish."""


class TrainedWeights:
    """The tensors of a heads file. An empty path has none.

    Reads what training here wrote, and published layouts: those use our names without the first
    part (``0.0.linear.weight`` for ``medusa.0.0.linear.weight``).

    Errors: `PassError` naming the file if it is missing, damaged, or was trained for another model.
    """

    def __init__(self, path: str, owner: str, program: Program) -> None:
        self.owner, self.path = owner, Path(path) if path else None
        if self.path is None:
            return
        if self.path.is_dir():
            self.path = next((p for n in FILES if (p := self.path / n).is_file()), self.path / FILE)
        if self.path.suffix in (".pt", ".bin", ".pth"):
            raise PassError(
                f"{owner}: {self.path} is a pickle, which can run code; convert it to safetensors"
            )
        try:
            handle = open_safetensors(self.path)
        except InputError as error:
            raise PassError(f"{owner}: {error}; give weights= what training wrote") from error
        self.names = frozenset(handle.keys())
        made_for = (handle.metadata() or {}).get("target", "")
        if made_for and made_for != fingerprint(program):
            raise PassError(
                f"{owner}: {self.path} was trained for another model than {program.name}: heads "
                f"know one model only; train them for this one"
            )

    def __bool__(self) -> bool:
        return self.path is not None

    def of(self, weight: Weight) -> Weight:
        """The trained weight of that name; the given one if nothing was trained.

        Errors: `PassError` naming the weight that is missing or has another shape.
        """
        if self.path is None:
            return weight
        name = next((n for n in _names(weight.name) if n in self.names), None)
        if name is None:
            raise PassError(
                f"{self.owner}: {self.path} has no {weight.name!r}; it holds {len(self.names)} "
                f"weights, such as {min(self.names, default='none')!r}: were the heads trained "
                f"with other options?"
            )
        trained = from_safetensors(self.path, name, weight.name)
        if trained.type.dims != weight.type.dims:
            raise PassError(
                f"{self.owner}: {self.path} has {weight.name} as {trained.type}, expected "
                f"{weight.type}: were the heads trained with other options?"
            )
        return trained.cast(weight.type.dtype)


def _names(name: str) -> tuple[str, str]:
    """Ours, and the published one."""
    return name, name.partition(".")[2]
