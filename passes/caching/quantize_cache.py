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

from typing import Any, Literal

import torch
import torch.fx

from ...ir import Function, PassError, Program, State, TensorType, arguments, site_of
from ..engine.base import Outcome, register
from .cached_rows import scored
from .contents import MOVED, CacheContents
from .exchange import Parts, beside, cached_states, exchange, exchanged
from .stored_form import bits_remark

G = torch.ops.graftwork


@register
class QuantizeCache(CacheContents):
    """bits: of a number, 4 or 8. turned: whether rows are turned by a Hadamard matrix first, so
    that no channel is larger than the others by far."""

    bits: Literal[4, 8] = 8
    turned: bool = True

    def run(self, program: Program) -> Outcome:
        self.refuse_other(program, f"{MOVED}: put {self.name} before it")
        wanted = cached_states(program)
        if not wanted:
            return Outcome(program, 0, "no attention of the target reads a cache")
        made = {n: self._states(state) for n, state in program.states.items() if n in wanted}
        functions = {
            name: exchange(self.name, fn, made, self._written, self._attend)
            for name, fn in program.functions.items()
        }
        caches = [program.states[name] for name in made]
        parts = [part for parts in made.values() for part in parts]
        remark = bits_remark(self.bits, caches, parts)
        states = exchanged(program.states, made)
        changed = program.replace(functions=functions, states=states)
        return Outcome(changed, len(wanted), remarks=(remark,))

    def _states(self, state: State) -> list[State]:
        *outer, width = state.type.dims
        even = isinstance(width, int) and width % 2 == 0
        power = isinstance(width, int) and width & (width - 1) == 0
        if not even or (self.turned and not power):
            wanted = "a power of two (or set turned: false)" if self.turned else "even"
            raise PassError(
                f"quantize_cache: rows of {state.name} are {width} wide; expected a width that is "
                f"{wanted}"
            )
        assert isinstance(width, int)
        codes = TensorType(torch.uint8, (*outer, width * self.bits // 8))
        steps = TensorType(torch.float32, (*outer, 2))
        return [beside(state, "codes", codes), beside(state, "steps", steps)]

    def _written(self, fn: Function, node: torch.fx.Node, caches: Parts) -> Parts:
        given = arguments(node)
        how: dict[str, Any] = {"bits": self.bits, "turned": self.turned}
        rows = fn.call(G.quantize_rows.default, given["new"], site=site_of(node), **how)
        parts = [fn.item(rows, index) for index in range(2)]
        return tuple(
            fn.call(G.cache_write.default, cache, part, given["past"], site=site_of(node))
            for cache, part in zip(caches, parts, strict=True)
        )

    def _attend(
        self, fn: Function, node: torch.fx.Node, keys: Parts, values: Parts
    ) -> torch.fx.Node:
        given = arguments(node)
        how: dict[str, Any] = {name: given[name] for name in ("mask", "bias", "sinks")}
        how |= {"bits": self.bits, "turned": self.turned, **scored(node)}
        operands = given["q"], *keys, *values
        return fn.call(G.attend_quantized.default, *operands, site=site_of(node), **how)
