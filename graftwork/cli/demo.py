"""`graftwork demo`: the bundled model with a few recipes on both backends, next to transformers."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ..ir import InputError
from ..measuring.compare import compare

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
    """Measure the demo's recipes; returns the table, and the figures as plain data.

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
