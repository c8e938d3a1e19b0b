"""Models of transformers, as objects or checkpoint folders, as programs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import InputError, ModelInfo, Program, TensorType, UnsupportedError, Weight
from ...ir.support.files import LARGE, SMALL, open_regular
from ...ir.support.tokenizer import refusing
from ..generation import ASSETS, Known, defaults_of, nobody, read_object
from ..importer import INPUTS, LOGITS
from ..program import build_program
from ..stored_weights import StoredWeight, keep_stored
from ..trace import (
    fake_mode,
    fake_parameter,
    first_names,
    twin_of,
    weights_of,
)
from .checkpoint import Checkpoint, Tensors, opened, tensors_of
from .experts import prepare_experts
from .families import LANGUAGE, Family, instantiate
from .formats import format_of
from .formats import read as read_quantized
from .image_tokens import pictures_of
from .lengths import context_of, frozen_ropes, warn_of_change
from .recurrences import check
from .registry import NAME, register
from .sequences import traced_pair
from .speech_prompts import spoken
from .tracing import import_traced

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def import_folder(folder: Path, dtype: torch.dtype | None = None, known: Known = nobody) -> Program:
    """A checkpoint folder (config.json, safetensors) as a program; weights stay on disk.

    dtype: of the floating weights; None is the checkpoint's own. Weights of few bits stay as they
    are (see `formats`). known: see `import_model`. Errors: `InputError` for missing or wrong files,
    `UnsupportedError` for models that cannot be traced, and for formats that are not read.
    """
    check_files(folder)
    config = read_config(folder)
    assets = {name: folder / name for name in ASSETS if (folder / name).exists()}
    generation = _generation_config(folder)
    tell(known, config, generation, assets)
    found = contents(folder, config)
    check_layers(folder, config, len(found[0]))
    return import_tensors(
        folder, config, lambda twin: found, dtype, generation=generation, assets=assets
    )


def tell(known: Known, config: Any, generation: Any, assets: Mapping[str, Path]) -> None:
    """Tell of a model whose texts are its prompts, and not written from sources."""
    if not getattr(config, "is_encoder_decoder", False):
        known(_info(config, generation), assets)


def import_tensors(
    source: Path,
    config: Any,
    read: Callable[[nn.Module], tuple[Tensors, dict[str, StoredWeight]]],
    dtype: torch.dtype | None,
    *,
    generation: Any,
    assets: dict[str, Path],
    prepare: Callable[[Any], None] = lambda twin: None,
    family: Family = LANGUAGE,
) -> Program:
    """A configuration of transformers and the tensors for it, as a program.

    read: finds the tensors for a model of that configuration, and those of them that the source
    holds in few bits. prepare: changes the model that is traced. family: what makes it. dtype and
    errors: as `import_folder`.
    """
    mode = fake_mode()
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    twin = instantiate(config, wanted, mode, family)
    tensors, kept = read(twin)
    checkpoint = Checkpoint(source, twin, tensors, kept)
    if dtype is None and getattr(config, "dtype", None) is None:
        wanted = next(checkpoint.dtypes(), torch.float32)
        twin = instantiate(config, wanted, mode, family)
        checkpoint = Checkpoint(source, twin, tensors, kept)
    _keep_float32(twin, mode, wanted)
    prepare(twin)
    buffers, first = dict(twin.named_buffers()), first_names(twin)

    def weight_of(name: str) -> Weight:
        name = first[name]
        if name in checkpoint:
            return checkpoint.weight(name)
        return Weight.of(name, buffers[name].clone())

    wrap = Scored if family.scores else Traced
    program = traced(twin, mode, weight_of, generation, assets, wrap, both_ways=family.both_ways)
    return keep_stored(program, checkpoint.stored())


def check_layers(source: Path, config: Any, tensors: int) -> None:
    """That there may be a tensor for each layer, before all of them are made. Errors:
    `InputError`."""
    for name in ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"):
        layers = getattr(config, name, None)
        if isinstance(layers, int) and layers > tensors:
            raise InputError(
                f"{source}: the configuration says {name}={layers}, but there are {tensors} tensors"
            )


def contents(folder: Path, config: Any) -> tuple[Tensors, dict[str, StoredWeight]]:
    """The tensors of a checkpoint under their names in the original, and those kept in few bits."""
    method = getattr(config, "quantization_config", None)
    if method is None:
        return opened(folder), {}
    format = format_of(method, folder)
    del config.quantization_config  # the model that is traced is the float one
    return read_quantized(format, folder, tensors_of(folder))


def import_object(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Program:
    """A transformers model in memory as a program that shares its weights.

    dtype: of the floating weights; None keeps each parameter's. Errors: `UnsupportedError`.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            "the model in memory is quantized already; give the folder of its checkpoint, or "
            "import the original and quantize it with a recipe"
        )
    mode = fake_mode()
    twin = twin_of(model, mode, dtype)
    _keep_float32(twin, mode, dtype)
    generation = getattr(model, "generation_config", None)
    return traced(twin, mode, weights_of(model, twin), generation, {})


