"""Keep the rows of caches as whole numbers of few bits.

Before::

    state kv.0.key: f32[B,G,C,64] ...
    func step(..., past: i64[B], kv.0.key, kv.0.value) -> logits, kv.0.key, kv.0.value {
      %kw: f32[B,G,C,64] = graftwork.cache_write(%kv.0.key, %k, %past)
      %vw: f32[B,G,C,64] = graftwork.cache_write(%kv.0.value, %v, %past)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After (bits 4)::

    state kv.0.key.codes: u8[B,G,C,32], state kv.0.key.steps: f32[B,G,C,2] ...
    func step(..., past, kv.0.key.codes, kv.0.key.steps, ...) -> logits, kv.0.key.codes, ... {
      %r: (u8[B,G,T,32], f32[B,G,T,2]) = graftwork.quantize_rows(%k, bits=4, turned=True)
      %kc: u8[B,G,C,32] = graftwork.cache_write(%kv.0.key.codes, %r.0, %past)
      %ks: f32[B,G,C,2] = graftwork.cache_write(%kv.0.key.steps, %r.1, %past)
      ...
      %y: f32[B,H,T,64] = graftwork.attend_quantized(%q, %kc, %ks, %vc, %vs, %m, bits=4,
          turned=True, scale=0.125)

A row is stored when it is written, with a step and a least number of its own: what is stored
depends on the row alone, and is never stored again. So rows of trees commit and roll back as others
do, and a token's result is the same whatever shared its step. All functions of a program that read
a cache of the target's read it so.

Refuses caches that something else than attention reads, such as one that loses rows by its keys;
rows of an odd width; and with `turned` rows whose width is no power of two.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.fx

from ...ir import Function, PassError, Program, Role, State, TensorType, arguments, site_of, type_of
from ..engine.base import Outcome, register
from .contents import MOVED, CacheContents
from .stored_form import bits_remark

G = torch.ops.graftwork


@register
class QuantizeCache(CacheContents):
    """bits: of a number, 4 or 8. turned: whether rows are turned by a Hadamard matrix first, so
    that no channel is larger than the others by far."""

    bits: Literal[4, 8] = 8
    turned: bool = True

    name: ClassVar[str] = "quantize_cache"

    def run(self, program: Program) -> Outcome:
        """Store what attention of the target reads. See the module docstring."""
        self.refuse_other(program, f"{MOVED}: put {self.name} before it")
        wanted = cached_states(program)
        if not wanted:
            return Outcome(program, 0, "no attention of the target reads a cache")
        states: dict[str, State] = {}
        for name, state in program.states.items():
            made = self._states(state) if name in wanted else [state]
            states.update({each.name: each for each in made})
        functions = {
            name: self._stored(fn, wanted, program, states)
            for name, fn in program.functions.items()
        }
        caches = [program.states[name] for name in wanted]
        parts = [state for name, state in states.items() if name not in program.states]
        remark = bits_remark(self.bits, caches, parts)
        return Outcome(
            program.replace(functions=functions, states=states), len(wanted), remarks=(remark,)
        )

    def _states(self, state: State) -> list[State]:
        width = state.type.dims[3]
        even = isinstance(width, int) and width % 2 == 0
        power = isinstance(width, int) and width & (width - 1) == 0
        if not even or (self.turned and not power):
            wanted = "a power of two (or set turned: false)" if self.turned else "even"
            raise PassError(
                f"quantize_cache: rows of {state.name} are {width} wide; expected a width that is "
                f"{wanted}"
            )
        assert isinstance(width, int)
        outer = state.type.dims[:3]
        codes = TensorType(torch.uint8, (*outer, width * self.bits // 8))
        steps = TensorType(torch.float32, (*outer, 2))
        return [
            State(f"{state.name}.codes", codes, state.layer, f"{state.part}_codes"),
            State(f"{state.name}.steps", steps, state.layer, f"{state.part}_steps"),
        ]

    def _stored(
        self, function: Function, wanted: set[str], program: Program, states: dict[str, State]
    ) -> Function:
        """A function with what it reads and writes of these states stored."""
        own = [str(node.target) for node in function.inputs if str(node.target) in wanted]
        if not own:
            return function
        fn = function.copy()
        pairs: dict[torch.fx.Node, tuple[torch.fx.Node, torch.fx.Node]] = {}
        for name in own:
            parts = [fn.add_input(p, states[p].type) for p in _parts(name)]
            pairs[fn.input(name)] = (parts[0], parts[1])
        for node in fn.calls(G.cache_write.default, G.attend.default):
            with fn.graph.inserting_before(node):
                if node.target is G.cache_write.default and node.args[0] in pairs:
                    pairs[node] = self._written(fn, node, pairs)
                elif node.target is G.attend.default and node.args[1] in pairs:
                    node.replace_all_uses_with(self._attend(fn, node, pairs))
        outputs: dict[str, torch.fx.Node] = {}
        for name, value in fn.outputs.items():
            kept = zip(_parts(name), pairs[value], strict=True) if name in own else [(name, value)]
            outputs.update(kept)
        fn.set_outputs(outputs)
        for node in reversed(list(fn)):
            if node in pairs or (node.target is G.attend.default and not node.users):
                erase(self.name, fn, node)
        return fn

    def _written(self, fn: Function, node: torch.fx.Node, pairs: Any) -> Any:
        given = arguments(node)
        how: dict[str, Any] = {"bits": self.bits, "turned": self.turned}
        rows = fn.call(G.quantize_rows.default, given["new"], site=site_of(node), **how)
        parts = [fn.item(rows, index) for index in range(2)]
        return tuple(
            fn.call(G.cache_write.default, cache, part, given["past"], site=site_of(node))
            for cache, part in zip(pairs[given["cache"]], parts, strict=True)
        )

    def _attend(self, fn: Function, node: torch.fx.Node, pairs: Any) -> torch.fx.Node:
        given = arguments(node)
        if given["v"] not in pairs:
            raise PassError(
                f"quantize_cache: {fn.name} attends to keys of a cache and other values"
            )
        options = {n: given[n] for n in ("scale", "softcap") if given[n] is not None}
        rest = [given[name] for name in ("mask", "bias", "sinks")]
        while rest[-1] is None:
            rest.pop()
        stored = (*pairs[given["k"]], *pairs[given["v"]])
        how = {"bits": self.bits, "turned": self.turned, **options}
        return fn.call(
            G.attend_quantized.default, given["q"], *stored, *rest, site=site_of(node), **how
        )


def _parts(name: str) -> tuple[str, str]:
    return f"{name}.codes", f"{name}.steps"


def cached_states(program: Program) -> set[str]:
    """Names of the states whose rows attention of the target reads."""
    targets = [fn for fn in program.functions.values() if fn.role is Role.TARGET]
    return {name for fn in targets for name in _read(fn) if name in program.states}


def _read(fn: Function) -> set[str]:
    """Names of inputs whose rows attention reads, written or not."""
    found = set()
    for node in fn.calls(G.attend.default):
        for cache in (node.args[1], node.args[2]):
            while isinstance(cache, torch.fx.Node) and cache.target is G.cache_write.default:
                cache = cache.args[0]
            if isinstance(cache, torch.fx.Node) and cache.op == "placeholder":
                found.add(str(cache.target))
    return found


def erase(what: str, fn: Function, node: torch.fx.Node) -> None:
    """Take away what stored rows stand for. Errors: `PassError` if something else reads it."""
    if node.users:
        reader = next(iter(node.users))
        raise PassError(
            f"{what}: %{reader.name} of {fn.name} ({reader.target}) reads "
            f"{node.target if node.op == 'placeholder' else type_of(node)} as it is, and only "
            f"attention can read stored rows: leave out the pass that needs it, or this one"
        )
    fn.graph.erase_node(node)
