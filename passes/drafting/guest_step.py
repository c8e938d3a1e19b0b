"""Another model's step, taken into a program as a function of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...ir import Function, InputError, PassError, Program, Role
from ...ir.files import LARGE, read_json
from .decoder_layer import free_layer
from .guest_source import check_source, renumber_sources, with_encoder_of

G = torch.ops.graftwork
TOKENIZER = "tokenizer.json"


def guest_of(program: Program, model: str, owner: str, name: str) -> Program:
    """The model beside a program (`Program.guests`) that is to become its function `name`.

    Errors: `PassError` naming `owner` for a model that is not there, one whose tokens are others
    than the program's, and one that writes from a source that the program does not read.
    """
    guest = program.guests.get(model)
    if guest is None:
        given = ", ".join(map(repr, program.guests)) or "none"
        raise PassError(
            f"{owner}: expected the model {model!r} beside the program, got {given}; "
            f"set the option model to a checkpoint folder and start from graftwork.optimize"
        )
    if name in program.functions:
        raise PassError(f"{owner}: the program has a function {name!r} already")
    if guest.stage != "canonical" or guest.states:
        raise PassError(f"{owner}: expected {guest.name} at the stage canonical, got {guest.stage}")
    check_source(program, guest, owner)
    ours, theirs = program.info.vocab_size, guest.info.vocab_size
    if ours != theirs:
        raise PassError(
            f"{owner}: {guest.name} has a vocabulary of {theirs} tokens and {program.name} one "
            f"of {ours}: its tokens must be the target's; choose a model of the same family"
        )
    files = [p.assets.get(TOKENIZER) for p in (program, guest)]
    if None not in files and _tokens(files[0]) != _tokens(files[1]):
        raise PassError(
            f"{owner}: the tokenizers of {program.name} and {guest.name} differ ({files[0]}, "
            f"{files[1]}): its tokens must be the target's; choose a model of the same family"
        )
    return guest


def with_step_of(program: Program, guest: Program, model: str, name: str, role: Role) -> Program:
    """The program with a guest's step as the function `name`, with caches and weights that are its
    own, and without the guest. Its encoder, if it has one, joins the program's."""
    fn = Function(name, guest.step.copy().graph, role)
    first = free_layer(program.functions.values())
    for node in fn:
        if node.op == "get_attr":
            node.target = f"{name}.{node.target}"
    for node in fn.calls(G.attention.default):
        layer = int(node.kwargs["layer"])  # type: ignore[arg-type]
        node.kwargs = {**node.kwargs, "layer": first + layer}
    renumber_sources(fn, first)
    weights = [guest.weights[n].renamed(f"{name}.{n}") for n in guest.step.weights]
    rest = {path: other for path, other in program.guests.items() if path != model}
    program = program.with_function(fn, weights=program.weights.adding(*weights))
    if guest.plan.source.encoder is not None:
        program = with_encoder_of(program, guest, name, first)
    return program.replace(guests=rest)


def untold(program: Program, guest: Program) -> tuple[str, ...]:
    """What nobody could compare: the tokenizers, unless both models came with theirs."""
    without = [p.name for p in (program, guest) if TOKENIZER not in p.assets]
    if not without:
        return ()
    return (
        f"{' and '.join(dict.fromkeys(without))} came without a {TOKENIZER}, so nothing shows that "
        f"the other model's tokens are the target's: of another vocabulary what it says is chance",
    )


def _tokens(path: Path | None) -> dict[str, Any]:
    """What a tokenizer file says of which text becomes which token."""
    assert path is not None
    try:
        content = read_json(path, LARGE)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the tokenizer {path}: {error}") from error
    # How a batch is cut and padded changes no token.
    return {k: v for k, v in content.items() if k not in ("truncation", "padding")}