def check_files(folder: Path) -> None:
    """That a folder's files are regular and of a likely size. Errors: `InputError`.

    transformers opens them by itself, and waits for pipes and reads devices without end.
    """
    for name in ASSETS:
        path = folder / name
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"cannot read the checkpoint: {error}") from error
        if size > (SMALL if name.endswith("config.json") else LARGE):
            raise InputError(f"{path} has {size} bytes, more than any such file; fetch it again")


def read_config(folder: Path) -> Any:
    """A folder's configuration, without what it says of who computes. Nothing of the folder's own
    code runs, and nobody is asked whether it may.

    Errors: `InputError`, `UnsupportedError` for one that transformers cannot read.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        raise InputError(f"{folder} holds no config.json; expected a checkpoint of transformers")
    check_settings(folder / "config.json")
    with refusing(f"{folder}: transformers cannot read config.json", kind=UnsupportedError):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # These may name kernels that transformers would fetch and run.
        config._attn_implementation = config._experts_implementation = None
    return config


def check_settings(path: Path) -> None:
    """What transformers takes for granted. Errors: `InputError`."""
    quantized = read_object(path).get("quantization_config")
    if quantized is not None and not isinstance(quantized, dict):
        raise InputError(f"{path}: quantization_config: expected an object, got {quantized!r:.100}")


def load_model(folder: Path, **options: Any) -> Any:
    """The causal language model of a folder as transformers has it. options: for its
    `from_pretrained`. Errors: as `read_config`, and `InputError` for what cannot be loaded."""
    from transformers import AutoModelForCausalLM

    check_files(folder)
    config = read_config(folder)
    with refusing(f"{folder}: transformers cannot load the model"):
        return AutoModelForCausalLM.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False, **options
        )


def without_data(folder: Path, dtype: torch.dtype) -> Any:
    """The model that a folder's config.json describes, its parameters without data.

    Errors: `UnsupportedError` if transformers does not know it.
    """
    config = read_config(folder)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    model = instantiate(config, dtype, fake_mode())
    model.tie_weights()
    return model


def _keep_float32(twin: Any, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
    """Parameters that a model keeps in float32 whatever its dtype, as transformers loads them."""
    names = set(getattr(twin, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(twin, "_keep_in_fp32_modules", None) or ())
    for path, parameter in list(twin.named_parameters()):
        if not names.intersection(path.split(".")) or parameter.dtype == torch.float32:
            continue
        owner = twin.get_submodule(path.rpartition(".")[0])
        setattr(owner, path.rpartition(".")[2], fake_parameter(parameter, mode, torch.float32))


def _generation_config(folder: Path) -> Any:
    """What transformers' own loading finds: in a file of its own or, of old, in config.json."""
    from transformers import GenerationConfig

    own = "generation_config.json"
    name = own if (folder / own).exists() else "config.json"
    with refusing(f"{folder}: transformers cannot read {name}"):
        return GenerationConfig.from_pretrained(
            folder, config_file_name=name, local_files_only=True
        )


