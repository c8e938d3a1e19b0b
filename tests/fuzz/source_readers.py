"""What a source means: read by graftwork, and by somebody else."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_archs
import gguf_files
import numpy as np
import onnxruntime
import torch
from tiny import cached_llama, tiny_llama

from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.data.prompts import read_prompts
from graftwork.exporting.gguf import add_metadata
from graftwork.frontends import import_model
from graftwork.frontends.gguf.reader import GgufFile
from graftwork.frontends.gguf.tokens import tokenizer_entries
from graftwork.frontends.gguf.vocabulary import Vocabulary
from graftwork.ir import GraftworkWarning, Program, UnsupportedError
from graftwork.ir.support.tokenizer import decode, encode, read_tokenizer
from graftwork.model import Model
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe

IDS = [1, 5, 9, 30, 7, 3]
TEXTS = ("def f(x):\n    return x", "", "a\u00e9\U0001f600 \x00b")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


def logits_of(program: Program) -> torch.Tensor:
    """Of a source's step, f32[T,V]."""
    made, _ = run_passes(program, Recipe.load("baseline").steps)
    found: torch.Tensor = Model(made, Target("eager"), {})(torch.tensor([IDS]))[0]
    return found.float()


def gguf_ours(path: Path) -> torch.Tensor:
    return logits_of(import_model(path))


def gguf_theirs(path: Path) -> torch.Tensor:
    """The package reads the file, transformers computes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    reader = gguf.GGUFReader(path)
    fields = {n: f for n, f in reader.fields.items() if not n.startswith("tokenizer.")}
    said = {name: field.contents() for name, field in fields.items()}
    arch = said["general.architecture"]
    value = lambda key, default=None: said.get(f"{arch}.{key}", default)  # noqa: E731
    single = lambda found: found[0] if isinstance(found, list) else found  # noqa: E731
    tensors = {t.name: torch.from_numpy(_floats(t)) for t in reader.tensors}
    heads = single(value("attention.head_count"))
    groups = single(value("attention.head_count_kv", heads))
    factor = value("rope.scaling.factor", value("rope.scale_linear", 0.0)) or 1.0
    scaled = value("rope.scaling.type", "linear") == "linear" and factor != 1.0
    rope = {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    config = AutoConfig.for_model(
        arch,
        hidden_size=value("embedding_length"),
        intermediate_size=single(value("feed_forward_length")),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=value("attention.key_length", value("embedding_length") // heads),
        vocab_size=len(tensors["token_embd.weight"]),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={**rope, "rope_theta": value("rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in tensors,
        max_position_embeddings=512,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ordered = {"q_proj": heads, "k_proj": groups} if arch == "llama" else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            held = tensors[gguf_files.their_name(name)]
            if count := ordered.get(name.split(".")[-2]):
                held = held.reshape(count, -1, 2, *held.shape[1:]).swapaxes(1, 2)
            parameter.copy_(held.reshape(parameter.shape))
        if "rope_freqs.weight" in tensors:
            model.model.rotary_emb.inv_freq /= tensors["rope_freqs.weight"]
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def _floats(tensor: Any) -> np.ndarray:
    made = gguf.dequantize(tensor.data, tensor.tensor_type)
    return made.reshape(tuple(reversed(tensor.shape.tolist()))).astype(np.float32)


def onnx_ours(path: Path) -> torch.Tensor:
    return logits_of(import_model(path))


def onnx_theirs(path: Path) -> torch.Tensor:
    """ONNX Runtime, on the whole text without a past."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    ids = np.array([IDS])
    feeds: dict[str, Any] = {}
    for value in session.get_inputs():
        if "past" in value.name:
            width = value.shape[3] if isinstance(value.shape[3], int) else 16
            feeds[value.name] = np.zeros((1, value.shape[1], 0, width), np.float32)
        elif value.name == "position_ids":
            feeds[value.name] = np.arange(len(IDS))[None]
        else:
            feeds[value.name] = np.ones_like(ids) if value.name == "attention_mask" else ids
    names = [value.name for value in session.get_outputs()]
    wanted = "logits" if "logits" in names else names[0]
    return torch.from_numpy(session.run([wanted], feeds)[0][0]).float()


