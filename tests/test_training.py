"""Training inserted weights: it learns, only what was inserted, the same way each time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import named, tiny_llama

from graftwork.backends.target import Target
from graftwork.data.corpus import Windows, read_corpus, split
from graftwork.ir import GraftworkError, InputError, PassError, UnsupportedError, Weight
from graftwork.ir.plan import Chain
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.training import FitState, fit
from graftwork.training.fit import Fitted, accepted_per_step
from graftwork.training.objectives.base import distilled

EAGER = Target("eager", "cpu")
TEXT = [[(i * i + j) % 32 for i in range(90)] for j in range(12)]
FEW = {"steps": 3, "batch": 2, "window": 24, "own": 0.5}


def drafted(*drafters: Pass, seed: int = 0) -> Model:
    """A tiny llama with drafters and a chain of three tokens."""
    steps = [*drafters, InsertKvCache(), PickLogits(), AddArgmax()]
    program, _ = run_passes(tiny_llama(seed=seed), [Step(step) for step in steps])
    plan = replace(program.plan, tree=Chain(depth=3))
    return Model(program.replace(plan=plan), EAGER, {"name": "test"})


def taught(model: Model, out: Path, steps: int) -> tuple[Fitted, tuple[float, ...]]:
    """What training on `TEXT` makes of a model, and how often each level was right at first."""
    hits: list[tuple[float, ...]] = []

    def note(state: FitState) -> None:
        hits.extend([state.hits] if state.hits else [])

    options = {"steps": steps, "batch": 6, "window": 24, "own": 0.0, "rate": 1e-2}
    return fit(model, TEXT, out=out, progress=note, **options), hits[0]


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: weight.load() for name, weight in model.program.weights.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "drafter",
    [DraftMedusa(heads=3), pytest.param(DraftHydra(heads=3), marks=pytest.mark.long)],
    ids=str,
)
def test_trained_heads_are_accepted_and_the_target_stays(drafter: Pass, tmp_path: Path) -> None:
    model = drafted(drafter)
    ids = torch.tensor([TEXT[0][:9], TEXT[3][4:13]])
    plain = drafted().generate(ids, max_new_tokens=24, eos_token_id=[])
    untrained = model.generate(
        ids, max_new_tokens=24, eos_token_id=[], return_dict_in_generate=True
    )
    losses: list[float] = []

    def note(state: FitState) -> None:
        losses.extend([state.loss] if state.hits else [])

    how = {"steps": 300, "batch": 8, "window": 48, "own": 1.0, "rate": 1e-2, "seed": 1}
    fitted = fit(model, TEXT, out=tmp_path, progress=note, **how)
    trained = fitted.model.generate(
        ids, max_new_tokens=24, eos_token_id=[], return_dict_in_generate=True
    )
    assert torch.equal(untrained.sequences, plain) and torch.equal(trained.sequences, plain)
    # Acceptance on these two prompts says nothing: untrained heads repeat the last token, which
    # this model's own loops reward. The loss does, over the last uses of all windows.
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-75:])
    assert last < 0.8 * first, (first, last)
    # A random model's text has nothing general to learn: what counts is the text it was shown.
    shown = split(TEXT)[0]
    assert accepted_per_step(fitted.model, shown) > 1.03 * accepted_per_step(model, shown)
    before, after = weights(model), weights(fitted.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    step = model.program.function("step").weights
    assert changed and not changed & step
    assert changed == set(before) - step - {n for n in before if n in ("cos", "sin")}
    record = fitted.model.program.plan.draft
    assert record.trained and not model.program.plan.draft.trained


def test_the_same_seed_trains_the_same_weights(tmp_path: Path) -> None:
    runs = [
        weights(fit(drafted(DraftMedusa()), TEXT, out=tmp_path / str(i), seed=s, **FEW).model)
        for i, s in enumerate((5, 5, 6))
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert any(not torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_resumed_training_ends_where_uninterrupted_training_does(tmp_path: Path) -> None:
    model = drafted(DraftMedusa())
    options = {**FEW, "save_every": 2, "seed": 2}

    def stop(state: FitState) -> None:
        if state.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, TEXT, out=tmp_path / "a", progress=stop, **{**options, "steps": 5})
    resumed = fit(model, TEXT, out=tmp_path / "a", resume=True, **{**options, "steps": 5})
    whole = fit(model, TEXT, out=tmp_path / "b", **{**options, "steps": 5})
    first, second = weights(resumed.model), weights(whole.model)
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    assert resumed.steps == whole.steps == 5


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    model = drafted(DraftMedusa())

    def spoil(state: FitState) -> None:
        if state.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, TEXT, out=tmp_path, progress=spoil, **{**FEW, "save_every": 1})
    kept = load_file(tmp_path / "heads.safetensors")
    program = model.program
    broken = Weight.of("norm", torch.full((32,), math.nan))
    bad = replace(model, program=program.replace(weights=program.weights.replacing(broken)))
    with pytest.raises(InputError, match=r"loss became nan.*last checkpoint"):
        fit(bad, TEXT, out=tmp_path, resume=True, **{**FEW, "own": 0.0, "steps": 9})
    after = load_file(tmp_path / "heads.safetensors")
    assert kept.keys() == after.keys() and all(torch.equal(kept[k], after[k]) for k in kept)


def test_heads_come_back_into_another_recipe(tmp_path: Path) -> None:
    fitted = fit(drafted(DraftMedusa()), TEXT, out=tmp_path, **FEW)
    again = drafted(DraftMedusa(weights=str(tmp_path)))
    assert again.program.plan.draft.trained
    first, second = weights(fitted.model), weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    fit(drafted(DraftMedusa()), TEXT, out=tmp_path, **FEW)
    for made, message in (
        (DraftMedusa(weights=str(tmp_path / "none")), "none"),
        (DraftMedusa(weights=str(tmp_path), heads=5), r"has no 'medusa\.4\.0"),
        (DraftHydra(weights=str(tmp_path)), "has no 'hydra"),
    ):
        with pytest.raises(PassError, match=message):
            drafted(made)
    with pytest.raises(PassError, match="another model"):
        drafted(DraftMedusa(weights=str(tmp_path)), seed=4)
    heads = load_file(tmp_path / "heads.safetensors")
    save_file({**heads, "medusa.0.1.weight": torch.zeros(3, 3)}, tmp_path / "odd.safetensors")
    with pytest.raises(PassError, match=r"medusa\.0\.1\.weight as f32\[3,3\], expected f32"):
        drafted(DraftMedusa(weights=str(tmp_path / "odd.safetensors")))
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "odd.safetensors").read_bytes()[:500])
    with pytest.raises(PassError, match="cut"):
        drafted(DraftMedusa(weights=str(tmp_path / "cut.safetensors")))


@pytest.mark.parametrize("damage", ["cut", "empty", "pickle", "floats", "zip", "claims more"])
def test_token_ids_that_are_none_are_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    arrays = {"pickle": np.array([{}], dtype=object), "floats": np.ones(3)}
    np.save(path, arrays.get(damage, np.arange(30)), allow_pickle=True)
    data = path.read_bytes()
    if damage in ("cut", "empty"):
        path.write_bytes(data[: 140 if damage == "cut" else 0])
    if damage == "claims more":
        path.write_bytes(data.replace(b"(30,), }" + b" " * 9, b"(10000000000,), }"))
    if damage == "zip":
        np.savez(path.with_suffix(""), ids=np.arange(30))
        path.with_suffix(".npz").rename(path)
    with pytest.raises(InputError, match=rf"data: (cannot read|expected integers in) {path}"):
        read_corpus(path, tiny_llama())


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    model = drafted(DraftMedusa())
    with pytest.raises(InputError, match="nothing to resume"):
        fit(model, TEXT, out=tmp_path / "new", resume=True, **FEW)
    fit(model, TEXT, out=tmp_path, **FEW)
    with pytest.raises(InputError, match="holds a checkpoint already"):
        fit(model, TEXT, out=tmp_path, **FEW)
    with pytest.raises(InputError, match="another model"):
        fit(drafted(DraftMedusa(), seed=8), TEXT, out=tmp_path, resume=True, **FEW)
    with pytest.raises(InputError, match="another recipe"):
        fit(drafted(DraftHydra()), TEXT, out=tmp_path, resume=True, **FEW)
    optimizer = next(tmp_path.glob("optimizer.*"))
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"optimizer.*missing or damaged"):
        fit(model, TEXT, out=tmp_path, resume=True, **FEW)
    said = json.loads((tmp_path / "state.json").read_text())
    for change in ({"step": "3"}, {"step": 99}, {"losses": None}, {"more": 1}, {"files": {}}):
        (tmp_path / "state.json").write_text(json.dumps(said | change))
        with pytest.raises(InputError, match=r"state.json is damaged"):
            fit(drafted(DraftMedusa(heads=2)), TEXT, out=tmp_path, resume=True, **FEW)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(InputError, match=r"state.json is damaged"):
        fit(model, TEXT, out=tmp_path, resume=True, **FEW)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], FEW, "at least one prompt"),
        ([[1, 2]], FEW, "too few"),
        ([[1, 2, 99]] * 20, FEW, "outside the vocabulary of 32"),
        (torch.rand(9), FEW, "expected token ids"),
        (TEXT, {}, "how long to train"),
        (TEXT, {"steps": 0}, "steps=0: expected a positive number"),
        (TEXT, {"steps": 1, "passes": 0}, "passes=0: expected a positive number"),
        (TEXT, {"steps": 1, "own": 2.0}, "own in 0..1"),
    ],
)
def test_bad_data_and_options(data, options, message, tmp_path: Path) -> None:
    with pytest.raises(GraftworkError, match=message):
        fit(drafted(DraftMedusa()), data, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_nothing_to_train_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"suffix.*nothing to train.*heads"):
        fit(drafted(named("draft_suffix")), TEXT, out=tmp_path, **FEW)


def test_text_comes_from_files_arrays_and_the_model(tmp_path: Path) -> None:
    program = tiny_llama()
    np.save(tmp_path / "ids.npy", np.arange(20))
    assert read_corpus(tmp_path / "ids.npy", program) == [list(range(20))]
    (tmp_path / "ids.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [3]}\n')
    assert read_corpus(tmp_path / "ids.jsonl", program) == [[1, 2], [3]]
    assert read_corpus(torch.tensor([[1, 2], [3, 4]]), program) == [[1, 2], [3, 4]]
    with pytest.raises(InputError, match=r"no\.npy"):
        read_corpus(tmp_path / "no.npy", program)
    fitted = fit(drafted(DraftMedusa()), None, out=tmp_path / "out", **FEW)
    assert fitted.steps == 3


def test_windows_follow_from_their_number_alone() -> None:
    windows = Windows(TEXT, 16, seed=3)
    assert torch.equal(windows(7, 4), windows(7, 4)) and windows(7, 4).shape == (4, 16)
    assert not torch.equal(windows(7, 4), windows(8, 4))
    train, held = split(TEXT)
    assert held == [TEXT[9]] and TEXT[9] not in train and len(train) == 11
    train, held = split([list(range(100))])
    assert train == [list(range(90))] and held == [list(range(90, 100))]


def test_the_fused_cross_entropy_is_the_plain_one() -> None:
    student = torch.randn(2, 6, 7, dtype=torch.float32, requires_grad=True)
    target = torch.randn(2, 6, 7).softmax(-1)
    for shift in (0, 2):
        plain = -(target[:, shift:] * student[:, : 6 - shift].log_softmax(-1)).sum(-1).mean()
        (expected,) = torch.autograd.grad(3 * plain, student)
        fused = distilled(student, target, shift)
        (slope,) = torch.autograd.grad(3 * fused, student)
        torch.testing.assert_close(fused, plain)
        torch.testing.assert_close(slope, expected)


TWO = """
import sys
sys.path[:0] = [{tests!r}]
from test_training import TEXT, FEW, DraftMedusa, drafted, fit
fit(drafted(DraftMedusa()), TEXT, out={out!r}, **{{**FEW, "own": 0.0}})
"""


@pytest.mark.long
def test_two_processes_average_their_gradients(tmp_path: Path) -> None:
    """Two processes of one window each do what one process does with both."""
    script = tmp_path / "two.py"
    script.write_text(TWO.format(tests=str(Path(__file__).parent), out=str(tmp_path / "two")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen([*command, str(script)], env=environment, start_new_session=True)
    try:
        assert launcher.wait(timeout=240) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)  # its workers too, if they hang
    heads = load_file(tmp_path / "two" / "heads.safetensors")
    assert len(heads) == 12 and all(bool(t.isfinite().all()) for t in heads.values())
    moved = [n for n, t in heads.items() if n.endswith("linear.weight") and bool(t.any())]
    assert len(moved) == 4


def test_published_medusa_layouts_go_in_and_vllms_comes_out(tmp_path: Path) -> None:
    fitted = fit(drafted(DraftMedusa(heads=2)), TEXT, out=tmp_path / "heads", **FEW)
    heads = load_file(tmp_path / "heads" / "heads.safetensors")
    published = {name.removeprefix("medusa."): tensor for name, tensor in heads.items()}
    assert {"0.0.linear.weight", "0.0.linear.bias", "1.1.weight"} <= set(published)
    save_file(published, tmp_path / "medusa_lm_head.safetensors")
    again = drafted(DraftMedusa(heads=2, weights=str(tmp_path)))
    first, second = weights(fitted.model), weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)

    folder = fitted.model.export_vllm_medusa(tmp_path / "vllm")
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["blocks.1.layers.0.weight"], heads["medusa.1.0.linear.weight"])
    assert torch.equal(tensors["lm_heads.0.weight"], heads["medusa.0.1.weight"])
    assert len(tensors) == len(heads) == 6
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_heads"], config["num_hidden_layers"]) == (2, 1)
    assert config["medusa_fc_bias"] and "num_attention_heads" not in config
    with pytest.raises(InputError, match="not an empty folder"):
        fitted.model.export_vllm_medusa(folder)
    with pytest.raises(InputError, match="untrained"):
        drafted(DraftMedusa()).export_vllm_medusa(tmp_path / "no")
    with pytest.raises(InputError, match=r"suffix.*Medusa"):
        drafted(named("draft_suffix")).export_vllm_medusa(tmp_path / "no")
    (tmp_path / "old.pt").write_bytes(b"pickle")
    with pytest.raises(PassError, match="pickle"):
        drafted(DraftMedusa(weights=str(tmp_path / "old.pt")))


def test_text_may_begin_with_the_token_that_pads(tmp_path: Path) -> None:
    """As the model's own text does where one token begins, ends and pads."""
    model = drafted(DraftMedusa())
    info = replace(model.program.info, eos=(0,), bos=0, pad=0)
    model = replace(model, program=model.program.replace(info=info))
    assert fit(model, None, out=tmp_path / "own", **FEW).steps == 3
    zeros = [[0, 0, *row] for row in TEXT]
    assert fit(model, zeros, out=tmp_path / "zeros", **{**FEW, "own": 1.0}).steps == 3
