"""The ONNX Runtime executable against the reference interpreter, step by step."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from archs import ARCHS, build
from handmade import Shape, cached_llama
from onnxruntime_helpers import without_own_attention
from selection import one_in
from test_onnxruntime_lowering import KERNEL, PLAIN, TREE, name_of
from tiny import in_int8

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.backends.onnxruntime import executable as executables
from graftwork.backends.onnxruntime import probe
from graftwork.backends.onnxruntime.executable import GRAIN, OnnxExecutable
from graftwork.backends.onnxruntime.probe import attention_kernel_works
from graftwork.ir import InputError, Program, UnsupportedError, run
from graftwork.ir.execution.executable import ANY
from graftwork.ir.support.errors import GraftworkWarning
from graftwork.passes.engine.validate import empty_states, reference_logits

TARGET = Target(threads=1)
CHAIN = "chain"


@pytest.fixture(autouse=True, params=["own", "runtime's"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All holds of graftwork's own attention, and of ONNX Runtime's where that is missing."""
    if request.param != "own":
        without_own_attention(monkeypatch)
    return str(request.param)


def executable(program: Program) -> OnnxExecutable:
    """Compiled for one CPU thread."""
    made = compile(program, TARGET)
    assert isinstance(made, OnnxExecutable)
    return made


class Twin:
    """Runs the same steps in ONNX Runtime and in the interpreter and compares."""

    def __init__(self, program: Program, batch: int, rows: int = 8) -> None:
        self.program, self.ort = program, executable(program)
        self.ort.begin(batch, rows)
        self.states = empty_states(program, batch, program.info.context)
        self.past = torch.zeros(batch, dtype=torch.int64)
        self.random = torch.Generator().manual_seed(1)

    def step(self, width: int, tree: torch.Tensor | None = None, keep: Any = None) -> None:
        """One step of random tokens; `keep` says how many rows each sequence commits."""
        batch = len(self.past)
        chain = torch.ones(width, width, dtype=torch.bool).tril()
        ancestors = chain if tree is None else tree
        depth = ancestors.sum(-1) - 1
        inputs = {
            "tokens": torch.randint(0, 61, (batch, width), generator=self.random),
            "positions": self.past[:, None] + depth,
            "past": self.past.clone(),
            "select": torch.arange(width).expand(batch, width),
        }
        whole = inputs | {"ancestors": ancestors.expand(batch, width, width)}
        takes = {str(node.target) for node in self.program.function("step").inputs}
        reference = {k: v for k, v in (whole | self.states).items() if k in takes}
        want = run(self.program, "step", reference)
        self.ort.reserve(int(self.past.max()) + width)
        given = inputs if tree is None else whole
        got = self.ort.run("step", given, ("logits", "argmax"))
        torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-4, atol=1e-4)
        assert got["argmax"].dtype == torch.int64 and got["argmax"].shape == (batch, width)
        assert torch.equal(got["argmax"], got["logits"].argmax(-1))
        self.states = {name: want[name] for name in self.states}
        self.past = self.past + torch.as_tensor(width if keep is None else keep)

    def commit(self, source: torch.Tensor) -> None:
        """Gather an accepted path's rows in both; `source` i64[B,N]."""
        self.ort.commit(self.states, self.past, source)
        for tensor in self.states.values():
            for b, start in enumerate(self.past.tolist()):
                path = tensor[b, :, start + source[b]].clone()
                tensor[b, :, start : start + source.shape[1]] = path
        self.past = self.past + source.shape[1]


@pytest.mark.parametrize("shape", one_in(2, KERNEL + PLAIN), ids=name_of)
def test_chains_and_trees_of_one_sequence(shape: Shape) -> None:
    twin = Twin(cached_llama(shape), 1)
    twin.step(5)
    twin.step(1)
    twin.step(4, keep=2)  # two rows are forgotten
    twin.step(4, TREE, keep=0)
    twin.commit(torch.tensor([[0, 2, 3]]))
    twin.step(3)
    twin.step(1)


