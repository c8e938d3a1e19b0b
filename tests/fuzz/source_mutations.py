"""Ways to damage a source's file: each changes it in place and says what it did."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import onnx
from onnx import TensorProto, helper
from source_readers import ARCHITECTURES

NUMBERS = (0, 1, 2, -1, 3, 7, 31, 64, 4096, 2**31, 2**63, 2**70)
VALUES: tuple[Any, ...] = (None, True, "", "x", "\ud800", 0.5, 1e400, [], {}, [1, 2], *NUMBERS)


def flipped(rng: random.Random, path: Path) -> str:
    """A few bytes, anywhere."""
    data = bytearray(path.read_bytes())
    near = rng.choice((len(data), min(len(data), 2000)))
    for _ in range(rng.choice((1, 1, 4, 32))):
        data[rng.randrange(near)] = rng.randrange(256)
    path.write_bytes(data)
    return "bytes"


def cut(rng: random.Random, path: Path) -> str:
    """The file's end, or a piece of its middle."""
    data = path.read_bytes()
    at, size = rng.randrange(len(data)), rng.choice((1, 8, 100, len(data)))
    path.write_bytes(data[:at] + data[at + size :])
    return f"cut {size} at {at}"


# -- gguf


def _fields(path: Path) -> list[tuple[str, int, int]]:
    """Keys of the metadata that are single numbers, with their types and the byte of the value."""
    found = []
    for name, field in gguf.GGUFReader(path).fields.items():
        kinds = [int(kind) for kind in field.types]
        if len(kinds) == 1 and kinds[0] in _CODES:
            found.append((name, kinds[0], field.offset + 8 + len(name) + 4))
    return found


_CODES = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def entry_value(rng: random.Random, path: Path) -> str:
    """A number of the metadata."""
    name, kind, place = rng.choice(_fields(path))
    data = bytearray(path.read_bytes())
    new = rng.choice((*NUMBERS, 0.5, 4.0, 1e30, float("nan")))
    try:
        value = struct.pack(_CODES[kind], float(new) if kind in (6, 12) else int(new))
    except (struct.error, ValueError, OverflowError):
        value = bytes(struct.calcsize(_CODES[kind]))
    data[place : place + len(value)] = value
    path.write_bytes(data)
    return f"{name}={new}"


EXTRA: tuple[tuple[str, Any], ...] = (
    ("rope.scaling.factor", 4.0),
    ("rope.scale_linear", 4.0),
    ("rope.scaling.type", "yarn"),
    ("rope.scaling.type", "none"),
    ("rope.scaling.attn_factor", 2.0),
    ("attention.scale", 0.5),
    ("attention.sliding_window", 4),
    ("attn_logit_softcapping", 2.0),
    ("final_logit_softcapping", 2.0),
    ("logit_scale", 0.5),
    ("residual_scale", 0.5),
    ("embedding_scale", 2.0),
    ("attention.clamp_kqv", 0.1),
    ("attention.causal", False),
    ("attention.max_alibi_bias", 8.0),
    ("expert_count", 2),
    ("rope.dimension_sections", [4, 4, 0, 0]),
    ("unheard_of", 1),
    ("vocab_size", 77),
    ("rope.scaling.finetuned", True),
)


def new_entry(rng: random.Random, path: Path) -> str:
    """A key more, in front of the others."""
    key, value = rng.choice(EXTRA)
    data = path.read_bytes()
    name = f"llama.{key}".encode()
    made = struct.pack("<Q", len(name)) + name + _packed(value)
    (count,) = struct.unpack_from("<Q", data, 16)
    head = data[:16] + struct.pack("<Q", count + 1) + made + data[24:]
    # Tensors begin at the next multiple of 32 behind the header.
    end = gguf.GGUFReader(path).data_offset
    pad = -len(made) % 32
    path.write_bytes(head[: end + len(made)] + bytes(pad) + head[end + len(made) :])
    return f"{key}={value}"


def _packed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)


