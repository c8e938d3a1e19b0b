"""Export folders, written atomically, with the model's files.

README.md                a card: files, usage, passes
generation_config.json   the model's, or written from its facts
tokenizer.json, chat_template.jinja, LICENSE, ... the model's files
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import onnx
import onnx_ir as oir

from .._version import __version__
from ..artifact.destinations import check_folder
from ..ir import InputError, Program, UnsupportedError
from ..ir.plan.contract import Contract
from ..ir.support.files import LARGE, read_bytes
from ..ir.support.scratch import replacing
from ..ir.text.printer import call_text
from ..passes.engine.manager import weakest

GENERATION, CARD = "generation_config.json", "README.md"
LICENCE = "LICENSE"
Ops = Literal["contrib", "standard"]
"""contrib: ONNX Runtime's own ops may be used; standard: ONNX's ops alone."""


@dataclass(frozen=True)
class Card:
    """Contents of a folder's README.md besides provenance. title: one line. files: description by
    file name. usage: lines of Python that run the export."""

    title: str
    files: Mapping[str, str]
    usage: str


def write_folder(
    program: Program, folder: Path, fill: Callable[[Path], None], card: Card, *, ours: str
) -> Path:
    """Write a folder by `fill`, add the model's files and the card; returns the folder.

    ours: a file that identifies an older export, which is replaced atomically. Errors: `InputError`
    if the folder has other contents, cannot be written, or if a file of the model has the name of
    an exported one.
    """
    check_folder(folder, ours)
    with replacing(folder) as new:
        fill(new)
        for name, source in program.assets.items():
            if (new / name).exists():
                raise InputError(
                    f"the model brings a file {name!r}, which the export writes itself; "
                    f"rename it in the model's folder"
                )
            (new / name).write_bytes(read_bytes(source, LARGE))
        if GENERATION not in program.assets:
            write_json(new / GENERATION, program.info.generation_config)
        if CARD not in program.assets:
            (new / CARD).write_text(card_text(program, card), encoding="utf-8")
    return folder


def check_ops(ops: str) -> None:
    """Errors: `InputError` for values not in `Ops`."""
    if ops not in get_args(Ops):
        raise InputError(f"ops: expected contrib or standard, got {ops!r}")


def refuse_other_states(program: Program) -> None:
    """Errors: `UnsupportedError` for states besides key-value caches of the text."""
    if program.plan.source.encoder is not None:
        raise UnsupportedError(
            f"{program.name} writes from a source, which loops around one decode graph do not "
            f"read. The formats onnx-loop and onnx-plan carry it"
        )
    if program.recurrent:
        raise UnsupportedError(
            f"{program.name} has recurrences, whose states loops around one decode graph do not "
            f"keep. The formats onnx-loop and onnx-plan carry it"
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def describe(program: Program, model: oir.Model, doc: str) -> None:
    """Set an ONNX model's producer, documentation and metadata. doc: one or two sentences."""
    model.producer_name, model.producer_version = "graftwork", __version__
    model.doc_string = model.graph.doc_string = doc
    model.metadata_props.update(metadata(program))


def metadata(program: Program) -> dict[str, str]:
    """The metadata_props of an exported model."""
    info = program.info
    return {
        "graftwork.version": __version__,
        "graftwork.program": program.name,
        "graftwork.contract": contract(program),
        "graftwork.passes": json.dumps([_pass(r) for r in program.provenance]),
        "model_type": info.model_type,
        "context_length": str(info.context),
        "vocab_size": str(info.vocab_size),
        "eos_token_id": json.dumps(list(info.eos)),
        "bos_token_id": json.dumps(info.bos),
        "pad_token_id": json.dumps(info.pad),
        "license": licence(program),
        "tools": f"onnx {onnx.__version__}, onnx-ir {oir.__version__}",
    }


def contract(program: Program) -> str:
    """The weakest of the passes' contracts; exact where none ran."""
    return weakest(Contract(record.contract) for record in program.provenance).value


def licence(program: Program) -> str:
    """The licence line of the README."""
    if LICENCE in program.assets:
        return f"the source model's, in {LICENCE} beside this file"
    return "the source model's, which came without a file of it"


def _pass(record: Any) -> str:
    return call_text(record.name, dict(record.options))


def card_text(program: Program, card: Card) -> str:
    """README.md of an exported folder."""
    passes = [f"- `{_pass(record)}` ({record.contract})" for record in program.provenance]
    files = [f"- `{name}`: {what}" for name, what in card.files.items()]
    lines = [
        "---",
        "library_name: onnxruntime",
        "license: other",
        "license_name: source-model",
        *([f"license_link: {LICENCE}"] if LICENCE in program.assets else []),
        "tags: [onnx, graftwork, text-generation]",
        "---",
        "",
        f"# {program.name}: {card.title}",
        "",
        f"Written by graftwork {__version__}. Contract: {contract(program)}. Licence: "
        f"{licence(program)}.",
        "",
        *files,
        "",
        "```python",
        card.usage.strip(),
        "```",
        "",
        "Passes that made it:",
        "",
        *(passes or ["- none"]),
        "",
    ]
    return "\n".join(lines)
