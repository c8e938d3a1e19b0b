"""Exports of a model, one method for each format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..artifact.destinations import MARKS, check_folder
from ..artifact.shards import checked
from ..ir import Program

# Late imports: exports load onnx.


class Exports:
    """Base of `Model`. Methods return the written folder or file. Errors, besides those of each
    format: `InputError` for a path that cannot be written, and for a weight that holds NaN."""

    program: Program

    def export_onnx(self, folder: str | Path, **options: Any) -> Path:
        """Write ``model.onnx`` with its weights and tokenizer, for ONNX Runtime. Options
        (``plain``, ``qdq``, ``ops``, ``opset``) and errors: as `onnx_folder.export_onnx`."""
        from .onnx_folder import export_onnx

        return export_onnx(checked(self.program), _place("onnx", folder), **options)

    def export_genai(self, folder: str | Path, *, plain: bool = False) -> Path:
        """Write a folder for onnxruntime-genai: the graph and ``genai_config.json``. plain: as in
        `export_onnx`. Errors: as `onnx_folder.export_genai`."""
        from .onnx_folder import export_genai

        return export_genai(checked(self.program), _place("genai", folder), plain=plain)

    def export_onnx_plan(self, folder: str | Path) -> Path:
        """Write every function as ONNX files with shared weights, the decode plan, and runners.
        Errors: as `plan.export_onnx_plan`."""
        from .plan import export_onnx_plan

        return export_onnx_plan(checked(self.program), _place("onnx-plan", folder))

    def export_onnx_loop(self, folder: str | Path, **options: Any) -> Path:
        """Write ``generate.onnx``: prompts in, tokens out. Options (``sample``, ``plain``,
        ``ops``) and errors: as `loop.export_onnx_loop`."""
        from .loop import export_onnx_loop

        return export_onnx_loop(checked(self.program), _place("onnx-loop", folder), **options)

    def export_vllm_medusa(self, folder: str | Path) -> Path:
        """Write trained Medusa heads for vLLM. Errors: as `heads.export_vllm_medusa`."""
        from .heads import export_vllm_medusa

        return export_vllm_medusa(self.program, _place("vllm-medusa", folder))

    def export_speculators(self, folder: str | Path, target: str = "") -> Path:
        """Write a trained EAGLE-3 draft for vLLM. target: name or path of its model. Errors: as
        `speculators.export_speculators`."""
        from .speculators import export_speculators

        return export_speculators(self.program, _place("speculators", folder), target)

    def export_compressed_tensors(self, folder: str | Path) -> Path:
        """Write the quantized weights, without drafters, as a compressed-tensors checkpoint for
        transformers and vLLM. Errors: as `compressed.export_compressed_tensors`."""
        from .compressed import export_compressed_tensors

        return export_compressed_tensors(self.program, _place("compressed-tensors", folder))

    def export_gguf(self, path: str | Path) -> Path:
        """Write a .gguf file for llama.cpp: weights in their bits, tokenizer, chat template.
        Errors: as `gguf.export_gguf`."""
        from .gguf import check_path, export_gguf

        return export_gguf(checked(self.program), check_path(path))


def _place(format_: str, folder: str | Path) -> Path:
    return check_folder(folder, MARKS[format_])
