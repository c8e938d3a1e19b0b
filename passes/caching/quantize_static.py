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
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

from ...ir import (
    Function,
    PassError,
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
from .quantize_cache import erase

A, G = torch.ops.aten, torch.ops.graftwork


@register
class QuantizeStatic(LearnedContents):
    """bits: of a number, 4 or 8. turned: whether rows are turned by a Hadamard matrix first. clip:
    the share of a channel's numbers at each end that may lie beyond its range. windows, length: of
    the text that is read."""

    bits: Literal[4, 8] = 8
    turned: bool = True
    clip: Annotated[float, Field(ge=0, lt=0.5)] = 0.0005

    name: ClassVar[str] = "quantize_static"

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """Store rows on steps of text. See the module docstring."""
        caches = list(written(program.step, program))
        if not caches:
            return Outcome(program, 0, f"{program.step.name} has no attention that reads a cache")
        self.refuse_other(program, MOVED)
        for cache in caches:
            self._check(cache, program)
        windows = evidence.sampled(self.text, program)
        ranges, clipped = self._ranges(program, caches, windows)
        made = {name: state for name, state in program.states.items() if name not in ranges}
        made |= {f"{name}.codes": self._codes(program.states[name]) for name in ranges}
        weights = [w for r in ranges.values() for w in (r.step, r.least, r.times, r.plus)]
        functions = {
            name: self._stored(fn, ranges, program, made) for name, fn in program.functions.items()
        }
        changed = program.replace(
            functions=functions, states=made, weights=program.weights.adding(*weights)
        )
        remark = f"{clipped:.2%} of the text's numbers lie beyond the range of their channel"
        return Outcome(changed, len(caches), remarks=(remark,))

    def _check(self, cache: Written, program: Program) -> None:
        given = arguments(cache.attend)
        wrong = None
        if cache.how:
            wrong = "stores rows in few bits already"
        elif not cache.whole:
            wrong = "reads what is not a cache's rows"
        elif given["softcap"] is not None or given["sinks"] is not None:
            wrong = "bounds its scores, or has sinks: steps of channels need scores as they are"
        elif type_of(given["q"]).dtype != torch.float32:
            wrong = f"has queries in {type_of(given['q']).dtype}; steps of channels need float32"
        if wrong is not None:
            raise PassError(f"{self.name}: attention of {cache.what} {wrong}")
        for name in cache.names:
            width = program.states[name].type.dims[3]
            assert isinstance(width, int)
            check_stored(self.name, width, self.bits, self.turned)

    def _codes(self, state: State) -> State:
        *outer, width = state.type.dims
        assert isinstance(width, int)
        type = TensorType(torch.uint8, (*outer, width * self.bits // 8))
        return State(f"{state.name}.codes", type, state.layer, f"{state.part}_codes")

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
        program: Program,
        states: Mapping[str, State],
    ) -> Function:
        """A function with what it reads and writes of these states stored."""
        if not any(function.has_input(name) for name in ranges):
            return function
        fn = function.copy()
        outputs, units = dict(fn.outputs), dict[int, torch.fx.Node]()
        for write in list(written(fn, program)):
            if write.keys.names[0] not in ranges:
                continue
            self._check(write, program)
            with fn.graph.inserting_before(write.attend):
                codes = [
                    self._write(fn, part, ranges, states) for part in (write.keys, write.values)
                ]
                read = self._attend(fn, write, codes, ranges, units)
            write.attend.replace_all_uses_with(read)
            fn.graph.erase_node(write.attend)
            for part, node in zip((write.keys, write.values), codes, strict=True):
                (name,) = part.names
                outputs[f"{name}.codes"] = node
                outputs.pop(name)
        fn.set_outputs(outputs)
        for node in reversed(list(fn)):
            own = node.target is G.cache_write.default and str(node.args[0].target) in ranges  # type: ignore[union-attr]
            if own or (node.op == "placeholder" and str(node.target) in ranges):
                erase(self.name, fn, node)
        return fn

    def _write(self, fn: Function, part: Any, ranges: Any, states: Any) -> torch.fx.Node:
        """The codes of all rows, those of the step written."""
        (name,) = part.names
        new, of = part.new, ranges[name]
        rows = fn.call(G.hadamard_rows.default, new) if self.turned else new
        weights = fn.weight(of.step), fn.weight(of.least)
        codes = fn.call(G.static_codes.default, rows, *weights, bits=self.bits)
        kept = fn.add_input(f"{name}.codes", states[f"{name}.codes"].type)
        past = arguments(part.writes[0])["past"]
        return fn.call(G.cache_write.default, kept, codes, past, site=site_of(part.writes[0]))

    def _attend(
        self,
        fn: Function,
        write: Written,
        codes: Sequence[torch.fx.Node],
        ranges: Any,
        units: dict[int, torch.fx.Node],
    ) -> torch.fx.Node:
        given = arguments(write.attend)
        keys, values = (ranges[part.names[0]] for part in (write.keys, write.values))
        query = fn.call(G.hadamard_rows.default, given["q"]) if self.turned else given["q"]
        query = fn.call(A.mul.Tensor, query, fn.weight(keys.times))
        heads = int(str(type_of(codes[0]).dims[1]))
        if heads not in units:
            units[heads] = fn.call(G.unit_steps.default, codes[0])
        unit = units[heads]
        bias = [] if given["bias"] is None else [given["bias"]]
        out = fn.call(
            G.attend_quantized.default,
            *(query, codes[0], unit, codes[1], unit, given["mask"], *bias),
            site=site_of(write.attend),
            bits=self.bits,
            turned=False,
            scale=given["scale"],
        )
        out = fn.call(A.mul.Tensor, out, fn.weight(values.times))
        out = fn.call(A.add.Tensor, out, fn.weight(values.plus))
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
