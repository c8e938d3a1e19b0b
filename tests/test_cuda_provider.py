"""What ONNX Runtime's CUDA provider makes of sessions, on a machine without a GPU (`hollow_cuda`):
which nodes it takes, what memory weights take there, and which steps it records."""

from __future__ import annotations

import ctypes
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import hollow_cuda
import onnx
import pytest
import torch
from every_recipe import FLOAT32, NAMES, program_of
from handmade import Shape, cached_llama
from hollow_cuda import Hollow

from graftwork.backends import base
from graftwork.backends.onnxruntime import executable, probe, routing, step
from graftwork.backends.onnxruntime import session as sessions
from graftwork.backends.onnxruntime.attention import TOTAL
from graftwork.backends.onnxruntime.device_weights import DeviceWeights
from graftwork.backends.onnxruntime.emit import Emitted, emit
from graftwork.backends.onnxruntime.executable import OnnxExecutable
from graftwork.backends.onnxruntime.lower import Variant, has_states, lower
from graftwork.backends.onnxruntime.store import WeightFile, store
from graftwork.backends.onnxruntime.wide import widen
from graftwork.backends.staging import Stream
from graftwork.backends.target import Target
from graftwork.ir import Function, Program, arguments

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

SIZES = {"Add", "Concat", "Mul", "Squeeze"}
"""What the provider leaves to the CPU: sums and products of sizes, which are there."""

EVERY_DAY = ["recycling", "int4"]
OFTEN = ["baseline", "eagle_chain", "int8"]
REST = [name for name in NAMES if name not in (*EVERY_DAY, *OFTEN, *FLOAT32)]


@pytest.fixture(scope="session")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hollow]:
    """A process with libraries that the provider takes for CUDA's."""
    hollow_cuda.skip_without()
    folder = tmp_path_factory.mktemp("hollow")
    hollow_cuda.build(folder)
    process = Hollow(folder, "test_cuda_provider")
    yield process
    process.close()


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


def written(program: Program, folder: Path) -> Iterator[tuple[str, Variant, Path, bool, Emitted]]:
    """The models of a program's functions in all variants, as they are for CUDA, and whether they
    count themselves."""
    weights = WeightFile(folder / "weights.data")
    for place, name in enumerate(program.functions):
        for variant in variants_of(program, name):
            lowered = lower(program, name, variant)
            fn = lowered.function(name)
            model = emit(fn, lowered.weights, cuda=True)
            widen(model.model.graph)
            path = folder / f"{place}.{variant}.onnx"
            store(model, path, weights)
            yield name, variant, path, counts_itself(fn), model


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
        for function, variant, path, own, _ in written(program, folder):
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
        pytest.param("bfloat16", OFTEN, marks=pytest.mark.long),
        pytest.param("float16", EVERY_DAY + OFTEN, marks=pytest.mark.long),
        *(pytest.param("bfloat16", REST[i::8], marks=pytest.mark.sweep) for i in range(8)),
    ],
)
def test_all_that_is_no_size_runs_on_the_device(
    dtype: str, names: list[str], hollow: Hollow
) -> None:
    """And nothing comes back to the host within a step, which would wait for it, but for numbers of
    rows that a step counts itself."""
    found: list[Any] = [json.loads(line) for line in hollow.run(f"placed({names!r}, {dtype!r})")]
    assert {name for name, *_ in found} == set(names)
    for *which, there, here, back, own in found:
        assert there and set(here) <= SIZES, (which, here)
        assert own or not back, (which, back)


def attended(dtype: str) -> None:
    """Print why attention in a dtype does not take the device's kernel."""
    pretend()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        probe.attention_kernel_works("cuda", getattr(torch, dtype), "chain")
    print(json.dumps([str(warning.message) for warning in told]), flush=True)


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [("float32", False), pytest.param("bfloat16", True, marks=pytest.mark.long)],
)
def test_attention_is_not_left_to_the_cpu(dtype: str, kernel: bool, hollow: Hollow) -> None:
    """ONNX Runtime has a kernel for float32 there alone, and would take it without a word."""
    [line] = hollow.run(f"attended({dtype!r})")
    [told] = json.loads(line)
    assert ("the device has no kernel of GroupQueryAttention" in told) != kernel, told


def multiplied() -> None:
    """Print whether sessions round what they multiply in float32."""
    pretend()
    folder = Path(tempfile.mkdtemp())
    path = next(path for *_, path, _, _ in written(program_of("baseline", folder), folder))
    session = sessions.open_session(path, Target("onnxruntime", "cuda"))
    print(session.get_provider_options()["CUDAExecutionProvider"]["use_tf32"], flush=True)


