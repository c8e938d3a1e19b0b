"""graftwork's attention as ops of ONNX Runtime: torch's bits, whatever shares the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as oir
import onnxruntime
import pytest
import torch
from handmade import Shape, cached_llama
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime_helpers import without_own_attention
from selection import one_in
from tiny import in_int8

from graftwork.backends import Target, cached_library, compile
from graftwork.backends.onnxruntime import probe
from graftwork.backends.onnxruntime.emit import IR_VERSION, OWN
from graftwork.backends.onnxruntime.ops import ort_attend, ort_put_rows
from graftwork.backends.onnxruntime.own_ops import node_name
from graftwork.backends.onnxruntime.session import register_own_ops
from graftwork.backends.own_kernels import own_ops, zero_of
from graftwork.backends.torch import cpu
from graftwork.ir.ops.attention import SPANS, alibi, cache_write, step_mask
from graftwork.ir.ops.rotary import rotary
from graftwork.ir.support.errors import GraftworkWarning

OWN_OPS = {node_name(op): op for op in own_ops()}
PLACES = {
    "CachedAttention": (
        *("query", "past_key", "past_value", "past", "key", "value"),
        *("positions", "cos", "sin", "ancestors", "sinks", "slopes", "past_kept", "kept_past"),
    ),
    "PutRows": (
        *("query", "past_key", "past_value", "past", "key", "value"),
        *("positions", "cos", "sin"),
    ),
    "CachedQuantizedAttention": (
        *("query", "past_key", "past_value", "past_key_steps", "past_value_steps", "past"),
        *("key", "value", "positions", "cos", "sin", "ancestors", "sinks", "slopes"),
        *("past_kept", "kept_past"),
    ),
    **{name: op.declared.names[: -len(zero_of(op)) or None] for name, op in OWN_OPS.items()},
}
F32, U8, I64 = oir.DataType.FLOAT, oir.DataType.UINT8, oir.DataType.INT64
F16 = oir.DataType.FLOAT16
OUTPUTS = {
    "CachedAttention": [F32, F32, F32],
    "PutRows": [F32, F32, F32, F32],
    "CachedQuantizedAttention": [F32, U8, U8, F32, F32],
    **{
        name: [{"i64": I64, "u8": U8}.get(said.split()[0], F32) for said in op.declared.results]
        for name, op in OWN_OPS.items()
    },
    "StoreGroups": [U8, F16, F32],
    "StoreFactors": [F16, F16],
    "LinearAttentionStepInt8": [F32, oir.DataType.INT8, F32, F32, F32, F32],
}
SIZES: dict[str, dict[str, Any]] = {
    "CachedAttention": {
        **{"heads": 4, "groups": 2, "scale": 0.25, "softcap": 0.0, "window": 0, "chunk": 0},
        **{"interleaved": 0, "threads": 2, "repeat": 0, "first": 0, "keys": 0, "latest": 0},
    },
    **{name: {"threads": 2} | dict.fromkeys(zero_of(op), 0.25) for name, op in OWN_OPS.items()},
}
SIZES["CachedQuantizedAttention"] = SIZES["PutRows"] = SIZES["CachedAttention"]


def node(op: str, operands: dict[str, torch.Tensor | None], **sizes: Any) -> list[torch.Tensor]:
    """What one node returns, of operands that are all inputs."""
    values = {}
    for name, tensor in operands.items():
        if tensor is not None:
            kind = oir.tensor(tensor.numpy()).dtype
            values[name] = oir.val(name, dtype=kind, shape=[None] * tensor.dim())
    inputs = [values.get(name) for name in PLACES[op]]
    while inputs[-1] is None:
        inputs.pop()
    kinds = OUTPUTS[op] + ([F32] if operands.get("past_kept") is not None else [])
    made = oir.node(op, inputs, {**SIZES[op], **sizes}, domain=OWN, num_outputs=len(kinds))
    for i, value in enumerate(made.outputs):
        value.name, value.dtype = f"out{i}", kinds[i]
    taken = [v for v in inputs if v is not None]
    opsets = {"": 24, OWN: 1}
    graph = oir.Graph(taken, made.outputs, nodes=[made], opset_imports=opsets, name="one")
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 2
    register_own_ops(options)
    data = oir.to_proto(oir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    feeds = {v.name: np.ascontiguousarray(operands[v.name]) for v in taken}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


def step(
    seed: int, batch: int, width: int, rows: int, dim: int, wide: int, kind: str
) -> tuple[dict[str, torch.Tensor | None], dict[str, Any]]:
    """Operands of a step of 4 heads in 2 groups: chains, trees, windows, chunks, sinks, slopes."""
    random = torch.Generator().manual_seed(seed)

    def values(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=random)

    past = torch.randint(0, rows - width + 1, (batch,), generator=random)
    parents = [int(torch.randint(0, max(t, 1), (1,), generator=random)) for t in range(width)]
    ancestors = torch.eye(width, dtype=torch.bool)
    for t in range(1, width):
        ancestors[t] |= ancestors[parents[t]]
    depths = ancestors.sum(-1) - 1 if "tree" in kind else torch.arange(width)
    found: dict[str, torch.Tensor | None] = {
        "query": values(batch, width, 4 * dim),
        "key": values(batch, width, 2 * dim),
        "value": values(batch, width, 2 * wide),
        "past_key": values(batch, 2, rows, dim),
        "past_value": values(batch, 2, rows, wide),
        "past": past,
        "positions": past[:, None] + depths,
    }
    options: dict[str, Any] = {"scale": 0.25}
    if "tree" in kind:
        found["ancestors"] = ancestors.expand(batch, width, width)
    if "turned" in kind:
        angle = values(rows + 8, dim // 4)
        found |= {"cos": angle.cos(), "sin": angle.sin()}
        options["interleaved"] = seed % 2 == 1
    if "sinks" in kind:
        found["sinks"] = values(4)
    if "slopes" in kind:
        found["slopes"] = values(4).abs()
    if "window" in kind:
        options["window"] = 5
    if "chunk" in kind:
        options["chunk"] = 6
    if "cap" in kind:
        options["softcap"] = 3.0
    return found, options


KINDS = ("", "tree", "turned", "tree turned", "window", "tree window", "sinks cap", "slopes")
KINDS += ("chunk", "tree chunk", "turned chunk window")
SHAPES = st.tuples(
    st.integers(0, 99),
    st.sampled_from(((1, 1), (1, 7), (3, 1), (3, 5), (2, 20))),
    st.sampled_from((20, 33, 70)),
    st.sampled_from(((16, 16), (24, 40), (4, 80))),
    st.sampled_from(KINDS),
)


def as_torch(of: dict[str, torch.Tensor | None], options: dict[str, Any]) -> list[torch.Tensor]:
    """The same with torch: its rotary embedding and writes, and its door to the kernel."""
    query, key, value, positions = (of[n] for n in ("query", "key", "value", "positions"))
    keys, values, past = of["past_key"], of["past_value"], of["past"]
    assert query is not None and key is not None and value is not None and positions is not None
    assert keys is not None and values is not None and past is not None
    batch, width = positions.shape
    dim, rows = keys.shape[3], keys.shape[2]
    q = query.reshape(batch, width, 4, dim).transpose(1, 2)
    k = key.reshape(batch, width, 2, dim).transpose(1, 2)
    cos, sin = of.get("cos"), of.get("sin")
    if cos is not None and sin is not None:
        turned = {"interleaved": options["interleaved"]}
        q, k = (rotary(x, cos[positions], sin[positions], **turned) for x in (q, k))
    keys = cache_write(keys, k, past)
    values = cache_write(values, value.reshape(batch, width, 2, -1).transpose(1, 2), past)
    reach = {name: options.get(name) for name in SPANS}
    mask = step_mask(past, positions, of.get("ancestors"), rows, **reach)
    slopes = of.get("slopes")
    bias = None if slopes is None else alibi(slopes, past, positions, rows)
    how = {"scale": options["scale"], "softcap": options.get("softcap")}
    out = cpu.OWN["attend"](q, keys, values, mask, bias, of.get("sinks"), **how)
    return [out.transpose(1, 2).flatten(2), keys, values]


def written(of: dict[str, Any], keys: torch.Tensor) -> torch.Tensor:
    """Of a new cache the rows that a step may read: others are undefined."""
    ends = of["past"] + of["positions"].shape[1]
    return torch.cat([keys[b, :, :end] for b, end in enumerate(ends.tolist())], 1)


@given(SHAPES)
def test_a_step_has_torchs_bits_and_the_ops_meaning(shape):
    seed, (batch, width), rows, (dim, wide), kind = shape
    of, options = step(seed, batch, width, rows, dim, wide, kind)
    got = node("CachedAttention", of, **as_attributes(options))
    want = as_torch(of, options)
    assert torch.equal(got[0], want[0])
    for new, old in zip(got[1:], want[1:], strict=True):
        assert torch.equal(written(of, new), written(of, old))
    order = ("query", "key", "value", "past_key", "past_value", "past", "positions", "cos", "sin")
    operands = [of.get(n) for n in (*order, "ancestors", "sinks", "slopes")]
    meant = ort_attend(*operands, heads=4, groups=2, **options)[0]
    torch.testing.assert_close(got[0], meant, rtol=1e-4, atol=1e-5)


@given(SHAPES)
def test_queries_are_kept_as_they_meet_keys(shape):
    """With torch's bits, and attention has the bits that it has without."""
    seed, (batch, width), rows, (dim, wide), kind = shape
    of, options = step(seed, batch, width, rows, dim, wide, kind)
    how, kept = as_attributes(options), torch.randn(batch, 4, width + 3, dim)
    keeping = {"past_kept": kept, "kept_past": torch.tensor([0, 3, 2])[:batch]}
    *got, queries = node("CachedAttention", of | keeping, **how)
    assert torch.equal(got[0], node("CachedAttention", of, **how)[0])
    asked = of["query"].reshape(batch, width, 4, dim).transpose(1, 2)
    if of.get("cos") is not None:
        tables = (of[name][of["positions"]] for name in ("cos", "sin"))
        asked = rotary(asked, *tables, interleaved=options["interleaved"])
    assert torch.equal(queries, cache_write(kept, asked, keeping["kept_past"]))


