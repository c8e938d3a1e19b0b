"""Runs single ops and small functions through emission and a plain ONNX Runtime session."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from graftwork.backends.onnxruntime import lower as _lower  # noqa: F401  (fills the row table)
from graftwork.backends.onnxruntime.decompose import decompose
from graftwork.backends.onnxruntime.emit import emit
from graftwork.backends.onnxruntime.store import WeightFile, store
from graftwork.ir import Function, TensorType, Weight, WeightStore


def without_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where graftwork's own attention cannot be compiled or loaded."""
    for module in ("routing", "rows_attention", "rows_own"):
        name = f"graftwork.backends.onnxruntime.{module}.own_attention_available"
        monkeypatch.setattr(name, lambda: "not here")


def function_of(
    target: Any, args: Any, kwargs: Any, symbols: Mapping[int, str] | None = None
) -> tuple[Function, dict[str, torch.Tensor]]:
    """A function that makes one call, and its inputs.

    symbols: sizes that become symbolic dims wherever they occur.
    """
    fn, feeds = Function("call"), {}
    leaves, spec = tree_flatten((args, kwargs))
    nodes = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            nodes.append(leaf)
            continue
        name = f"in{len(feeds)}"
        feeds[name] = leaf
        nodes.append(fn.add_input(name, _symbolic(TensorType.of(leaf), symbols or {})))
    given, named = tree_unflatten(nodes, spec)
    call = fn.call(target, *given, **named)
    results = call.meta["type"]
    many = isinstance(results, tuple)
    outputs = [fn.item(call, i) for i in range(len(results))] if many else [call]
    fn.set_outputs({f"out{i}": node for i, node in enumerate(outputs)})
    return fn, feeds


def _symbolic(type: TensorType, symbols: Mapping[int, str]) -> TensorType:
    dims = ",".join(symbols.get(int(str(d)), str(d)) for d in type.dims)
    return TensorType.parse(str(type).partition("[")[0] + f"[{dims}]")


def run_session(
    fn: Function,
    feeds: Mapping[str, torch.Tensor],
    folder: Path,
    weights: Mapping[str, Weight] | None = None,
    paired: bool = False,
    prepacked: bool = True,
    cuda: bool = False,
    contrib: bool = True,
) -> dict[str, torch.Tensor]:
    """Outputs of a function whose every op has a row, in ONNX Runtime on the CPU."""
    path = folder / "model.onnx"
    model = emit(fn, WeightStore(weights), paired=paired, cuda=cuda, contrib=contrib)
    store(model, path, WeightFile(folder / "weights.data"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if not prepacked:
        options.add_session_config_entry("session.disable_prepacking", "1")
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    taken = [value.name for value in session.get_inputs()]
    results = session.run(None, {name: feeds[name].numpy() for name in taken})
    names = [output.name for output in session.get_outputs()]
    return {n: torch.from_numpy(np.asarray(r)) for n, r in zip(names, results, strict=True)}


def call_in_session(
    target: Any, args: Any, kwargs: Any, folder: Path, symbols: Mapping[int, str] | None = None
) -> list[torch.Tensor]:
    """Results of one call in ONNX Runtime, decomposed if it has no row."""
    fn, feeds = function_of(target, args, kwargs, symbols)
    decompose(fn)
    return list(run_session(fn, feeds, folder).values())


def module_at(path: Path) -> ModuleType:
    """A file of Python as a module, under no name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needs_node() -> None:
    """Skip a test where there is no node, or none that finds onnxruntime-node."""
    if shutil.which("node") is None:
        pytest.skip("no node here")
    known = subprocess.run(["node", "-e", "require('onnxruntime-node')"], capture_output=True)
    if known.returncode:
        pytest.skip("node has no onnxruntime-node (npm install it where NODE_PATH looks)")
