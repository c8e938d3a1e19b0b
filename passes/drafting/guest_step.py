"""Another model's step, taken into a program as a function of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...ir import Function, PassError, Program, Role, type_of
from ...ir.plan import Accompanied, NoSource, Whole
from ...ir.plan.translated import TOKENIZER
from ...ir.support.tokenizer import read_tokenizer
from ..engine.plan_edits import with_plan
from .decoder_layer import free_layer
from .guest_source import check_source, renumber_sources, with_encoder_of

A, G = torch.ops.aten, torch.ops.graftwork


def guest_of(program: Program, model: str, owner: str, name: str) -> Program:
    """The model beside a program (`Program.guests`) that is to become its function `name`.

    Its logits are those of the program's tokens, whatever sizes both pad their vocabularies to.
    Errors: as `any_guest_of`, and `PassError` for a model whose tokens are others than the
    program's.
    """
    guest = any_guest_of(program, model, owner, name)
    check_tokens(program, guest, owner)
    return of_vocabulary(guest, program.info.vocab_size)


def guest_beside(program: Program, model: str, owner: str, name: str) -> Program:
    """`guest_of`, for a model that runs with every step. Errors: as of that, and `PassError` for a
    step that is more than one function."""
    check_whole(program, owner)
    return guest_of(program, model, owner, name)


def accompanied(
    program: Program, guest: Program, model: str, owner: str, said: Function
) -> tuple[Program, tuple[str, ...]]:
    """The program whose steps a model accompanies, and remarks. said: its function, under the name
    that it has there. Errors: `PassError` naming `owner` for models that read anything but texts,
    and for a step that is more than one function."""
    check_whole(program, owner)
    if {program.plan.source, guest.plan.source} != {NoSource()}:
        raise PassError(
            f"{owner}: {program.name} and {guest.name}: expected models that read texts alone, got "
            f"one that reads a source or pictures"
        )
    speaking = guest.with_function(Function(guest.step.name, said.graph))
    both = with_step_of(program, speaking, model, said.name, Role.TARGET)
    short = min(program.info.context, guest.info.context)
    remarks = tokenizer_remarks(program, guest)
    if short < program.info.context:
        remarks += (f"texts end at {short:,} tokens, where the positions of {guest.name} do",)
    both = with_plan(both, step=Accompanied(program.plan.step.plain, said.name))
    return both.replace(info=replace(program.info, context=short)), remarks


def check_whole(program: Program, owner: str) -> None:
    """Errors: `PassError` naming `owner` for a step that is more than one function."""
    step = program.plan.step
    if step != Whole(step.plain):
        raise PassError(
            f"{owner}: expected a step that is one function, got step={step.brief}: leave out what "
            f"cuts it, such as cut_depth"
        )


def any_guest_of(program: Program, model: str, owner: str, name: str) -> Program:
    """`guest_of`, whatever its tokens are. Errors: `PassError` naming `owner` for a model that is
    not there, and one that writes from a source that the program does not read."""
    guest = program.guests.get(model)
    if guest is None:
        given = ", ".join(map(repr, program.guests)) or "none"
        raise PassError(
            f"{owner}: expected the model {model!r} beside the program, got {given}; "
            f"set the option model to a checkpoint folder or .gguf file and start from "
            f"graftwork.optimize"
        )
    if name in program.functions:
        raise PassError(f"{owner}: the program has a function {name!r} already")
    if guest.stage != "canonical" or guest.states:
        raise PassError(f"{owner}: expected {guest.name} at the stage canonical, got {guest.stage}")
    check_source(program, guest, owner)
    return guest


def check_tokens(program: Program, guest: Program, owner: str) -> None:
    """Errors: `PassError` naming `owner` for a model whose tokens are others than the program's."""
    if why := other_tokens(program, guest):
        raise PassError(
            f"{owner}: {why}; its tokens must be the target's; choose a model of the same family"
        )


def other_tokens(program: Program, guest: Program) -> str:
    """How a guest's tokens differ from the program's; "" where they do not, or where one of the two
    has no tokenizer. Errors: `InputError` for a tokenizer that cannot be read."""
    files = [p.assets.get(TOKENIZER) for p in (program, guest)]
    if None in files:
        return ""
    ours, theirs = map(_tokens, files)
    other = sorted(id for id in ours.keys() & theirs.keys() if ours[id] != theirs[id])
    if not other and ours.keys() & theirs.keys():
        return ""
    shown = f": {other[0]} is {ours[other[0]]!r} and {theirs[other[0]]!r}" if other else ""
    return (
        f"the tokenizers of {program.name} and {guest.name} differ ({files[0]}, {files[1]}){shown}"
    )


def of_vocabulary(guest: Program, size: int) -> Program:
    """The guest with logits for `size` tokens; models of one family pad vocabularies differently.
    More are cut; tokens unknown to it get the least logits and are read as its last token."""
    known = guest.info.vocab_size
    if known == size:
        return guest
    fn = reading(guest, known, size)
    logits = fn.outputs["logits"]
    with fn.graph.inserting_before(fn.output_node):
        if size > known:
            least = torch.finfo(type_of(logits).dtype).min
            logits = fn.call(A.constant_pad_nd.default, logits, [0, size - known], least)
        else:
            logits = fn.call(A.slice.Tensor, logits, -1, 0, size)
    fn.set_outputs({**fn.outputs, "logits": logits})
    return guest.with_function(fn).replace(info=replace(guest.info, vocab_size=size))


def reading(guest: Program, known: int, size: int) -> Function:
    """A copy of the guest's step that reads `size` tokens, of which it knows some."""
    fn = guest.step.copy()
    if size > known:
        tokens = fn.input("tokens")
        with fn.graph.inserting_before(next(iter(fn.calls()))):
            read = fn.call(A.clamp.default, tokens, 0, known - 1)
        tokens.replace_all_uses_with(read, lambda user: user is not read)
    return fn


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


def tokenizer_remarks(program: Program, guest: Program) -> tuple[str, ...]:
    """A remark where the tokenizers could not be compared: one model came without."""
    without = [p.name for p in (program, guest) if TOKENIZER not in p.assets]
    if not without:
        return ()
    return (
        f"{' and '.join(dict.fromkeys(without))} came without a {TOKENIZER}, so nothing shows that "
        f"the other model's tokens are the target's: of another vocabulary what it says is chance",
    )


def _tokens(path: Path | None) -> dict[int, str]:
    """The text of each token, by its id, as a tokenizer file has it, with plain spaces: files write
    them as those are or as ``▁``, and a .gguf file of a model may do otherwise than its folder.

    That is all that two models must share: how a text is cut into tokens, only the target's
    decides. Errors: `InputError` for a file that cannot be read.
    """
    assert path is not None
    tokenizer = read_tokenizer(path)
    known = tokenizer.get_vocab(with_added_tokens=True)
    return {id: text.replace("▁", " ") for text, id in known.items()}