@pytest.mark.parametrize("shape", [KERNEL[0], KERNEL[5], KERNEL[9], *PLAIN], ids=name_of)
def test_ragged_batches(shape: Shape) -> None:
    twin = Twin(cached_llama(shape), 3)
    twin.step(5, keep=[5, 2, 4])  # prompts of different lengths, padded on the right
    twin.step(1)
    twin.step(3, keep=[1, 3, 2])
    twin.step(4, TREE, keep=0)
    twin.commit(torch.tensor([[0, 2, 3], [0, 1, 3], [0, 1, 2]]))
    twin.step(1)


def test_a_tree_may_come_first() -> None:
    twin = Twin(cached_llama(), 1)
    twin.step(4, TREE, keep=0)
    twin.commit(torch.tensor([[0, 2, 3]]))
    twin.step(2)


def test_programs_without_trees() -> None:
    program = cached_llama(trees=False)
    for batch in (1, 2):
        twin = Twin(program, batch)
        twin.step(4)
        twin.step(2)
    with pytest.raises(InputError, match="without trees"):
        twin.step(4, TREE)


def test_growing_keeps_what_the_caches_hold() -> None:
    twin = Twin(cached_llama(), 2, rows=4)
    twin.step(4)
    first = twin.ort.capacity
    sizes = [twin.ort.state_bytes()]
    while twin.ort.capacity == first:
        twin.step(16)
    sizes.append(twin.ort.state_bytes())
    twin.step(1)
    assert first == GRAIN and sizes[0] * twin.ort.capacity == sizes[1] * first
    layers, groups, dim = 2, 2, 16
    assert sizes[0] == 2 * layers * 2 * groups * first * dim * 4


def test_beginning_again_forgets() -> None:
    program = cached_llama()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    inputs = {
        "tokens": tokens,
        "positions": torch.arange(5)[None],
        "past": torch.tensor([0]),
        "select": torch.tensor([[4]]),
    }
    ort = executable(program)
    ort.begin(1, 16)
    first = ort.run("step", inputs, ["logits"])["logits"].clone()
    ort.run(
        "step", inputs | {"past": torch.tensor([5]), "positions": torch.arange(5, 10)[None]}, []
    )
    ort.begin(1, 16)
    assert torch.equal(ort.run("step", inputs, ["logits"])["logits"], first)
    ort.begin(2, 16)
    both = {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}
    pair = ort.run("step", both, ["logits"])["logits"]
    torch.testing.assert_close(pair, first.expand(2, -1, -1))


def test_a_token_does_not_depend_on_its_step() -> None:
    """Width 8 and eight widths of 1 give the same logits up to float error."""
    program = cached_llama()
    tokens = torch.randint(0, 61, (1, 8), generator=torch.Generator().manual_seed(0))
    rows = []
    for widths in ([8], [1] * 8, [3, 5]):
        ort, past, parts = executable(program), 0, []
        ort.begin(1, 8)
        for width in widths:
            inputs = {
                "tokens": tokens[:, past : past + width],
                "positions": torch.arange(past, past + width)[None],
                "past": torch.tensor([past]),
                "select": torch.arange(width)[None],
            }
            parts.append(ort.run("step", inputs, ["logits"])["logits"].clone())
            past += width
        rows.append(torch.cat(parts, 1))
    for other in rows[1:]:
        torch.testing.assert_close(other, rows[0], rtol=1e-5, atol=2e-5)


def int8_llama(
    shape: Shape | None = None, *, trees: bool = True, exclude: tuple[str, ...] = ()
) -> Program:
    """A cached llama whose linear layers are int8."""
    return in_int8(exclude=exclude).run(cached_llama(shape, trees=trees)).program


