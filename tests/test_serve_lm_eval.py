"""lm-eval itself against the server, by its models for OpenAI's API: the scores of the model in
this process. Needs lm-eval with its client (``pip install 'lm-eval[api]'``), and no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import served
from test_chat import DEMO, TARGET

import graftwork as gw
from graftwork.measuring.tasks import lm_of
from graftwork.serving.service import Service

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity", reason="lm-eval's client: pip install 'lm-eval[api]'")

ROWS = [
    {"before": "import", "ends": ["os", "none", "two words"], "which": 0},
    {"before": "def add(a, b):\n    return", "ends": ["a + b", "os", "class"], "which": 0},
    {"before": "for n in", "ends": ["return", "range(3):"], "which": 1},
    {"before": "class Reader:\n    def", "ends": ["import", "__init__(self):"], "which": 1},
]
TASKS = {
    "graftwork_choices": 'output_type: multiple_choice\ndoc_to_text: "{{before}}"\n'
    'doc_to_choice: "{{ends}}"\ndoc_to_target: which\n',
    "graftwork_texts": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
    'doc_to_target: "{{before}} {{ends[which]}}"\n'
    "metric_list: [{metric: bits_per_byte, higher_is_better: false}]\n",
    "graftwork_answers": 'output_type: generate_until\ndoc_to_text: "{{before}}"\n'
    'doc_to_target: "{{ends[which]}}"\nmetric_list: [{metric: exact_match, aggregation: mean, '
    'higher_is_better: true}]\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8, '
    "do_sample: false}\n",
}
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> gw.Model:
    return gw.optimize(DEMO, target=TARGET)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    model = gw.optimize(DEMO, "copyspec", target=TARGET)
    service = Service(model, "demo", usual=80, seconds=60, template=TEMPLATE, slots=2)
    with served(service) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from lm_eval.tasks import TaskManager

    folder: Path = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name, text in TASKS.items():
        files = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{files}\ntest_split: test\n{text}")
    return TaskManager(include_path=str(folder))


def evaluated(tasks: Any, names: list[str], model: Any, **options: Any) -> dict[str, Any]:
    """Scores by task, and what the model said of each example, in the order of the examples."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, **options
    )
    said = {
        name: [one["filtered_resps"] for one in sorted(kept, key=lambda one: one["doc_id"])]
        for name, kept in found["samples"].items()
    }
    return {"results": found["results"], "said": said}


@pytest.mark.parametrize("several", [1, 3])
def test_completions(address: str, tasks: Any, plain: gw.Model, several: int) -> None:
    """Choices, whole texts and answers: one request at a time, and three."""
    wanted = evaluated(tasks, list(TASKS), lm_of(plain))
    asks = {"model": "demo", "base_url": f"{address}/completions", "tokenizer": str(DEMO)}
    found = evaluated(
        tasks, list(TASKS), "local-completions", model_args={**asks, "num_concurrent": several}
    )
    answers = "graftwork_answers"
    assert found["said"].pop(answers) == wanted["said"].pop(answers)
    for name, rows in wanted["said"].items():
        for mine, own in zip(found["said"][name], rows, strict=True):
            pairs = zip(mine, own, strict=True) if name == "graftwork_choices" else [(mine, own)]
            for one, two in pairs:  # (nats, whether greedy decoding would write it)
                values = (one, two) if name == "graftwork_choices" else (one[0], two[0])
                assert numbers(values[0]) == pytest.approx(numbers(values[1]), rel=1e-4, abs=1e-3)
    for name in TASKS:
        scores = {key: value for key, value in wanted["results"][name].items() if "," in key}
        for key, value in scores.items():
            if isinstance(value, float):
                assert found["results"][name][key] == pytest.approx(value, rel=1e-4), (name, key)


def numbers(value: Any) -> list[float]:
    return [float(part) for part in (value if isinstance(value, tuple | list) else [value])]


def test_chats(address: str, tasks: Any, plain: gw.Model) -> None:
    """Answers to messages, by the server's template."""
    found = evaluated(
        tasks,
        ["graftwork_answers"],
        "local-chat-completions",
        model_args={"model": "demo", "base_url": f"{address}/chat/completions"},
        apply_chat_template=True,
    )
    for row, said in zip(ROWS, found["said"]["graftwork_answers"], strict=True):
        text = f"# user\n{row['before']}\n# assistant\n"
        ids = plain.tokenizer.encode(text).ids
        whole = plain.generate([ids], max_new_tokens=8, do_sample=False)[0, len(ids) :]
        assert said == [plain.tokenizer.decode(whole.tolist()).split("\n")[0]]
