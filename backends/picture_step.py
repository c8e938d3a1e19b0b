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

Where a picture's rows see each other, masks take `seen_together` of the tokens for their ancestors;
where rows have places in time, height and width, tables of angles are looked up by
`placed_angles`. Both read further states, with a number, or three places, for each row.

What a recipe makes of a step is made of this one, too, because it is made last, of the step that
there is when a program is compiled; it costs nothing before a prompt has pictures. Steps that look
their tokens up otherwise, or whose attention or angles depend on more than tokens and positions,
stay alone: their recipes read texts.
"""

from __future__ import annotations

import torch
import torch.fx

from ..ir import SOURCE, Function, Program, State, Sym, TensorType, arguments, type_of
from ..ir.ops.attention import SPANS
from ..ir.ops.quantized import LOOK_UPS
from ..ir.ops.rounded_state import STEPS
from ..ir.plan import Pictures

A, G = torch.ops.aten, torch.ops.graftwork
SCALES = (A.mul.Tensor, A._to_copy.default)
"""What may be done to an embedding before pictures take their places among it."""


def with_pictures(program: Program) -> Program:
    """The program with functions for prompts with pictures, where its plan says that it reads some
    and its steps look their tokens up in one table."""
    plan, step = program.plan.source, program.plan.step
    if not isinstance(plan, Pictures) or not program.states or plan.state in program.states:
        return program
    if program.plan.cache.moves and (plan.together or plan.axes):
        return program  # blocks of rows would be cut, and rows' numbers taken for their positions
    readers = dict.fromkeys(step.read(argmax)[0] for argmax in (True, False))
    made = [_reading(program, plan, name) for name in readers]
    functions = {fn.name: fn for fn in made if fn is not None}
    if len(functions) < len(readers) or step.in_parts:
        return program
    fn = next(iter(functions.values()))
    names = [name for name in (plan.state, plan.blocks, plan.places) if fn.has_input(name)]
    states = {name: State(name, type_of(fn.input(name)), 0, "rows") for name in names}
    return program.replace(
        functions={**program.functions, **functions}, states={**program.states, **states}
    )


def _reading(program: Program, plan: Pictures, name: str) -> Function | None:
    """A function of the target as it reads prompts with pictures; None where it cannot."""
    fn, first = program.function(name).copy(), program.info.vocab_size
    fn.name = plan.function(name)
    tokens = fn.input("tokens")
    found = [node for node in tokens.users if node.target in LOOK_UPS]
    if len(found) != 1:
        return None
    if plan.together and not _see_together(fn, plan, first):
        return None
    if plan.axes and not _turn_apart(fn, plan, first):
        return None
    others = set(fn.calls(G.seen_together.default, G.placed_angles.default))
    with fn.graph.inserting_before(fn.calls()[0]):
        stands = fn.call(A.ge.Scalar, tokens, first)
        token = fn.call(A.full_like.default, tokens, plan.token)
        known = fn.call(A.where.self, stands, token, tokens)
    own = {stands, token, known, *others}
    tokens.replace_all_uses_with(known, lambda user: user not in own)
    embedded = _scaled(found[0])
    type = type_of(embedded)
    rows = fn.add_input(plan.state, TensorType(type.dtype, (Sym("B"), Sym(SOURCE), type.dims[2])))
    with fn.graph.inserting_after(embedded):
        placed = fn.call(G.placed_rows.default, embedded, tokens, rows, first)
    embedded.replace_all_uses_with(placed, lambda user: user is not placed)
    return fn


def _see_together(fn: Function, plan: Pictures, first: int) -> bool:
    """Have a picture's rows see each other; whether masks alone say what tokens see."""
    fed = fn.input("positions")  # masks of other positions are of tokens drafted inside the step
    masks = [mask for mask in fn.calls(G.step_mask.default) if arguments(mask)["positions"] is fed]
    if not masks or fn.calls(*STEPS):
        return False
    tokens, blocks = fn.input("tokens"), fn.add_input(plan.blocks, _of_rows())
    seen: dict[object, torch.fx.Node] = {}
    for mask in masks:
        given = arguments(mask)
        if given["past"] is not fn.input("past") or given["row_positions"] is not None:
            return False
        ancestors = given["ancestors"]
        if ancestors not in seen:
            with fn.graph.inserting_before(fn.calls()[0]):
                seen[ancestors] = fn.call(G.seen_together.default, tokens, blocks, ancestors, first)
        mask.update_arg(2, seen[ancestors])
    return True


def _turn_apart(fn: Function, plan: Pictures, first: int) -> bool:
    """Turn a picture's rows by their places; whether that is all that positions are for."""
    tokens, positions = fn.input("tokens"), fn.input("positions")
    masks = set(fn.calls(G.step_mask.default))
    tables = [node for node in positions.users if node not in masks]
    fits = [_looks_up(node, positions, len(plan.axes)) for node in tables]
    reaches = [arguments(mask)[name] for mask in masks for name in SPANS]
    if not tables or not all(fits) or any(reach is not None for reach in reaches):
        return False
    places = fn.add_input(plan.places, _of_rows(3))
    for node in tables:
        with fn.graph.inserting_before(node):
            given = node.args[0], positions, tokens, places, first
            turned = fn.call(G.placed_angles.default, *given, axes=list(plan.axes))
        node.replace_all_uses_with(turned)
        fn.graph.erase_node(node)
    return True


def _looks_up(node: torch.fx.Node, positions: torch.fx.Node, angles: int) -> bool:
    """Whether a node looks positions up in a table of so many angles."""
    if node.target is not A.embedding.default or node.args[1] is not positions:
        return False
    return type_of(node).dims[2] == angles


def _of_rows(*more: int) -> TensorType:
    """A whole number, or several, for each row of a picture."""
    return TensorType(torch.int64, (Sym("B"), Sym(SOURCE), *more))


def _scaled(node: torch.fx.Node) -> torch.fx.Node:
    """An embedding as the first layer reads it."""
    while len(node.users) == 1 and (user := next(iter(node.users))).target in SCALES:
        node = user
    return node
