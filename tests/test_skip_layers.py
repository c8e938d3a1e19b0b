"""Skipped layers: the text of a model in which they change nothing, and no trace of them left."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from selection import on_backends, one_in
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.artifact.saved import load, save
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, Weight, WeightStore
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.skip_layers import SkipLayers, unified
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate

RECIPE = {"name": "test", "contract": "approximate", "passes": []}
LAYERS = 4
MLP = ("norm2", "gate", "up", "down")
ASKED = {"max_new_tokens": 12, "eos_token_id": []}
SETS = {
    "layers": (SkipLayers(layers=(0, 2)), ("0.o", "0.down", "2.o", "2.down")),
    "neighbours": (SkipLayers(layers=(1, 2)), ("1.o", "1.down", "2.o", "2.down")),
    "last": (SkipLayers(layers=(3,)), ("3.o", "3.down")),
    "attention": (SkipLayers(attention=(1, 3)), ("1.o", "3.o")),
    "mlp": (SkipLayers(mlp=(0, 3)), ("0.down", "3.down")),
    "mixed": (
        SkipLayers(layers=(1,), attention=(2,), mlp=(0,)),
        ("1.o", "1.down", "2.o", "0.down"),
    ),
    "speedup": (SkipLayers(speedup=1.3), ("1.o", "1.down")),
}


def made(*passes: Pass, start: Program | None = None) -> Program:
    """A program that backends compile, after these passes."""
    every = (*passes, InsertKvCache(), PickLogits(), FuseResidualNorm(), AddArgmax())
    return run_passes(start or tiny_llama(LAYERS), [Step(p) for p in every])[0]


def without(names: tuple[str, ...]) -> Program:
    """The model with these products zero: what they add to the residual stream is nothing."""
    program = tiny_llama(LAYERS)
    nothing = {f"layers.{name}" for name in names}
    weights = {
        name: Weight.of(name, torch.zeros_like(old.load())) if name in nothing else old
        for name, old in program.weights.items()
    }
    return program.replace(weights=WeightStore(weights))


@cache
def expected(names: tuple[str, ...]) -> torch.Tensor:
    executable = compile(made(start=without(names)), Target("eager", "cpu"))
    return generate(executable, PROMPTS, attention_mask=MASK, **ASKED)


@pytest.mark.parametrize(("which", "backend"), on_backends(SETS, ["layers", "mlp"]))
def test_a_skipped_part_adds_nothing(which: str, backend: str) -> None:
    pass_, names = SETS[which]
    executable = compile(made(pass_), Target(backend, "cpu"))
    found = generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
    assert torch.equal(found, expected(names))
    assert not torch.equal(found, expected(()))


@pytest.mark.long
def test_compiled_steps_skip_it_too() -> None:
    pass_, names = SETS["mixed"]
    executable = compile(made(pass_), Target("torch", "cpu"))
    found = generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
    assert torch.equal(found, expected(names))


def test_weights_and_caches_leave_the_program_and_the_artifact(tmp_path: Path) -> None:
    whole, less = made(), made(SkipLayers(layers=(1,), attention=(2,)))
    gone = set(whole.weights) - set(less.weights)
    parts = {f"layers.1.{name}" for name in ("norm1", "q", "k", "v", "o", *MLP)}
    assert gone == parts | {f"layers.2.{name}" for name in ("norm1", "q", "k", "v", "o")}
    lost = {f"kv.{layer}.{part}" for layer in (1, 2) for part in ("key", "value")}
    assert set(whole.states) - set(less.states) == lost
    sizes = []
    for name, program in {"whole": whole, "less": less}.items():
        folder = save(program, tmp_path / name, target=Target(), recipe=RECIPE)
        assert set(load(folder).program.weights) == set(program.weights)
        sizes.append(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    saved = sum(whole.weights[name].type.nbytes for name in gone)
    assert 0 <= sizes[0] - sizes[1] - saved < 4096  # the file's own table of names


def _continued(full: Executable, less: Executable, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens: `full` reads the prompt, `less` takes over its caches and goes on."""
    full.begin(1, 64)
    less.begin(1, 64)
    ids = torch.tensor([prompt])
    token = int(full.run("step", chain_inputs_of(ids, 0), ("argmax",))["argmax"][0, -1])
    rows = full.read_rows(set(less.program.states), 0, 0, len(prompt))
    less.write_rows(0, 0, rows)
    found = [token]
    while len(found) < count:
        past = len(prompt) + len(found) - 1
        fed = chain_inputs_of(torch.tensor([[token]]), past)
        token = int(less.run("step", fed, ("argmax",))["argmax"][0, -1])
        found.append(token)
    return found


def chain_inputs_of(ids: torch.Tensor, past: int) -> dict[str, torch.Tensor]:
    """What a step without ancestors is fed."""
    return {name: value for name, value in chain_inputs(ids, past).items() if name != "ancestors"}


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_prompts_may_run_through_the_full_model(backend: str) -> None:
    target = Target(backend, "cpu")
    skipping = {"layers": (1, 2)}
    fast = compile(made(SkipLayers(**skipping, prefill="full")), target)
    full, less = compile(made(), target), compile(made(SkipLayers(**skipping)), target)
    texts = generate(fast, PROMPTS, attention_mask=MASK, **ASKED)
    differ = 0
    for row, mask, text in zip(PROMPTS, MASK, texts.tolist(), strict=True):
        prompt = row[mask.bool()].tolist()
        assert text[PROMPTS.shape[1] :] == _continued(full, less, prompt, 12)
        same = generate(less, torch.tensor([prompt]), **ASKED)[0, len(prompt) :]
        differ += text[PROMPTS.shape[1] :] != same.tolist()
    assert differ, "a prompt that skips layers says the same: the model is too simple to tell"


@pytest.mark.parametrize("prefill", one_in(2, ["full", "same"]))
def test_it_composes_with_copies_and_int8(prefill: str) -> None:
    skip = SkipLayers(layers=(1,), prefill=prefill)
    for more in ((), (in_int8(),)):
        plain = compile(made(skip, *more), Target("onnxruntime", "cpu"))
        fast = compile(made(skip, *more, named("draft_suffix")), Target("onnxruntime", "cpu"))
        ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
        asked = {"max_new_tokens": 40, "eos_token_id": []}
        found = generate(fast, ids, return_dict_in_generate=True, **asked)
        assert torch.equal(found.sequences, generate(plain, ids, **asked))
        assert found.stats.draft_tokens > 0


def test_heads_tap_what_is_left_and_nothing_else() -> None:
    program = made(SkipLayers(layers=(1,)), named("draft_eagle3", layers=(1, 3, 4)))
    assert program.plan.speculates
    with pytest.raises(PassError, match="some of 1, 3, 4"):
        made(SkipLayers(layers=(1,)), named("draft_eagle3", layers=(1, 2, 4)))
    with pytest.raises(PassError, match="'hidden', which prefill does not return"):
        made(SkipLayers(layers=(1,), prefill="full"), named("draft_medusa"))


@pytest.mark.parametrize(
    ("speedup", "kept"),
    [(2.0, {0, 2, 4, 7}), (1.5, {0, 2, 4, 6, 7}), (4.0, {0, 7}), (1.1, {0, 1, 2, 3, 4, 5, 7})],
)
def test_the_rule_of_unified_skipping(speedup: float, kept: set[int]) -> None:
    """R = floor(L / speedup) layers: the first, the last, multiples of floor(L / (R - 1))."""
    assert unified(range(8), speedup) == kept
