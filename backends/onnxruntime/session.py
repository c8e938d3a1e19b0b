"""Opening ONNX Runtime sessions: providers, threads, what to prepack."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from onnx import TensorProto, helper

from ...ir import InputError
from ...ir.support.memory import free_memory
from ..cores import default_threads
from ..pages import huge_pages
from ..target import Target
from .own_ops import own_library

SPARE = 0.4
"""Share of the free memory that repacked weights may take; above it they stay mapped files."""


def open_session(
    path: Path,
    target: Target,
    *,
    weight_bytes: int = 0,
    copies: bool = True,
    threads: int | None = None,
    own_ops: bool = False,
    stream: str | None = None,
    in_turn: bool = False,
    shared: Mapping[str, Any] | None = None,
    graphs: bool = False,
) -> Any:
    """An `InferenceSession` over the model at `path`.

    threads: the target's, unless said.
    weight_bytes: what its weights take; if memory for a second copy of them is short, they are used
    as they lie in the file, which makes steps of several tokens slower but costs no memory.
    copies: False for a model that cannot do without the second copy.
    own_ops: whether the model has any of graftwork's own domain.
    stream: the CUDA stream to work in, see `Stream.handle`. in_turn: whether another session runs
    as soon as this one has, with threads of its own. shared: values to use for initializers of
    these names, see `device_weights`; they must live as long as the session. graphs: let runs be
    recorded as CUDA graphs if the provider can, see `records_graphs`.
    Errors: `InputError` if the device's provider is missing or does not load, `UnsupportedError` if
    the kernels of own ops are missing.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or threads_of(target)
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if in_turn:
        # Threads that spin after their work would take the cores from the next session's.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if copies and weight_bytes > SPARE * free_memory():
        options.add_session_config_entry("session.disable_prepacking", "1")
    if own_ops:
        register_own_ops(options)
    for name, value in (shared or {}).items():
        options.add_initializer(name, value)
    with huge_pages(weight_bytes):
        if graphs:
            try:
                return ort.InferenceSession(
                    str(path), options, providers=providers(target, stream, graphs=True)
                )
            except Exception as error:  # the library's errors have no common base
                if _NO_GRAPHS not in str(error):
                    raise
        return ort.InferenceSession(str(path), options, providers=providers(target, stream))


_NO_GRAPHS = "cannot use the graph capture feature"
"""What is said of a session in which something is copied between the device and the host."""


def records_graphs(session: Any) -> bool:
    """Whether a session's runs are recorded as CUDA graphs, unless they ask not to be."""
    options = session.get_provider_options().get("CUDAExecutionProvider", {})
    return bool(options.get("enable_cuda_graph") == "1")


def as_graph(number: int | None) -> Any:
    """Options of a run that is recorded under a number when it is first made, and launched as a
    whole from then on; of None, of one that is not recorded."""
    return _run_options("gpu_graph_id", "-1" if number is None else str(number))


def giving_back() -> Any:
    """Options of a run on the CPU after which the session gives back what it took for values in
    between: sessions keep the most that any run took, and some of it twice."""
    return _run_options("memory.enable_memory_arena_shrinkage", "cpu:0")


def _run_options(name: str, value: str) -> Any:
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry(name, value)
    return options


def threads_of(target: Target) -> int:
    """Threads that sessions for a target run with, unless they are told another number."""
    return target.threads or default_threads()


def register_own_ops(options: Any) -> None:
    """Let sessions of these options run ops of graftwork's own domain, on the CPU.

    The library is the one that was looked at, see `cached_library`. Errors: `UnsupportedError`.
    """
    options.register_custom_ops_library(own_library())


def providers(target: Target, stream: str | None = None, *, graphs: bool = False) -> list[Any]:
    """ONNX Runtime's providers for a target. stream, graphs: see `open_session`.

    Errors: `InputError` if the device has none, or it does not load.
    """
    import onnxruntime as ort

    if target.device == "cpu":
        return ["CPUExecutionProvider"]
    preload_cuda()
    known = ort.get_available_providers()
    if "CUDAExecutionProvider" not in known:
        raise InputError(
            f"target {target}: this onnxruntime has no CUDA provider (it has {', '.join(known)}); "
            f"install onnxruntime-gpu, or use onnxruntime:cpu"
        )
    if not cuda_loads():
        raise InputError(
            f"target {target}: onnxruntime {ort.__version__} could not load CUDA's libraries; "
            f"install those of its CUDA version (pip install 'onnxruntime-gpu[cuda,cudnn]'), or "
            f"use onnxruntime:cpu"
        )
    # Float32 means float32, as on every other target: by itself the provider multiplies ten bits.
    options = {"device_id": str(torch.cuda.current_device()), "use_tf32": "0"}
    if stream is not None:
        options["user_compute_stream"] = stream
    if graphs:
        options["enable_cuda_graph"] = "1"
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


@lru_cache(maxsize=1)
def cuda_loads() -> bool:
    """Whether the CUDA provider runs a session. Where its libraries do not load, ONNX Runtime goes
    on with the CPU without a word, and then has no kernels for bfloat16."""
    import onnxruntime as ort

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    wanted = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=wanted)
    return "CUDAExecutionProvider" in session.get_providers()


@lru_cache(maxsize=1)
def preload_cuda() -> None:
    """Load CUDA's libraries from where pip put them, before the first session."""
    import onnxruntime as ort

    ort.preload_dlls()
