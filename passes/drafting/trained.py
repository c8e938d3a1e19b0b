"""Weights of draft heads that were trained before: what training left, or what others published."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...ir import InputError, PassError, Program, TensorType, Weight
from ...ir.plan.contract import Contract
from ...ir.support.files import read_json
from ...ir.weight_files import from_safetensors, open_safetensors
from ...ir.weights import piece
from ..engine.base import Effect, all_passes

FILE = "heads.safetensors"
FILES = (
    FILE,
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "model.safetensors",
    "pytorch_model.safetensors",
)
"""Names of heads files in a folder: what training writes, and what others publish."""

PICKLES = (".pt", ".bin", ".pth")

ADAPTER = "tuned."
"""Begins the names of adapters in the target (see `tune_target`)."""

Published: TypeAlias = Callable[[str], tuple[str, ...]]
"""The names that a weight of ours may have in published files."""


def as_published(name: str) -> tuple[str, ...]:
    """Our name without its first part: ``0.0.linear.weight`` for ``medusa.0.0.linear.weight``."""
    return (name.partition(".")[2],)


def fingerprint(program: Program) -> str:
    """A hash of the step's vocabulary-sized weights' first rows, whatever their dtype.

    Heads that were trained on one model fit another of the same shape, but know nothing of it.
    """
    digest = hashlib.sha256(f"{program.info.vocab_size}".encode())
    wholes = (_whole(program.weights[name]) for name in program.step.weights)
    used = {weight.name: weight for weight in wholes}
    names = sorted(
        name
        for name, weight in used.items()
        if weight.type.dims[:1] == (program.info.vocab_size,)
        and weight.type.dtype.is_floating_point
    )
    for name in names[:2]:
        rows = used[name].load()[:32].to(torch.bfloat16).view(torch.int16)
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()[:32]


def _whole(weight: Weight) -> Weight:
    """The weight that this one is a piece of, else itself."""
    return _whole(weight.inputs[0]) if weight.made.target is piece else weight


def trained_on(program: Program) -> str:
    """What tells heads for this program from others: the model, and the passes that made its layers
    or their states other ones than the model's. Heads of the model whole know nothing of a part."""
    known, mark = all_passes(), fingerprint(program)
    others = frozenset({Effect.HIDDEN_BASIS, Effect.LAYER_SET})
    changed = [
        f"{record.name}{record.options}"
        for record in program.provenance
        if record.matches
        and record.name in known
        and known[record.name].effects & others
        and known[record.name].contract is not Contract.TUNED  # adapters are compared themselves
    ]
    return hashlib.sha256(repr([mark, *changed]).encode()).hexdigest()[:32] if changed else mark


def adapters_of(program: Program) -> dict[str, Weight]:
    """The adapters that a program's weights are computed from, by name, in order."""
    found: dict[str, Weight] = {}

    def look(weight: Weight) -> None:
        if weight.name.startswith(ADAPTER):
            found.setdefault(weight.name, weight)
        for part in weight.inputs:
            look(part)

    for weight in program.weights.values():
        look(weight)
    return found


