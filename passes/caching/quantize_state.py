"""Hold the states of recurrences in 8 bits.

Before::

    state recurrent.0.state: f32[B,H,K,V] ...
    func step(..., recurrent.0.state, ...) -> logits, recurrent.0.state, ... {
      %r: (f32[B,H,T,V], f32[B,H,K,V], ...) = graftwork.linear_attention_step(%recurrent.0.state,
          %recurrent.0.keys, ..., %q, %k, %v, %g)

After::

    state recurrent.0.state.codes: i8[B,H,K,V], state recurrent.0.state.scale: f32[B,H,V] ...
    func step(..., recurrent.0.state.codes, recurrent.0.state.scale, ...) -> logits, ... {
      %r: (f32[B,H,T,V], i8[B,H,K,V], f32[B,H,V], ...) = graftwork.linear_attention_step_int8(
          %recurrent.0.state.codes, %recurrent.0.state.scale, ..., %q, %k, %v, %g)

A state is rounded after every token that it covers, and only then: what it holds depends on the
text alone, and not on how steps, prompts and drafts shared it out. So trees commit and roll back as
they do with states in float, and a draft is verified by the target that decodes alone. The logs of
tokens that may be taken back and the last tokens of convolutions stay as they are.

Leaves states with one key a head, such as RG-LRU's, which a scale would make larger, and refuses a
program that has no others. Source: Chiang et al., Quamba2 (2025), where scales are fixed on text
for groups of heads, columns and keys; here each column of a head has one that follows the state.
"""

from __future__ import annotations

import torch
import torch.fx

from ...ir import Function, Program, State, TensorType, arguments, site_of, type_of
from ..engine.base import Outcome, register
from .contents import CacheContents
from .exchange import beside, erase, exchanged

G = torch.ops.graftwork
STEP, ROUNDED = G.linear_attention_step.default, G.linear_attention_step_int8.default
NEW = 1
"""The place of the new state among a step's results."""

PARTS = ("codes", "scale")


@register
class QuantizeState(CacheContents):
    """No options."""

    def run(self, program: Program) -> Outcome:
        calls = [node for fn in program.functions.values() for node in fn.calls(STEP)]
        wanted = {_state(n) for n in calls if type_of(arguments(n)["state"]).dims[2] != 1}
        if not wanted:
            few = "recurrences have one key a head, which a scale would make larger"
            return Outcome(
                program, 0, few if calls else "no function has a recurrence with a state"
            )
        states = exchanged(
            program.states, {name: _parts(program.states[name]) for name in sorted(wanted)}
        )
        functions = {
            name: _rounded(fn, wanted, states) if fn.calls(STEP) else fn
            for name, fn in program.functions.items()
        }
        return Outcome(program.replace(functions=functions, states=states), len(wanted))


def _state(node: torch.fx.Node) -> str:
    """The state that a step reads."""
    return str(arguments(node)["state"].target)


def _parts(state: State) -> list[State]:
    """What a state becomes."""
    batch, heads, _, values = state.type.dims
    codes = TensorType(torch.int8, state.type.dims)
    scale = TensorType(torch.float32, (batch, heads, values))
    return [beside(state, PARTS[0], codes), beside(state, PARTS[1], scale)]


def _rounded(function: Function, wanted: set[str], states: dict[str, State]) -> Function:
    """A copy of a function whose steps read and write these states in 8 bits."""
    fn = function.copy()
    made: dict[str, dict[str, torch.fx.Node]] = {}
    olds: list[torch.fx.Node] = []
    for node in fn.calls(STEP):
        name = _state(node)
        if name not in wanted:
            continue
        names = [f"{name}.{part}" for part in PARTS]
        held = [fn.add_input(part, states[part].type) for part in names]
        with fn.graph.inserting_before(node):
            step = fn.call(ROUNDED, *held, *node.args[1:], site=site_of(node))
            y, codes, scale, *log = (fn.item(step, index) for index in range(6))
        made[name] = {names[0]: codes, names[1]: scale}
        for item in list(node.users):
            if (place := int(str(item.args[1]))) != NEW:
                item.replace_all_uses_with((y, y, *log)[place])
            olds.append(item)
        olds += [node, fn.input(name)]
    outputs = [made.get(name, {name: value}) for name, value in fn.outputs.items()]
    fn.set_outputs({name: value for each in outputs for name, value in each.items()})
    for old in olds:
        erase("quantize_state", fn, old, "the recurrence itself can read a state in 8 bits")
    return fn
