"""Layers that predict tokens further ahead (MTP), which checkpoints hold and transformers leaves.

Such a layer reads the token after next to the state that the model made of the text so far::

    x = proj [enorm(e); hnorm(h)]     e: embedding of token t + 1, h: what the head reads at token t
    y = norm(block(x))                the head makes of y what follows token t + 1

Its block is a layer of the model's own kind, so it is run as the only layer of the model: its own
code then makes masks and angles. Which kind, where a model has several, its tensors tell: the one
that has all of them and no others. Checkpoints differ in names only (`_PLACES`, `_NAMES`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import InputError, Program, TensorType, UnsupportedError, Weight
from ...ir.weights import Call
from ..importer import INPUTS
from ..stored_weights import StoredWeight, keep_stored
from ..trace import fake_mode, first_names, twin_of
from .checkpoint import Checkpoint, Tensors
from .families import instantiate
from .model import Traced, contents, read_config, traced

_OUTSIDE = re.compile(r"^(?:(?:model|language_model|backbone)\.)+(?!$)")
_PLACES = (
    (r"^layers\.(\d+)\.", "layers"),  # counted on from the model's own
    (r"^mtp\.layers\.(\d+)\.", ""),
    (r"^mtp_layers\.(\d+)\.", ""),
    (r"^mtp\.()(?=fc\.|pre_fc_norm_|norm\.)", ""),
    (r"^mtp_(?=[a-z_]+\.(\d+)\.)", ""),
)
"""How a tensor of such a layer is called: its number, and what it is counted from."""

_NAMES = (
    (r"^(?:enorm|embed_norm|emb_norm\.\d+|pre_fc_norm_embedding)\.", "mtp.enorm."),
    (r"^(?:hnorm|hidden_norm(?:\.\d+)?|pre_fc_norm_hidden)\.", "mtp.hnorm."),
    (r"^(?:eh_proj|input_proj|linear_proj\.\d+|fc)\.", "mtp.proj."),
    (r"^(?:shared_head\.norm|final_layernorm|post_norm|norm)\.", "norm."),
    (r"^pre_mlp_layernorm\.", "layers.0.post_attention_layernorm."),
    (r"^(?:transformer_block|mtp_block|block\.\d+)\.", "layers.0."),
    (r"^(?!mtp\.|norm\.|layers\.0\.)", "layers.0."),
)
"""What follows the number, and its name here; the first that fits. The last: the block's own."""

_REPEATED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's own table and head."""


def import_mtp(folder: Path, layer: int, dtype: torch.dtype | None = None) -> Program:
    """A layer of a checkpoint that predicts one token further ahead, as a program.

    Its step takes ``tokens`` (those that follow), ``positions`` and ``hidden`` f[B,T,H], what the
    model's head reads, and returns ``hidden``, the layer's own, beside logits. layer: counted from
    0. dtype: of the floating weights. Errors: `InputError` for a checkpoint without such a layer,
    or with tensors missing, of another shape or of no known place; `UnsupportedError` for models
    that cannot be traced.
    """
    config = read_config(folder)
    tensors, kept = contents(folder, config)
    config = config.get_text_config(decoder=True)
    names = _named(list(tensors), int(config.num_hidden_layers))
    if layer not in names:
        there = ", ".join(map(str, sorted(names))) or "none"
        raise InputError(
            f"{folder} has no multi-token-prediction layer {layer}; it has {there}: looked for the "
            f"tensors layers.{int(config.num_hidden_layers) + layer}.*, mtp.* and mtp_*.{layer}.*"
        )
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    found = _fitting(folder, config, wanted, names[layer], tensors, kept)
    twin, checkpoint = found.twin, found.checkpoint
    buffers, first = dict(twin.named_buffers()), first_names(twin)
    parameters = dict(twin.named_parameters())

    def weight_of(name: str) -> Weight:
        name = first[name]
        if name in checkpoint:
            return checkpoint.weight(name)
        if name in buffers:
            return Weight.of(name, buffers[name].clone())
        return Weight(name, TensorType.of(parameters[name]), Call(_absent))

    program = traced(twin, found.mode, weight_of, None, {}, _Ahead)
    return keep_stored(program, checkpoint.stored())


def _absent() -> torch.Tensor:
    raise AssertionError("the model's own table and head stand for a layer's")


def _named(tensors: list[str], layers: int) -> dict[int, dict[str, str]]:
    """By number of a layer: its tensors in the file, by their names in the model that runs it."""
    found: dict[int, dict[str, str]] = {}
    for name in tensors:
        bare = _OUTSIDE.sub("", name)
        for pattern, counted in _PLACES:
            match = re.match(pattern, bare)
            if match is None:
                continue
            number = int(match[1] or 0) - (layers if counted else 0)
            rest = bare[match.end() :]
            if number >= 0 and rest not in _REPEATED:
                found.setdefault(number, {})[_ours(rest)] = name
            break
    return found


def _ours(rest: str) -> str:
    """A tensor's name without what says the layer, as the model calls it that runs the layer."""
    for pattern, name in _NAMES:
        if re.match(pattern, rest):
            return re.sub(pattern, name, rest)
    return rest