class TrainedWeights:
    """The tensors of a heads file. An empty path has none.

    Reads what training here wrote, and published layouts: `published` gives the names that one of
    our weights may have there. config: what the config.json beside a published file says.

    Errors: `PassError` naming the file if it is missing, damaged, a pickle, or was trained for
    another model.
    """

    def __init__(
        self, path: str, owner: str, program: Program, published: Published = as_published
    ) -> None:
        self.owner, self.published, self.path = owner, published, Path(path) if path else None
        self.names: frozenset[str] = frozenset()
        self.ours = False
        self.config: dict[str, Any] = {}
        if self.path is None:
            return
        if self.path.is_dir():
            self.path = _file_in(self.path)
        if self.path.suffix in PICKLES:
            raise PassError(
                f"{owner}: {self.path} is a pickle, which can run code; convert it to safetensors "
                f"where that does not matter: safetensors.torch.save_file({{k: v.contiguous() for "
                f"k, v in torch.load({self.path.name!r}, weights_only=True).items()}}, "
                f"'model.safetensors')"
            )
        try:
            self.file = handle = open_safetensors(self.path)
        except InputError as error:
            raise PassError(f"{owner}: {error}; give weights= what training wrote") from error
        self.names = frozenset(handle.keys())
        made_for = handle.metadata().get("target", "")
        if made_for and made_for != trained_on(program):
            raise PassError(
                f"{owner}: {self.path} was trained for another model than {program.name}: heads "
                f"know one model only; train them for this one"
            )
        self.ours = bool(made_for)
        if not self.ours:
            self.config = self._config(self.path.with_name("config.json"))

    def __bool__(self) -> bool:
        return self.path is not None

    def of(self, weight: Weight) -> Weight:
        """The trained weight of that name; the given one if nothing was trained.

        Errors: `PassError` naming the weight that is missing or has another shape.
        """
        if self.path is None:
            return weight
        name = self.find(weight.name)
        if name is None:
            raise PassError(
                f"{self.owner}: {self.path} has no {weight.name!r}; it holds {len(self.names)} "
                f"weights, such as {min(self.names, default='none')!r}: were the heads trained "
                f"with other options?"
            )
        trained = from_safetensors(self.file, name, weight.name)
        if trained.type.dims != weight.type.dims:
            raise PassError(
                f"{self.owner}: {self.path} has {weight.name} as {trained.type}, expected "
                f"{weight.type}: were the heads trained with other options?"
            )
        return trained.cast(weight.type.dtype)

    def find(self, name: str) -> str | None:
        """What one of our weights is called in the file; None if it is not there."""
        return next((n for n in (name, *self.published(name)) if n in self.names), None)

    def type_of(self, name: str) -> TensorType:
        """The type of a tensor of the file, by its name there."""
        return from_safetensors(self.file, name).type

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the file, by its name there."""
        return from_safetensors(self.file, name).load()

    def check_all_used(self, ours: Collection[str], known: Collection[str] = ()) -> None:
        """That a file says nothing that the program does not hear.

        ours: names of weights that the pass made. known: names in the file that may stay unread.
        Training writes all drafters of a recipe into one file: of such a file a pass answers for
        the weights of its own kind. Errors: `PassError` naming a tensor that has no place.
        """
        names = set(self.names) - {self.find(name) for name in ours} - set(known)
        if self.ours:
            kinds = {_kind(name) for name in ours}
            names = {name for name in names if _kind(name) in kinds}
        if left := sorted(names):
            assert self.path is not None
            raise PassError(
                f"{self.owner}: {self.path} has {left[0]!r} as {self.type_of(left[0])}, for which "
                f"these options have no place: were the heads trained with other options?"
            )

    def check_tuned(self, program: Program) -> None:
        """That a file which training wrote knows the target as the program has it: adapters that
        were trained with the heads are in the program, and no others. Errors: `PassError`."""
        held = adapters_of(program)
        own = {name for name in self.names if name.startswith(ADAPTER)}
        if not self.ours or self.path is None or not (held or own):
            return
        if not held:
            raise PassError(
                f"{self.owner}: {self.path} was trained together with the target's weights: add "
                f"the pass tune_target with weights={str(self.path)!r}"
            )
        if any(held[name].load().any() for name in held if name.endswith(".up")):
            same = own == held.keys() and all(self._equal(weight) for weight in held.values())
        else:
            same = not own
        if not same:
            raise PassError(
                f"{self.owner}: {self.path} was trained for another target than tune_target makes: "
                f"give both passes the same file of weights"
            )

    def _equal(self, weight: Weight) -> bool:
        stored = from_safetensors(self.file, weight.name).cast(weight.type.dtype)
        return stored.type == weight.type and torch.equal(stored.load(), weight.load())

    def check_config(self, **expected: Any) -> None:
        """That config.json, where it speaks of these keys, says this.

        Errors: `PassError` naming the key, expected and got.
        """
        for key, value in expected.items():
            if key in self.config and self.config[key] not in (value, None):
                assert self.path is not None
                raise PassError(
                    f"{self.owner}: {self.path.with_name('config.json')} says {key}="
                    f"{self.config[key]!r}, expected {value!r}: set the option to match, or use "
                    f"other heads"
                )

    def check_embedding(self, table: Weight, name: str = "embed_tokens.weight") -> None:
        """That the file's copy of the target's embedding table, if it has one, is the target's.

        Errors: `PassError` with expected and got shape, or saying that they differ.
        """
        if name not in self.names:
            return
        found = self.type_of(name)
        if found.dims != table.type.dims:
            raise PassError(
                f"{self.owner}: {self.path} has {name} as {found}, expected {table.type}: the "
                f"heads belong to another model"
            )
        # A few rows tell: published tables differ in dtype only, or altogether.
        theirs, ours = self.read(name)[:64].float(), table.load()[:64].float()
        if not torch.allclose(theirs, ours, atol=1e-2 * float(ours.abs().max()), rtol=2e-2):
            raise PassError(
                f"{self.owner}: {self.path} has an embedding table {name} other than the model's: "
                f"the heads belong to another model"
            )

    def _config(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            return {}
        try:
            config = read_json(path)
        except (OSError, ValueError) as error:
            raise PassError(f"{self.owner}: cannot read {path}: {error}") from error
        if not isinstance(config, dict):
            raise PassError(f"{self.owner}: {path} is no configuration: expected a JSON object")
        return config


def _kind(name: str) -> str:
    """A weight's drafter: ``hydra`` of ``hydra.0.skip``, ``speculator`` of ``speculator_0``."""
    return re.split(r"\.|_\d", name)[0]


def _file_in(folder: Path) -> Path:
    """The heads file of a folder: safetensors first, then a pickle to complain about."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    pickles = (path for path in sorted(folder.glob("*")) if path.suffix in PICKLES)
    return next(pickles, folder / FILE)
