"""What this machine's ONNX Runtime can do, found out by running tiny graphs once a process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as oir
import torch

from ...ir import Function, TensorType, UnsupportedError, WeightStore, type_of
from ...ir.support.errors import GraftworkWarning
from .. import tiles
from ..target import Target
from .attention import Counted
from .emit import DTYPES, IR_VERSION, MICROSOFT, OPSETS, OWN, emit
from .ops import ort_attend, ort_gqa
from .session import providers, register_own_ops
from .wide import widen

A = torch.ops.aten
G = torch.ops.graftwork


@lru_cache(maxsize=1)
def signed_weights_are_exact() -> bool:
    """Whether products of unsigned activations with signed weights are exact on this CPU.

    Without dot-product instructions (VNNI, AMX) the kernel adds pairs of products in 16 bits and
    saturates; unsigned weights are then the fast exact ones.
    """
    rows, inner, columns = 8, 64, 32
    a = oir.val("a", oir.DataType.UINT8, [rows, inner])
    b = _constant("b", np.full((inner, columns), 127, np.int8))
    node = oir.node("MatMulInteger", [a, b])
    model = _model([node], [a], [b], oir.DataType.INT32, [rows, columns])
    got = _run(model, {"a": np.full((rows, inner), 255, np.uint8)}, Target())
    return bool((got[0] == 255 * 127 * inner).all())


@lru_cache(maxsize=32)
def rows_of_few_bits_are_exact(bits: int, block: int) -> bool:
    """Whether MatMulNBits with rounded activations runs on this CPU, is right, and gives a row the
    same bits whatever rows are beside it.

    For some blocks the kernel takes rows by fours, and those left over in another order.
    """
    random = np.random.default_rng(0)
    rows, inner, columns = 71, max(2 * block, 96), 72
    groups = -(-inner // block)
    stored = random.integers(0, 256, (columns, groups, block * bits // 8), np.uint8)
    scale = random.random((columns, groups), np.float32)
    model = _few_bits_model(stored, scale, bits, block)
    x = random.standard_normal((rows, groups * block), np.float32)
    x[:, ::17] *= 20
    try:
        whole = _run(model, {"x": x}, Target())[0]
        pieces = [_run(model, {"x": x[at : at + size]}, Target())[0] for at, size in _CUTS]
    except Exception:  # the library's errors have no common base
        return False
    values = np.unpackbits(stored, axis=-1, bitorder="little").reshape(columns, groups, block, bits)
    steps = (values * 2 ** np.arange(bits)).sum(-1) - 2 ** (bits - 1)
    wanted = x @ (steps * scale[..., None]).reshape(columns, -1).T
    right = np.abs(whole - wanted).max() < 0.05 * np.abs(wanted).max()
    alike = [
        np.array_equal(part, whole[at : at + size])
        for part, (at, size) in zip(pieces, _CUTS, strict=True)
    ]
    return bool(right and all(alike))


_CUTS = [*((at, 1) for at in range(0, 71, 7)), (0, 2), (3, 3), (1, 5), (2, 8), (30, 33)]
"""Where pieces of 71 rows begin, and how long they are."""


def _few_bits_model(stored: Any, scale: Any, bits: int, block: int) -> oir.Model:
    x = oir.val("x", oir.DataType.FLOAT, ["M", stored.shape[1] * block])
    constants = [_constant("weight", stored), _constant("scale", scale)]
    options = {"K": stored.shape[1] * block, "N": stored.shape[0], "bits": bits}
    options |= {"block_size": block, "accuracy_level": 4}
    node = oir.node("MatMulNBits", [x, *constants], options, domain=MICROSOFT)
    return _model([node], [x], constants, oir.DataType.FLOAT, ["M", "N"])


def _constant(name: str, array: Any) -> oir.Value:
    tensor = oir.tensor(array, name=name)
    return oir.val(name, tensor.dtype, list(array.shape), const_value=tensor)


def _model(
    nodes: Sequence[oir.Node],
    inputs: Sequence[oir.Value],
    constants: Sequence[oir.Value],
    dtype: oir.DataType,
    dims: Sequence[int | str],
) -> oir.Model:
    """A model of nodes, whose last value, of this type, is `out`."""
    out = nodes[-1].outputs[0]
    out.name, out.dtype, out.shape = "out", dtype, oir.Shape(dims)
    opsets = {**OPSETS, **({OWN: 1} if nodes[-1].domain == OWN else {})}
    graph = oir.Graph(inputs, [out], nodes=nodes, opset_imports=opsets, name="probe")
    for value in constants:
        graph.register_initializer(value)
    return oir.Model(graph, ir_version=IR_VERSION)


@lru_cache(maxsize=32)
def attention_kernel_works(device: str, dtype: torch.dtype, variant: Counted) -> bool:
    """Whether GroupQueryAttention runs there in that dtype, and is right: for steps whose tokens
    follow one another, or with the bias of a token tree.

    (The CUDA kernel has no float32: ONNX Runtime would put it on the CPU, and say nothing.)
    """
    args, kwargs = _tree_step()
    if variant == "chain":
        args = [*args[:7], None, *args[8:10]]

    def right() -> bool:
        got = _ran_alone(G.ort_gqa.default, args, kwargs, Target(device=device), dtype)
        return torch.allclose(got, ort_gqa(*args, **kwargs)[0], rtol=3e-2, atol=3e-2)

    reason = _fault(right)
    if reason and device != "cpu":
        warnings.warn(
            f"attention in {str(dtype).removeprefix('torch.')}, in a step that is a {variant} of "
            f"tokens, takes ONNX Runtime's other kernels on {device}, which are slower, because "
            f"GroupQueryAttention does not run: {reason}",
            GraftworkWarning,
            stacklevel=3,
        )
    return not reason


@lru_cache(maxsize=8)
def mixtures_work(device: str, dtype: torch.dtype) -> bool:
    """Whether ONNX Runtime's kernel for mixtures of experts runs there in that dtype, and is right.

    (On some GPUs the float32 one wants more shared memory than they have, and fails when it runs.)
    """
    x, logits, gate_up, down = _mixture()

    def right() -> bool:
        model, where = _mixture_model(gate_up, down, dtype), Target(device=device)
        got = _run(model, {"x": x, "logits": logits}, where)
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        gates, ups = (np.einsum("nh,efh->nef", x, w) for w in (gate_up[:, ::2], gate_up[:, 1::2]))
        hidden = gates / (1 + np.exp(-gates)) * ups
        wanted = np.einsum("nef,ehf,ne->nh", hidden, down, shares)
        return np.allclose(got[0], wanted, rtol=3e-2, atol=3e-2)

    reason = _fault(right)
    if reason:
        warnings.warn(
            f"mixtures of experts in {str(dtype).removeprefix('torch.')} compute one expert after "
            f"another on {device}, which is slower, because ONNX Runtime's kernel does not run: "
            f"{reason}",
            GraftworkWarning,
            stacklevel=3,
        )
    return not reason


def _mixture() -> tuple[Any, ...]:
    """Rows [N,H], logits [N,E] of routers of which two are chosen, gates and ups in turns [E,2F,H],
    and [E,H,F]."""
    random = np.random.default_rng(0)
    sizes = (3, 64), (4, 256, 64), (4, 64, 128)
    x, gate_up, down = (random.standard_normal(size, np.float32) / 4 for size in sizes)
    none = -np.inf
    rows = [[0.5, none, none, 0], [none, 1, 0, none], [none, none, 0, 2]]
    return x, np.array(rows, np.float32), gate_up, down


def _mixture_model(gate_up: Any, down: Any, dtype: torch.dtype) -> oir.Model:
    """A mixture that computes in this dtype, of rows and logits in float32."""
    float_ = oir.DataType.FLOAT
    sizes = {"x": ["N", gate_up.shape[2]], "logits": ["N", len(gate_up)]}
    given = [oir.val(name, float_, dims) for name, dims in sizes.items()]
    constants = [_constant("gate_up", gate_up), _constant("down", down)]
    casts = [oir.node("Cast", [value], {"to": DTYPES[dtype]}) for value in (*given, *constants)]
    x, logits, first, second = (cast.outputs[0] for cast in casts)
    options: dict[str, Any] = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1}
    options |= {"normalize_routing_weights": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
    mixture = oir.node("MoE", [x, logits, first, None, second], options, domain=MICROSOFT)
    last = oir.node("Cast", mixture.outputs, {"to": float_})
    return _model([*casts, mixture, last], given, constants, float_, sizes["x"])


def _ran_alone(
    op: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    target: Target,
    dtype: torch.dtype = torch.float32,
    *,
    native: bool = False,
) -> torch.Tensor:
    """The first result of an op in a graph of its own, whose floats have this dtype."""
    fn = Function("probe")
    tensors = {f"in{i}": a for i, a in enumerate(args) if a is not None}
    nodes = {name: fn.add_input(name, TensorType.of(t)) for name, t in tensors.items()}
    given = [_in_dtype(fn, nodes.get(f"in{i}"), dtype) for i in range(len(args))]
    out = fn.item(fn.call(op, *given, **kwargs), 0)
    fn.set_outputs({"out": fn.call(A._to_copy.default, out, dtype=torch.float32)})
    model = emit(fn, WeightStore(), native=native).model
    if target.device == "cuda":
        widen(model.graph)
    feeds = {name: tensor.numpy() for name, tensor in tensors.items()}
    return torch.from_numpy(_run(model, feeds, target, own_ops=native)[0])


@lru_cache(maxsize=1)
def own_attention_available() -> str:
    """Why graftwork's own attention cannot be used; empty if it can.

    It can if its kernel is compiled and loaded, this runtime takes it as an op, and a tree's step
    on a cache comes out.
    """
    return _told("attention", _no_own_attention())


def _fault(right: Callable[[], bool], *, native: bool = False) -> str:
    """What is wrong with a kernel; "" if it runs and what it gives is right. native: it is ours."""
    try:
        if right():
            return ""
    except UnsupportedError as error:
        return str(error)
    except Exception as error:  # the library's errors have no common base
        if native:
            return f"this onnxruntime does not run ops of other libraries: {error}"
        return str(error).strip().partition("\n")[0]
    return (
        "native kernels give wrong numbers in this onnxruntime"
        if native
        else "it gives wrong numbers"
    )


def _told(what: str, reason: str) -> str:
    """The reason, of which users are told if there is one."""
    if reason:
        warnings.warn(
            f"graftwork's own kernels do not run {what} here, ONNX Runtime's do, which is slower, "
            f"and last bits may depend on what shares a step: {reason}",
            GraftworkWarning,
            stacklevel=3,
        )
    return reason


def _no_own_attention() -> str:
    args, kwargs = _tree_step()
    past = args[5].long() + 1 - args[0].shape[1]
    own = [*args[:5], past, *args[7:]]

    def right() -> bool:
        got = _ran_alone(G.ort_attend.default, own, kwargs, Target(), native=True)
        return torch.allclose(got, ort_attend(*own, **kwargs)[0], rtol=1e-4, atol=1e-5)

    return _fault(right, native=True)


@lru_cache(maxsize=1)
def quantized_ops_available() -> str:
    """Why graftwork's own ops for weights of few bits cannot be used; empty if they can.

    They can if their kernels are compiled and loaded, this runtime takes them as ops, and a product
    of known bits comes out.
    """
    return _told("products with weights of few bits", _no_quantized_ops())


def _no_quantized_ops() -> str:
    rows, columns, outputs = 3, 32, 20
    values = torch.arange(columns * outputs) * 7 % 16
    q = values.reshape(outputs, columns)
    packed = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    scale = torch.full((outputs, 2), 0.25)
    # Whole numbers up to 127, so that nothing is rounded.
    x = torch.arange(rows * columns).reshape(rows, columns).float() % 100
    x[:, 0] = 127
    want = x @ (q - 8).float().T * 0.25

    def right() -> bool:
        with_tiles = {
            "packed": tiles.tile_values(packed, bits=4, group=16),
            "scale": tiles.tile_columns(scale),
        }
        constants = [_constant(name, tensor.numpy()) for name, tensor in with_tiles.items()]
        given = oir.val("x", oir.DataType.FLOAT, list(x.shape))
        sizes = {"bits": 4, "group": 16, "span": 0, "N": outputs}
        node = oir.node("QuantizedLinear", [given, *constants], sizes, domain=OWN)
        model = _model([node], [given], constants, oir.DataType.FLOAT, [rows, outputs])
        got = _run(model, {"x": x.numpy()}, Target(), own_ops=True)[0]
        return np.array_equal(got, want.numpy())

    return _fault(right, native=True)


def _in_dtype(fn: Function, node: Any, dtype: torch.dtype) -> Any:
    if node is None or not type_of(node).dtype.is_floating_point:
        return node
    return fn.call(A._to_copy.default, node, dtype=dtype)


def _tree_step() -> tuple[list[Any], dict[str, Any]]:
    """A small step of a token tree in float32, as arguments of ort_gqa."""
    random = torch.Generator().manual_seed(0)
    heads, groups, dim, width, past = 4, 2, 16, 3, 4

    def values(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=random)

    packed = values(1, width, (heads + 2 * groups) * dim)
    caches = [values(1, groups, 12, dim) for _ in range(2)]
    counts = [torch.tensor([past + width - 1]), torch.tensor(past + width)]
    counts = [count.to(torch.int32) for count in counts]
    angle = torch.rand(32, dim // 2, generator=random)
    tables = [angle.cos(), angle.sin()]
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    positions = torch.tensor([[past, past + 1, past + 1]])
    args = [packed, None, None, *caches, *counts, positions, *tables, tree]
    return args, {"heads": heads, "groups": groups, "scale": 0.25}


def _run(model: oir.Model, feeds: dict[str, Any], target: Target, *, own_ops: bool = False) -> Any:
    """Outputs of a model whose initializers are all there. own_ops: see `open_session`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if own_ops:
        register_own_ops(options)
    if target.device != "cpu":
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    data = oir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, options, providers(target))
    if target.device != "cpu":
        _require_on_device(session, "GroupQueryAttention")
    return session.run(None, feeds)


def _require_on_device(session: Any, op: str) -> None:
    """Errors: `UnsupportedError` if a session for a device leaves this op to the CPU."""
    for part in session.get_provider_graph_assignment_info():
        left = part.ep_name == "CPUExecutionProvider"
        if left and any(node.op_type == op for node in part.get_nodes()):
            raise UnsupportedError(f"the device has no kernel of {op} for it")