class _Parts(nn.Module):
    """What comes before the block."""

    def __init__(self, norm: nn.Module, twin: Any, mode: FakeTensorMode) -> None:
        super().__init__()
        self.enorm, self.hnorm = twin_of(norm, mode, None), twin_of(norm, mode, None)
        size = int(twin.config.hidden_size)
        with mode:
            self.proj = nn.Linear(2 * size, size, bias=False, dtype=twin.dtype)
        self.requires_grad_(False)


class _Ahead(Traced):
    """The layer, run as the only one of its model."""

    outputs = ("logits", "hidden")

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        size = int(model.config.hidden_size)
        hidden = TensorType.parse(f"f32[B,T,{size}]").with_dtype(model.dtype)
        self.inputs = {**INPUTS, "hidden": hidden}
        self.hidden_first = bool(getattr(model.config, "mtp_hidden_states_first", False))

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.model.mtp
        pair = [parts.enorm(self.model.get_input_embeddings()(tokens)), parts.hnorm(hidden)]
        x = parts.proj(torch.cat(pair[::-1] if self.hidden_first else pair, -1))
        out = self.model.base_model(
            inputs_embeds=x, position_ids=positions, use_cache=False, return_dict=True
        )
        made = out.last_hidden_state
        return self.model.get_output_embeddings()(made), made


@dataclass
class _Candidate:
    """A kind of layer, as the only one of its model, and what of the tensors does not fit it."""

    twin: Any
    mode: Any
    checkpoint: Checkpoint
    faults: list[str]


def _fitting(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    names: Mapping[str, str],
    tensors: Tensors,
    kept: Mapping[str, StoredWeight],
) -> _Candidate:
    """The first kind of layer that has these tensors and no others. Errors: `InputError` saying
    what the kind that comes nearest lacks."""
    tried = []
    for twin, mode in _twins(config, dtype, "norm.weight" in names):
        candidate = _loaded(folder, twin, mode, names, tensors, kept)
        if not candidate.faults:
            return candidate
        tried.append(candidate)
    nearest = min(tried, key=lambda candidate: len(candidate.faults))
    shown = "; ".join(nearest.faults[:3]) + ("; ..." if len(nearest.faults) > 3 else "")
    raise InputError(
        f"{folder}: its multi-token-prediction layer is like no layer of {config.model_type}: "
        f"{shown}"
    )


def _loaded(
    folder: Path,
    twin: Any,
    mode: Any,
    names: Mapping[str, str],
    tensors: Tensors,
    kept: Mapping[str, StoredWeight],
) -> _Candidate:
    """A kind of layer with the tensors that it takes of the checkpoint."""
    path = {ours: ours if ours.startswith("mtp.") else _inside(twin, ours) for ours in names}
    held = {path[ours]: tensors[name] for ours, name in names.items()}
    few = {path[ours]: kept[name] for ours, name in names.items() if name in kept}
    every = twin.state_dict()
    checkpoint = Checkpoint(folder, twin, held, few, optional=every)
    used = {part.name for recipe in checkpoint.recipes.values() for _, part in recipe.parts}
    faults = [f"{name} has no place in it" for name in names.values() if name not in used]
    for name in (name for name in every if _is_own(twin, name)):
        try:
            if name in checkpoint:
                checkpoint.weight(name)
            else:
                faults.append(f"the checkpoint lacks {name}")
        except InputError as error:
            faults.append(str(error))
    return _Candidate(twin, mode, checkpoint, faults)


def _inside(twin: Any, name: str) -> str:
    return f"{twin.base_model_prefix}.{name}"


def _is_own(twin: Any, name: str) -> bool:
    """Whether a parameter is the layer's, and not of what the whole model shares."""
    ours = ("mtp.", _inside(twin, "layers."), _inside(twin, "norm."))
    return name.startswith(ours)


def _twins(config: Any, dtype: torch.dtype, normed: bool) -> Iterator[tuple[Any, Any]]:
    """Models of one layer, for each kind that the model has, its last layer's first.

    What a configuration lists by layer is tried in all combinations, unless it says what holds for
    layers that predict (``mtp_...``); other rules go by a layer's number.
    """
    count = int(config.num_hidden_layers)
    kinds: dict[str, list[Any]] = {}
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count and isinstance(value[-1], str):
            said = getattr(config, f"mtp_{name}", None)
            kinds[name] = list(dict.fromkeys(said or value[::-1]))
    for values in itertools.product(*kinds.values()):
        for index in dict.fromkeys((count - 1, 0)):
            own = deepcopy(config)
            for name, value in zip(kinds, values, strict=True):
                setattr(own, name, [value] * count)
            mode = fake_mode()
            twin = instantiate(own, dtype, mode)
            _keep_one(twin, index, mode, normed)
            yield twin, mode


def _keep_one(twin: Any, index: int, mode: FakeTensorMode, normed: bool) -> None:
    """Leave one layer, and put what comes before it there. Errors: `UnsupportedError`."""
    base = twin.base_model
    norm, layers = getattr(base, "norm", None), getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise UnsupportedError(
            f"{type(base).__name__} has no layers and norm to run a multi-token-prediction layer "
            f"with; expected a model whose blocks are called layers, with a norm behind them"
        )
    base.layers = nn.ModuleList([layers[index]])
    twin.mtp = _Parts(norm, twin, mode)
    if not normed:
        base.norm = nn.Identity()
