"""Tokens that leave early: as the method says, whatever tells how sure an exit is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from evidence import evidence_for
from selection import mostly_long, on_backends
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.confident.graph import DepthConfident
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.depth.probes import fitted
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.fusing.fuse_qkv import FuseQkv
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate

LAYERS = 4
ASKED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
EACH = CutDepth(every=1)
THRESHOLDS = {"margin": 0.05, "saturation": 0.78, "probe": 0.12}


def made(*passes: Pass) -> Program:
    start = tiny_llama(LAYERS)
    every = (*passes, FuseQkv(), InsertKvCache(), PickLogits(), FuseResidualNorm(), AddArgmax())
    return run_passes(start, [Step(p) for p in every], evidence=evidence_for(start))[0]


@cache
def compiled(backend: str, measure: str, threshold: float) -> Executable:
    leaves = DepthConfident(measure=measure, threshold=threshold)  # type: ignore[arg-type]
    return compile(made(EACH, leaves), Target(backend, "cpu"))


class ByHand:
    """A sequence that is decoded layer by layer; rows that are lacking are made of the exit's
    state, which every deeper layer is given in its turn."""

    def __init__(self) -> None:
        self.executable = compile(made(EACH), Target("eager", "cpu"))
        self.executable.begin(1, 64)

    def state(self, row: int) -> torch.Tensor:
        return self.executable.read_rows(["stream"], 0, row, row + 1)["stream"].clone()

    def run(self, layer: int, tokens: list[int], past: int) -> None:
        name, given = f"step.{layer}", chain_inputs(torch.tensor([tokens]), past)
        fn = self.executable.program.function(name)
        self.executable.run(name, {k: v for k, v in given.items() if fn.has_input(k)}, ())

    def head(self, past: int, width: int = 1) -> torch.Tensor:
        given = {"past": torch.tensor([past]), "select": torch.tensor([[width - 1]])}
        return self.executable.run("step.head", given, ("logits",))["logits"][0, 0].clone()

    def fill(self, layers: range, token: int, past: int) -> None:
        state = self.state(past)
        for layer in layers:
            self.run(layer, [token], past)
            self.executable.write_rows(0, past, {"stream": state})


def by_hand(prompt: list[int], measure: str, threshold: float) -> tuple[list[int], list[int]]:
    """Greedy tokens by the definition, and the layers of each but the first."""
    text = ByHand()
    for layer in range(LAYERS):
        text.run(layer, prompt, 0)
    found, layers = [int(text.head(0, len(prompt)).argmax())], []
    program = compiled("eager", measure, threshold).program
    embed = made(EACH).weights["embed"].load()
    while len(found) < 20:
        past = len(prompt) + len(found) - 1
        before = embed[found[-1]]
        for layer in range(LAYERS):
            text.run(layer, found[-1:], past)
            state = text.state(past).reshape(-1)
            best = text.head(past).softmax(-1).topk(2).values
            sure = {"margin": float(best[0] - best[1])}
            sure["saturation"] = float(torch.cosine_similarity(before, state, dim=0))
            if measure == "probe" and layer < LAYERS - 1:
                parts = (program.weights[f"step.{layer}.probe.{k}"] for k in ("weight", "bias"))
                weight, bias = (part.load() for part in parts)
                sure["probe"] = float((weight[0] @ state + bias).sigmoid())
            before = state
            if layer < LAYERS - 1 and sure[measure] > threshold:
                break
        found.append(int(text.head(past).argmax()))
        layers.append(layer + 1)
        text.fill(range(layer + 1, LAYERS), found[-2], past)
    return found, layers


@pytest.mark.parametrize(
    ("measure", "backend"), on_backends(THRESHOLDS, (), rare=["saturation", "probe"])
)
def test_tokens_leave_where_the_method_says(measure: str, backend: str) -> None:
    threshold = THRESHOLDS[measure]
    fast, seen = compiled(backend, measure, threshold), set()
    for row, mask in zip(PROMPTS, MASK, strict=True):
        prompt = row[mask.bool()].tolist()
        found = generate(fast, torch.tensor([prompt]), **ASKED, return_dict_in_generate=True)
        expected, layers = by_hand(prompt, measure, threshold)
        assert found.sequences[0, len(prompt) :].tolist() == expected
        assert found.stats.layers == pytest.approx(sum(layers) / len(layers))
        seen |= set(layers)
    assert len(seen) >= 3, f"tokens only ever ran through {seen} layers"


@pytest.mark.parametrize("measure", mostly_long(THRESHOLDS, keep=["saturation"]))
def test_where_nobody_leaves_the_text_is_the_targets_own(measure: str) -> None:
    for passes in ((), (in_int8(),)):
        leaves = DepthConfident(measure=measure, threshold=1.0)  # type: ignore[arg-type]
        fast, plain = (
            compile(made(*passes, *more), Target("onnxruntime", "cpu"))
            for more in ((EACH, leaves), ())
        )
        texts = [generate(one, PROMPTS, attention_mask=MASK, **ASKED) for one in (fast, plain)]
        assert torch.equal(*texts)


def test_a_batch_leaves_together_or_not_at_all() -> None:
    fast = compiled("eager", "margin", 0.05)
    twice = generate(fast, PROMPTS[2:3].expand(2, -1), **ASKED)
    alone = generate(fast, PROMPTS[2:3], **ASKED)
    assert torch.equal(twice[:1], alone) and torch.equal(twice[0], twice[1])
    asked = {**ASKED, "return_dict_in_generate": True}
    batch = generate(fast, PROMPTS, attention_mask=MASK, **asked).stats.layers
    rows = [PROMPTS[i : i + 1, MASK[i].argmax() :] for i in range(4)]
    assert batch > max(generate(fast, ids, **asked).stats.layers for ids in rows) - 0.5


def test_drafts_are_verified_by_all_layers() -> None:
    ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    fast = compile(
        made(EACH, DepthConfident(threshold=0.05), named("draft_suffix")), Target("eager", "cpu")
    )
    found = generate(fast, ids, **{**ASKED, "max_new_tokens": 40}, return_dict_in_generate=True)
    assert found.stats.draft_tokens > 0 and found.stats.layers < LAYERS


def test_rows_are_filled_without_the_layers_outputs() -> None:
    program = compiled("eager", "margin", 0.05).program
    for layer in range(1, LAYERS):
        fill = program.function(f"step.{layer}.fill")
        assert {n for n in fill.outputs} == {f"kv.{layer}.key", f"kv.{layer}.value"}
        names = " ".join(fill.weights)
        assert "norm1" in names and not any(part in names for part in ("gate", "up", "down", ".o"))


def test_a_probe_separates_what_a_line_separates() -> None:
    states = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1
    labels = states[:, 2] - 0.5 * states[:, 4] > 0.5
    weight, bias = fitted(states, labels)
    odds = (states @ weight[0] + bias) > 0
    assert float((odds == labels).float().mean()) > 0.97
    sure, _ = fitted(states, torch.ones(400, dtype=torch.bool))
    assert bool(sure.isfinite().all())


def test_what_cannot_be_carried_out_is_refused() -> None:
    with pytest.raises(PassError, match="segments"):
        made(DepthConfident())
    with pytest.raises(PassError, match="has a depth policy already"):
        made(EACH, DepthConfident(), named("depth_linear"))
    with pytest.raises(PassError, match="needs text to calibrate on"):
        every = (EACH, DepthConfident(measure="probe"), InsertKvCache(), PickLogits(), AddArgmax())
        run_passes(tiny_llama(LAYERS), [Step(p) for p in every])
