"""Export of a model as a GGUF file, for llama.cpp: metadata, tokenizer and weights in one.

Weights keep the bits that they have where GGUF has a type with exactly their codes, scales and
offsets; the others are written as floats, with a warning. What comes from a GGUF file, and is what
a reader makes of it, is copied from there, metadata and tokenizer too. Names, metadata and the
order of rows are those of the frontend (`frontends.gguf`), the other way round.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..artifact.destinations import check_file
from ..frontends.gguf.model import FREQUENCIES
from ..frontends.gguf.reader import GgufFile
from ..frontends.gguf.tokens import tokenizer_entries
from ..frontends.gguf.writing import check_said, entries_of, row_of
from ..frontends.huggingface import without_data
from ..frontends.huggingface.families import instantiate
from ..frontends.huggingface.lengths import frozen_ropes
from ..frontends.trace import fake_mode
from ..ir import GraftworkWarning, InputError, Program, UnsupportedError, type_of
from ..ir.plan.contract import Contract
from ..ir.support.files import plain_path
from ..ir.support.packages import require
from ..ir.support.scratch import replacing_file
from ..passes.engine.base import Effect, Pass, all_passes
from .gguf_tensors import Parameter, Tensors

G = torch.ops.graftwork
CONFIG = "config.json"
SAID = frozenset({Effect.WEIGHT_NUMERICS, Effect.CACHE_LAYOUT, Effect.LOGITS})
"""What passes may change of a program that a file still says all of; logits only which are made,
not what they are."""


def check_passes(passes: Iterable[type[Pass] | Pass]) -> None:
    """Errors: `UnsupportedError` for a pass whose work a GGUF file cannot say."""
    for made in passes:
        others = made.effects - SAID
        if made.contract is Contract.APPROXIMATE:
            others |= made.effects & {Effect.LOGITS}
        if others:
            raise UnsupportedError(
                f"a GGUF file holds a model's weights, and cannot say what the pass {made.name} "
                f"changes ({', '.join(sorted(effect.value for effect in others))}): export "
                f"baseline, or a recipe that stores weights in few bits"
            )


def check_path(path: str | Path) -> Path:
    """A path that a file can be written to. Errors: `InputError`."""
    path = plain_path("export", path)
    if path.suffix != ".gguf":
        raise InputError(f"{path}: expected the name of a file that ends in .gguf")
    check_file(path, "export")
    return path


def check_model(model_type: str, assets: Mapping[str, Path]) -> None:
    """Errors: `UnsupportedError` for a model type that is not written, `InputError` for a model
    without config.json."""
    require("gguf", "writing a .gguf file", "gguf")
    row_of(model_type)
    if CONFIG not in assets:
        raise InputError(
            f"the {model_type} model came without a config.json, which the export needs: optimize "
            f"the folder of a checkpoint instead of a model in memory"
        )


def export_gguf(program: Program, path: Path) -> Path:
    """Write the file; returns its path.

    Warns (`GraftworkWarning`) of weights of few bits that become floats. Errors: as `check_passes`
    and `check_model`, and `UnsupportedError` for options of the configuration, weights and
    tokenizers that the format has no place for.
    """
    check_passes(all_passes()[record.name] for record in program.provenance)
    check_model(program.info.model_type, program.assets)
    hidden = type_of(program.step.calls(G.hidden.default)[0]).dtype
    twin = without_data(program.assets[CONFIG].parent, hidden)
    tensors = Tensors(program, twin)
    parameters = tensors.parameters()
    entries = {} if tensors.source else _entries(tensors, parameters)
    with replacing_file(path) as part:
        _write(part, tensors, parameters, entries)
    if tensors.floats:
        warnings.warn(
            f"{path}: {len(tensors.floats)} weights of few bits are written as floats, because "
            f"llama.cpp keeps them so (routers), or GGUF has no type with exactly their bits, "
            f"scales and offsets: {tensors.floats[0]} (groups of 32 with scales in f16 have one, "
            f"with offsets in 4 bits, without in 8)",
            GraftworkWarning,
            stacklevel=2,
        )
    return path


def _entries(tensors: Tensors, parameters: list[Parameter]) -> dict[str, Any]:
    """The metadata of a model that came from another format; vectors of floats under names of
    tensors."""
    program, spoken = tensors.program, tensors.spoken
    said = entries_of(tensors.row, tensors.config, program.info.context)
    entries = {k if k.endswith(".weight") else f"{spoken}.{k}": v for k, v in said.items()}
    entries |= {"general.architecture": spoken, "general.name": program.assets[CONFIG].parent.name}
    entries |= tokenizer_entries(program.info, program.assets, tensors.config.vocab_size)
    back = check_said(
        program.assets[CONFIG], tensors.row, tensors.config, entries, tensors.dims(parameters)
    )
    return entries | _frequencies(tensors, back)


def _frequencies(tensors: Tensors, back: Any) -> dict[str, list[float]]:
    """What the frequencies of rotary embeddings are divided by, beside what metadata says.

    back: the configuration that a reader makes of the file. Errors: `UnsupportedError` for
    frequencies that the file cannot say, `InputError` for a program that does not have them any
    more.
    """
    twin = instantiate(back, torch.float32, fake_mode())
    known = {**dict(twin.named_buffers()), **frozen_ropes(twin)}
    divisors: dict[str, list[float]] = {}
    for name, plain in known.items():
        if not name.endswith("inv_freq") or "original" in name:
            continue
        if name not in tensors.known:
            raise InputError(
                f"{tensors.program.name} holds no {name} any more, which the file must say: "
                f"export from the checkpoint instead of an artifact"
            )
        given = tensors.known[name].load().float()
        if torch.allclose(given, plain.float(), rtol=1e-6, atol=0):
            continue
        if not tensors.row.divided:
            raise UnsupportedError(
                f"config.json: rope_parameters: GGUF's {tensors.spoken} models have no place for "
                f"frequencies scaled in this way ({tensors.config.rope_parameters})"
            )
        divisors[FREQUENCIES] = (plain.float() / given).tolist()
    return divisors


def _write(
    path: Path, tensors: Tensors, parameters: list[Parameter], entries: Mapping[str, Any]
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, tensors.spoken, use_temp_file=True)
    kinds: Counter[int] = Counter()
    for name, vector in entries.items():
        if name.endswith(".weight"):
            writer.add_tensor(name, np.array(vector, np.float32))
    for tensor in tensors.written(parameters):
        kinds[tensor.kind] += tensor.data.numel()
        kind = gguf.GGMLQuantizationType(tensor.kind)
        writer.add_tensor(tensor.name, tensor.data.numpy(), raw_dtype=kind)
    if tensors.source:
        _copy_metadata(writer, tensors.source)
    else:
        add_metadata(writer, entries, gguf.GGMLQuantizationType(kinds.most_common(1)[0][0]).name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(writer: Any, source: GgufFile) -> None:
    """All entries but those that say how tensors lie in files."""
    import gguf

    kept_out = ("GGUF.", "split.", "general.architecture", "general.alignment")
    for key, entry in gguf.GGUFReader(source.path).fields.items():
        if not key.startswith(kept_out):
            inner = entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(key, entry.contents(), entry.types[0], inner)


def add_metadata(writer: Any, entries: Mapping[str, Any], most: str) -> None:
    """Entries, and what the file is called after: the type of most of its bytes."""
    import gguf

    for key, value in entries.items():
        if key.endswith(".weight") or key == "general.architecture":
            continue
        whole = type(value) is int and value >= 0  # the package takes numbers for signed ones
        kind = gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    files = gguf.LlamaFileType.__members__
    likely = (f"MOSTLY_{most}", f"MOSTLY_{most}_M", f"ALL_{most}")
    if found := [files[name] for name in likely if name in files]:
        writer.add_file_type(found[0])
