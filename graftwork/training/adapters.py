"""Adapters of low rank in a model's linear layers, which are trained in its place and merged.

    y = W x + 2 B A x            A: [rank, in], B: [out, rank], 0 at first

By peft. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021); all linear
layers but the head have one, as in Dettmers et al., "QLoRA" (2023).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..frontends.generation import read_object
from ..frontends.huggingface.model import check_files
from ..ir import InputError
from ..ir.support.packages import require

SCALE = 2
"""By which an adapter's product is multiplied: peft's alpha over the rank."""


class Adapters:
    """A model of transformers with adapters of a rank, which change nothing yet. model: what is
    traced and trained, the given one. Errors: `InputError` without peft, and for a model without
    linear layers."""

    def __init__(self, model: Any, rank: int, seed: int) -> None:
        check_peft()
        from peft import LoraConfig, get_peft_model

        chosen = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules="all-linear")
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what peft asks transformers
            torch.manual_seed(seed)
            self._whole: Any = get_peft_model(model, chosen)
        self.model: Any = self._whole.get_base_model()
        self.names = {n for n, p in self.model.named_parameters() if p.requires_grad}

    def merged(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """A copy of the model as it was given, its linear layers as adapters of these weights
        change them."""
        made = copy.deepcopy(self._whole)
        held = dict(made.get_base_model().named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                held[name].copy_(tensor)
        return made.merge_and_unload()


def check_peft() -> None:
    """Errors: `InputError` saying how to install peft."""
    require("peft", "training adapters (lora)", "lora")


def check_weights(model: Any) -> None:
    """That a model's weights can be trained, before it is read. Errors: `InputError` for a file,
    a folder that does not say what it holds, and weights of few bits."""
    why = "weights of few bits cannot take small steps, nor adapters be merged into them"
    if isinstance(model, Path):
        if not model.is_dir():
            raise InputError(
                f"{model}: expected a checkpoint folder as transformers writes it, not a file: "
                f"{why}, such as a .gguf's"
            )
        check_files(model)
        settings = model / "config.json"
        quantized = settings.exists() and read_object(settings).get("quantization_config")
        where = str(model)
    else:
        quantized = getattr(model, "hf_quantizer", None) is not None
        where = "the model in memory"
    if quantized:
        raise InputError(
            f"{where} is quantized, and {why}: train the checkpoint that it was made from, and "
            f"quantize what comes out"
        )
