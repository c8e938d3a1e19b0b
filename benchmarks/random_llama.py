"""Write a llama checkpoint of random weights, for benchmarks that depend on shapes only.

    python benchmarks/random_llama.py --preset 200m --out /tmp/llama200m
    python benchmarks/random_llama.py --preset 3b --dtype bfloat16 --out /tmp/llama3b
    python benchmarks/random_llama.py --hidden 512 --layers 16 ... --out DIR

Weights are drawn shard by shard, so that memory stays small whatever the model's size; on a GPU
(`--device cuda`) billions take seconds. With `--tokenizer DIR` the tokenizer files of another
checkpoint are copied beside them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD = 1 << 30
"""Bytes of weights a file holds at most."""


@dataclass(frozen=True)
class Shape:
    """A llama's sizes. The 200m preset has 197M parameters, the 3b one 3.0B (with untied head).
    tied: the head is the embedding's table."""

    hidden: int = 1024
    layers: int = 16
    heads: int = 16
    groups: int = 4
    inner: int = 2816
    vocab: int = 8192
    context: int = 2048
    tied: bool = False

    @property
    def dim(self) -> int:
        """Channels of an attention head."""
        return self.hidden // self.heads


PRESETS = {
    "tiny": Shape(hidden=64, layers=2, heads=4, groups=2, inner=128, vocab=256, context=256),
    "200m": Shape(),
    "1b": Shape(hidden=2048, layers=16, heads=32, groups=8, inner=8192, vocab=65536),
    "3b": Shape(hidden=2560, layers=32, heads=32, groups=8, inner=9216, vocab=49152),
    "8b": Shape(hidden=4096, layers=32, heads=32, groups=8, inner=14336, vocab=65536),
}


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of all weights, in order."""
    kv = shape.groups * shape.dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        path = f"model.layers.{i}"
        yield f"{path}.input_layernorm.weight", (shape.hidden,)
        yield f"{path}.self_attn.q_proj.weight", (shape.hidden, shape.hidden)
        yield f"{path}.self_attn.k_proj.weight", (kv, shape.hidden)
        yield f"{path}.self_attn.v_proj.weight", (kv, shape.hidden)
        yield f"{path}.self_attn.o_proj.weight", (shape.hidden, shape.hidden)
        yield f"{path}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{path}.mlp.gate_proj.weight", (shape.inner, shape.hidden)
        yield f"{path}.mlp.up_proj.weight", (shape.inner, shape.hidden)
        yield f"{path}.mlp.down_proj.weight", (shape.hidden, shape.inner)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def config(shape: Shape, dtype: str) -> dict[str, object]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def write(shape: Shape, dtype: str, out: Path, seed: int = 0, device: str = "cpu") -> int:
    """Write the checkpoint, drawn on a device; returns the number of parameters."""
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    size = files = count = 0
    for name, dims in tensors(shape):
        drawn = torch.ones(dims) if len(dims) == 1 else torch.empty(dims, device=device)
        if len(dims) > 1:
            drawn.normal_(0.0, dims[-1] ** -0.5, generator=generator)
        tensor = drawn.to(kind).cpu()
        if shard and size + tensor.nbytes > SHARD:
            save_file(shard, out / f"model-{files:05d}.safetensors", {"format": "pt"})
            shard, size, files = {}, 0, files + 1
        shard[name], size, count = tensor, size + tensor.nbytes, count + tensor.numel()
        where[name] = f"model-{files:05d}.safetensors"
    save_file(shard, out / f"model-{files:05d}.safetensors", {"format": "pt"})
    index = {"metadata": {"total_size": count * kind.itemsize}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config(shape, dtype), indent=1))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="200m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="copy tokenizer files from this folder")
    parser.add_argument("--tied", action="store_true", default=None, help="no head of its own")
    for field, value in asdict(Shape()).items():
        if field != "tied":
            parser.add_argument(f"--{field}", type=int, help=f"instead of the preset's, {value}")
    args = parser.parse_args()
    given = {f: v for f in asdict(Shape()) if (v := getattr(args, f)) is not None}
    shape = Shape(**{**asdict(PRESETS[args.preset]), **given})
    count = write(shape, args.dtype, args.out, device=args.device)
    for path in sorted(args.tokenizer.glob("tokenizer*")) if args.tokenizer else []:
        shutil.copy(path, args.out / path.name)
    print(f"{args.out}: {count / 1e6:.1f}M parameters, {args.dtype}")


if __name__ == "__main__":
    main()
