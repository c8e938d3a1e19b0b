"""`graftwork export`: models for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import out, progress
from .options import TO_WRITE, AnyModel, DataOption, MaybeRecipe, SetOption, TargetOption, require

# Late imports: torch takes seconds, which `--help` does not need.

Format = Literal[
    "onnx",
    "onnx-loop",
    "onnx-plan",
    "genai",
    "gguf",
    "compressed-tensors",
    "vllm-medusa",
    "speculators",
]

TAKES: dict[str, tuple[str, ...]] = {
    "plain": ("onnx", "onnx-loop", "genai"),
    "qdq": ("onnx",),
    "ops": ("onnx", "onnx-loop"),
    "opset": ("onnx",),
    "dtype": ("onnx", "onnx-loop", "onnx-plan", "genai"),
    "sample": ("onnx-loop",),
}
"""Formats by option."""


def export(
    model: AnyModel,
    format_: Annotated[Format, typer.Option("--format", help="Target format.")],
    folder: Annotated[Path, typer.Option("--out", **TO_WRITE, help="Where to write.")],
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: TargetOption = None,
    data: DataOption = None,
    dtype: Annotated[
        Literal["float32", "float16", "int8", "int4"] | None,
        typer.Option(help="Of weights: floats, or quantized as by the recipes int8 and int4."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Leave the drafter out.")] = False,
    qdq: Annotated[
        bool,
        typer.Option(
            "--qdq", help="onnx: DequantizeLinear for quantized weights, not MatMulNBits."
        ),
    ] = False,
    ops: Annotated[
        Literal["contrib", "standard"] | None,
        typer.Option(help="With ONNX Runtime's own ops (default), or ONNX's only."),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="onnx-loop: add inputs for sampling.")
    ] = False,
    opset: Annotated[int | None, typer.Option(help="onnx: the version of ONNX's ops.")] = None,
) -> None:
    """Write a model for ONNX Runtime, onnxruntime-genai, llama.cpp or transformers, or drafts for
    vLLM."""
    from ..artifact.destinations import MARKS, check_folder
    from ..exporting.onnx_folder import check_opset
    from .open_model import open_model, stored_as

    given: dict[str, Any] = {"plain": plain, "qdq": qdq, "ops": ops, "opset": opset}
    given["sample"] = sample
    options = {name: value for name, value in given.items() if value not in (None, False)}
    for name in [*options, *(["dtype"] if dtype else [])]:
        require(format_ in TAKES[name], f"--{name} is for {_listed(TAKES[name])}")
    one = dtype is None or target is None
    require(one, "give --dtype or --target, not both: a target includes a dtype")
    wanted = stored_as(dtype, recipe, set_, target)
    if format_ == "gguf":
        known = _check_gguf(folder, wanted)
    else:
        known = {}
        check_folder(folder, MARKS[format_])
    if opset is not None:
        check_opset(ops or "contrib", opset)
    with progress() as show:
        opened = open_model(model, *wanted, show, data=data, **known)
        show(f"export {format_}")
        getattr(opened, "export_" + format_.replace("-", "_"))(folder, **options)
    out.print(f"written to {folder}", markup=False)


def _check_gguf(path: Path, wanted: Any) -> dict[str, Any]:
    """Check what can be before the model is traced, and what is asked of it then."""
    from ..exporting.gguf import check_model, check_passes, check_path
    from .open_model import with_settings

    check_path(path)
    recipe, settings, _ = wanted
    asked = with_settings(recipe or "baseline", settings)
    check_passes(step.pass_ for step in asked.steps)
    return {"known": lambda info, assets, room: check_model(info.model_type, assets)}


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
