"""`graftwork map`: files of prompts in shards, stopped and gone on with, here and on Ray."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from small_llama import small_llama
from test_chat import DEMO, TARGET, TEMPLATE
from test_front_door import run

import graftwork as gw
from graftwork.ir import InputError
from graftwork.mapping import worker
from graftwork.mapping.job import begin, lines_of
from graftwork.mapping.worker import Work, Worker

TEXTS = ["import os\n", "def add(a, b):", "class A:", "for x in", "x = 1", "if a", "return", "#"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> gw.Model:
    """Two layers, with the tokenizer of the demo's model: workers here are given it."""
    folder = tmp_path_factory.mktemp("small")
    small_llama(2048, 0, max_position_embeddings=256).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(DEMO / name, folder)
    return gw.optimize(folder, target=TARGET)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Texts, ids and messages, and a line that cannot be answered."""
    rows: list[Any] = [{"text": text, "id": n} for n, text in enumerate(TEXTS)]
    rows.insert(3, {"ids": [5, 6, 7]})
    rows.insert(4, {"messages": [{"role": "user", "content": "def add(a, b):"}]})
    rows.insert(5, {"ids": [10**6]})
    path = tmp_path / "texts.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def opened(demo: gw.Model, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """What workers are opened with; each has the model that is there."""
    found: list[Work] = []

    def open_worker(work: Work, show: Any = None) -> Worker:
        found.append(work)
        return Worker(demo, work)

    monkeypatch.setattr("graftwork.mapping.local.open_worker", open_worker)
    return found


def answers(folder: Path) -> list[dict[str, Any]]:
    parts = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def command(prompts: Path, out: Path, *more: object) -> int:
    options = ["--out", out, "--shard", 3, "--batch", 2, "--max-new-tokens", 6, *more]
    return run("map", DEMO, prompts, *options, "--target", TARGET, "--temperature", 0)


def test_answers_are_those_of_generate(
    prompts: Path, tmp_path: Path, demo: gw.Model, opened: list[Work], capsys: Any
) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    more = ("--template", tmp_path / "template")
    assert command(prompts, tmp_path / "out", *more) == 2  # of one prompt
    said = capsys.readouterr().err
    assert "1 prompts could not be answered" in said and "Traceback" not in said
    found = answers(tmp_path / "out")
    assert [row["line"] for row in found] == list(range(1, 22, 2))
    assert "the token id 1000000" in found[5]["error"]
    by_line = {row["line"]: row for row in found}
    numbers = [1, 3, 5, 13, 15, 17, 19, 21]
    for text, number in zip(TEXTS, numbers, strict=True):
        ids = demo.tokenizer.encode(text).ids
        new = demo.generate([ids], max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
        ended = new[-1] in demo.program.info.eos
        row = by_line[number]
        assert row["text"] == demo.tokenizer.decode(new) and row["new_tokens"] == len(new)
        assert row["finish_reason"] == ("stop" if ended else "length")
    message = [{"role": "user", "content": "def add(a, b):"}]
    options = {"max_new_tokens": 6, "do_sample": False, "chat_template": TEMPLATE}
    assert by_line[9]["text"] == demo.chat(message, **options)
    # Nothing is done again, and a model is not even opened.
    assert command(prompts, tmp_path / "out", *more) == 0 and len(opened) == 1


def test_a_job_goes_on_where_it_was_stopped(
    prompts: Path, tmp_path: Path, opened: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    command(prompts, whole, "--seed", 3)
    write, count = worker.write_text, 0

    def fails(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        write(path, text)

    monkeypatch.setattr(worker, "write_text", fails)
    assert command(prompts, out, "--seed", 3) not in (0, 2)
    done = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert len(done) == 2
    command(prompts, out, "--seed", 3)
    assert answers(out) == answers(whole)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items())


def test_other_jobs_and_bad_files_are_refused(
    prompts: Path, tmp_path: Path, opened: list[Work], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command(prompts, out)
    for change in (("--shard", 4), ("--max-new-tokens", 7)):
        assert command(prompts, out, *change) == 2
        assert "was begun with another" in capsys.readouterr().err
    prompts.write_text('{"text": "x"}\n')
    assert command(prompts, out) == 2 and "another prompts" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("a")
    assert command(prompts, tmp_path / "mine") == 2
    assert "holds other files" in capsys.readouterr().err
    assert command(prompts, tmp_path / "x", "--workers", 2) == 2
    assert command(tmp_path / "none.jsonl", tmp_path / "x") == 2
    for bad in ('{"text": 3}', "[1]", "{", '{"text": ""}', "[" * 100_000, "null"):
        prompts.write_text(f'{{"text": "x"}}\n{bad}\n')
        with pytest.raises(InputError, match=r"texts\.jsonl:2: expected"):
            begin(prompts, tmp_path / "y", 2, {})
    prompts.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(InputError, match="UTF-8"):
        begin(prompts, tmp_path / "y", 2, {})
    prompts.write_text("\n\n")
    with pytest.raises(InputError, match="there is none"):
        begin(prompts, tmp_path / "y", 2, {})
    assert len(opened) == 1


def test_shards_hold_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(f"line {n}\n" if n % 3 else f"line {n}" for n in range(20)))
    for size in (1, 3, 20, 50):
        job = begin(path, tmp_path / str(size), size, {})
        lines = [line for shard in job.shards for line in lines_of(path, shard)]
        assert [line.value for line in lines] == [f"line {n}" for n in range(20)]
        assert len({line.number for line in lines}) == job.lines == 20
        assert all(len(lines_of(path, shard)) <= size for shard in job.shards)


@pytest.mark.long
def test_two_workers_of_a_ray_cluster(prompts: Path, tmp_path: Path, demo: gw.Model) -> None:
    """A local cluster writes what this process writes; a shard that is there is not done again."""
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    (tmp_path / "template").write_text(TEMPLATE)
    more = ("--template", tmp_path / "template", "--seed", 5)
    here, there = tmp_path / "here", tmp_path / "there"
    assert command(prompts, here, *more) == 2
    kept = (here / "part-000001.jsonl").read_text()
    command(prompts, there, *more, "--on", "ray", "--workers", 2)
    assert answers(there) == answers(here)
    for number in (0, 2):
        (there / f"part-{number:06d}.jsonl").unlink()
    stamp = (there / "part-000001.jsonl").stat().st_mtime_ns
    command(prompts, there, *more, "--on", "ray", "--workers", 2)
    assert answers(there) == answers(here)
    assert (there / "part-000001.jsonl").stat().st_mtime_ns == stamp
    assert (there / "part-000001.jsonl").read_text() == kept
