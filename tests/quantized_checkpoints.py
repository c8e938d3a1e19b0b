"""Quantized checkpoints as their methods lay them out, written value by value for tests.

Nothing here shares code with what reads them: codes are put into words one at a time, as the
layouts' descriptions say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from archs import ARCHS, build
from safetensors.torch import load_file, save_file

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a module, by their names in it, and the weight [N,K] that they stand for."""


def write(
    folder: Path,
    config: dict[str, Any],
    layer: Callable[[int, int], Written],
    arch: str = "llama",
    **sizes: int,
) -> tuple[Path, Path]:
    """A tiny model in `folder/quantized`, its layers as `layer(rows, columns)` gives them, and in
    `folder/float` the same one with the values that those stand for."""
    plain, quantized = folder / "float", folder / "quantized"
    model = build(ARCHS[arch]) if not sizes else resized(arch, **sizes)
    for place in (plain, quantized):
        model.save_pretrained(place)
    tensors = load_file(plain / "model.safetensors")
    kept, values = dict(tensors), dict(tensors)
    for name in tensors:
        module = name.removesuffix(".weight")
        if not module.endswith(LAYERS) or name == module:
            continue
        parts, weight = layer(*tensors[name].shape)
        del kept[name]
        kept.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
        values[name] = weight
    save_file(kept, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((quantized / "config.json").read_text())
    said["quantization_config"] = config
    (quantized / "config.json").write_text(json.dumps(said))
    return quantized, plain


def resized(arch: str, **sizes: int) -> Any:
    """The tiny model of an architecture with other sizes."""
    from dataclasses import replace

    known = ARCHS[arch]
    return build(replace(known, config={**known.config, **sizes}))


def words(values: torch.Tensor, bits: int, each: int = 0) -> torch.Tensor:
    """Integers [R,C] as int32 words [R,W]: a bitstream along each row, or `each` values a word."""
    rows = []
    for row in values.tolist():
        if each:
            made = [
                sum(value << bits * place for place, value in enumerate(row[start : start + each]))
                for start in range(0, len(row), each)
            ]
        else:
            number = sum(value << bits * place for place, value in enumerate(row))
            made = [number >> 32 * place & 2**32 - 1 for place in range(len(row) * bits // 32)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in made])
    return torch.tensor(rows, dtype=torch.int32)


def drawn(
    rows: int, columns: int, bits: int, group: int, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Codes i64[N,K], scales f16[N,K/group], zero points i64[N,K/group] (from 1 on)."""
    made = torch.Generator().manual_seed(seed + rows * 1000 + columns)
    codes = torch.randint(2**bits, (rows, columns), generator=made)
    scale = (0.02 + 0.05 * torch.rand(rows, columns // group, generator=made)).half()
    zeros = torch.randint(1, 2**bits, (rows, columns // group), generator=made)
    return codes, scale, zeros


def values(
    codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, of_channel: torch.Tensor
) -> torch.Tensor:
    """scale * (q - z) in float32, each channel's of its group."""
    return scale.float()[:, of_channel] * (codes - zeros[:, of_channel])


def gptq_layer(
    bits: int = 4,
    group: int = 16,
    *,
    sym: bool = False,
    less: int = 1,
    ordered: bool = True,
    padded: bool = False,
    index: bool = True,
) -> Callable[[int, int], Written]:
    """less: how much less than the zero point is stored. padded: ten values of 3 bits a word.
    ordered: channels are in the order of their groups. index: whether there is a g_idx."""

    def layer(rows: int, columns: int) -> Written:
        size = columns if group == -1 else group
        codes, scale, zeros = drawn(rows, columns, bits, size)
        if sym:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        of_channel = torch.arange(columns) // size
        if not ordered:
            made = torch.Generator().manual_seed(columns)
            of_channel = of_channel[torch.randperm(columns, generator=made)]
        each = 10 if padded else 0
        parts = {
            "qweight": words(codes, bits, each).T.contiguous(),
            "scales": scale.T.contiguous(),
            "qzeros": words(zeros.T - less, bits, each),
        }
        if index:
            parts["g_idx"] = of_channel.int()
        return parts, values(codes, scale, zeros, of_channel)

    return layer


def gptq_config(bits: int = 4, group: int = 16, **more: Any) -> dict[str, Any]:
    """What AutoGPTQ says in config.json."""
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False}
    return {**said, "desc_act": False, **more}


def awq_layer(group: int = 16) -> Callable[[int, int], Written]:
    """AutoAWQ's GEMM layout."""
    places = (0, 2, 4, 6, 1, 3, 5, 7)

    def shuffled(values: torch.Tensor) -> torch.Tensor:
        found = [
            values[:, start + place] for start in range(0, values.shape[1], 8) for place in places
        ]
        return words(torch.stack(found, 1), 4)

    def layer(rows: int, columns: int) -> Written:
        codes, scale, zeros = drawn(rows, columns, 4, group)
        parts = {
            "qweight": shuffled(codes.T),
            "scales": scale.T.contiguous(),
            "qzeros": shuffled(zeros.T),
        }
        return parts, values(codes, scale, zeros, torch.arange(columns) // group)

    return layer


def awq_config(group: int = 16, **more: Any) -> dict[str, Any]:
    """What AutoAWQ says in config.json."""
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return {**said, "version": "gemm", **more}


_LOWER = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
_MIDDLE = (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
_ABOVE = (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
_UPPER = (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
NF4 = (*_LOWER, *_MIDDLE, *_ABOVE, *_UPPER)
"""The values that QLoRA gives its sixteen codes."""


def nf4_layer(block: int = 64, *, nested: int = 0) -> Callable[[int, int], Written]:
    """bitsandbytes' layout. nested: the size of the blocks in which absmax is quantized; 0: it is
    not."""

    def layer(rows: int, columns: int) -> Written:
        made = torch.Generator().manual_seed(rows * 1000 + columns)
        codes = torch.randint(16, (rows * columns,), generator=made)
        blocks = -(-rows * columns // block)
        book = torch.tensor(NF4)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = [rows, columns]
        parts = {
            "weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8).unsqueeze(1),
            "weight.quant_map": book,
        }
        if nested:
            small = torch.randint(256, (blocks,), generator=made).to(torch.uint8)
            known = torch.linspace(-1, 1, 256)
            outer = 0.01 + 0.02 * torch.rand(-(-blocks // nested), generator=made)
            parts |= {"weight.absmax": small, "weight.nested_absmax": outer}
            parts["weight.nested_quant_map"] = known
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.05}
            largest = torch.stack(
                [known[int(code)] * outer[place // nested] for place, code in enumerate(small)]
            )
            largest = largest + 0.05
        else:
            largest = 0.02 + 0.1 * torch.rand(blocks, generator=made)
            parts["weight.absmax"] = largest
        said = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(said), dtype=torch.uint8)
        weight = book[codes] * largest[torch.arange(rows * columns) // block]
        return parts, weight.reshape(rows, columns)

    return layer


def nf4_config(**more: Any) -> dict[str, Any]:
    """What transformers says in config.json."""
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    return {**said, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8", **more}


def compressed_layer(
    format: str, arguments: dict[str, Any], scales: torch.dtype = torch.float16
) -> Callable[[int, int], Written]:
    """What the package itself compresses random weights to, and takes them for."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    compressor = BaseCompressor.get_value_from_registry(format)
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def layer(rows: int, columns: int) -> Written:
        made = torch.Generator().manual_seed(rows * 1000 + columns)
        group = args.group_size or columns
        weight = torch.randn(rows, columns, generator=made)
        largest = weight.reshape(rows, -1, group).abs().amax(-1)
        top = 448 if args.type == "float" else 2 ** (args.num_bits - 1)
        if args.strategy == "tensor":
            largest = largest.max().reshape(1)
        state = {"weight": weight, "weight_scale": (largest / top).to(scales)}
        if not args.symmetric:
            low = -(2 ** (args.num_bits - 1))
            zeros = torch.randint(low, -low, largest.shape, generator=made)
            state["weight_zero_point"] = zeros.to(torch.int8)
        parts = compressor.compress(state, scheme)
        values = compressor.decompress(parts, scheme)["weight"]
        return {name: tensor.contiguous() for name, tensor in parts.items()}, values

    return layer


def compressed_config(
    format: str, arguments: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """What llm-compressor says in config.json."""
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"g": group}}
    return {**said, "ignore": ["lm_head"], "quantization_status": "compressed", **more}