def test_float32_is_not_rounded_before_it_is_multiplied(hollow: Hollow) -> None:
    assert hollow.run("multiplied()") == ["0"]


class There:
    """A tensor in memory of the device, which this machine's is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        find = ctypes.pythonapi.PyCapsule_GetPointer
        find.restype, find.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        device = ctypes.c_int32.from_address(find(capsule, b"dltensor") + 8)
        device.value = 2  # CUDA's
        return capsule


def weighed() -> None:
    """Print the bytes of a model's weights and, of two sessions that have their own and two that
    share them, those that the runtime takes of the device."""
    import onnxruntime as ort

    pretend()
    from_torch = ort.OrtValue.from_dlpack
    ort.OrtValue.from_dlpack = lambda tensor: from_torch(There(tensor))
    program = cached_llama(Shape(layers=2, heads=8, groups=4, dim=32, inner=1024, vocab=8192))
    print(sum(weight.type.nbytes for weight in program.weights.values()))
    device = DeviceWeights(torch.device("cpu"))
    for shares in (False, True):
        folder, kept = Path(tempfile.mkdtemp()), []
        before = hollow_cuda.count("held")
        for _, variant, path, _, model in written(program, folder):
            if variant != "tree":
                shared = device.of(model.pending) if shares else None
                target = Target("onnxruntime", "cuda")
                kept.append(sessions.open_session(path, target, shared=shared))
        print(hollow_cuda.count("held") - before)


def test_sessions_take_memory_for_weights_once(hollow: Hollow) -> None:
    weights, alone, shared = map(int, hollow.run("weighed()"))
    assert alone > 1.9 * weights
    assert shared < 0.2 * weights  # none: what is shared is torch's


def executable_of(name: str) -> OnnxExecutable:
    """A recipe's executable on the device, whose memory torch takes for this machine's."""
    import onnxruntime as ort

    pretend()
    from_torch, bind, buffers = ort.OrtValue.from_dlpack, step._bind, base.StateBuffers
    ort.OrtValue.from_dlpack = lambda tensor: from_torch(There(tensor))

    def bound(bind_to: Any, name: str, tensor: torch.Tensor, device: str) -> None:
        bind(bind_to, name, tensor, "cpu" if name == TOTAL else "cuda")

    step._bind = bound
    base.StateBuffers = lambda program, device, *more, **options: buffers(
        program, torch.device("cpu"), *more, **options
    )
    routing.attention_kernel_works = lambda *_: True
    executable._stream = lambda target: OneStream(torch.device("cpu"))
    program = program_of(name, Path(tempfile.mkdtemp()), torch.bfloat16)
    return OnnxExecutable(program, Target("onnxruntime", "cuda", torch.bfloat16))


class OneStream(Stream):
    """One of the device's, as ONNX Runtime takes it."""

    @property
    def handle(self) -> str:
        made = ctypes.c_void_p()
        ctypes.CDLL(hollow_cuda.RUNTIME).cudaStreamCreate(ctypes.byref(made))
        return str(made.value)


def repeats(name: str, width: int) -> None:
    """Print graphs that are captured, steps that are launched as graphs and whether kernels are
    launched by themselves, after each of some steps in caches that grow before the last two."""
    made = executable_of(name)
    made.begin(1, 32)
    every = torch.arange(width)[None]
    fed = {"tokens": every + 3, "positions": every + 1, "past": torch.tensor([1]), "select": every}
    if width > 1:
        fed["ancestors"] = torch.eye(width, dtype=torch.bool)[None]
    call = made.hold("step", fed, ("argmax",))
    for turn in range(6):
        if turn == 4:
            made.reserve(made.capacity + 1)
        before = hollow_cuda.count("launched")
        call()
        alone = hollow_cuda.count("launched") > before
        found = [hollow_cuda.count(what) for what in ("captured", "replayed")]
        print(json.dumps([*found, alone]), flush=True)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("baseline", 1),
        pytest.param("recycling", 4, marks=pytest.mark.long),
        pytest.param("int8", 1, marks=pytest.mark.long),
    ],
    ids=["chain", "tree", "few bits"],
)
def test_steps_that_come_again_are_one_launch(name: str, width: int, hollow: Hollow) -> None:
    """Once for as long as the caches stay."""
    call = f"repeats({name!r}, {width})"
    found = [json.loads(line) for line in hollow.run(call)]
    assert [captured for captured, *_ in found] == [1, 1, 1, 1, 2, 2]
    replayed = [launches for _, launches, _ in found]
    assert [b - a for a, b in pairwise(replayed)] == [1] * 5
    assert [alone for *_, alone in found] == [True, False, False, False, True, False]
