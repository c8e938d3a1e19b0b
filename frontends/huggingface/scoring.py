"""Models that score texts: reward models, which give every token a number for the text up to it.

What comes of one is a step whose ``logits`` are scores, one a label::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,1]

Read are transformers' ``...ForSequenceClassification`` and ``...ForTokenClassification`` whose head
is one product, ``score``, and checkpoints whose head is called ``v_head.summary``, as trl names a
value head. The first kind scores a text by its last token; here each token has what it would say
of the text that ends with it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...ir import InputError, Program
from ..generation import ASSETS
from .checkpoint import Tensors
from .families import TEXT_SCORES, TOKEN_SCORES
from .model import check_files, check_layers, contents, import_tensors, read_config

HEAD, VALUE_HEAD = "score.", "v_head.summary."
UNUSED = ("lm_head.",)
"""The head of words that a model with a value head comes with."""


def import_scoring_folder(folder: Path, dtype: torch.dtype | None = None) -> Program:
    """A checkpoint folder (config.json, safetensors) of a model that scores texts as a program.

    dtype: of the floating weights; None is the checkpoint's own. Errors: `InputError` for missing
    or wrong files, and for a model without such a head; `UnsupportedError` for models that cannot
    be traced.
    """
    check_files(folder)
    config = read_config(folder)
    tensors, kept = contents(folder, config)
    named = {_named(name): open for name, open in tensors.items()}
    check_layers(folder, config, len(named))
    head = named.get(f"{HEAD}weight")
    dims = () if head is None else head().type.dims
    if len(dims) != 2:
        raise InputError(
            f"{folder}: expected a model that scores texts, with a matrix {HEAD}weight "
            f"(...ForSequenceClassification, ...ForTokenClassification) or {VALUE_HEAD}weight, got "
            f"one without"
        )
    given: Tensors = {name: open for name, open in named.items() if not name.startswith(UNUSED)}
    config.num_labels = dims[0]
    assets = {name: folder / name for name in ASSETS if (folder / name).exists()}
    family = TOKEN_SCORES if f"{HEAD}bias" in given else TEXT_SCORES
    return import_tensors(
        *(folder, config, lambda twin: (given, kept), dtype),
        generation=None,
        assets=assets,
        family=family,
    )


def _named(name: str) -> str:
    """What the model calls a tensor."""
    return HEAD + name.removeprefix(VALUE_HEAD) if name.startswith(VALUE_HEAD) else name
