"""Arguments and options of several commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

# Late imports: torch takes seconds, which `--help` does not need.

ModelArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint folder, .gguf or .onnx file, or org/name[@revision] of the Hub.",
    ),
]


def written(text: str) -> Path:
    """Parser of output paths. Errors: `InputError` for an empty one."""
    from ..ir.support.files import plain_path

    return plain_path("where to write", text)


def require(holds: bool, message: str) -> None:
    """Errors: `InputError` with the message unless it holds."""
    from ..ir.support.errors import InputError

    if not holds:
        raise InputError(message)


def require_tokenizer(model: str, assets: Mapping[str, Path], what: str) -> None:
    """Errors: `InputError` for a model whose files have no tokenizer. what: needs one."""
    found = "tokenizer.json" in assets
    require(found, f"{model}: expected a model with a tokenizer.json, which {what} needs")


def listed(names: str) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def decoding(temperature: float | None) -> dict[str, Any]:
    """Options of `Model.generate` for --temperature."""
    if temperature is None:
        return {}
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


def template_text(path: Path | None) -> str | None:
    """The text of --template. Errors: `InputError`."""
    from ..ir.support.errors import InputError
    from ..ir.support.files import read_text

    try:
        return None if path is None else read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--template {path}: cannot read text in UTF-8: {error}") from error


TO_WRITE: dict[str, Any] = {"parser": written, "metavar": "PATH"}
"""Common parameters of options for output paths."""

AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_DIR", help="A checkpoint, .gguf or .onnx file, or saved artifact."
    ),
]
RecipeOption = Annotated[str, typer.Option("--recipe", help="A recipe's name, or a .yaml path.")]
MaybeRecipe = Annotated[
    str | None, typer.Option("--recipe", help="A recipe's name, or a .yaml path.")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="PASS.OPTION=VALUE", help="Override an option.")
]
DRAFT = "draft="
"""How a setting begins that names a draft model."""


def _as_setting(model: str) -> str:
    return DRAFT + model


DraftOption = Annotated[
    list[str],
    typer.Option(
        "--draft",
        metavar="MODEL",
        parser=_as_setting,
        help="A smaller model that drafts: a folder or .gguf file; or first:N, layers of MODEL.",
    ),
]
TargetOption = Annotated[
    str | None, typer.Option("--target", metavar="BACKEND[:DEVICE[:DTYPE]]", help="Where it runs.")
]
DataOption = Annotated[
    Path | None, typer.Option(help="For recipes that calibrate, as of optimize.")
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        help="For recipes that calibrate: a text file, a folder of them, .jsonl or .npy of ids."
    ),
]
TemplateOption = Annotated[
    Path | None,
    typer.Option("--template", help="A chat template instead of the checkpoint's (Jinja)."),
]
SystemOption = Annotated[str | None, typer.Option("--system", help="The system message.")]
StopOption = Annotated[
    list[str], typer.Option("--stop", metavar="TEXT", help="Stop before this text; repeatable.")
]
