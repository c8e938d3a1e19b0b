"""The step as prompts are read that a call gives as rows: transformers' ``inputs_embeds``.

Before, a program of a vocabulary of 128::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,128], ... {
      %x: f32[B,T,H] = aten.embedding(@embed, %tokens)

After, beside it::

    state embeds: f32[B,E,H]
    func step.embeds(tokens: i64[B,T], ..., embeds: f32[B,E,H]) -> ... {
      %id: i64[B,T] = ...                              %tokens, and 0 where they are 128 or more
      %e: f32[B,T,H] = aten.embedding(@embed, %id)
      %x: f32[B,T,H] = graftwork.placed_rows(%e, %tokens, %embeds, 128)

Rows stand for what the embedding's module returns: behind a scale that is the module's own (Gemma),
before one of the model's (Granite), as transformers takes them. Prompts of tokens run through
`step`, as before; so does all that is generated. It is made of the step that there is when a
program is compiled, so that every artifact can do it, and it costs nothing before it is asked for.
A step that is called in parts has a first part of this kind. Functions that look their tokens up
more than once, or make more of them, stay alone: their prompts are tokens.
"""

from __future__ import annotations

import torch
import torch.fx

from ..ir import SOURCE, Function, Program, State, Sym, TensorType, site_of, type_of
from ..ir.ops.quantized import LOOK_UPS
from ..ir.plan.source import EMBEDS
from .picture_step import SCALES

A, G = torch.ops.aten, torch.ops.graftwork


def with_embeds(program: Program) -> Program:
    """The program with functions for prompts of rows, beside those that prompts run through and
    look their tokens up once, in one table."""
    plan = program.plan.step
    if not program.states or program.plan.source.encoder is not None:
        return program
    readers = plan.parts[:1] or (plan.read(argmax=False)[0], plan.plain)
    names = dict.fromkeys((*readers, *([plan.ahead] if plan.ahead else [])))
    read = [_reading(program.function(name), program.ids) for name in names]
    made = [fn for fn in read if fn is not None]
    if not made:
        return program
    state = State(EMBEDS, type_of(made[0].input(EMBEDS)), 0, "rows")
    return program.replace(
        functions={**program.functions, **{fn.name: fn for fn in made}},
        states={**program.states, EMBEDS: state},
    )


def _reading(fn: Function, first: int) -> Function | None:
    """A function as it reads rows for the tokens from `first` on; None where it cannot."""
    users = fn.input("tokens").users if fn.has_input("tokens") else {}
    if len(users) != 1 or next(iter(users)).target not in LOOK_UPS:
        return None
    fn = fn.copy()
    fn.name = f"{fn.name}.{EMBEDS}"
    tokens = fn.input("tokens")
    (found,) = tokens.users
    with fn.graph.inserting_before(fn.calls()[0]):
        stands = fn.call(A.ge.Scalar, tokens, first)
        known = fn.call(A.where.self, stands, fn.call(A.zeros_like.default, tokens), tokens)
    found.replace_input_with(tokens, known)
    embedded = _returned(found)
    type = type_of(embedded)
    rows = fn.add_input(EMBEDS, TensorType(type.dtype, (Sym("B"), Sym(SOURCE), type.dims[2])))
    with fn.graph.inserting_after(embedded):
        placed = fn.call(G.placed_rows.default, embedded, tokens, rows, first)
    embedded.replace_all_uses_with(placed, lambda user: user is not placed)
    return fn


def _returned(node: torch.fx.Node) -> torch.fx.Node:
    """What the module returns that looks tokens up."""
    module = site_of(node).module
    while len(node.users) == 1 and (user := next(iter(node.users))).target in SCALES:
        if site_of(user).module != module:
            break
        node = user
    return node
