"""Keep the rows of caches as whole numbers of few bits, on steps that text has fixed.

Before::

    state kv.0.key: f32[B,G,C,64] ...
    func step(..., past: i64[B], kv.0.key, kv.0.value) -> logits, kv.0.key, kv.0.value {
      %kw: f32[B,G,C,64] = graftwork.cache_write(%kv.0.key, %k, %past)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After (bits 4)::

    state kv.0.key.codes: u8[B,G,C,32] ...
    func step(..., past, kv.0.key.codes, kv.0.value.codes) -> logits, kv.0.key.codes, ... {
      %kt: f32[B,G,T,64] = graftwork.hadamard_rows(%k)
      %kn: u8[B,G,T,32] = graftwork.static_codes(%kt, @kv.0.key.step, @kv.0.key.least, bits=4)
      %kc: u8[B,G,C,32] = graftwork.cache_write(%kv.0.key.codes, %kn, %past)
      ...
      %qs: f32[B,H,T,64] = aten.mul.Tensor(graftwork.hadamard_rows(%q), @kv.0.key.times)
      %u: f32[B,G,C,2] = graftwork.unit_steps(%kc)
      %a: f32[B,H,T,64] = graftwork.attend_quantized(%qs, %kc, %u, %vc, %u, %m, bits=4, ...)
      %y: f32[B,H,T,64] = graftwork.hadamard_rows(%a * @kv.0.value.times + @kv.0.value.plus)

Each channel of a head has one step and one least number, those that rows of text lie between but
for a share of `clip` at each end; rows of other texts are clipped to them. So a row has no steps of
its own, and the steps of channels are factors of the query and of the result: what keys have at
least adds the same to all of a query's scores, which changes nothing.

Refuses what `quantize_cache` does; scores with a bound (softcap) or with sinks, where that is not
so; queries that are not float32. The report says what share of the text's numbers was clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.fx
from pydantic import Field

from ...ir import (
    Function,
    Program,
    State,
    TensorType,
    Weight,
    arguments,
    site_of,
    type_of,
)
from ...ir.ops.quantized_cache import check_stored, hadamard
from ..engine.base import Evidence, Outcome, register
from .cached_rows import Written, read_of, written
from .contents import MOVED, LearnedContents
from .exchange import Parts, beside, exchange, exchanged, state_of

A, G = torch.ops.aten, torch.ops.graftwork


@register
class QuantizeStatic(LearnedContents):
    """bits: of a number, 4 or 8. turned: whether rows are turned by a Hadamard matrix first. clip:
    the share of a channel's numbers at each end that may lie beyond its range. windows, length: of
    the text that is read."""

    bits: Literal[4, 8] = 8
    turned: bool = True
    clip: Annotated[float, Field(ge=0, lt=0.5)] = 0.0005

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        caches = list(written(program.step, program))
        if not caches:
            return Outcome(program, 0, f"{program.step.name} has no attention that reads a cache")
        self.refuse_other(program, MOVED)
        for cache in caches:
            self._check(cache, program)
        windows = evidence.sampled(self.sample, program)
        ranges, clipped = self._ranges(program, caches, windows)
        made = {name: [self._codes(program.states[name])] for name in ranges}
        weights = [w for r in ranges.values() for w in (r.step, r.least, r.times, r.plus)]
        functions = {name: self._stored(fn, ranges, made) for name, fn in program.functions.items()}
        changed = program.replace(
            functions=functions,
            states=exchanged(program.states, made),
            weights=program.weights.adding(*weights),
        )
        remark = f"{clipped:.2%} of the text's numbers lie beyond the range of their channel"
        return Outcome(changed, len(caches), remarks=(remark,))

    def _check(self, cache: Written, program: Program) -> None:
        self.refuse(bool(cache.how), f"attention of {cache.what} stores rows in few bits already")
        self.refuse(not cache.whole, f"attention of {cache.what} reads what is not a cache's rows")
        self._check_scores(cache.attend, cache.what)
        for name in cache.names:
            width = program.states[name].type.dims[3]
            assert isinstance(width, int)
            check_stored(self.name, width, self.bits, self.turned)

    def _check_scores(self, attend: torch.fx.Node, what: str) -> None:
        given = arguments(attend)
        self.refuse(
            given["softcap"] is not None or given["sinks"] is not None,
            f"attention of {what} bounds its scores, or has sinks: steps of channels need scores "
            f"as they are",
        )
        dtype = type_of(given["q"]).dtype
        self.refuse(
            dtype != torch.float32,
            f"attention of {what} has queries in {dtype}; steps of channels need float32",
        )

    def _codes(self, state: State) -> State:
        *outer, width = state.type.dims
        assert isinstance(width, int)
        return beside(state, "codes", TensorType(torch.uint8, (*outer, width * self.bits // 8)))

    def _ranges(
        self, program: Program, caches: Sequence[Written], windows: torch.Tensor
    ) -> tuple[dict[str, _Range], float]:
        """Of each state; and the share of the text's numbers beyond them."""
        rows: dict[str, list[torch.Tensor]] = {}
        heads = {}
        for window in windows:
            for cache, read in zip(caches, read_of(program, caches, window), strict=True):
                found = read.keys, read.values
                for part, own in zip((cache.keys, cache.values), found, strict=True):
                    seen = own[0, :, : len(window)].float()
                    rows.setdefault(part.names[0], []).append(
                        hadamard(seen) if self.turned else seen
                    )
                    heads[part.names[0]] = read.queries.shape[1]
        beyond = total = 0
        ranges = {}
        for name, parts in rows.items():
            every = torch.cat(parts, dim=1)
            low, high = (_quantile(every, share) for share in (self.clip, 1 - self.clip))
            beyond += int(((every < low[:, None]) | (every > high[:, None])).sum())
            total += every.numel()
            ranges[name] = _Range.of(name, low, high, self.bits, heads[name])
        return ranges, beyond / total

    def _stored(
        self,
        function: Function,
        ranges: Mapping[str, _Range],
        made: Mapping[str, Sequence[State]],
    ) -> Function:
        """A function with what it reads and writes of these states stored."""
        units = dict[Any, torch.fx.Node]()

        def write(fn: Function, node: torch.fx.Node, caches: Parts) -> Parts:
            given, of = arguments(node), ranges[state_of(node)]
            new, weights = given["new"], (fn.weight(of.step), fn.weight(of.least))
            rows = fn.call(G.hadamard_rows.default, new) if self.turned else new
            codes = fn.call(G.static_codes.default, rows, *weights, bits=self.bits)
            operands = caches[0], codes, given["past"]
            return (fn.call(G.cache_write.default, *operands, site=site_of(node)),)

        def attend(fn: Function, node: torch.fx.Node, keys: Parts, values: Parts) -> torch.fx.Node:
            self._check_scores(node, fn.name)
            heads = type_of(keys[0]).dims[1]
            if heads not in units:
                units[heads] = fn.call(G.unit_steps.default, keys[0])
            return self._attend(fn, node, keys[0], values[0], ranges, units[heads])

        return exchange(self.name, function, made, write, attend)

    def _attend(
        self,
        fn: Function,
        node: torch.fx.Node,
        keys: torch.fx.Node,
        values: torch.fx.Node,
        ranges: Mapping[str, _Range],
        unit: torch.fx.Node,
    ) -> torch.fx.Node:
        given = arguments(node)
        of_keys, of_values = ranges[state_of(given["k"])], ranges[state_of(given["v"])]
        query = fn.call(G.hadamard_rows.default, given["q"]) if self.turned else given["q"]
        query = fn.call(A.mul.Tensor, query, fn.weight(of_keys.times))
        out = fn.call(
            G.attend_quantized.default,
            *(query, keys, unit, values, unit, given["mask"]),
            site=site_of(node),
            bias=given["bias"],
            bits=self.bits,
            turned=False,
            scale=given["scale"],
        )
        out = fn.call(A.mul.Tensor, out, fn.weight(of_values.times))
        out = fn.call(A.add.Tensor, out, fn.weight(of_values.plus))
        return fn.call(G.hadamard_rows.default, out) if self.turned else out


@dataclass(frozen=True)
class _Range:
    """step, least: f32[G,D], of a state's channels. times, plus: the same f32[H,1,D], as queries
    and results have them."""

    step: Weight
    least: Weight
    times: Weight
    plus: Weight

    @classmethod
    def of(cls, name: str, low: torch.Tensor, high: torch.Tensor, bits: int, heads: int) -> _Range:
        """low, high: f32[G,D]; heads: of the queries."""
        step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
        wide = [x.repeat_interleave(heads // len(x), 0)[:, None].contiguous() for x in (step, low)]
        made = zip(("step", "least", "times", "plus"), (step, low, *wide), strict=True)
        return cls(*(Weight.of(f"{name}.{part}", x) for part, x in made))


def _quantile(rows: torch.Tensor, share: float) -> torch.Tensor:
    """Of each channel f32[G,D] the number below which that share of its rows lies. rows [G,N,D]."""
    place = round(share * (rows.shape[1] - 1))
    return rows.kthvalue(place + 1, dim=1).values
