"""Texts whose rows go to a file and come back: long prompts that many programs begin with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from ..ir import InputError, Program, State, TensorType, function_text
from ..ir.execution.executable import Executable
from ..ir.weight_files import SafetensorsFile, open_safetensors
from .asking.request import read_request
from .cache.conversations import (
    LEAST,
    Conversation,
    Conversations,
    deciding,
    kept_states,
    read_text,
    rows_of,
)
from .loop import decode
from .sealed_files import is_sealed, write_sealed

FORMAT = "graftwork-prefix"
VERSION = "2"
_SAMPLE = 4096


@torch.no_grad()
def save_prefix(executable: Executable, ids: torch.Tensor, path: Path) -> int:
    """Run a text i64[S] or i64[1,S] and write what the caches hold of it; its length in tokens.

    The file is complete or not there at all. Errors: `InputError` for more than one text, one that
    is too short to be worth it, ids that the model has not, or a file that cannot be written.
    """
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] < LEAST:
        raise InputError(
            f"a prefix is one text of at least {LEAST} tokens, got ids of shape {list(ids.shape)}"
        )
    program = executable.program
    if program.recurrent:
        raise InputError(
            f"{program.name} has recurrences, whose states have no rows that a prefix could keep"
        )
    if program.plan.source.encoder is not None:
        raise InputError(
            f"{program.name} writes from a source, and what the caches hold of a text belongs to "
            "that source: a prefix would serve no other"
        )
    asked = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1}
    request = read_request(ids, {**asked, "attention_mask": torch.ones_like(ids)}, program)
    with executable.turn:
        decode(executable, request)
        held = Conversations.of(executable).lying[0]
        assert held is not None
        states = read_text(executable, 0, held.rows, len(held.tokens))
    tensors = {"tokens": torch.tensor(held.tokens)}
    tensors |= {f"state.{name}": rows.contiguous() for name, rows in states.items()}
    tensors |= {f"memo.{name}": kept.contiguous() for name, kept in held.memo.items()}
    said = {"rows": str(held.rows), "position": str(held.position)}
    write_sealed(path, tensors, {**_marks(executable), **said})
    return len(held.tokens)


def load_prefix(executable: Executable, path: Path) -> torch.Tensor:
    """Hold what `save_prefix` wrote until it is forgotten; the text i64[1,S] that prompts may go on
    from.

    Errors: `InputError` for a file that is missing, damaged or none of these, that another program
    wrote, or that holds what it cannot have written.
    """
    file, program = open_safetensors(path), executable.program
    said, wanted = file.metadata(), _marks(executable)
    if said.get("format") != FORMAT:
        raise InputError(f"{path} is no saved prefix: its header does not say {FORMAT}")
    for name in ("version", "program"):
        if said.get(name) != wanted[name]:
            raise InputError(
                f"{path} was saved by another {'graftwork' if name == 'version' else 'program'}: "
                f"its {name} is {said.get(name)!r}, expected {wanted[name]!r}; save it again with "
                f"this model and recipe"
            )
    if not is_sealed(file):
        raise InputError(f"{path} is a damaged prefix: its sha256 is another; save it again")
    held = _Reader(path, file, program).read(said)
    with executable.turn:
        kept = Conversations.of(executable)
        kept.stored = [c for c in kept.stored if not (c.pinned and c.tokens == held.tokens)]
        kept.stored.append(held)
    return torch.tensor([held.tokens])


class _Reader:
    """Checks a file against the program before anything of it is used."""

    def __init__(self, path: Path, file: SafetensorsFile, program: Program) -> None:
        self.path, self.file, self.program = path, file, program

    def read(self, said: Mapping[str, str]) -> Conversation:
        """The conversation. Errors: `InputError`."""
        tokens = self._tokens()
        rows = self._number(said, "rows", len(tokens))
        position = self._number(said, "position", len(tokens))
        wanted = rows if self.program.plan.cache.endless else len(tokens)
        if position != wanted:
            raise self._wrong(f"position={position}, expected {wanted}")
        own = self.program.states
        counts = rows, len(tokens)
        states = {name: self._state(own[name], *counts) for name in kept_states(self.program)}
        memo = {
            name.removeprefix("memo."): self._memo(name, len(tokens))
            for name in self.file.keys()  # noqa: SIM118  (the file is not a mapping)
            if name.startswith("memo.")
        }
        strange = set(self.file.keys()) - {"tokens", *(f"state.{n}" for n in states)}
        if strange := {name for name in strange if not name.startswith("memo.")}:
            raise self._wrong(f"tensors that belong to nothing: {', '.join(sorted(strange))}")
        plan = self.program.plan
        decided = deciding(self.program)
        return Conversation(tokens, rows, position, decided, plan.draft, memo, states, pinned=True)

    def _tokens(self) -> list[int]:
        found, info = self._tensor("tokens"), self.program.info
        if found.dtype != torch.int64 or found.dim() != 1:
            raise self._wrong(f"tokens of type {TensorType.of(found)}, expected i64[S]")
        if not LEAST <= len(found) < info.context:
            raise self._wrong(f"{len(found)} tokens; the model's context is {info.context}")
        if int(found.min()) < 0 or int(found.max()) >= info.vocab_size:
            raise self._wrong(f"tokens outside the vocabulary of {info.vocab_size}")
        ids: list[int] = found.tolist()
        return ids

    def _number(self, said: Mapping[str, str], name: str, most: int) -> int:
        text = said.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= most):
            raise self._wrong(f"{name}={text!r}, expected 1 to {most}")
        return int(text)

    def _state(self, state: State, rows: int, tokens: int) -> torch.Tensor:
        held = self._tensor(f"state.{state.name}")
        rows = rows_of(self.program, state.name, rows, tokens)
        sizes = {"B": 1, **({state.capacity: rows} if state.capacity else {})}
        whole = state.type.bind(sizes)
        batch = [str(dim) for dim in state.type.dims].index("B")
        dims = (*whole.dims[:batch], *whole.dims[batch + 1 :])
        if TensorType.of(held) != TensorType(whole.dtype, dims):
            raise self._wrong(
                f"{state.name} of type {TensorType.of(held)}, expected "
                f"{TensorType(whole.dtype, dims)}"
            )
        return self._finite(state.name, held)

    def _memo(self, name: str, most: int) -> torch.Tensor:
        """What a drafter keeps: a number of rows, features of some tokens, or its own tokens."""
        held = self._tensor(name)
        if held.dtype == torch.int64 and held.dim() == 1:  # compared with others, and not used
            return held
        if held.dtype == torch.int64 and held.dim() == 0:
            if not 0 <= int(held) <= most:
                raise self._wrong(f"{name}={int(held)}, expected 0 to {most}")
            return held
        sizes = {t.meta["type"].dims[-1] for t in self.program.step.outputs.values()}
        fits = held.is_floating_point() and held.dim() == 2 and held.shape[0] <= most
        if not fits or held.shape[1] not in sizes:
            raise self._wrong(f"{name} of type {TensorType.of(held)}, which no drafter keeps")
        return self._finite(name, held)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self.file.keys():  # noqa: SIM118  (the file is not a mapping)
            raise self._wrong(f"no tensor {name}")
        self.file.type_of(name)
        return self.file.tensor(name).clone()  # what is checked is what is used

    def _finite(self, name: str, held: torch.Tensor) -> torch.Tensor:
        if held.is_floating_point() and not bool(held.isfinite().all()):
            raise self._wrong(f"{name} with values that are not finite")
        return held

    def _wrong(self, what: str) -> InputError:
        return InputError(f"{self.path} is a damaged prefix: it holds {what}; save it again")


def _marks(executable: Executable) -> dict[str, str]:
    known = executable.scratch(program_mark, shared=True)
    if "mark" not in known:  # it takes a look at every weight
        known["mark"] = program_mark(executable.program)
    return {"format": FORMAT, "version": VERSION, "program": known["mark"]}


def program_mark(program: Program) -> str:
    """A hash of what decides a text's rows: functions, states, plan, samples of all weights."""
    digest = hashlib.sha256()
    for function in program.functions.values():
        digest.update(function_text(function).encode())
    plan = program.plan
    types = {name: str(state.type) for name, state in program.states.items()}
    digest.update(json.dumps([types, str(plan.cache), str(plan.depth), str(plan.draft)]).encode())
    for name in sorted(set().union(*(f.weights for f in program.functions.values()))):
        flat = program.weights[name].load().contiguous().reshape(-1).view(torch.uint8)
        picked = torch.linspace(0, max(len(flat) - 1, 0), min(_SAMPLE, len(flat))).long()
        digest.update(name.encode() + flat[picked].numpy().tobytes())
    return digest.hexdigest()
