"""The torch backend against the reference interpreter, step by step."""

from __future__ import annotations

import pytest
import torch
from tiny import cached_llama, in_int8
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from graftwork.backends import Target, compile
from graftwork.ir import InputError
from graftwork.passes.engine.validate import reference_logits
from graftwork.passes.numerics.quantize_weights import QuantizeWeights

TOKENS = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1))


def inputs(tokens: torch.Tensor, past: list[int]) -> dict[str, torch.Tensor]:
    """A chain step for sequences with these numbers of valid rows."""
    width = torch.arange(tokens.shape[1])
    start = torch.tensor(past)
    return {
        "tokens": tokens,
        "positions": start[:, None] + width,
        "past": start,
        "select": width.expand(tokens.shape),
    }


@pytest.fixture(scope="module")
def program():
    return cached_llama(context=1024)


@pytest.fixture(scope="module")
def expected(program):
    return reference_logits(program, TOKENS)


def test_chunks_equal_the_whole(program, expected):
    executable = compile(program, Target.parse("eager"))
    executable.begin(2, 12)
    past, parts = 0, []
    for width in (5, 1, 1, 5):
        step = inputs(TOKENS[:, past : past + width], [past, past])
        parts.append(executable.run("step", step, ("logits",))["logits"].clone())
        past += width
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-4)


def test_ragged_sequences_do_not_touch_each_other(program, expected):
    executable = compile(program, Target.parse("eager"))
    executable.begin(2, 16)
    executable.run("step", inputs(TOKENS[:, :6], [0, 0]), ("argmax",))
    # Sequence 1 keeps only 3 of its rows; its next tokens overwrite the forgotten ones.
    chunk = torch.stack([TOKENS[0, 6:9], TOKENS[1, 3:6]])
    logits = executable.run("step", inputs(chunk, [6, 3]), ("logits",))["logits"]
    torch.testing.assert_close(logits[0], expected[0, 6:9], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits[1], expected[1, 3:6], atol=1e-5, rtol=1e-4)


def test_growth_keeps_rows(program, expected):
    executable = compile(program, Target.parse("eager"))
    executable.begin(2, 4)
    executable.run("step", inputs(TOKENS[:, :8], [0, 0]), ("argmax",))
    before = executable.state_bytes()
    executable.reserve(executable.capacity + 1)
    assert executable.state_bytes() > before
    logits = executable.run("step", inputs(TOKENS[:, 8:], [8, 8]), ("logits",))["logits"]
    torch.testing.assert_close(logits, expected[:, 8:], atol=1e-5, rtol=1e-4)


def test_context_limit_is_an_error(program):
    executable = compile(program, Target.parse("eager"))
    executable.begin(1, 8)
    with pytest.raises(InputError, match="context of 1024 tokens"):
        executable.reserve(100_000)


def test_tree_step_equals_each_path_alone():
    program = cached_llama(trees=True, context=1024)
    executable = compile(program, Target.parse("eager"))
    executable.begin(1, 16)
    prompt, tree = TOKENS[:1, :4], torch.tensor([[5, 7, 9, 11]])
    executable.run("step", inputs(prompt, [0]), ("argmax",))
    # 5 -> 7 -> 9 and 5 -> 11
    parents = [0, 0, 1, 0]
    ancestors = torch.eye(4, dtype=torch.bool)[None]
    for node, parent in enumerate(parents[1:], start=1):
        ancestors[0, node] |= ancestors[0, parent]
    depth = ancestors.sum(-1) - 1
    step = inputs(tree, [4]) | {"positions": 4 + depth, "ancestors": ancestors}
    logits = executable.run("step", step, ("logits",))["logits"].clone()
    for path in ([0, 1, 2], [0, 3]):
        text = torch.cat([prompt, tree[:, path]], 1)
        alone = reference_logits(program, text)[:, 4:]
        torch.testing.assert_close(logits[:, path], alone, atol=1e-5, rtol=1e-4)
    # Commit 5 -> 11; the next token must see exactly that path.
    executable.commit(program.states, torch.tensor([4]), torch.tensor([[0, 3]]))
    logits = executable.run("step", inputs(torch.tensor([[3]]), [6]), ("logits",))["logits"]
    text = torch.tensor([[*prompt[0].tolist(), 5, 11, 3]])
    torch.testing.assert_close(
        logits[:, 0], reference_logits(program, text)[:, -1], atol=1e-5, rtol=1e-4
    )


def test_missing_input_is_named(program):
    executable = compile(program, Target.parse("eager"))
    executable.begin(2, 8)
    step = inputs(TOKENS[:, :2], [0, 0])
    del step["positions"]
    with pytest.raises(InputError, match="positions"):
        executable.run("step", step, ("argmax",))


@pytest.mark.long
def test_compiled_equals_eager_and_layers_are_compiled_once():
    program = cached_llama(layers=3, context=1024)
    expected = reference_logits(program, TOKENS)
    executable = compile(program, Target.parse("torch"))
    executable.begin(2, 12)
    step = inputs(TOKENS, [0, 0])
    out, codes = run_and_get_code(executable.run, "step", step, ("logits",))
    torch.testing.assert_close(out["logits"], expected, atol=1e-5, rtol=1e-4)
    assert len(codes) == 3, "what is before the layers, one layer, and what is after them"


