"""`graftwork demo`: a model that answers, where it is installed (see `demo_chat`); else the bundled
one with a few recipes on both backends. Both next to transformers."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..ir import InputError
from ..measuring.compare import compare
from .demo_chat import INSTALL, NAME, chat_model, lacking, run_chat_demo

RECIPES = ("baseline", "copyspec", "int8", "int8_copyspec")
# Steps of this small model are compute-bound, so draft tokens are expensive.
SETTINGS = ("draft_suffix.tokens=5",)
TARGETS = ("onnxruntime:cpu:float32", "torch:cpu:float32")
# Inductor's compilation of int8 graphs would dominate the time.
SKIP = (("int8", "torch:cpu:float32"), ("int8_copyspec", "torch:cpu:float32"))


def demo_folder() -> Path:
    """The bundled checkpoint. Errors: `InputError` if this installation lacks it."""
    folder = Path(str(importlib.resources.files("graftwork.demo_model")))
    if not (folder / "config.json").is_file():
        raise InputError(
            f"the demo model is not in {folder}; make it with examples/train_demo_model.py"
        )
    return folder


def run_demo(
    *, quick: bool = False, progress: Callable[[str], None] = lambda what: None
) -> tuple[RenderableType, dict[str, Any]]:
    """Run the demo; returns what to show, and the figures as plain data."""
    path = chat_model()
    missing = lacking()
    if path is not None and not missing:
        return run_chat_demo(path, quick=quick, progress=progress)
    table, figures = run_bundled_demo(quick=quick, progress=progress)
    how = f"(93 MB): {INSTALL}"
    if path is not None:
        how = f"install what transformers reads it with: python -m pip install {' '.join(missing)}"
    note = f"The bundled model, which continues Python. To see {NAME} answer {how}"
    return Group(Text(note), Text(), table), figures


def run_bundled_demo(
    *, quick: bool, progress: Callable[[str], None]
) -> tuple[RenderableType, dict[str, Any]]:
    """Measure recipes on the bundled model; returns the table, and the figures as plain data.

    Outputs are compared with transformers' token by token. The int8 recipes are approximate and run
    on ONNX Runtime only; the drafting one is compared with its own plain decoding.
    """
    return compare(
        demo_folder(),
        RECIPES,
        ("transformers",),
        settings=SETTINGS,
        targets=TARGETS,
        skip=SKIP,
        prompts=3 if quick else 12,
        tokens=48 if quick else 96,
        repeats=1 if quick else 3,
        progress=progress,
    )
