"""The verifier's other half: whether the decode plan and the model's facts fit the functions.

What a record names must be there, and return what the runtime reads, in the sizes that the record
states. A plan whose numbers disagree with its functions would fail somewhere in the runtime, or be
answered with tokens that do not exist.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

import torch

from .errors import InputError, VerifyError
from .names import shown
from .plan import DraftRecord, Record
from .plan.base import Returned, Size
from .plan.bounds import MOST_NODES, MOST_PARTS
from .program import Program
from .types import TensorType


def verify_plan(program: Program) -> None:
    """Check plan and facts of a program whose functions are valid. Errors: `VerifyError`."""
    _check_info(program)
    for slot in fields(program.plan):
        record = getattr(program.plan, slot.name)
        if record.slot != slot.name:
            raise VerifyError(f"plan: {record.brief} is a {record.slot} record, not a {slot.name}")
        if len(record.every) > MOST_PARTS:
            raise VerifyError(
                f"plan: {slot.name} has {len(record.every)} parts; {MOST_PARTS} are allowed"
            )
        # A draft model's own drafter reads what that model returns, not the step.
        helpers = [part.helper for part in record.every if isinstance(part, DraftRecord)]
        inner = {id(deep) for helper in helpers if helper is not None for deep in helper.every}
        for part in record.every:
            _check_names(program, part)
            for function, returned in _calls(program, part):
                if function != program.step.name or id(part) not in inner:
                    _check_returns(program, part, function, returned)
            for name, ids, sizes in part.looks_up():
                _check_weight(program, part, name, ids, sizes)
    if program.plan.columns > MOST_NODES:
        raise VerifyError(
            f"plan: a step verifies up to {program.plan.columns} tokens; expected at most "
            f"{MOST_NODES}: make drafts or trees smaller"
        )


def _check_info(program: Program) -> None:
    info, logits = program.info, program.step.outputs["logits"].meta["type"]
    if logits.dims[-1] != info.vocab_size:
        raise VerifyError(
            f"info: vocab_size={info.vocab_size}, but the step's logits are {logits}; expected the "
            f"last size of the logits"
        )
    if not 0 < info.context < 2**31:
        raise VerifyError(f"info: context={info.context}; expected at least one position")
    ids = {"eos": info.eos, "bos": (info.bos,), "pad": (info.pad,)}
    for name, tokens in ids.items():
        for token in tokens:
            if token is not None and not 0 <= token < info.vocab_size:
                raise VerifyError(
                    f"info: {name}={token} is outside the vocabulary of {info.vocab_size}"
                )


def _check_names(program: Program, part: Record) -> None:
    """Fields with these names name what there is."""
    functions = set(program.functions)
    known: dict[str, Collection[str]] = {
        "function": functions,
        "functions": functions,
        "entry": functions,
        "chain": functions,
        "plain": functions,
        "prefill": functions,
        "head": functions,
        "output": set(program.step.outputs),
        "state": set(program.states),
        "weight": set(program.weights),
    }
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in known or value is None:
            continue
        for name in value if isinstance(value, tuple) else (value,):
            if name not in known[field.name]:
                there = ", ".join(sorted(known[field.name])[:20]) or "none"
                raise VerifyError(
                    f"plan: {part.brief} refers to the {field.name} {shown(name)}; the program has "
                    f"{there}"
                )


def _calls(program: Program, part: Record) -> list[tuple[str, Returned]]:
    """See `Record.calls`. Errors: `VerifyError` for a record that cannot be carried out."""
    try:
        return list(part.calls(program.plan))
    except InputError as error:
        raise VerifyError(f"plan: {error}") from error


def _check_returns(program: Program, part: Record, function: str, returned: Returned) -> None:
    outputs = program.function(function).outputs
    bound: dict[Size, int] = {"V": program.info.vocab_size}
    for name, sizes in returned.items():
        if name not in outputs:
            raise VerifyError(
                f"plan: {part.brief} reads {name!r}, which {function} does not return; it returns "
                f"{', '.join(outputs)}"
            )
        given = outputs[name].meta["type"]
        if not isinstance(given, TensorType) or not _fits(given, sizes, bound):
            wanted = ",".join("any" if n == "" else str(bound.get(n, n)) for n in sizes)
            raise VerifyError(
                f"plan: {part.brief} reads {name} of {function} as [{wanted}]; it is {given}"
            )
        ids = name in ("draft_tokens", "drafted", "argmax", "top_tokens")
        if (given.dtype == torch.int64) != ids:
            kind = "token ids, i64" if ids else "floating values"
            raise VerifyError(
                f"plan: {part.brief} reads {name} of {function} as {kind}; it is {given}"
            )


def _fits(given: TensorType, sizes: tuple[Size, ...], bound: dict[Size, int]) -> bool:
    if len(given.dims) != len(sizes):
        return False
    for dim, size in zip(given.dims, sizes, strict=True):
        if size == "K" and isinstance(dim, int):
            bound.setdefault("K", dim)
        if size != "" and dim != bound.get(size, size):
            return False
    return True


def _check_weight(
    program: Program,
    part: Record,
    name: str,
    ids: bool,
    sizes: tuple[Size, ...],
) -> None:
    given = program.weights[name].type
    right = given.dtype == torch.int64 if ids else given.dtype.is_floating_point
    if not right or not _fits(given, sizes, {}):
        kind = "int64" if ids else "floating values"
        wanted = ",".join("any" if size == "" else str(size) for size in sizes)
        raise VerifyError(
            f"plan: {part.brief} reads weight {name} as {kind} [{wanted}]; it is {given}"
        )