@pytest.mark.long
def test_growing_caches_compiles_nothing():
    program = cached_llama(layers=1, context=1024)
    expected = reference_logits(program, TOKENS)
    executable = compile(program, Target.parse("torch"))
    executable.begin(2, 12)
    executable.run("step", inputs(TOKENS[:, :1], [0, 0]), ("logits",))
    compiled = counters["stats"]["unique_graphs"]
    for position, rows in zip(range(1, 12), range(50, 1150, 100), strict=True):
        executable.reserve(rows)
        step = inputs(TOKENS[:, position : position + 1], [position, position])
        out = executable.run("step", step, ("logits",))["logits"]
        torch.testing.assert_close(out[:, 0], expected[:, position], atol=1e-5, rtol=1e-4)
    assert executable.capacity > 1024
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.long
@pytest.mark.parametrize("first", [40, 64])
def test_prompts_of_any_length_share_what_is_compiled(first):
    """No column is fed for nothing. 64: a prompt as long as the caches, whose sizes are alike then,
    is not to make them one."""
    program = cached_llama(layers=1, context=1024)
    tokens = torch.randint(0, 32, (1, 600), generator=torch.Generator().manual_seed(2))
    expected = reference_logits(program, tokens)
    executable = compile(program, Target.parse("torch"))
    graphs = []
    for width in (first, 2, 600, 300, 65):
        executable.begin(1, 64)
        executable.reserve(width)
        step = inputs(tokens[:, :width], [0])
        out = executable.run("step", step, ("logits",))["logits"]
        torch.testing.assert_close(out, expected[:, :width], atol=1e-5, rtol=1e-4)
        step["select"] = torch.tensor([[width - 1]])
        out = executable.run("step", step, ("logits",))["logits"]
        torch.testing.assert_close(out, expected[:, width - 1 : width], atol=1e-5, rtol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    extra = graphs[-1] - graphs[0]
    assert extra == 0 if first == 40 else extra <= 2, "once more where sizes were alike, at most"
    assert executable.widths("step").holding(300) == 300


@pytest.mark.long
def test_other_threads_are_compiled_for():
    program = cached_llama(layers=1, context=1024)
    threads = torch.get_num_threads()
    executable = compile(program, Target.parse("torch"))
    step = inputs(TOKENS[:, :1], [0, 0])
    try:
        for count in (1, 3):
            executable.begin(2, 12)
            torch.set_num_threads(count)
            compiled = counters["stats"]["unique_graphs"]
            out = executable.run("step", step, ("logits",))["logits"]
            assert counters["stats"]["unique_graphs"] == compiled + 1, "code for other threads"
            want = reference_logits(program, TOKENS[:, :1])
            torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    finally:
        torch.set_num_threads(threads)


FEW_BITS = QuantizeWeights(bits=4, group=8, embedding=True)


@pytest.mark.parametrize(
    "pass_",
    [
        pytest.param(in_int8(), id="int8"),
        pytest.param(FEW_BITS, id="int4", marks=pytest.mark.long),
    ],
)
def test_quantized_weights_stay_bytes_and_give_the_same_logits(pass_):
    program = pass_.run(cached_llama(layers=1, context=1024)).program
    quantized = {name for name in program.weights if name.endswith((".q8", ".q4"))}
    assert quantized
    eager = compile(program, Target.parse("eager"))
    compiled = compile(program, Target.parse("torch"))
    for name in quantized:
        tiles = f"{name}.tiles"
        held = [w for n, w in compiled.weights.items() if n == name or n.startswith(tiles)]
        assert held and all(tensor.element_size() == 1 for tensor in held)
    results = []
    for executable in (eager, compiled):
        executable.begin(2, 12)
        out = executable.run("step", inputs(TOKENS[:, :3], [0, 0]), ("logits",))
        results.append(out["logits"])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "pass_",
    [
        pytest.param(in_int8(), id="int8", marks=pytest.mark.long),
        pytest.param(FEW_BITS, id="int4", marks=pytest.mark.long),
    ],
)
def test_a_token_has_the_same_bits_alone_and_among_others(pass_):
    # Wide enough that a sum over a row of one would be shared out among threads.
    program = pass_.run(cached_llama(layers=1, dim=256, context=64)).program
    executable = compile(program, Target.parse("torch"))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        executable.begin(1, 12)
        step = inputs(TOKENS[:1, :5], [0])
        together = executable.run("step", step, ("logits",))["logits"].clone()
        executable.begin(1, 12)
        for place in range(5):
            step = inputs(TOKENS[:1, place : place + 1], [place])
            alone = executable.run("step", step, ("logits",))["logits"]
            assert torch.equal(alone[:, 0], together[:, place])
    finally:
        torch.set_num_threads(threads)


def test_argmax_is_the_logits_argmax(program, expected):
    executable = compile(program, Target.parse("eager"))
    executable.begin(2, 12)
    out = executable.run("step", inputs(TOKENS, [0, 0]), ("argmax", "logits"))
    assert torch.equal(out["argmax"], out["logits"].argmax(-1))
    assert torch.equal(out["argmax"], expected.argmax(-1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("onnxruntim", "did you mean 'onnxruntime'"),
        ("torch:gpu", "expected one of cpu, cuda"),
        ("torch:cpu:float31", "did you mean 'float32'"),
        ("torch:cpu:float32:x", "columns=N"),
    ],
)
def test_bad_targets_are_named(text, message):
    with pytest.raises(InputError, match=message):
        Target.parse(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
def test_cuda_without_a_gpu_is_a_clear_error(program):
    with pytest.raises(InputError, match="no CUDA device is usable"):
        compile(program, Target.parse("torch:cuda"))


def test_a_driver_that_is_too_old_is_named(program, monkeypatch):
    def start() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nSee"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", start)
    for backend in ("torch", "onnxruntime"):
        with pytest.raises(
            InputError, match=r"driver .* too old \(found version 11040\).*; use .*:cpu"
        ):
            compile(program, Target.parse(f"{backend}:cuda"))
