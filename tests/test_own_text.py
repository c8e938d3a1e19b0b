"""Wherever an approximate recipe's speed is told, so is how much of the target's text it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import CPU, checkpoint, run  # noqa: F401  (a fixture)
from test_training import FEW, TEXT, drafted

import graftwork as gw
from graftwork.measuring.agreement import OwnText
from graftwork.measuring.tuning import tune
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.report import render
from graftwork.training import fit

# An untrained judge says even odds: more than this, so it keeps whatever is drafted.
LAX = "verify_judge.threshold=0.4"
PROMPTS = ["def add", "for item in"]


def lax_judge() -> gw.Recipe:
    return gw.Recipe.load("judge").with_options([LAX])


def test_text_up_to_the_first_other_token_counts() -> None:
    kept = OwnText.of([([1, 2, 3, 4], [1, 9, 3, 4]), ([5, 6], [5, 6]), ([7, 8], [7, 8, 9])])
    assert (kept.texts, kept.equal, kept.tokens, kept.kept) == (3, 1, 8, 1 + 2 + 2)
    assert kept.first == 1.5 and kept.share == 5 / 8
    whole = OwnText.of([([1], [1])])
    assert (
        whole.first is None and str(whole) == "100% of the target's own text (1 of 1 texts equal)"
    )


@pytest.mark.long
def test_bench_tells_it_of_approximate_recipes(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, figures = tmp_path / "prompts.txt", tmp_path / "figures.json"
    data.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    args = ("--recipes", "copyspec,judge,int8", "--set", LAX, "--target", CPU, "--data", data)
    options = ("--tokens", 24, "--repeats", 1, "--json", figures)
    code, text, errors = run(capsys, "bench", checkpoint, *args, *options)
    assert code == 0, errors
    reference, copyspec, judge, int8 = json.loads(figures.read_text())["rows"]
    assert reference["own_text"] is None and copyspec["own_text"] is None
    # The judge's model says next to nothing of its own: it is fast, and that is what it costs.
    assert judge["accepted_per_step"] > 3 and judge["own_text"]["share"] < 0.5
    assert judge["own_text"]["texts"] == 2 and judge["own_text"]["first"] is not None
    model = gw.optimize(checkpoint, lax_judge(), target=CPU)
    plain = gw.optimize(checkpoint, "baseline", target=CPU)
    ids = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    pairs = [
        [m.generate([i], max_new_tokens=24)[0, len(i) :].tolist() for m in (plain, model)]
        for i in ids
    ]
    assert judge["own_text"]["kept"] == OwnText.of(pairs).kept
    # Of a quantized model the text is compared with the unquantized one's, not with its own.
    eight = gw.optimize(checkpoint, "int8", target=CPU)
    pairs = [
        [m.generate([i], max_new_tokens=24)[0, len(i) :].tolist() for m in (plain, eight)]
        for i in ids
    ]
    assert int8["own_text"]["kept"] == OwnText.of(pairs).kept
    assert "own text" in text and f"{judge['own_text']['share']:.0%}, first after" in text


def test_training_tells_it_of_approximate_recipes(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ("--recipe", "judge", "--set", LAX, "--out", tmp_path / "heads", "--steps", 1)
    small = ("--target", CPU, "--batch", 1, "--window", 24, "--own", 0)
    code, text, errors = run(capsys, "train", checkpoint, *args, *small)
    assert code == 0 and "of the target's own text (" in text, errors
    fitted = fit(drafted(DraftMedusa()), TEXT, out=tmp_path / "lossless", **FEW)
    assert fitted.own_text is None


@pytest.mark.long
def test_tuning_reports_and_generate_tell_it(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"prompts": 2, "tokens": 12, "depth": 2, "widths": (1, 4, 8)}
    tuned = tune(checkpoint, lax_judge(), data=PROMPTS, target=CPU, **options)
    assert tuned.own is not None and tuned.own.share < 1
    assert f"approximate: the recipe keeps {tuned.own.share:.0%}" in render(tuned.table(), 200)
    lossless = tune(checkpoint, "medusa", data=PROMPTS, target=CPU, **options)
    assert lossless.own is None and "approximate" not in render(lossless.table(), 200)
    for name, told in (("int8", True), ("medusa", False)):
        model = gw.optimize(checkpoint, name, target=CPU)
        assert ("approximate: texts may differ" in str(model.report)) == told
        folder = model.save(tmp_path / name)
        asked = ("--prompt", PROMPTS[0], "--max-new-tokens", 4)
        _, _, errors = run(capsys, "generate", folder, *asked)
        assert ("approximate: the target itself" in errors) == told