ROWS = ("query", "key", "value", "past_key", "past_value", "past", "positions", "cos", "sin")


@given(SHAPES)
def test_rows_are_put_as_attention_puts_them(shape):
    """Queries and keys turned by position, and caches of which no other row changes."""
    seed, (batch, width), rows, (dim, wide), kind = shape
    of, options = step(seed, batch, width, rows, dim, wide, kind)
    turned = {"interleaved": options.get("interleaved", False)}
    got = node("PutRows", {name: of.get(name) for name in ROWS}, **as_attributes(turned))
    want = ort_put_rows(*(of.get(name) for name in ROWS), heads=4, groups=2, **turned)
    for mine, meant in zip(got, want, strict=True):
        torch.testing.assert_close(mine, meant, rtol=1e-6, atol=1e-6)
    _, keys, values = node("CachedAttention", of, **as_attributes(options))
    assert torch.equal(written(of, got[1]), written(of, keys))
    assert torch.equal(written(of, got[2]), written(of, values))


@given(SHAPES)
def test_heads_out_of_wider_operands_have_the_bits_that_they_have_alone(shape):
    seed, (batch, width), rows, (dim, wide), kind = shape
    of, options = step(seed, batch, width, rows, dim, wide, kind)
    how = as_attributes(options)
    for name in ("sinks", "slopes"):
        of[name] = None
    whole, keys, values = node("CachedAttention", of, **how)
    packed = of | {"query": torch.cat([of[n] for n in ("query", "key", "value")], -1)}
    packed |= {"key": None, "value": None}
    for first in range(2):
        part = {name: of[name][:, first : first + 1] for name in ("past_key", "past_value")}
        for operands in (of, packed):
            sizes = {"heads": 2, "groups": 1, "first": first, "keys": 2}
            got = node("CachedAttention", operands | part, **how, **sizes)
            assert torch.equal(got[0], whole[..., 2 * wide * first : 2 * wide * (first + 1)])
            assert torch.equal(written(of, got[1]), written(of, keys[:, first : first + 1]))
            assert torch.equal(written(of, got[2]), written(of, values[:, first : first + 1]))
    both = {n: of[n].repeat_interleave(2, 1) for n in ("past_key", "past_value")}
    own = node("CachedAttention", of | both, **how, groups=4, repeat=2)
    assert torch.equal(own[0], whole)
    assert torch.equal(written(of, own[1]), written(of, keys.repeat_interleave(2, 1)))


