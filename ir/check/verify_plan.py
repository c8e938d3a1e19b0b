"""Verification of the decode plan and the model's facts against the functions.

Functions, states and weights that records name must exist and return what the runtime reads, in the
stated sizes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import torch
import torch.fx

from ..function import Function, Role, type_of
from ..plan import DraftRecord, Record
from ..plan.base import Returned, Size
from ..plan.bounds import MOST_NODES, MOST_PARTS
from ..plan.held import Latest
from ..program import SOURCE, Program
from ..support.errors import InputError, VerifyError
from ..support.names import shown
from ..types import TensorType

A, G = torch.ops.aten, torch.ops.graftwork
READ_WINDOWS = (
    G.row_attention.default,
    G.expected_queries.default,
    G.first_queries.default,
    G.probe_query.default,
)
"""Ops that select the valid rows of a window."""

FUNCTION_FIELDS = (
    *("function", "functions", "entry", "chain", "plain", "prefill", "head", "beside", "guest"),
)
"""Fields of records that name functions."""


def verify_plan(program: Program) -> None:
    """Check plan and facts of a program whose functions are valid. Errors: `VerifyError`."""
    _check_info(program)
    leaves = program.plan.draft.leaves
    for slot in fields(program.plan):
        record = getattr(program.plan, slot.name)
        if record.slot != slot.name:
            raise VerifyError(f"plan: {record.brief} is a {record.slot} record, not a {slot.name}")
        if len(record.every) > MOST_PARTS:
            raise VerifyError(
                f"plan: {slot.name} has {len(record.every)} parts; {MOST_PARTS} are allowed"
            )
        for part in record.every:
            _check_names(program, part)
            # A draft model's own drafter reads what that model returns, not the step.
            inner = isinstance(part, DraftRecord) and not any(part is leaf for leaf in leaves)
            for function, returned in _calls(program, part):
                if function != program.step.name or not inner:
                    _check_returns(program, part, function, returned)
            for name, ids, sizes in part.looks_up():
                _check_weight(program, part, name, ids, sizes)
    _check_source(program)
    _check_windows(program)
    _check_upkeep(program)
    _check_shared(program)
    if program.plan.columns > MOST_NODES:
        raise VerifyError(
            f"plan: a step verifies up to {program.plan.columns} tokens; expected at most "
            f"{MOST_NODES}: make drafts or trees smaller"
        )


def _check_source(program: Program) -> None:
    """Only the encoder reads the source and writes its states; without an encoder there are no
    states of a source."""
    plan, vocabulary = program.plan.source, program.info.vocab_size
    held = {name for name, state in program.states.items() if state.capacity == SOURCE}
    if held and not plan.rows:
        raise VerifyError(
            f"state {min(held)} has rows of a source (capacity {SOURCE}), and the plan has none"
        )
    if plan.encoder is None:
        return
    if strange := [token for token in plan.beginning(()) if token >= vocabulary]:
        raise VerifyError(
            f"plan: {plan.brief} begins texts with {strange[0]}, outside the vocabulary of "
            f"{vocabulary}"
        )
    encode = program.function(plan.encoder)
    sources = [name for name in ("tokens", "features") if encode.has_input(name)]
    if len(sources) != 1 or not encode.has_input("lengths"):
        given = ", ".join(str(node.target) for node in encode.inputs)
        raise VerifyError(
            f"plan: {plan.brief} reads a source: expected the inputs lengths and tokens, or "
            f"features; {encode.name} takes {given}"
        )
    for function in program.functions.values():
        if function is not encode and (written := held & function.outputs.keys()):
            raise VerifyError(
                f"{function.name} writes {min(written)}, which {encode.name} makes of the source "
                f"that steps go on reading"
            )


def _check_windows(program: Program) -> None:
    """States with the last rows only are written at their ring positions, and used by no op that
    indexes all rows, which would be out of bounds."""
    for symbol, held in program.plan.cache.latest.items():
        names = {name for name, state in program.states.items() if state.capacity == symbol}
        for function in program.functions.values():
            for node in function.inputs:
                if node.target not in names:
                    continue
                for user in node.users:
                    if not _keeps_latest(function, user, held):
                        place = f"past modulo {held.block}"
                        if held.budget:
                            place = f"the least of past and {held.budget} + {place}"
                        raise VerifyError(
                            f"plan: {program.plan.cache.brief} says that {node.target} holds the "
                            f"last {held.most} rows, and {function.name} uses it in %{user.name}; "
                            f"expected cache_write at {place}, or what weighs rows"
                        )


def _check_upkeep(program: Program) -> None:
    """Upkeep functions write at row 0, at most as many rows as the policy keeps."""
    cache = program.plan.cache
    for function in program.functions.values():
        if function.role is not Role.UPKEEP:
            continue
        for node in function.calls(G.cache_write.default):
            rows, place = type_of(node.args[1]).dims[2], node.args[2]  # type: ignore[arg-type]
            state = program.states.get(str(getattr(node.args[0], "target", "")))
            own = cache.latest.get(state.capacity or "") if state is not None else None
            most = (cache.most or 0) if own is None else own.most
            zero = isinstance(place, torch.fx.Node) and place.target is A.full_like.default
            front = zero and place.args[1:] == (0,)  # type: ignore[union-attr]
            if not (front and isinstance(rows, int) and rows <= most):
                raise VerifyError(
                    f"{function.name}: %{node.name} writes {rows} rows; expected at most {most}, "
                    f"as cache={cache.brief} keeps, at row full_like(%past, 0)"
                )


def _check_shared(program: Program) -> None:
    """Functions that draft may read the target's states, and leave them as they are. A step that
    drafts, too, writes the draft's."""
    step = program.plan.step
    more = set(step.variants) - {step.plain}
    targets = [
        fn for fn in program.functions.values() if fn.role is Role.TARGET and fn.name not in more
    ]
    written = {name for fn in targets for name in fn.outputs if name in program.states}
    for function in program.functions.values():
        if function.role is Role.DRAFT and (both := written & function.outputs.keys()):
            raise VerifyError(
                f"{function.name} drafts and writes {min(both)}, which the target writes: expected "
                f"states of its own"
            )


def _keeps_latest(function: Function, user: torch.fx.Node, held: Latest) -> bool:
    if user.op == "output" or user.target in READ_WINDOWS:
        return True
    if function.role is Role.UPKEEP and held.budget:
        return True  # see `_check_upkeep`
    if user.target is not G.cache_write.default:
        return False
    place: Any = user.args[2]
    if held.budget:
        if not _is_call(place, A.minimum.default) or not _is_past(place.args[0]):
            return False
        place = place.args[1]
        if not _is_call(place, A.add.Scalar) or place.args[1:] != (held.budget,):
            return False
        place = place.args[0]
    within = _is_call(place, A.remainder.Scalar) and place.args[1:] == (held.block,)
    return within and _is_past(place.args[0])


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is target


def _is_past(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "placeholder" and node.target == "past"


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
    """Fields of these names refer to existing functions, outputs, states and weights."""
    functions = set(program.functions)
    known: dict[str, Collection[str]] = {
        **dict.fromkeys(FUNCTION_FIELDS, functions),
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
    """See `Record.calls`. Errors: `VerifyError` for an invalid record."""
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
