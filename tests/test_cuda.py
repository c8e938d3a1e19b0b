"""What can only be seen on a GPU. Skipped without one; `test_devices`, `test_staging`,
`test_graphs` and `test_wide` show on the CPU what a CPU can show of it, `test_cuda_provider` what
ONNX Runtime's provider makes of it where nothing computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import FLOAT32, NAMES, program_of
from handmade import Shape, cached_llama
from tiny import MASK, PROMPTS, drafting_llama

from graftwork.backends import compile
from graftwork.backends.onnxruntime import session as sessions
from graftwork.backends.target import Target
from graftwork.ir import Program, UnsupportedError
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.runtime import generate

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
BACKENDS = ["torch", "onnxruntime"]
DTYPES = [torch.float16, torch.bfloat16]
ASKED: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": []}
SHAPES_ONLY = {"Shape", "Gather", "Unsqueeze", "Squeeze", "Concat", "Slice", "Cast", "Add", "Sub"}
SHAPES_ONLY |= {"Mul", "Div", "Range", "Reshape", "Size", "Equal", "Where", "Max", "Min", "Expand"}
"""Ops that ONNX Runtime puts on the CPU where they work out sizes."""


def target(backend: str, dtype: torch.dtype = torch.float32) -> Target:
    return Target(backend, DEVICE, dtype)


def inputs(width: int, past: int, batch: int = 1) -> dict[str, torch.Tensor]:
    every = torch.arange(width).repeat(batch, 1)
    return {
        "tokens": (every * 7 + past) % 32,
        "positions": every + past,
        "past": torch.full((batch,), past),
        "select": every.clone(),
    }


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits agree within what the dtype allows of their scale."""
    bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    a, b = a.float().cpu(), b.float().cpu()
    return bool((a - b).abs().max() <= bound * b.abs().max())


def near_ties(program: Program, texts: Any, wanted: Any, margin: float = 5e-2) -> int:
    """Rows whose text leaves another where two tokens are nearly as good; others must not."""
    counted = 0
    executable = compile(program, Target("eager"))
    for text, other in zip(texts.tolist(), wanted.tolist(), strict=True):
        if text == other:
            continue
        place = next(i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b)
        executable.begin(1, place + 1)
        fed = inputs(place, 0)
        fed["tokens"] = torch.tensor([other[:place]])
        fed["select"] = torch.tensor([[place - 1]])
        logits = executable.run("step", fed, ("logits",))["logits"][0, 0].float()
        best = logits.topk(2).values
        assert float(best[0] - logits[text[place]]) <= margin * float(logits.abs().max())
        assert float(best[0] - best[1]) <= margin * float(logits.abs().max())
        counted += 1
    return counted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_held_steps_read_new_inputs(backend: str, dtype: torch.dtype, tmp_path: Path) -> None:
    program = program_of("baseline", tmp_path, dtype)
    held, fresh = compile(program, target(backend, dtype)), compile(program, Target("eager"))
    for executable in (held, fresh):
        executable.begin(1, 64)
    fed = inputs(1, 0)
    call = held.hold("step", fed, ("logits",))
    for past in range(6):
        new = inputs(1, past)
        for name, tensor in fed.items():
            tensor.copy_(new[name])
        got = call()["logits"].clone()
        assert close(got, fresh.run("step", new, ("logits",))["logits"], dtype), past


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_outputs_are_on_the_host(backend: str, tmp_path: Path) -> None:
    """Of the first call, which compiles, as of those after it."""
    executable = compile(program_of("baseline", tmp_path), target(backend))
    executable.begin(1, 64)
    call = executable.hold("step", inputs(1, 0), ("logits", "argmax"))
    for _ in range(3):
        assert all(output.is_cpu for output in call().values())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FLOAT32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_recipe_generates(backend: str, name: str, tmp_path: Path) -> None:
    program = program_of(name, tmp_path, torch.bfloat16)
    try:
        executable = compile(program, target(backend, torch.bfloat16))
    except UnsupportedError as error:
        assert "on the CPU alone" in str(error)
        return
    found = generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
    assert found.shape == (len(PROMPTS), PROMPTS.shape[1] + 16)
    alone = generate(executable, PROMPTS[2:3], **ASKED)
    assert alone.shape == (1, PROMPTS.shape[1] + 16)