@given(SHAPES)
def test_a_window_looks_back_from_where_the_latest_rows_stand(shape):
    seed, (batch, width), rows, (dim, wide), kind = shape
    of, options = step(seed, batch, width, rows, dim, wide, kind.replace("turned", ""))
    of["slopes"], options["window"] = None, 5
    how = as_attributes(options)
    far = of | {"positions": of["positions"] + 9}
    got = node("CachedAttention", far, **how, latest=1)[0]
    if options.get("chunk") is None:
        assert torch.equal(got, node("CachedAttention", of, **how)[0])
    names = (*ROWS, "ancestors", "sinks", "slopes")
    given = [far.get(name) for name in names]
    meant = ort_attend(*given, heads=4, groups=2, latest=True, **options)[0]
    torch.testing.assert_close(got, meant, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"repeat": 3}, "groups must be a multiple of repeat"),
        ({"keys": 1}, "first and keys must leave room"),
        ({"first": 1}, "first and keys must leave room"),
        ({"first": -1}, "first and keys must leave room"),
        ({"keys": 3}, "query must be"),
    ],
)
def test_heads_that_there_are_not_are_refused(sizes, says):
    of, options = step(0, 1, 2, 20, 16, 16, "")
    with pytest.raises(Exception, match=says):
        node("CachedAttention", of, **as_attributes(options), **sizes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kept_past": None}, "past_kept and kept_past go together"),
        ({"kept_past": torch.tensor([0, 0, 0])}, "kept_past must be"),
        ({"kept_past": torch.tensor([0, 7])}, "index 7 lies outside 0..6"),
        ({"kept_past": torch.tensor([0, -1])}, "index -1 lies outside 0..6"),
        ({"past_kept": torch.zeros(2, 2, 8, 16)}, "past_kept must be"),
        ({"past_kept": torch.zeros(2, 4, 128)}, "past_kept must be"),
    ],
)
def test_states_that_do_not_hold_the_queries_are_refused(changes, says):
    of, options = step(0, 2, 2, 20, 16, 16, "")
    of |= {"past_kept": torch.zeros(2, 4, 8, 16), "kept_past": torch.tensor([0, 6])} | changes
    with pytest.raises(Exception, match=says):
        node("CachedAttention", of, **options)