def tensor_info(rng: random.Random, path: Path) -> str:
    """A size, the type, the offset or the name of a tensor."""
    data = bytearray(path.read_bytes())
    tensor = rng.choice(gguf.GGUFReader(path).tensors)
    place = data.index(struct.pack("<Q", len(tensor.name)) + tensor.name.encode())
    place += 8 + len(tensor.name)
    axes = len(tensor.shape)
    which = rng.choice(("axes", "size", "kind", "start", "start", "name"))
    if which == "axes":
        struct.pack_into("<I", data, place, rng.choice((0, 1, 3, 5, 2**31)))
    elif which == "size":
        struct.pack_into("<Q", data, place + 4, rng.choice((0, 1, 32, 63, 65, 128, 2**40, 2**63)))
    elif which == "kind":
        struct.pack_into("<I", data, place + 4 + 8 * axes, rng.choice((0, 1, 2, 3, 8, 30, 99)))
    elif which == "start":
        (start,) = struct.unpack_from("<Q", data, place + 8 + 8 * axes)
        new = max(0, start + rng.choice((-32, 32, 1, -64, 4096, 2**40)))
        struct.pack_into("<Q", data, place + 8 + 8 * axes, new)
    else:
        data[place - 1] = rng.choice(b"xts0")
    path.write_bytes(data)
    return f"{which} of {tensor.name}"


# -- onnx


def _model(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def _save(path: Path, model: onnx.ModelProto) -> None:
    path.write_bytes(model.SerializeToString())


def nodes(rng: random.Random, path: Path) -> str:
    """Nodes dropped, doubled, moved or turned into others."""
    model = _model(path)
    graph, place = model.graph, rng.randrange(len(model.graph.node))
    node = graph.node[place]
    which = rng.choice(("drop", "double", "last", "op", "domain", "input", "output", "attribute"))
    others = [name for n in graph.node for name in (*n.input, *n.output)]
    ops = ("Add", "Mul", "Sub", "Neg", "Identity", "MatMul", "If", "Loop", "Softmax", "Fancy")
    if which == "drop":
        del graph.node[place]
    elif which == "double":
        graph.node.add().CopyFrom(node)
    elif which == "last":
        moved = onnx.NodeProto.FromString(node.SerializeToString())
        del graph.node[place]
        graph.node.append(moved)
    elif which == "op":
        node.op_type = rng.choice(ops)
    elif which == "domain":
        node.domain = rng.choice(("com.microsoft", "my.ops", "ai.onnx"))
    elif which in ("input", "output"):
        names = node.input if which == "input" else node.output
        if names:
            names[rng.randrange(len(names))] = rng.choice((*others, "", "nothing"))
    else:
        _attribute(rng, node)
    _save(path, model)
    return f"{which} of {node.op_type} {place}"


def _attribute(rng: random.Random, node: onnx.NodeProto) -> None:
    if not node.attribute or rng.random() < 0.2:
        name = rng.choice(("axis", "alpha", "perm", "softcap", "scale", "to"))
        node.attribute.append(helper.make_attribute(name, rng.choice((0, 1, 2, 0.5))))
        return
    place = rng.randrange(len(node.attribute))
    attribute = node.attribute[place]
    if rng.random() < 0.3:
        del node.attribute[place]
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = rng.choice((0, 1, 2, -1, 3, 7, 2**40))
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice((0.0, 0.5, 2.0, 1e30, float("nan")))
    elif attribute.type == onnx.AttributeProto.INTS and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice((0, 1, -1, 5, 2**40))


def weights(rng: random.Random, path: Path) -> str:
    """Sizes, types, names or places of weights."""
    model = _model(path)
    weight = rng.choice(model.graph.initializer)
    which = rng.choice(("size", "kind", "name", "external", "external", "raw", "drop"))
    if which == "size" and weight.dims:
        weight.dims[rng.randrange(len(weight.dims))] = rng.choice((0, 1, 3, -1, 2**40))
    elif which == "kind":
        weight.data_type = rng.choice((0, 1, 2, 7, 8, 10, 11, 16, 22, 99))
    elif which == "name":
        weight.name = rng.choice([w.name for w in model.graph.initializer] + ["", "x"])
    elif which == "external":
        weight.data_location = TensorProto.EXTERNAL
        key = rng.choice(("location", "offset", "length"))
        value = rng.choice(("../x", "/etc/passwd", "-5", "4", "99999999", "x", "a\0b", ""))
        del weight.external_data[:]
        weight.external_data.add(key="location", value="main.onnx")
        weight.external_data.add(key=key, value=value)
    elif which == "raw":
        weight.raw_data = bytes(rng.choice((0, 3, 64)))
    else:
        model.graph.initializer.remove(weight)
    _save(path, model)
    return f"{which} of {weight.name}"


def signature(rng: random.Random, path: Path) -> str:
    """Inputs, outputs, opsets, metadata and functions."""
    model = _model(path)
    which = rng.choice(("input", "output", "opset", "metadata", "functions", "shape", "subgraph"))
    graph = model.graph
    if which == "input":
        del graph.input[rng.randrange(len(graph.input))]
    elif which == "output":
        graph.output[0].name = rng.choice((graph.input[0].name, "nothing", graph.node[0].output[0]))
    elif which == "opset":
        model.opset_import[0].version = rng.choice((1, 7, 13, 99, 0))
    elif which == "metadata":
        key = rng.choice(("eos_token_id", "bos_token_id", "context_length", "model_type"))
        value = rng.choice(("", "[", "-1", "[[1]]", "1e9", '"x"', "9" * 5000, "[" * 20000))
        model.metadata_props.add(key=key, value=value)
    elif which == "functions":
        inner = [helper.make_node("f", ["x"], ["y"], domain="own")]
        opsets = [helper.make_opsetid("own", 1), helper.make_opsetid("", 20)]
        model.functions.append(helper.make_function("own", "f", ["x"], ["y"], inner, opsets))
        model.opset_import.append(helper.make_opsetid("own", 1))
    elif which == "shape":
        dims = graph.input[rng.randrange(len(graph.input))].type.tensor_type.shape.dim
        dims[rng.randrange(len(dims))].dim_value = rng.choice((0, 1, 7, -3, 2**40))
    else:
        node = rng.choice(graph.node)
        node.attribute.append(helper.make_attribute("body", helper.make_graph([], "g", [], [])))
    _save(path, model)
    return which


# -- json


def json_value(rng: random.Random, path: Path) -> str:
    """A value somewhere in a JSON file becomes another one, or goes."""
    whole = json.loads(path.read_text("utf-8"))
    at, where = whole, []
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        where.append(str(key))
        deeper = isinstance(at[key], (dict, list)) and at[key]
        if not deeper or rng.random() < 0.25:
            break
        at = at[key]
    if rng.random() < 0.3:
        del at[key]
    else:
        at[key] = rng.choice((*VALUES, *PARTS))
    text = json.dumps(whole)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return ".".join(where)[:80]


PARTS: tuple[Any, ...] = (
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "FixedLength", "length": 0},
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Strip", "content": "a", "start": 1, "stop": 2**60},
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]},
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    },
    {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
)