@pytest.mark.parametrize("name", ["baseline", "copyspec", "recycling", "medusa", "eagle_chain"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_are_the_float32_ones_but_for_near_ties(
    backend: str, name: str, tmp_path: Path
) -> None:
    program = program_of(name, tmp_path, torch.float16)
    long = {**ASKED, "max_new_tokens": 100}
    wanted = generate(compile(program, Target("eager")), PROMPTS, attention_mask=MASK, **long)
    executable = compile(program, target(backend, torch.float16))
    found = generate(executable, PROMPTS, attention_mask=MASK, **long)
    assert near_ties(program, found[2:3], wanted[2:3]) <= 1
    again = generate(executable, PROMPTS, attention_mask=MASK, **long)
    assert torch.equal(found, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_node_runs_on_the_cpu_but_those_of_shapes(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime as ort

    class Profiled(ort.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.enable_profiling = True
            self.profile_file_prefix = str(tmp_path / "profile")

    monkeypatch.setattr(ort, "SessionOptions", Profiled)
    opened: list[Any] = []
    open_ = sessions.open_session

    def noted(*args: Any, **options: Any) -> Any:
        opened.append(open_(*args, **options))
        return opened[-1]

    monkeypatch.setattr("graftwork.backends.onnxruntime.executable.open_session", noted)
    program = program_of("recycling", tmp_path, dtype)
    generate(compile(program, target("onnxruntime", dtype)), PROMPTS[2:3], **ASKED)
    strays = {
        event["args"]["op_name"]
        for session in opened
        for event in json.loads(Path(session.end_profiling()).read_text())
        if event.get("args", {}).get("provider") == "CPUExecutionProvider"
    }
    assert strays <= SHAPES_ONLY, strays - SHAPES_ONLY


@pytest.mark.parametrize("backend", BACKENDS)
def test_commits_follow_the_steps_that_they_move_rows_of(backend: str) -> None:
    """The device is kept busy, so that what is not queued behind a step comes too early."""
    program = cached_llama(Shape(), trees=True)
    executables = [compile(program, target(backend)), compile(program, Target("eager"))]
    busy = torch.randn(2048, 2048, device=DEVICE)
    seen = torch.eye(4, dtype=torch.bool)[None]
    seen[..., 0] = True
    states = list(program.states)
    for turn in range(200):
        found = []
        for executable in executables:
            executable.begin(1, 64)
            executable.run("step", inputs(4, 0), ("logits",))
            for _ in range(4):
                busy = busy @ busy * 1e-3
            executable.run("step", {**inputs(4, 4), "ancestors": seen}, ("logits",))
            executable.commit(states, torch.tensor([4]), torch.tensor([[0, 3]]))
            found.append(executable.run("step", inputs(1, 6), ("logits",))["logits"].clone())
        assert close(found[0], found[1], torch.float32), turn


def test_steps_are_recorded_once(tmp_path: Path) -> None:
    program = program_of("copyspec", tmp_path, torch.float16)
    executable: Any = compile(program, target("torch", torch.float16))
    for _ in range(2):
        generate(executable, PROMPTS[2:3], **{**ASKED, "max_new_tokens": 60})
    graphs, spent = len(executable.captured), executable.preparing
    assert graphs
    generate(executable, PROMPTS[2:3], **{**ASKED, "max_new_tokens": 60})
    assert len(executable.captured) == graphs and executable.preparing == spent


@pytest.mark.parametrize("backend", BACKENDS)
def test_caches_grow(backend: str) -> None:
    program = cached_llama(Shape(context=4096))
    given = {**ASKED, "max_new_tokens": 2500}
    found = generate(compile(program, target(backend)), PROMPTS[2:3] % 61, **given)
    wanted = generate(compile(program, Target("eager")), PROMPTS[2:3] % 61, **given)
    assert near_ties(program, found, wanted) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_so_many_columns_have_the_same_bits(
    backend: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Whatever is drafted, and whoever shares the batch: not near ties, but bits."""
    fixed, rows = Target(backend, DEVICE, dtype, columns=12), []
    for name in ("baseline", "copyspec"):
        executable = compile(program_of(name, tmp_path, dtype), fixed)
        found = generate(executable, PROMPTS[2:3], **{**ASKED, "max_new_tokens": 100})
        states = [name for name in executable.program.states if name.startswith("kv.")]
        held = executable.read_rows(states, 0, 0, found.shape[1] - 1)
        rows.append({"text": found, **held})
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_that_of_weights_and_caches(backend: str) -> None:
    """Of what torch allocates; ONNX Runtime's own shows as memory that is not free any more."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    shape = Shape(layers=8, dim=128, heads=16, groups=4, inner=8192, context=2048)
    program = cached_llama(shape)
    executable = compile(program, target(backend))
    generate(executable, PROMPTS[2:3] % 61, **{**ASKED, "max_new_tokens": 200})
    torch.cuda.empty_cache()
    used = free - torch.cuda.mem_get_info()[0]
    kernels = 512 << 20  # what libraries load and reserve once, whatever the model
    assert used <= 1.2 * executable.memory().total + kernels


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_goes_on_from_its_checkpoint(backend: str, tmp_path: Path) -> None:
    from graftwork import Model
    from graftwork.training.fit import fit

    program = drafting_llama(DraftMedusa(heads=2))
    model = Model(program, Target("torch" if backend == "torch" else "eager", DEVICE), {"n": "t"})
    data = [[(i * 5 + j) % 31 + 1 for j in range(64)] for i in range(40)]
    options: dict[str, Any] = {"batch": 4, "window": 32, "seed": 1}
    fit(model, data, out=tmp_path / "heads", steps=2, **options)
    done = fit(model, data, out=tmp_path / "heads", steps=4, resume=True, **options)
    assert done.steps == 4
