"""What ONNX Runtime's CUDA provider makes of sessions, on a machine without a GPU (`hollow_cuda`):
which nodes it takes, what memory weights take there, and which steps it records."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hollow_cuda
import onnx
import pytest
import torch
from every_recipe import FLOAT32, NAMES, program_of

from graftwork.backends.onnxruntime import session as sessions
from graftwork.backends.onnxruntime.emit import emit
from graftwork.backends.onnxruntime.lower import Variant, has_states, lower
from graftwork.backends.onnxruntime.store import WeightFile, store
from graftwork.backends.onnxruntime.wide import widen
from graftwork.backends.target import Target
from graftwork.ir import Function, Program, arguments

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

SIZES = {"Add", "Concat", "Mul", "Squeeze"}
"""What the provider leaves to the CPU: sums and products of sizes, which are there."""

EVERY_DAY = ["baseline", "recycling", "eagle_chain"]
REST = [name for name in NAMES if name not in (*EVERY_DAY, *FLOAT32)]


@pytest.fixture(scope="session")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries that the provider takes for CUDA's."""
    hollow_cuda.skip_without()
    folder = tmp_path_factory.mktemp("hollow")
    hollow_cuda.build(folder)
    return folder


def variants_of(program: Program, name: str) -> tuple[Variant, ...]:
    return ("chain", "tree", "batch") if has_states(program.functions[name]) else ("chain",)


def pretend() -> None:
    """In a process of its own: torch says that there is the device that the provider sees."""
    import onnxruntime as ort

    ort.set_default_logger_severity(3)
    torch.cuda.current_device = lambda: 0
    sessions.preload_cuda = lambda: None


def counts_itself(fn: Function) -> bool:
    """Whether a function works out how many rows there are, for tokens that it drafts itself."""
    calls = fn.calls(torch.ops.graftwork.ort_gqa.default)
    return any(arguments(node)["total"].op != "placeholder" for node in calls)


def written(program: Program, folder: Path) -> Iterator[tuple[str, Variant, Path, bool]]:
    """The models of a program's functions in all variants, as they are for CUDA, and whether they
    count themselves."""
    weights = WeightFile(folder / "weights.data")
    for place, name in enumerate(program.functions):
        for variant in variants_of(program, name):
            lowered = lower(program, name, variant)
            fn = lowered.function(name)
            model = emit(fn, lowered.weights)
            widen(model.model.graph)
            path = folder / f"{place}.{variant}.onnx"
            store(model, path, weights)
            yield name, variant, path, counts_itself(fn)


def placed(names: list[str], dtype: str) -> None:
    """Print for each session: whose it is, how many nodes the device takes, which are left to the
    CPU, how many values come back from the device, and whether the function counts itself."""
    import onnxruntime as ort

    class Noted(ort.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            self.optimized_model_filepath = str(folder / "optimized.onnx")

    pretend()
    ort.SessionOptions = Noted
    for name in names:
        folder = Path(tempfile.mkdtemp())
        program = program_of(name, folder, getattr(torch, dtype))
        for function, variant, path, own in written(program, folder):
            session = sessions.open_session(path, Target("onnxruntime", "cuda"))
            nodes: dict[str, Counter[str]] = {}
            for part in session.get_provider_graph_assignment_info():
                where = nodes.setdefault(part.ep_name, Counter())
                where.update(node.op_type for node in part.get_nodes())
            optimized = onnx.load(str(folder / "optimized.onnx"), load_external_data=False)
            back = sum(node.op_type == "MemcpyToHost" for node in optimized.graph.node)
            there = sum(nodes.get("CUDAExecutionProvider", {}).values())
            here = sorted(nodes.get("CPUExecutionProvider", {}))
            print(json.dumps([name, function, variant, there, here, back, own]), flush=True)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("bfloat16", EVERY_DAY),
        pytest.param("float16", EVERY_DAY, marks=pytest.mark.long),
        *(pytest.param("bfloat16", REST[i::8], marks=pytest.mark.sweep) for i in range(8)),
    ],
)
def test_all_that_is_no_size_runs_on_the_device(dtype: str, names: list[str], hollow: Path) -> None:
    """And nothing comes back to the host within a step, which would wait for it, but for numbers of
    rows that a step counts itself."""
    found: list[Any] = [
        json.loads(line)
        for line in hollow_cuda.run(hollow, "test_cuda_provider", f"placed({names!r}, {dtype!r})")
    ]
    assert {name for name, *_ in found} == set(names)
    for *which, there, here, back, own in found:
        assert there and set(here) <= SIZES, (which, here)
        assert own or not back, (which, back)
