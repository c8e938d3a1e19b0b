"""The key of a model's ready steps: all that decides them, found without torch."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..ir.support.discovery import sources_of, versions_of
from ..ir.support.files import stamp_of
from ..tracing.source_files import files_of

PACKAGES = (
    *("torch", "transformers", "safetensors", "gguf", "onnx", "onnx-ir", "numpy"),
    *("onnxruntime", "tokenizers"),
)
GPUS = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dxg")
"""Devices of which the default target may depend."""


def ready_key(
    model: str, recipe: str | None, settings: Sequence[str], target: str | None
) -> str | None:
    """The key for the arguments of a command; None where something else may decide, too: a recipe
    in a file of the user's, or passes of an installed package."""
    source = Path(model).absolute()
    if recipe is not None and (Path(recipe).suffix or Path(recipe).exists()):
        return None
    if any(group.startswith("graftwork.") for group in metadata.entry_points().groups):
        return None
    try:
        model_files = [(path.name, stamp_of(path.stat())) for path in files_of(source)]
    except OSError:
        return None
    if not model_files:
        return None
    gpus = None if target else (_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    asked = (str(source), sorted(model_files), recipe, tuple(settings), target, gpus)
    tools = (sys.version_info[:3], versions_of(*PACKAGES), platform.machine(), _processor())
    rooms = ("ir", "frontends", "passes", "backends", "runtime")
    code = sources_of(*(_folder(f"graftwork.{room}") for room in rooms), _folder("graftwork"))
    files = sorted(_folder("graftwork.recipe_files").glob("*.yaml"))
    recipes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256(repr((asked, tools, code, recipes)).encode()).hexdigest()


def _folder(package: str) -> Path:
    """Where a package lies; it is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _gpus() -> list[bool]:
    return [os.path.exists(path) for path in GPUS]


def _processor() -> str:
    """What layouts of weights may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
