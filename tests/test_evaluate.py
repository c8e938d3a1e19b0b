"""`graftwork eval`: recipes beside the unchanged model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import graftwork as gw
from graftwork.cli import main
from graftwork.cli.demo import demo_folder
from graftwork.measuring.evaluate import evaluate
from graftwork.measuring.tasks import answer, likelihood

DEMO = demo_folder()
TARGET = "onnxruntime:cpu:float32"


@pytest.fixture(scope="module")
def plain() -> gw.Model:
    return gw.optimize(DEMO, target=TARGET)


def test_a_row_a_recipe_and_the_model_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    command = ["eval", str(DEMO), "--recipes", "int4,baseline", "--target", TARGET]
    with pytest.raises(SystemExit) as left:
        main([*command, "--html", str(page), "--json", str(figures), "--windows", "2"])
    assert left.value.code == 0
    rows = json.loads(figures.read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["baseline", "int4"]
    own, other = (row["cost"] for row in rows)
    assert (own["divergence"], own["ratio"], own["tokens"]) == (0.0, 1.0, 2 * 511)
    assert 0 < other["divergence"] < 0.01 and rows[1]["weights"] < rows[0]["weights"] / 4
    assert other["perplexity"] / own["perplexity"] == pytest.approx(other["ratio"], rel=1e-6)
    assert "int4" in capsys.readouterr().out
    text = page.read_text()
    assert "<svg" in text and "int4" in text and "//" not in text.split("<svg")[0]


def test_perplexity_is_that_of_the_text(plain: gw.Model) -> None:
    """Over the windows' tokens but their first, which nothing predicts."""
    ids = plain.tokenizer.encode("def total(items):\n    return sum(items)\n" * 4).ids
    found = evaluate(DEMO, [], text=[ids], windows=1, length=len(ids), target=TARGET)
    logits = plain([ids])[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert found.rows[0].cost is not None
    assert found.rows[0].cost.perplexity == pytest.approx(float(nats.exp()), rel=1e-4)


def test_caches_that_lose_rows_are_read_in_long_windows() -> None:
    small = ["evict_cache.budget=256"]
    found = evaluate(DEMO, ["streaming_llm"], settings=small, target=TARGET, windows=1)
    longest = found.rows[0].cost
    assert longest is not None and longest.tokens > 1000


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"recipes": ["int9"]}, "int9"),
        ({"length": 1}, "windows of two tokens"),
        ({"recipes": ["int8"], "settings": ["evict_cache.budget=9"]}, "evict_cache"),
        ({"settings": ["evict_cache.budget=9"]}, "at least one recipe"),
        ({"text": "no/such/file.txt"}, "no/such/file.txt"),
    ],
)
def test_errors_come_before_the_model(asked: dict[str, object], said: str) -> None:
    with pytest.raises(gw.GraftworkError, match=said):
        evaluate("no/model", asked.pop("recipes", []), **asked)  # type: ignore[arg-type]


def test_a_likelihood_is_the_sum_of_the_continuations_tokens(plain: gw.Model) -> None:
    ids = plain.tokenizer.encode("import os\nimport sys\n").ids
    context, continuation = ids[:-3], ids[-3:]
    chances = plain([ids])[0].log_softmax(-1)
    places = range(len(context) - 1, len(ids) - 1)
    by_hand = sum(float(chances[place, ids[place + 1]]) for place in places)
    best = all(int(chances[place].argmax()) == ids[place + 1] for place in places)
    assert likelihood(plain, context, continuation) == (pytest.approx(by_hand, abs=1e-4), best)


def test_an_answer_ends_before_what_the_task_says(plain: gw.Model) -> None:
    ids = plain.tokenizer.encode("def add(a, b):\n").ids
    whole = answer(plain, ids, {"until": [], "max_gen_toks": 16, "temperature": 0.0})
    assert "\n" in whole.strip("\n")
    cut = answer(plain, ids, {"until": ["\n"], "max_gen_toks": 16, "do_sample": False})
    assert cut == whole.split("\n")[0]


def test_tasks_by_lm_eval(plain: gw.Model, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"before": "import", "which": 0}, {"before": "return", "which": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "words.yaml").write_text(
        f"task: words\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows."
        'jsonl}}\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{before}}"\n'
        "doc_to_choice: [os, none]\ndoc_to_target: which\n"
    )
    found = evaluate(DEMO, ["int8"], tasks=["words"], task_folder=tmp_path, target=TARGET)
    right = 0
    for row in rows:
        told = [plain.tokenizer.encode(f"{row['before']}{word}").ids for word in (" os", " none")]
        nats = [likelihood(plain, ids[:1], ids[1:])[0] for ids in told]
        right += nats.index(max(nats)) == row["which"]
    assert [row.scores["words"]["acc"][0] for row in found.rows] == [right / 2, right / 2]
    with pytest.raises(gw.GraftworkError, match="knows no task wrods"):
        evaluate(DEMO, [], tasks=["wrods"], target=TARGET)


def test_without_lm_eval_tasks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    with pytest.raises(gw.GraftworkError, match=r"graftwork\[eval\]"):
        evaluate("no/model", [], tasks=["arc_easy"])
