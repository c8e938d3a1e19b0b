"""The step of a model that reads pictures, as prompts with some are read.

Before, a program whose plan says ``source = pictures(token=31, ...)``, of a vocabulary of 128::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,128], ... {
      %x: f32[B,T,H] = aten.embedding(@embed, %tokens)

After, beside it::

    state pictures: f32[B,E,H]
    func step.pictures(tokens: i64[B,T], ..., pictures: f32[B,E,H]) -> ... {
      %id: i64[B,T] = ...                             %tokens, and 31 where they are 128 or more
      %e: f32[B,T,H] = aten.embedding(@embed, %id)
      %x: f32[B,T,H] = graftwork.placed_rows(%e, %tokens, %pictures, 128)

What a recipe makes of a step is made of this one, too, because it is made last, of the step that
there is when a program is compiled; it costs nothing before a prompt has pictures. Steps that look
their tokens up otherwise stay alone: their recipes read texts.
"""

from __future__ import annotations

import torch
import torch.fx

from ..ir import SOURCE, Function, Program, State, Sym, TensorType, type_of
from ..ir.plan import Pictures

A, G = torch.ops.aten, torch.ops.graftwork
LOOK_UPS = (A.embedding.default, G.quantized_embedding.default)
SCALES = (A.mul.Tensor, A._to_copy.default)
"""What may be done to an embedding before pictures take their places among it."""


def with_pictures(program: Program) -> Program:
    """The program with functions for prompts with pictures, where its plan says that it reads some
    and its steps look their tokens up in one table."""
    plan, step = program.plan.source, program.plan.step
    if not isinstance(plan, Pictures) or not program.states or plan.state in program.states:
        return program
    readers = dict.fromkeys(step.read(argmax)[0] for argmax in (True, False))
    made = [_reading(program, plan, name) for name in readers]
    functions = {fn.name: fn for fn in made if fn is not None}
    if len(functions) < len(readers) or step.in_parts:
        return program
    fn = next(iter(functions.values()))
    state = State(plan.state, type_of(fn.input(plan.state)), 0, "rows")
    return program.replace(
        functions={**program.functions, **functions}, states={**program.states, state.name: state}
    )


def _reading(program: Program, plan: Pictures, name: str) -> Function | None:
    """A function of the target as it reads prompts with pictures; None where it cannot."""
    fn, first = program.function(name).copy(), program.info.vocab_size
    fn.name = plan.function(name)
    tokens = fn.input("tokens")
    found = [node for node in tokens.users if node.target in LOOK_UPS]
    if len(found) != 1:
        return None
    with fn.graph.inserting_before(fn.calls()[0]):
        stands = fn.call(A.ge.Scalar, tokens, first)
        token = fn.call(A.full_like.default, tokens, plan.token)
        known = fn.call(A.where.self, stands, token, tokens)
    own = {stands, token, known}
    tokens.replace_all_uses_with(known, lambda user: user not in own)
    embedded = _scaled(found[0])
    type = type_of(embedded)
    rows = fn.add_input(plan.state, TensorType(type.dtype, (Sym("B"), Sym(SOURCE), type.dims[2])))
    with fn.graph.inserting_after(embedded):
        placed = fn.call(G.placed_rows.default, embedded, tokens, rows, first)
    embedded.replace_all_uses_with(placed, lambda user: user is not placed)
    return fn


def _scaled(node: torch.fx.Node) -> torch.fx.Node:
    """An embedding as the first layer reads it."""
    while len(node.users) == 1 and (user := next(iter(node.users))).target in SCALES:
        node = user
    return node