def as_attributes(options: dict[str, Any]) -> dict[str, Any]:
    return {name: int(n) if isinstance(n, bool) else n for name, n in options.items()}


@given(SHAPES)
def test_a_sequence_has_the_same_bits_alone_in_a_larger_cache_and_packed(shape):
    seed, (batch, width), rows, (dim, wide), kind = shape
    of, options = step(seed, batch, width, rows, dim, wide, kind)
    whole = node("CachedAttention", of, **as_attributes(options))[0]
    for b in range(batch):
        alone = {
            n: t if n in ("cos", "sin", "sinks", "slopes") else t[b : b + 1]
            for n, t in of.items()
            if t is not None
        }
        for name in ("past_key", "past_value"):
            alone[name] = torch.nn.functional.pad(alone[name], (0, 0, 0, 29), value=7.0)
        pieces = [alone.pop(name) for name in ("query", "key", "value")]
        alone["query"] = torch.cat(pieces, -1)
        got = node("CachedAttention", alone, **as_attributes(options), threads=1)[0]
        assert torch.equal(got[0], whole[b])


@given(SHAPES)
def test_a_token_has_the_same_bits_alone_and_after_others(shape):
    """A step of one token after the rows of the others is the chain's last token."""
    seed, (batch, width), rows, (dim, wide), kind = shape
    of, options = step(seed, batch, width, rows, dim, wide, kind.replace("tree", ""))
    whole, keys, values = node("CachedAttention", of, **as_attributes(options))
    last = dict(of) | {"past_key": keys, "past_value": values, "past": of["past"] + width - 1}
    for name in ("query", "key", "value", "positions"):
        last[name] = of[name][:, -1:]
    alone = node("CachedAttention", last, **as_attributes(options))[0]
    assert torch.equal(alone[:, 0], whole[:, -1])


