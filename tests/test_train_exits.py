"""Training the target for exits: the paper's equations, what is dropped, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build, logits_of
from safetensors.torch import load_file
from selection import mostly_long
from transformers import AutoModelForCausalLM

import graftwork as gw
from graftwork.ir import InputError
from graftwork.optimizing import trace
from graftwork.recipe import Recipe
from graftwork.tracing.traced import Traced
from graftwork.training.layerskip import ExitTrainer, LayerSkip

TEXT = [[(i * i + j) % 30 + 1 for i in range(60)] for j in range(20)]
SHORT: dict[str, Any] = {"steps": 6, "batch": 4, "window": 16, "rate": 3e-3, "save_every": 3}


def trainer(model: Any, **objective: Any) -> ExitTrainer:
    program = Traced.of(model, torch.float32).program
    names = {name for name, _ in model.named_parameters()}
    return ExitTrainer(program, LayerSkip(**objective), names, torch.device("cpu"))


def test_layers_are_dropped_the_oftener_the_later() -> None:
    tuned, scratch = LayerSkip(dropout=0.2), LayerSkip(dropout=0.2, scratch=True)
    # D(l) = 2^(l / 4) - 1 of five layers.
    wanted = [0.2 * (2 ** (layer / 4) - 1) for layer in range(5)]
    assert tuned.drops(5, 0.0) == pytest.approx(wanted) == tuned.drops(5, 1.0)
    assert scratch.drops(5, 0.0) == [0.0] * 5
    assert scratch.drops(5, 0.5) == pytest.approx([p * (2**0.5 - 1) for p in wanted])
    assert scratch.drops(5, 1.0) == pytest.approx(wanted)


def test_losses_weigh_more_the_deeper() -> None:
    # e = scale * (0, 1, 3, 6) and L - 1 + scale * (0 + 1 + 2 + 3) = 4 + 6 scale for the last of 5.
    made = LayerSkip(scale=0.5).shares(5, [0, 1, 2, 3, 4])
    assert made == pytest.approx({1: 0.5 / 12, 2: 1.5 / 12, 3: 3 / 12, 4: 7 / 12})
    assert LayerSkip(scale=0.0).shares(5, [1, 4]) == {4: 1.0}


def test_each_depth_is_asked_in_its_turn() -> None:
    turning = LayerSkip(every=3)
    asked = [turning.asked(7, step, 0.5) for step in range(3)]
    assert asked == [[0, 3, 6], [1, 4, 6], [2, 5, 6]] and turning.asked(7, 3, 0.5) == asked[0]
    growing = LayerSkip(curriculum="gradual")
    # Another depth each T / 2L steps: all of them after half of the training.
    depths = [len(growing.asked(4, 0, share)) for share in (0.0, 0.124, 0.126, 0.251, 0.5, 1.0)]
    assert depths == [1, 1, 2, 3, 4, 4]
    assert LayerSkip(curriculum="all").asked(3, 5, 0.0) == [0, 1, 2]


@pytest.mark.parametrize("name", mostly_long(("llama", "gpt2"), keep=("llama",)))
def test_a_dropped_layer_is_a_skipped_one(name: str) -> None:
    model = build(ARCHS[name])
    made = trainer(model)
    tokens = torch.tensor(TEXT[0])[None, :12]
    kept = torch.ones(2, 1, made.layers)
    kept[1, 0, 1] = 0.0
    both = made._states(tokens.expand(2, -1), kept, (made.layers - 1,))[made.layers - 1]
    logits = made.net.outputs(made.head, ("logits",), {"hidden": both})["logits"]
    with torch.no_grad():
        torch.testing.assert_close(logits[0], model(tokens).logits[0], atol=2e-5, rtol=1e-4)
    skipping = Recipe.load("skip_layers").with_options(["skip_layers.layers=[1]"])
    short = trace(model, skipping, target="eager", after="skip_layers")
    positions = torch.arange(12)[None]
    wanted = logits_of(short, tokens, positions)
    torch.testing.assert_close(logits[1], wanted[0], atol=2e-5, rtol=1e-4)


def test_the_loss_is_the_weighted_sum_of_what_each_depth_says() -> None:
    model = build(ARCHS["llama"])
    made = trainer(model, dropout=0.0, curriculum="all", scale=1.0)
    tokens = torch.tensor(TEXT[:3])[:, :17]
    loss = made.loss(tokens, 0, 0.0, seed=0)
    by_depth = made.losses(tokens)
    shares = made.objective.shares(made.layers, list(range(made.layers)))
    assert loss.total.item() == pytest.approx(sum(s * by_depth[n] for n, s in shares.items()))
    with torch.no_grad():
        assert by_depth[-1] == pytest.approx(float(model(tokens, labels=tokens).loss), abs=1e-4)


def test_first_layers_learn_and_the_folder_is_a_checkpoint(tmp_path: Path) -> None:
    model = build(ARCHS["llama"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {**SHORT, "steps": 60}
    made = gw.train_exits(model, TEXT, out=tmp_path / "m", **options)
    assert made.steps == 60 and made.after[-1] < made.before[-1] - 0.3
    assert made.after[0] < made.before[0] - 0.1, "the first exit learns, too"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    changed = [n for n, p in read.named_parameters() if not torch.equal(p, before[n])]
    assert len(changed) == len(before)
    tokens = torch.tensor(TEXT[0])[None]
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits)
    gw.optimize(tmp_path / "m", "baseline", target="eager")


@pytest.mark.long
def test_a_folder_brings_its_tokenizer_along(tmp_path: Path) -> None:
    demo = Path(gw.__file__).parent / "demo_model"
    texts = [f"def f{i}(x):\n    return x + {i}\n" * 4 for i in range(12)]
    options = {"steps": 1, "batch": 1, "window": 16, "half": True}
    made = gw.train_exits(demo, texts, out=tmp_path / "m", **options)
    assert len(made.after) == 6 and abs(made.rise) < 1.0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "m" / name).read_bytes() == (demo / name).read_bytes()


@pytest.mark.long
def test_what_was_interrupted_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = gw.train_exits(build(ARCHS["llama"]), TEXT, out=tmp_path / "whole", **SHORT)
    stopped = {"count": 0}

    class Stopped(Exception):
        pass

    def stop(state: Any) -> None:
        stopped["count"] = state.step
        if state.step == 4:
            raise Stopped

    with pytest.raises(Stopped):
        options = {**SHORT, "progress": stop}
        gw.train_exits(build(ARCHS["llama"]), TEXT, out=tmp_path / "part", **options)
    assert json.loads((tmp_path / "part/training/state.json").read_text())["step"] == 3
    again = gw.train_exits(build(ARCHS["llama"]), TEXT, out=tmp_path / "part", resume=True, **SHORT)
    assert again.steps == whole.steps and again.before == whole.before
    names = ("whole", "part")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in names)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = build(ARCHS["llama"])
    with pytest.raises(InputError, match="dropout=1"):
        LayerSkip(dropout=1.0)
    with pytest.raises(InputError, match="curriculum='sometimes'"):
        LayerSkip(curriculum="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="device=tpu: expected cpu, or cuda where"):
        gw.train_exits(model, TEXT, out=tmp_path, steps=1, device="tpu")
    with pytest.raises(InputError, match="say how long"):
        gw.train_exits(model, TEXT, out=tmp_path)
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(InputError, match="not empty"):
        gw.train_exits(model, TEXT, out=tmp_path, **SHORT)
    with pytest.raises(InputError, match="nothing to resume"):
        gw.train_exits(model, TEXT, out=tmp_path, resume=True, **SHORT)