def logits_by_widths(program: Program, batch: int, widths: list[int]) -> torch.Tensor:
    """Logits [B,T,V] of the same random tokens, fed in steps of these widths."""
    tokens = torch.randint(0, 61, (batch, 24), generator=torch.Generator().manual_seed(0))
    ort, past, parts = executable(program), 0, []
    ort.begin(batch, sum(widths))
    for width in widths:
        inputs = {
            "tokens": tokens[:, past : past + width],
            "positions": torch.arange(past, past + width).expand(batch, width),
            "past": torch.full((batch,), past),
            "select": torch.arange(width).expand(batch, width),
        }
        ort.reserve(past + width)
        parts.append(ort.run("step", inputs, ["logits"])["logits"].clone())
        past += width
    return torch.cat(parts, 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("trees", [False, True])
def test_int8_tokens_are_the_same_bits_at_every_width(batch: int, trees: bool) -> None:
    program = int8_llama(trees=trees)
    whole = logits_by_widths(program, batch, [24])
    for widths in ([1] * 24, [2] * 12, [5, 1, 1, 8, 1, 7, 1], [20, 4]):
        assert torch.equal(logits_by_widths(program, batch, widths), whole)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("shape", one_in(4, [*KERNEL, *PLAIN]), ids=name_of)
def test_int8_tokens_are_the_same_bits_in_every_attention(shape: Shape, trees: bool) -> None:
    program = int8_llama(shape, trees=trees)
    whole = logits_by_widths(program, 1, [24])
    for widths in ([1] * 24, [5, 1, 1, 8, 1, 7, 1]):
        assert torch.equal(logits_by_widths(program, 1, widths), whole)


@pytest.mark.parametrize(
    ("shape", "exclude", "columns"),
    [
        (Shape(), (), {"own": 1, "runtime's": 1}),
        (Shape(dim=12), (), {"own": 1, "runtime's": 1}),
        (Shape(), ("*.down.weight",), {"own": 2, "runtime's": 2}),
        (Shape(sinks=True), (), {"own": 1, "runtime's": 2}),
    ],
)
def test_a_lone_int8_token_takes_one_row_unless_floats_are_summed(
    shape: Shape, exclude: tuple[str, ...], columns: dict[str, int], attention: str
) -> None:
    program = int8_llama(shape, exclude=exclude)
    whole = logits_by_widths(program, 1, [24])
    assert torch.equal(logits_by_widths(program, 1, [7] + [1] * 17), whole)
    ort = executable(program)
    ort.begin(1, 8)
    ort.run("step", step_of(1), ["logits"])
    (made,) = ort._made["step"].values()
    (bound,) = made.bound.values()
    fed = {feed.name: feed.buffer for feed in bound.feeds}
    assert fed["tokens"].shape == (1, columns[attention])


def test_int8_means_what_the_interpreter_says() -> None:
    program = int8_llama()
    tokens = torch.randint(0, 61, (1, 24), generator=torch.Generator().manual_seed(0))
    want = reference_logits(program, tokens)
    got = logits_by_widths(program, 1, [24])
    # Where float error moves a value to the next integer, the two differ by a rounding step.
    assert float((got - want).abs().max() / want.abs().max()) < 0.03
    assert float((got.argmax(-1) == want.argmax(-1)).float().mean()) > 0.9


def test_a_single_int8_token_at_the_end_of_the_buffer(attention: str) -> None:
    """ONNX Runtime's attention takes two columns, for the second of which nobody reserved a row."""
    program = int8_llama()
    ort = executable(program)
    ort.begin(1, GRAIN)
    for past in (0, GRAIN - 1):
        ort.run("step", step_of(1, past=torch.tensor([past])), ["logits"])
    assert (ort.capacity > GRAIN) == (attention != "own")


def test_variants_share_weights_on_disk_and_leave_nothing() -> None:
    twin = Twin(cached_llama(), 2)
    twin.step(4)
    file = twin.ort._weights
    size, folder = file.end, Path(file.path).parent
    twin.step(4, TREE, keep=0)
    twin.step(1)
    assert file.end < 1.1 * size  # rotary tables of another length, no second copy of the rest
    assert folder.is_dir()
    del twin, file
    gc.collect()
    assert not folder.exists()


def test_outputs_other_than_logits_and_functions_without_caches() -> None:
    program = cached_llama()
    fn = program.function("step").copy()
    markers = fn.calls(torch.ops.graftwork.hidden.default)
    fn.set_outputs({**fn.outputs, "tap": markers[1]})
    heads = cached_llama(Shape(layers=1)).function("step").copy()
    for node in reversed(heads.calls()):
        if str(node.target) != "aten.embedding.default":
            continue
        heads.set_outputs({"rows": node})
    for node in reversed(list(heads.graph.nodes)):
        if node.op != "output" and not node.users and str(node.target) != "positions":
            heads.graph.erase_node(node)
    heads.name = "lookup"
    program = program.replace(functions={"step": fn, "lookup": heads})
    ort = executable(program)
    ort.begin(1, 8)
    inputs = {
        "tokens": torch.tensor([[3, 5]]),
        "positions": torch.tensor([[0, 1]]),
        "past": torch.tensor([0]),
        "select": torch.tensor([[1]]),
    }
    assert ort.run("step", inputs, ["tap"])["tap"].shape == (1, 2, 64)
    rows = ort.run("lookup", {"positions": torch.tensor([[2, 0, 1]])}, ["rows"])["rows"]
    assert torch.equal(rows, program.weights["cos"].load()[torch.tensor([[2, 0, 1]])])


def step_of(width: int, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs of a chain of one sequence."""
    return {
        "tokens": torch.zeros(1, width, dtype=torch.int64),
        "positions": torch.arange(width)[None],
        "past": torch.tensor([0]),
        "select": torch.tensor([[0]]),
    } | changes


def test_refusals() -> None:
    program = cached_llama()
    ort = executable(program)
    ort.begin(1, 8)
    with pytest.raises(InputError, match=r"reserve\(65\)"):
        ort.run("step", step_of(65), ["logits"])
    with pytest.raises(InputError, match="context of 96"):
        ort.reserve(10_000)
    incomplete = step_of(2)
    del incomplete["select"]
    with pytest.raises(InputError, match="needs the input 'select'"):
        ort.run("step", incomplete, ["logits"])
    with pytest.raises(InputError, match="'positions': expected"):
        ort.run("step", step_of(2, positions=torch.zeros(1, 3, dtype=torch.int64)), ["logits"])
    with pytest.raises(InputError, match="'tokens': expected"):
        ort.run("step", step_of(2, tokens=torch.zeros(1, 2)), ["logits"])
    assert ort.run("step", step_of(2), ["logits"])["logits"].shape == (1, 1, 61)
    assert ort.widths("step") == ANY


def test_bfloat16_on_the_cpu_is_refused() -> None:
    program = cached_llama(Shape(dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match="bfloat16"):
        compile(program, Target(dtype=torch.bfloat16))


def test_float16_runs() -> None:
    program = cached_llama(Shape(dtype=torch.float16))
    ort = compile(program, Target(dtype=torch.float16, threads=1))
    ort.begin(1, 8)
    got = ort.run("step", step_of(3), ["logits"])["logits"]
    wide = cached_llama()
    reference = executable(wide)
    reference.begin(1, 8)
    want = reference.run("step", step_of(3), ["logits"])["logits"]
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), want, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("bad", ["cuda"])
def test_missing_device_is_named(bad: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(InputError, match="CUDA"):
        compile(cached_llama(), Target(device=bad))


@pytest.mark.parametrize(
    ("works", "made"),
    [
        ((), ["batch"]),
        pytest.param(("chain",), ["chain", "batch"]),
        pytest.param(("tree",), ["batch", "tree"], marks=pytest.mark.long),
    ],
    ids=["neither", "chains alone", "trees alone"],
)
def test_without_the_attention_kernel_everything_still_runs(
    works: tuple[str, ...], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device where GroupQueryAttention lacks the dtype, or fails with a bias or without."""
    without_own_attention(monkeypatch)
    routing = "graftwork.backends.onnxruntime.routing.attention_kernel_works"
    monkeypatch.setattr(routing, lambda device, dtype, variant: variant in works)
    twin = Twin(cached_llama(), 1)
    twin.step(5)
    twin.step(1)
    twin.step(4, TREE, keep=0)
    twin.commit(torch.tensor([[0, 2, 3]]))
    twin.step(2)
    assert list(twin.ort._made["step"]) == made


def test_why_an_attention_kernel_is_not_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("no implementation for Pad(24)\nmore")

    monkeypatch.setattr("graftwork.backends.onnxruntime.probe._ran_alone", fails)
    attention_kernel_works.cache_clear()
    why = r"bfloat16.*a tree of tokens.*on cuda.*implementation for Pad\(24\)$"
    with pytest.warns(GraftworkWarning, match=why):
        assert not attention_kernel_works("cuda", torch.bfloat16, "tree")
    attention_kernel_works.cache_clear()


@pytest.mark.parametrize("variant", ["chain", "tree"])
def test_probes_tell_yes_from_no(variant: Literal["chain", "tree"]) -> None:
    assert attention_kernel_works("cpu", torch.float32, variant)
    assert attention_kernel_works("cpu", torch.float16, variant)
    assert not attention_kernel_works("cpu", torch.float64, variant)


def test_a_fault_of_trees_says_nothing_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    run = probe._run

    def without_bias(model: Any, feeds: dict[str, Any], *more: Any, **options: Any) -> Any:
        if any(value.dtype == bool for value in feeds.values()):
            raise RuntimeError("no bias here")
        return run(model, feeds, *more, **options)

    monkeypatch.setattr(probe, "_run", without_bias)
    attention_kernel_works.cache_clear()
    assert attention_kernel_works("cpu", torch.float32, "chain")
    assert not attention_kernel_works("cpu", torch.float32, "tree")
    attention_kernel_works.cache_clear()


def test_why_the_mixtures_kernel_is_not_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    probe.mixtures_work.cache_clear()
    assert probe.mixtures_work("cpu", torch.float32) and probe.mixtures_work("cpu", torch.float16)
    run_it = probe._run
    monkeypatch.setattr(probe, "_run", lambda *given: [2 * out for out in run_it(*given)])
    probe.mixtures_work.cache_clear()
    with pytest.warns(GraftworkWarning, match="float32.*one expert after another.*wrong numbers"):
        assert not probe.mixtures_work("cpu", torch.float32)
    probe.mixtures_work.cache_clear()


@pytest.mark.parametrize("name", one_in(2, ["qwen3_moe", "gpt_oss"]))
def test_mixtures_run_without_their_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose kernel fails when it runs: of few tokens and of many."""
    model = build(ARCHS[name])
    fast = gw.optimize(model, target="onnxruntime")
    ids = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(2))
    want = fast(ids)
    monkeypatch.setattr(
        OnnxExecutable, "_refused", lambda self, node: node.target in executables.MIXTURES
    )
    emitted: set[str] = set()
    emit = executables.emit

    def noted(*args: Any, **options: Any) -> Any:
        made = emit(*args, **options)
        emitted.update(node.op_type for node in made.model.graph)
        return made

    monkeypatch.setattr(executables, "emit", noted)
    apart = gw.optimize(model, target="onnxruntime")
    torch.testing.assert_close(apart(ids), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(apart(ids[:, :1]), want[:, :1], rtol=1e-4, atol=1e-4)
    assert emitted and "MoE" not in emitted
