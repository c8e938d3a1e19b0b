"""The step as texts are embedded by it: what its head reads is returned, and no logits.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,S,V], ... {
      %n: f32[B,S,H] = graftwork.rms_norm(%pick_rows, @norm, ...)
      %logits: f32[B,S,V] = aten.linear(%n, @lm_head)

After, beside it::

    func step.states(tokens: i64[B,T], ...) -> states f32[B,S,H], ... {
      %n: f32[B,S,H] = graftwork.rms_norm(%pick_rows, @norm, ...)

That is the last layer's output behind the final norm, transformers' ``last_hidden_state``, of the
chosen tokens. It is made of the step that there is when a program is compiled, and costs nothing
before it is asked for. Programs have none whose steps are called in parts, whose texts are written
from sources, or whose logits come of no product with a weight.
"""

from __future__ import annotations

import torch
import torch.fx

from ..ir import Function, Program, cone, type_of
from ..ir.execution.analysis import part_of
from ..ir.plan.inputs import PACKED
from ..ir.plan.source import STATES
from ..ir.rewrite.cleanup import sweep

A, G = torch.ops.aten, torch.ops.graftwork
PRODUCTS = (A.linear.default, G.quantized_linear.default)


def with_states(program: Program) -> Program:
    """The program with a function that returns the states of a text's tokens, where it has some."""
    step = program.plan.step
    if not program.states or program.plan.source.encoder is not None or step.in_parts:
        return program
    fn = program.function(step.read(argmax=False)[0]).copy()
    if "logits" not in fn.outputs or not fn.has_input("select"):
        return program
    vocabulary = program.info.vocab_size // part_of(program)[1]
    needed = cone([fn.outputs["logits"]])
    heads = [
        node
        for node in fn.calls(*PRODUCTS)
        if node in needed and type_of(node).dims[-1] == vocabulary
    ]
    if not heads or not isinstance(read := heads[-1].args[0], torch.fx.Node):
        return program
    _return(fn, read, program)
    return program.replace(functions={**program.functions, fn.name: fn})


def _return(fn: Function, read: torch.fx.Node, program: Program) -> None:
    """Have a copy of a function return this node, and the states that it writes."""
    if fn.has_input(PACKED):  # its tokens are in one row
        with fn.graph.inserting_after(read):
            read = fn.call(G.take_tokens.default, read, fn.input("shown"))
    written = {name: node for name, node in fn.outputs.items() if name in program.states}
    fn.set_outputs({STATES: read, **written})
    sweep(fn)
    fn.name = f"{fn.name}.{STATES}"