def tokenizer_ours(path: Path) -> Any:
    tokenizer = read_tokenizer(path)
    ids = [encode(tokenizer, text) for text in TEXTS]
    return ids, [decode(tokenizer, tokens) for tokens in ids]


def tokenizer_theirs(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    backend = tokenizer.backend_tokenizer
    return ids, [backend.decode(tokens, skip_special_tokens=True) for tokens in ids]


def written_ours(path: Path) -> Any:
    """Written to a .gguf file and read again; what llama.cpp would do otherwise counts as
    refused."""
    info, size = cached_llama().info, read_tokenizer(path).get_vocab_size()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraftworkWarning)
        try:
            entries = tokenizer_entries(info, {"tokenizer.json": path}, size)
        except GraftworkWarning as warning:
            raise UnsupportedError(str(warning)) from warning
    written = path.with_suffix(".gguf")
    writer = gguf.GGUFWriter(written, "llama")
    add_metadata(writer, entries, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Vocabulary.of(GgufFile.open(written), size).tokenizer()
    written.unlink()
    ids = [encode(tokenizer, text) for text in TEXTS]
    return ids, [decode(tokenizer, tokens) for tokens in ids]


def with_tokenizer() -> Program:
    program = cached_llama()
    info = replace(program.info, vocab_size=2048)
    return program.replace(assets={"tokenizer.json": demo_folder() / "tokenizer.json"}, info=info)


def prompts_ours(path: Path) -> Any:
    return read_prompts(path, with_tokenizer())


def prompts_theirs(path: Path) -> Any:
    """Of every line its ids, or its text's."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    found = []
    for line in path.read_bytes().decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line.strip():
            continue
        said = json.loads(line)
        ids = said.get("ids")
        if not isinstance(ids, list):
            ids = tokenizer.encode(said["text"]).ids
        ids = ids[0] if ids and isinstance(ids[0], list) else ids
        if ids:
            found.append([int(token) for token in ids])
    assert all(0 <= token < 2048 for ids in found for token in ids)
    return found


ARCHITECTURES = {
    f"gguf-{which.split()[0]}": which
    for which in ("gemma3", "llama (experts)", "falcon", "mamba2", "deepseek2", "lfm2")
}
"""Of .gguf files that nothing else reads here: a mutated one must be refused, or run."""

READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "gguf": (gguf_ours, gguf_theirs),
    **dict.fromkeys(ARCHITECTURES, (gguf_ours, gguf_ours)),
    "onnx": (onnx_ours, onnx_theirs),
    "tokenizer": (tokenizer_ours, tokenizer_theirs),
    "gguf-tokenizer": (written_ours, tokenizer_theirs),
    "prompts": (prompts_ours, prompts_theirs),
}


def base_files(kind: str, folder: Path) -> None:
    """An unchanged source, its file called main."""
    folder.mkdir(parents=True)
    if kind == "gguf":
        kinds = {"": "Q4_0", "embed_tokens.weight": "F16", "lm_head.weight": "Q8_0"}
        gguf_files.write(folder / "main.gguf", kinds, **SIZES)
    elif kind in ARCHITECTURES:
        gguf_archs.write(folder / "main.gguf", ARCHITECTURES[kind], "Q4_0")
    elif kind == "onnx":
        program, _ = run_passes(tiny_llama(dim=16, context=96), Recipe.load("baseline").steps)
        made = Model(program, Target(threads=1), {"name": "baseline"})
        made.export_onnx(folder / "out", ops="standard")
        for file in (folder / "out").iterdir():
            name = "main.onnx" if file.name == "model.onnx" else file.name
            file.rename(folder / name)
        (folder / "out").rmdir()
    elif kind.endswith("tokenizer"):
        text = (demo_folder() / "tokenizer.json").read_text("utf-8")
        (folder / "main.json").write_text(text, "utf-8")
    else:
        lines = [{"ids": [1, 2, 3]}, {"text": "def f(x):"}, {"ids": [7], "text": "x"}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "main.jsonl").write_text(text, "utf-8")