def batches(rng: random.Random, path: Path) -> str:
    """What a tokenizer remembers of batches."""
    whole = json.loads(path.read_text("utf-8"))
    whole["truncation"], whole["padding"] = PARTS[-1], rng.choice((None, PARTS[-2]))
    whole["truncation"] = {**PARTS[-1], "max_length": rng.choice((0, 1, 2, 2**40))}
    path.write_text(json.dumps(whole), "utf-8")
    return "truncation and padding"


def line(rng: random.Random, path: Path) -> str:
    """A line of prompts becomes another one."""
    lines = path.read_text("utf-8").split("\n")
    value = rng.choice(
        (*VALUES, [[1, 2]], [1.5], [2**40], ["a"], "a\u2028b\x0c", [[[1]]], [True, 2])
    )
    key = rng.choice(("ids", "text", "other"))
    new = json.dumps({key: value}, ensure_ascii=rng.random() < 0.5)
    new = rng.choice((new, new, new, "[" * rng.choice((10, 100_000)), json.dumps(value), new + new))
    lines[rng.randrange(len(lines))] = new
    end = rng.choice(("\n", "\r\n", "\r"))
    path.write_bytes(end.join(lines).encode("utf-8", "surrogatepass"))
    return f"{key}: {ascii(value)[:40]}"


Mutation = Callable[[random.Random, Path], str]
_GGUF = (flipped, cut, *(entry_value, new_entry, tensor_info) * 2)
MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "gguf": _GGUF,
    **dict.fromkeys(ARCHITECTURES, _GGUF),
    "onnx": (flipped, cut, nodes, nodes, nodes, weights, weights, signature, signature),
    "tokenizer": (flipped, cut, json_value, json_value, json_value, batches),
    "gguf-tokenizer": (flipped, cut, *(json_value,) * 4),
    "prompts": (flipped, cut, line, line, line),
}