@given(SHAPES)
def test_attention_over_a_mask_has_torchs_bits(shape):
    seed, (batch, width), rows, (dim, wide), kind = shape
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, width, dim, generator=random)
    k = torch.randn(batch, 2, rows, dim, generator=random)
    v = torch.randn(batch, 2, rows, wide, generator=random)
    mask = torch.rand(batch, 1, width, rows, generator=random) < 0.4
    mask[..., seed % rows] = True
    bias = torch.randn(batch, 4, width, rows, generator=random) if "slopes" in kind else None
    sinks = torch.randn(4, generator=random) if "sinks" in kind else None
    softcap = 3.0 if "cap" in kind else None
    of = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "sinks": sinks}
    got = node("Attend", of, softcap=softcap or 0.0)[0]
    want = cpu.OWN["attend"](q, k, v, mask, bias, sinks, scale=0.25, softcap=softcap)
    assert torch.equal(got, want)


LARGE = 1 << 62


@pytest.mark.parametrize(
    ("changes", "sizes", "says"),
    [
        ({}, {}, None),
        ({"query": torch.zeros(2, 3, 63)}, {}, "query must be"),
        ({"query": torch.zeros(2, 64)}, {}, "query must be"),
        ({"key": None}, {}, "go together"),
        ({"key": torch.zeros(2, 3, 31)}, {}, "key must be"),
        ({"value": torch.zeros(2, 2, 48)}, {}, "value must be"),
        ({"past_key": torch.zeros(2, 2, 16)}, {}, "past_key must be"),
        ({"past_key": torch.zeros(2, 3, 20, 16)}, {}, "past_key must be"),
        ({"past_value": torch.zeros(2, 2, 19, 24)}, {}, "past_value must be"),
        ({"past_value": torch.zeros(1, 2, 20, 24)}, {}, "past_value must be"),
        ({"past": torch.tensor([3])}, {}, "past must be"),
        ({"past": torch.tensor([3, 18])}, {}, "index 20 of a row lies outside 0..19"),
        ({"past": torch.tensor([-1, 3])}, {}, "of a row lies outside 0..19"),
        ({"past": torch.tensor([LARGE, 3])}, {}, "of a row lies outside 0..19"),
        ({"positions": torch.zeros(2, 2, dtype=torch.int64)}, {}, "positions must be"),
        ({"positions": torch.full((2, 3), 28)}, {}, "index 28 lies outside 0..27"),
        ({"positions": torch.full((2, 3), -LARGE)}, {}, "lies outside 0..27"),
        ({"sin": None}, {}, "go together"),
        ({"sin": torch.zeros(28, 3)}, {}, "sin must be"),
        ({"cos": torch.zeros(28, 9), "sin": torch.zeros(28, 9)}, {}, "cos must be"),
        ({"cos": torch.zeros(28), "sin": torch.zeros(28)}, {}, "cos must be"),
        ({"ancestors": torch.ones(2, 3, 2, dtype=torch.bool)}, {}, "ancestors must be"),
        ({"ancestors": torch.ones(1, 3, 3, dtype=torch.bool)}, {}, "ancestors must be"),
        ({"sinks": torch.zeros(3)}, {}, "sinks must be"),
        ({"slopes": torch.zeros(5)}, {}, "slopes must be"),
        ({}, {"groups": 0}, "multiple of groups"),
        ({}, {"heads": 3}, "multiple of groups"),
        ({}, {"heads": LARGE}, "multiple of groups"),
        ({}, {"window": -1}, "window must"),
        ({}, {"threads": 0}, "threads must"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(changes, sizes, says):
    of, options = step(0, 2, 3, 20, 16, 24, "tree turned sinks slopes")
    whole = {"operands": of | changes, **as_attributes(options), **sizes}
    if says is None:
        assert len(node("CachedAttention", **whole)) == 3
        return
    with pytest.raises(Exception, match=says):
        node("CachedAttention", **whole)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q": torch.zeros(2, 3, 5, 16)}, "multiple of G"),
        ({"q": torch.zeros(4, 5, 16)}, "q must be"),
        ({"k": torch.zeros(2, 2, 20, 8)}, "k must be"),
        ({"k": torch.zeros(2, 0, 20, 16)}, "v must be"),
        ({"k": torch.zeros(2, 2, 0, 16)}, "v must be"),
        ({"v": torch.zeros(2, 2, 19, 16)}, "v must be"),
        ({"mask": torch.ones(2, 1, 1, 20, dtype=torch.bool)}, "mask must be"),
        ({"bias": torch.zeros(2, 1, 5, 20)}, "bias must be"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
    ],
)
def test_attention_over_a_mask_that_does_not_fit_is_refused(changes, says):
    of: dict[str, torch.Tensor | None] = {
        **{"q": torch.zeros(2, 4, 5, 16), "k": torch.zeros(2, 2, 20, 16)},
        **{"v": torch.zeros(2, 2, 20, 16), "mask": torch.ones(2, 1, 5, 20, dtype=torch.bool)},
    }
    with pytest.raises(Exception, match=says):
        node("Attend", of | changes)


def logits(program: Any, tokens: torch.Tensor, widths: list[int], own: bool) -> torch.Tensor:
    """Logits [B,T,V] of int8 texts that begin behind different numbers of rows, fed by `widths`."""
    ort = compile(program, Target(threads=1))
    batch = len(tokens)
    ort.begin(batch, 40)
    found, past = [], 0
    for width in widths:
        where = torch.full((batch,), past)
        inputs = {
            "tokens": tokens[:, past : past + width],
            "positions": where[:, None] + torch.arange(width),
            "past": where,
            "select": torch.arange(width).expand(batch, width),
        }
        found.append(ort.run("step", inputs, ["logits"])["logits"].clone())
        past += width
    assert {"own"} == set(ort._made["step"]) or not own
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "shape",
    one_in(2, [Shape(), Shape(dim=12, sinks=True), Shape(window=3), Shape(slopes=True, rotary=0)]),
    ids=["plain", "narrow", "window", "slopes"],
)
def test_int8_texts_have_the_same_bits_alone_and_in_batches(shape, monkeypatch):
    program = in_int8().run(cached_llama(shape)).program
    tokens = torch.randint(0, 61, (4, 20), generator=torch.Generator().manual_seed(0))
    alone = torch.cat([logits(program, row[None], [20], True) for row in tokens])
    for widths in ([1] * 20, [6, 1, 1, 8, 1, 3]):
        assert torch.equal(logits(program, tokens, widths, True), alone)
    without_own_attention(monkeypatch)
    other = logits(program, tokens, [6, 1, 1, 8, 1, 3], False)
    assert not torch.equal(other, alone)  # what it is for


@pytest.fixture
def asked_anew():
    """The probe looks again, in this test and after it."""
    probe.own_attention_available.cache_clear()
    cached_library.library.cache_clear()
    yield
    probe.own_attention_available.cache_clear()
    cached_library.library.cache_clear()


def test_here_it_can_be_used():
    assert probe.own_attention_available() == ""


def test_without_a_compiler_the_reason_says_so(asked_anew, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    missing = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with missing, pytest.warns(GraftworkWarning, match="no-such-compiler"):
        assert probe.own_attention_available()


def test_wrong_numbers_are_a_reason(asked_anew, monkeypatch):
    monkeypatch.setattr(probe, "ort_attend", lambda *a, **k: [ort_attend(*a, **k)[0] + 1e-3])
    with pytest.warns(GraftworkWarning, match="wrong numbers"):
        assert probe.own_attention_available()
