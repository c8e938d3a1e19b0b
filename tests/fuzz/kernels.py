"""Random calls of the native kernels, each compared with what its op means.

    python tests/fuzz/kernels.py --calls 10000 --seed 0

Operands are legal ones, of any size down to none, some of them then spoilt: laid out otherwise,
cut, widened, broadcast, of another dtype or rank. Every call must give what the meaning gives, or
be refused where the meaning refuses. What lies around an operand is NaN, so that reading beyond it
shows. Calls are made in another process: one that dies is a fault, and the next call goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graftwork.backends.torch import cpu, native
from graftwork.ir.ops import (
    attention,
    grouped_attention,
    grouped_cache,
    norm,
    quantized_cache,
    row_forms,
    shared,
    sparse,
)

sys.path.append(str(Path(__file__).parents[1]))
import few_bits
import old_rows
import picked
import recurrences
import sums
from operands import F32, Case, Maker, want

SAME = {"rtol": 0.0, "atol": 0.0}


def _int8_sums(weight: Tensor) -> Tensor | None:
    whole = weight.dim() == 2 and not weight.is_floating_point()
    return cpu.row_sums(weight) if whole else None


def linear(make: Maker) -> Case:
    columns, outputs = make.size(), make.size()
    x, weight = make.numbers(*make.rows(), columns), make.numbers(outputs, columns)
    bias = make.maybe(make.numbers(outputs))
    return Case("linear", cpu.linear, F.linear, {"x": x, "weight": weight, "bias": bias}, {})


def native_linear(make: Maker) -> Case:
    case = linear(make)
    del case.operands["bias"]

    def meaning(x: Tensor, weight: Tensor) -> Tensor:
        want(x.dtype == weight.dtype == F32 and weight.dim() == 2)
        return F.linear(x, weight)

    return Case("linear_float32", native.linear_float32, meaning, case.operands, {}, fake=True)


def _norm_operands(make: Maker) -> dict[str, Any]:
    columns = make.size()
    x = make.numbers(*make.rows(), columns) + make.random.choice((0, 10))
    return {"x": x, "weight": make.numbers(1 if make.random.random() < 0.1 else columns)}


def _norm(make: Maker, name: str, kernel: bool) -> Case:
    operands = _norm_operands(make)
    x = operands["x"]
    if name == "add_rms_norm":
        operands = {"x": x, "residual": make.numbers(*x.shape), "weight": operands["weight"]}
    if name == "layer_norm":
        operands["bias"] = make.maybe(make.numbers(x.shape[-1]))
    defined = getattr(norm, name)

    def meaning(*tensors: Any, eps: float) -> Any:
        x, *others = tensors
        plain = all(t is None or (t.dtype == F32) for t in tensors) and x.dim() > 0
        rows = others[:1] if name == "add_rms_norm" else []
        columns = others[len(rows) :]
        shaped = [t.shape == x.shape for t in rows]
        shaped += [t is None or t.shape == x.shape[-1:] for t in columns]
        want(not kernel or (plain and all(shaped)))
        return defined(*tensors, eps=eps)

    def direct(*tensors: Any, eps: float) -> Any:
        return getattr(native, name)(*tensors, eps)

    call = direct if kernel else getattr(cpu, name)
    label = name if kernel else f"{name} row"
    return Case(label, call, meaning, operands, {"eps": 1e-3}, fake=kernel)


def attend(make: Maker) -> Case:
    batch, groups, each = (make.random.choice((1, 1, 2, 3)) for _ in range(3))
    groups = 0 if make.random.random() < 0.03 else groups
    batch = 0 if make.random.random() < 0.03 else batch
    width = 0 if make.random.random() < 0.03 else make.random.choice((1, 1, 2, 5, 9, 70))
    rows, dim, wide = make.size(), make.size(), make.size()
    wide = dim if make.random.random() < 0.5 else wide
    heads = groups * each
    mask = torch.rand(batch, 1, width, rows, generator=make.generator) < 0.5
    mask[..., :1] = True
    operands = {
        "q": make.numbers(batch, heads, width, dim),
        "k": make.numbers(batch, groups, rows, dim),
        "v": make.numbers(batch, groups, rows, wide),
        "mask": mask,
        "bias": make.maybe(make.numbers(batch, heads, width, rows)),
        "sinks": make.maybe(make.numbers(heads)),
    }
    softcap = make.random.choice((None, None, 5.0, 0.0))
    options = {"scale": 0.3, "softcap": softcap}
    return Case("attend row", cpu.OWN["attend"], attention.attend, operands, options)


def native_attend(make: Maker) -> Case:
    case = attend(make)

    def meaning(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *extra: Any, **how: Any) -> Tensor:
        want(all(t is None or t.dtype == F32 for t in (q, k, v, *extra)))
        return attention.attend(q, k, v, mask, *extra, scale=how["scale"], softcap=how["softcap"])

    def call(*tensors: Any, scale: float, softcap: float | None) -> Any:
        return native.OPS["attend"](*tensors, scale, softcap or 0.0)

    case.options["softcap"] = case.options["softcap"] or None
    return Case("attend", call, meaning, case.operands, case.options, fake=True)


def native_attend_part(make: Maker) -> Case:
    case = native_attend(make)
    if make.random.random() < 0.3:
        case.operands["mask"][..., :1] = False  # some tokens see no row

    def meaning(*tensors: Any, scale: float, softcap: float | None) -> Any:
        q, k, v, _, *extra = tensors
        want(all(t is None or t.dtype == F32 for t in (q, k, v, *extra)))
        return shared.attend_part(*tensors, scale=scale, softcap=softcap)

    def call(*tensors: Any, scale: float, softcap: float | None) -> Any:
        return native.OPS["attend_part"](*tensors, scale, softcap or 0.0)

    near = {"rtol": 1e-4, "atol": 1e-4}
    return Case("attend_part", call, meaning, case.operands, case.options, tolerance=near)


def native_indices(make: Maker) -> Case:
    size = make.random.choice((1, 5, 40))
    x = torch.randint(0, size + (make.random.random() < 0.3), make.rows(), generator=make.generator)

    def meaning(x: Tensor, first: int, last: int) -> Tensor:
        want(x.dtype == torch.int64 and bool(((x >= first) & (x <= last)).all()))
        return x

    limits = {"first": 0, "last": size - 1}
    # What indices are worth no shape rule knows.
    return Case("indices", lambda x, **i: native.indices(x, *i.values()), meaning, {"x": x}, limits)


def native_topk(make: Maker) -> Case:
    rows = make.rows()
    # Few values, so that some are equal.
    x = torch.randint(-3, 4, rows, generator=make.generator).float()
    count = make.random.choice((1, 2, 7, 40))

    def meaning(x: Tensor, count: int) -> Any:
        want(x.dtype == torch.float32 and x.dim() > 0 and 1 <= count <= x.shape[-1])
        places = x.argsort(dim=-1, descending=True, stable=True)[..., :count]
        return x.gather(-1, places), places

    return Case("topk", lambda x, count: native.topk(x, count), meaning, {"x": x}, {"count": count})


def native_softmax(make: Maker) -> Case:
    x = torch.randn(make.rows(), generator=make.generator)

    def meaning(x: Tensor) -> Any:
        want(x.is_floating_point())
        return x.softmax(-1)

    return Case("softmax", native.softmax, meaning, {"x": x}, {})


def native_attend_rows(make: Maker) -> Case:
    given = attend(make).operands
    (batch, groups, capacity), width = given["k"].shape[:3], given["q"].shape[2]
    count = make.random.choice((0, 1, 3, 3, 20)) if capacity else 1
    last = capacity + (make.random.random() < 0.1)
    heads = given["q"].shape[1]
    picks = make.random.choice((groups, heads, heads, 1))
    shape = batch, picks, width, count
    rows = torch.randint(0, max(last, 1), shape, generator=make.generator)
    absent = torch.rand(shape, generator=make.generator) < 0.2
    absent[..., :1] = False  # every token reads one row at least
    rows = rows.masked_fill(absent, -1 if make.random.random() < 0.9 else -2)

    def meaning(*tensors: Any, scale: float, softcap: float) -> Tensor:
        q, k, v, rows, sinks = tensors
        want(all(t is None or t.dtype == F32 for t in (q, k, v, sinks)))
        want(k.dim() == 4 and bool(((rows >= -1) & (rows < k.shape[2])).all()))
        return sparse.attend_rows(*tensors, scale=scale, softcap=softcap or None)

    operands = {name: given[name] for name in "qkv"} | {"rows": rows, "sinks": given["sinks"]}
    options = {"scale": 0.3, "softcap": make.random.choice((0.0, 5.0))}

    def call(*tensors: Any, scale: float, softcap: float) -> Tensor:
        return native.OPS["attend_rows"](*tensors, scale, softcap)

    near = {"rtol": 1e-4, "atol": 1e-4}
    # What rows are worth no shape rule knows.
    return Case("attend_rows", call, meaning, operands, options, tolerance=near)


def native_quantize_rows(make: Maker) -> Case:
    bits, turned, width = picked.stored(make)
    rows = (make.random.choice((1, 2)), make.random.choice((1, 3)), make.size())

    def meaning(x: Tensor, **how: Any) -> Any:
        want(x.dim() == 4 and x.dtype == F32)
        codes, steps = quantized_cache.quantize_rows(x, **how)
        return quantized_cache.stored_values(codes, steps, bits), steps

    def call(x: Tensor, bits: int, turned: bool) -> Any:
        codes, steps = native.OPS["quantize_rows"](x, bits, turned)
        return quantized_cache.stored_values(codes, steps, bits), steps

    options = {"bits": bits, "turned": turned}
    # Turned rows are sums in another order, so that a number between two codes may become either.
    how = {"rtol": 1e-4, "atol": 1e-5} if not turned else {"rtol": 1e-4, "atol": 0.9}
    operands = {"x": make.numbers(*rows, width)}
    return Case("quantize_rows", call, meaning, operands, options, fake=True, tolerance=how)


def native_static_codes(make: Maker) -> Case:
    bits, _, width = picked.stored(make)
    groups = make.random.choice((1, 3))
    x = make.numbers(make.random.choice((1, 2)), groups, make.size(), width)
    step, least = torch.rand(groups, width, generator=make.generator) + 0.01, -torch.rand(width)
    operands = {"x": x, "step": step, "least": least.expand(groups, width).contiguous()}

    def meaning(*tensors: Tensor, **how: Any) -> Any:
        want(all(t.dtype == F32 for t in tensors))
        return quantized_cache.static_codes(*tensors, **how)

    def call(*tensors: Tensor, bits: int) -> Any:
        return native.OPS["static_codes"](*tensors, bits)

    return Case("static_codes", call, meaning, operands, {"bits": bits}, fake=True, tolerance=SAME)


def native_hadamard_rows(make: Maker) -> Case:
    shape = (make.random.choice((1, 2)), make.random.choice((1, 3)), make.size())
    width = make.random.choice((1, 2, 8, 24, 64, 128, 256))

    def meaning(x: Tensor) -> Any:
        want(x.dim() == 4 and x.dtype == F32)
        return row_forms.hadamard_rows(x)

    operands = {"x": make.numbers(*shape, width)}
    return Case("hadamard_rows", native.OPS["hadamard_rows"], meaning, operands, {}, fake=True)


def native_attend_quantized(make: Maker) -> Case:
    bits, turned, wide = picked.stored(make)
    case = attend(make)
    given, sizes = case.operands, tuple(case.operands["k"].shape[:3])
    operands: dict[str, Any] = {"q": make.numbers(*given["q"].shape[:3], wide)}
    for name in "kv":
        codes = torch.randint(0, 256, (*sizes, wide * bits // 8), generator=make.generator)
        operands |= {name: codes.to(torch.uint8), f"{name}_steps": make.numbers(*sizes, 2) * 0.02}
    operands |= {name: given[name] for name in ("mask", "bias", "sinks")}

    def meaning(*tensors: Any, **how: Any) -> Tensor:
        q, _, _, _, _, _, *extra = tensors
        want(all(t is None or t.dtype == F32 for t in (q, *extra)))
        return quantized_cache.attend_quantized(*tensors, **how)

    def call(*tensors: Any, scale: float, softcap: float | None, **how: Any) -> Any:
        return native.OPS["attend_quantized"](*tensors, *how.values(), scale, softcap or 0.0)

    softcap = case.options["softcap"] or None
    options = {"bits": bits, "turned": turned, "scale": 0.3, "softcap": softcap}
    near = {"rtol": 1e-4, "atol": 1e-4}
    return Case("attend_quantized", call, meaning, operands, options, fake=True, tolerance=near)


def native_attend_grouped(make: Maker) -> Case:
    draw = make.random.choice
    group, rows = draw(((8, 16), (16, 32), (32, 160)))
    bits, outliers, rank = draw((2, 3, 4, 8)), draw((0, 0, 1)), draw((0, 0, 2))
    batch, groups, width, wide = draw((1, 2)), draw((1, 2)), draw((8, 24, 64)), draw((8, 32))
    width = width if width % min(group, width) == 0 else 32
    by, turned = (draw((True, False)), draw((True, False))), draw((True, False)) and width != 24
    how: dict[str, Any] = {"bits": bits, "group": group, "outliers": outliers}
    shape, tokens = (batch, groups, rows), make.size()
    q = make.numbers(batch, groups * draw((1, 3)), tokens, width)
    operands: dict[str, Any] = {"q": q}
    factors: dict[str, Any] = {}
    for name, size, by_channel in (("k", width, by[0]), ("v", wide, by[1])):
        x = torch.randn(*shape, size, generator=make.generator)
        codes, steps = grouped_cache.quantize_groups(x, by_channel=by_channel, **how)
        recent = make.numbers(batch, groups, 9, size)
        operands |= {name: codes, f"{name}_steps": steps, f"{name}_recent": recent}
        made = row_forms.low_rank(0.1 * x, group=group, rank=rank) if rank else (None, None)
        factors |= zip((f"{name}_left", f"{name}_right"), made, strict=True)
    mask = torch.rand(batch, 1, tokens, rows, generator=make.generator) < 0.5
    mask[..., :1] = True
    operands |= {
        "past": torch.tensor([draw((0, 7, 12, rows - 4)) for _ in range(batch)]),
        "mask": mask,
    }
    operands |= {"bias": make.maybe(make.numbers(*q.shape[:3], rows)), "sinks": None, **factors}
    angle = torch.rand(1, rows, width // 2, generator=make.generator)
    rotates = draw((True, False))
    operands |= {"cos": angle.cos() if rotates else None, "sin": angle.sin() if rotates else None}
    options = {"bits": bits, "group": group, "keys_by_channel": by[0], "values_by_channel": by[1]}
    options |= {"residual": 4, "block": 8, "scale": 0.3, "outliers": outliers, "turned": turned}
    options |= {"interleaved": draw((True, False)), "softcap": draw((None, 5.0))}

    def meaning(*tensors: Any, **told: Any) -> Tensor:
        q, _, _, k_recent, _, _, v_recent, _, _, bias, sinks, *_ = tensors
        want(all(t is None or t.dtype == F32 for t in (q, k_recent, v_recent, bias, sinks)))
        return grouped_attention.attend_grouped(*tensors, **told)

    def call(*tensors: Any, softcap: float | None, **told: Any) -> Any:
        return native.OPS["attend_grouped"](*tensors, *told.values(), softcap or 0.0)

    near = {"rtol": 1e-4, "atol": 1e-4}
    return Case("attend_grouped", call, meaning, operands, options, fake=True, tolerance=near)


MAKERS: list[Callable[[Maker], Case]] = [
    linear,
    native_linear,
    attend,
    native_attend,
    native_indices,
    native_topk,
    native_softmax,
    few_bits.native_quantized_linear,
    few_bits.native_float_linear,
    few_bits.native_quantized_experts,
    few_bits.native_quantized_embedding,
    native_quantize_rows,
    native_static_codes,
    native_hadamard_rows,
    native_attend_quantized,
    native_attend_grouped,
    native_attend_part,
    sums.native_merge_parts,
    sums.native_positive_features,
    sums.native_read_dropped,
    native_attend_rows,
    picked.native_top_rows,
    picked.native_top_stored_rows,
    picked.native_chunk_rows,
    picked.native_take_channels,
    picked.native_row_attention,
    picked.native_keep_top,
    old_rows.native_store_groups,
    old_rows.native_store_factors,
    recurrences.native_linear_attention_step,
    recurrences.native_linear_attention_step_int8,
    recurrences.native_causal_conv_step,
    *(
        partial(_norm, name=name, kernel=kernel)
        for name in ("rms_norm", "add_rms_norm", "layer_norm")
        for kernel in (False, True)
    ),
]


def outcome(function: Callable[..., Any], case: Case, tensors: list[Any]) -> Any:
    """What a function gives for a case; None where it refuses."""
    try:
        found = function(*tensors, **case.options)
    except Exception:
        return None
    return found if isinstance(found, tuple) else (found,)


def verdict(case: Case) -> str:
    """ "equal", "refused", or what is wrong."""
    tensors = list(case.operands.values())
    plain = [None if t is None else t.clone(memory_format=torch.contiguous_format) for t in tensors]
    wanted, found = outcome(case.meaning, case, plain), outcome(case.call, case, tensors)
    if (wanted is None) != (found is None):  # what torch takes may depend on how a bias lies
        wanted = outcome(case.meaning, case, tensors)
    if case.fake:
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = [None if t is None else mode.from_tensor(t) for t in tensors]
            shaped = outcome(case.call, case, fakes)
        if (shaped is None) != (found is None):
            return f"the shape rule {'refuses' if shaped is None else 'takes'} it alone"
        if found is not None and [t.shape for t in shaped] != [t.shape for t in found]:
            return "the shape rule has another shape"
    if wanted is None or found is None:
        alone = "the meaning" if wanted is None else "the kernel"
        return "refused" if wanted is found else f"refused by {alone} alone"
    try:
        how = {"rtol": 1e-4, "atol": 1e-4 if "norm" in case.op else 3e-5}
        if found[0].dtype in (torch.float16, torch.bfloat16):
            how = {"rtol": 2e-2, "atol": 2e-2}
        how = case.tolerance or how
        torch.testing.assert_close(found, wanted, equal_nan=True, check_stride=False, **how)
    except AssertionError as error:
        return "other numbers: " + " ".join(str(error).split())
    return "equal"


def described(case: Case) -> str:
    """The call on one line."""
    texts = [
        f"{name}={None if t is None else (str(t.dtype)[6:], tuple(t.shape), t.stride())}"
        for name, t in case.operands.items()
    ]
    return f"{case.op}({', '.join(texts)}, {case.options})"


def work(seed: int, first: int, last: int) -> None:
    """Make calls; a line before each and a line after it."""
    for number in range(first, last):
        case = Maker(seed * 1_000_003 + number).case(MAKERS)
        print(f"call {number} {described(case)}", flush=True)
        print(f"done {verdict(case)}", flush=True)


def run(seed: int, calls: int) -> Iterator[tuple[str, str]]:
    """(call, verdict) of every call; a process that dies is a verdict, and another one goes on."""
    first = 0
    while first < calls:
        command = [sys.executable, __file__, "--seed", str(seed), "--work", str(first), str(calls)]
        done = subprocess.run(command, capture_output=True, text=True)
        call, before = "nothing", first
        for line in done.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "call":
                call, first = rest, int(rest.partition(" ")[0]) + 1
            elif kind == "done":
                yield call, rest
                call = "nothing"
        if done.returncode:
            yield call, f"died with {done.returncode}: {done.stderr[-300:]}"
            if first == before:
                return


def summary(seed: int, calls: int) -> tuple[Counter[str], list[str]]:
    """How many calls ended how, and the faulty ones."""
    counts: Counter[str] = Counter(calls=0, equal=0, refused=0, signals=0, mismatches=0)
    faults = []
    for call, said in run(seed, calls):
        kind = said if said in ("equal", "refused") else "mismatches"
        kind = "signals" if said.startswith("died") else kind
        counts[kind] += 1
        counts["calls"] += 1
        if kind in ("signals", "mismatches"):
            faults.append(f"{call}: {said}")
    return counts, faults


def main() -> int:
    """The command line; 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.seed, *given.work)
        return 0
    counts, faults = summary(given.seed, given.calls)
    for fault in faults[:20]:
        print(fault)
    print(
        f"{counts['calls']} calls: {counts['equal']} equal, {counts['refused']} refused by both, "
        f"{counts['signals']} signals, {counts['mismatches']} mismatches"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