def _reserved(model: nn.Module) -> int:
    """Rows of a table of positions that no text has: models that number tokens by themselves, from
    what is no padding, begin behind the padding's row."""
    numbering = [m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")]
    return max([0, *(int(m.padding_idx) + 1 for m in numbering)])  # type: ignore[arg-type]


class Traced(nn.Module):
    """What is traced of a model: token ids and positions [B,T] to logits [B,T,V].

    inputs, outputs: what it takes and returns, in order.
    """

    inputs: Mapping[str, TensorType] = INPUTS
    outputs: tuple[str, ...] = LOGITS

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.takes_positions = "position_ids" in parameters or open_ended
        self.reserved = _reserved(model)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        """Logits."""
        return self.out_of(self.model, tokens, positions).logits

    def out_of(self, model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        """What the model, or a part of it, returns."""
        numbered = positions + self.reserved if self.reserved else positions
        extra = {"position_ids": numbered} if self.takes_positions else {}
        return model(input_ids=tokens, use_cache=False, return_dict=True, **extra)


class Scored(Traced):
    """What is traced of a model that scores texts: its scores [B,T,labels] behind every token."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        """Scores, under the name of logits."""
        hidden = self.out_of(self.model.base_model, tokens, positions).last_hidden_state
        return self.model.score(hidden)


def traced(
    twin: Any,
    mode: FakeTensorMode,
    weight_of: Callable[[str], Weight],
    generation: Any,
    assets: dict[str, Path],
    wrap: Callable[[Any], Traced] = Traced,
    *,
    both_ways: bool = False,
) -> Program:
    """The program of a model without data. weight_of: see `import_traced`. wrap: what of the model
    is traced. both_ways: whether its tokens may see later ones. Errors: `UnsupportedError` for what
    cannot be."""
    config = twin.config
    check(twin, config.model_type)
    register()
    config.use_cache = False
    implementation = _implementation(twin)
    for own in {id(c): c for m in twin.modules() if (c := getattr(m, "config", None))}.values():
        own._attn_implementation = implementation  # encoders and decoders may have their own
    if any(hasattr(type(module), "_apply_gate") for module in twin.modules()):
        config._experts_implementation = NAME
    prepare_experts(twin)
    info, frozen = _info(config, generation), frozen_ropes(twin)
    if frozen:
        warn_of_change(_text_config(config))

    def settled(name: str) -> Weight:
        return Weight.of(name, frozen[name]) if name in frozen else weight_of(name)

    if getattr(config, "is_encoder_decoder", False):
        opening = {"start": _start(config, generation, info), **spoken(generation, config)}
        return traced_pair(twin, mode, settled, info, opening, assets)
    wrapper = wrap(twin)
    info = replace(info, context=info.context - wrapper.reserved)
    imported = import_traced(
        wrapper, mode, info.context, settled, outputs=wrapper.outputs, reads_source=both_ways
    )
    program = build_program(config.model_type, imported, info, assets)
    return program.replace(plan=replace(program.plan, source=pictures_of(config, program.info)))


def _start(config: Any, generation: Any, info: ModelInfo) -> tuple[int, ...]:
    """The tokens that texts written from a source begin with. Errors: `UnsupportedError`."""
    for owner in (generation, config, _text_config(config)):
        token = getattr(owner, "decoder_start_token_id", None)
        if token is not None:
            return (int(token[0] if isinstance(token, (list, tuple)) else token),)
    if info.bos is None:
        raise UnsupportedError(
            f"cannot import {config.model_type}: neither its generation config nor its "
            "configuration says decoder_start_token_id, with which its texts begin"
        )
    return (info.bos,)


def _implementation(twin: Any) -> str:
    """The attention implementation to trace with: ours, or, for models outside of transformers'
    registry, one of torch's whose graph can be raised, the model's own if possible."""
    if type(twin)._can_set_attn_implementation():
        return NAME
    current = str(twin.config._attn_implementation)
    if current in ("eager", "sdpa"):
        return current
    return "sdpa" if getattr(twin, "_supports_sdpa", False) else "eager"


def _info(config: Any, generation: Any) -> ModelInfo:
    text = _text_config(config)

    def token(name: str) -> Any:
        said = (getattr(source, name, None) for source in (generation, config, text))
        return next((token for token in said if token is not None), None)

    eos = token("eos_token_id")
    many = tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,))
    if strange := [id for id in many if isinstance(id, bool) or not isinstance(id, int)]:
        raise InputError(f"eos_token_id: expected token ids, got {strange[0]!r}")
    return ModelInfo(
        model_type=config.model_type,
        vocab_size=int(text.vocab_size),
        context=context_of(text),
        eos=many,
        bos=token("bos_token_id"),
        pad=token("pad_token_id"),
        defaults=defaults_of(generation),
    )


def _text_config(config: Any) -> Any:
    """The configuration of the model that writes text, which others may hold inside theirs.

    Errors: `UnsupportedError` where there is none, or more than one.
    """
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedError(f"cannot import {config.model_type}: {error}") from error
    if getattr(text, "vocab_size", None) is None:
        raise UnsupportedError(
            f"cannot import {config.model_type}: expected a configuration with vocab_size, got a "
            f"{type(text).__name__} without one"
        )
    return text
