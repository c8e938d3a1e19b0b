"""What texts have taught a plan's drafters, in a file: the next run begins with it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ..ir import InputError, Program
from ..ir.execution.executable import Executable
from ..ir.plan import DraftRecord
from ..ir.support.files import LARGE, read_bytes
from ..ir.weight_files import open_safetensors
from .memo import Lore
from .sealed_files import is_sealed, write_sealed
from .speculate.drafters.base import DRAFTERS, Drafter, lore_of

FORMAT = "graftwork-learnt"
VERSION = "1"


def save_learnt(executable: Executable, path: Path) -> int:
    """Write what texts have taught the drafters, a safetensors file; its tensors' bytes.

    The file is complete or not there at all. Errors: `InputError` for a plan whose drafters learn
    nothing that could be kept, and for a file that cannot be written.
    """
    with executable.turn:
        tensors = {
            f"{name}.{key}": tensor
            for name, lore in _lores(executable).items()
            for key, tensor in lore.tensors().items()
        }
    write_sealed(path, tensors, _marks(executable.program))
    return sum(tensor.nbytes for tensor in tensors.values())


def load_learnt(executable: Executable, path: Path) -> None:
    """Go on from what `save_learnt` wrote, in place of what the drafters have learned so far.

    Drafters that the file knows nothing of keep what they have. Errors: `InputError` for a file
    that is missing, damaged or none of these, of another vocabulary, or of no drafter of the plan;
    nothing is taken then.
    """
    lores, file = _lores(executable), open_safetensors(path)
    said, wanted = file.metadata(), _marks(executable.program)
    if said.get("format") != FORMAT:
        raise InputError(f"{path} is no file of save_learnt: its header does not say {FORMAT}")
    if said.get("version") != VERSION:
        raise InputError(
            f"{path} was saved by another graftwork: its version is {said.get('version')!r}, "
            f"expected {VERSION!r}; remove it and begin anew"
        )
    if said.get("vocabulary") != wanted["vocabulary"]:
        raise InputError(
            f"{path} is of a model with another vocabulary or tokenizer: its token ids mean other "
            f"words here; give the file of this model, or begin a new one"
        )
    if not is_sealed(file):
        raise InputError(f"{path} is damaged: its sha256 is another; remove it and begin anew")
    keys = list(file.keys())
    known = {
        name: {key: key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")}
        for name in lores
    }
    strange = set(keys).difference(*known.values())
    if strange:
        raise InputError(
            f"{path} holds {min(strange)}, which no drafter of this plan learns "
            f"({', '.join(lores)}): it was saved with another recipe"
        )
    vocabulary = executable.program.info.vocab_size
    with executable.turn:
        for name, own in known.items():
            if not own:
                continue
            try:
                memo = {key: file.tensor(whole).clone() for whole, key in own.items()}
                lores[name].take(memo, vocabulary)
            except InputError as error:
                raise InputError(f"{path}, {name}: {error}") from error


def _lores(executable: Executable) -> dict[str, Lore]:
    """What the plan's drafters know, by the drafter's place and kind."""
    found = {
        f"{number}.{leaf.kind}": lore_of(executable, drafter, leaf)
        for number, (leaf, drafter) in enumerate(_learning(executable.program))
    }
    if not found:
        raise InputError(
            f"draft={executable.program.plan.draft.brief} learns nothing of texts that could be "
            f"kept: recipes that do are recycling, ngram_cache, ngram_mod, aded "
            f"and ouroboros"
        )
    return found


def _learning(program: Program) -> Iterator[tuple[DraftRecord, type[Drafter]]]:
    for leaf in program.plan.draft.leaves:
        drafter = DRAFTERS.find(leaf) if DRAFTERS.has(leaf) else None
        if drafter is not None and drafter.lore is not None:
            yield leaf, drafter


def _marks(program: Program) -> dict[str, str]:
    """What token ids mean is what such a file depends on, and nothing else of a model."""
    path = program.assets.get("tokenizer.json")
    words = hashlib.sha256(b"" if path is None else read_bytes(path, LARGE)).hexdigest()
    vocabulary = f"{program.info.vocab_size} {words}"
    return {"format": FORMAT, "version": VERSION, "vocabulary": vocabulary}
