"""Mutated checkpoint folders, optimized and run: refused with a message, or as transformers reads
them.

    python tests/fuzz/folders.py --mutations 1000 --seed 0

Folders of tiny models, plain ones, in shards, with a source, and in the formats of quantized
checkpoints, are changed in their configurations, indexes, tokenizer files and safetensors. Every
one must be refused with graftwork's own error, or give the tokens that transformers gives of the
same folder; where transformers cannot read it (or cannot read its format here), those of the folder
as it was. Nothing may be written outside the process's own folder. Processes and the rest: see
`mutants.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mutants
import torch
from archs import ARCHS, Arch, build
from mutants import counted, spread
from mutations import character, in_json, in_weights
from quantized_checkpoints import (
    awq_config,
    awq_layer,
    compressed_layer,
    gptq_config,
    gptq_layer,
    nf4_config,
    nf4_layer,
    write,
)
from source_models import made
from tokenizers import Tokenizer, models, pre_tokenizers

import graftwork as gw
from graftwork.frontends.huggingface.model import load_model
from graftwork.ir import GraftworkError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
TEXT = "a b c"
NEW = 5
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = "floats"
"""Beside the folders: the values that those of quantized ones stand for."""

SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
DEEP: Any = json.loads("[" * 400 + "]" * 400)
JUNK = (
    *(None, True, False, -1, 0, 1, 2, 3, 6, 7, 33, 2**40, 2**70, 0.5, -0.5, 1e400),
    *("", "x", "1", "../x", "silu", "float16", "x" * 1000, "\ud800"),
    *([], [1], [[]], ["x"], {}, {"a": 1}, {"": None}, DEEP),
)


# -- folders to begin with


def bases(folder: Path) -> None:
    """Folders of tiny models, by what they show."""
    plain = {**ARCHS["llama"].config, "num_hidden_layers": 1}
    small = {"llama": plain, "gpt2": {**ARCHS["gpt2"].config, "n_layer": 1}}
    for name, config in small.items():
        build(Arch(name, config)).save_pretrained(folder / name)
    build(Arch("llama", plain)).save_pretrained(folder / "shards", max_shard_size="10KB")
    made("t5").save_pretrained(folder / "t5")
    group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    scheme = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": group}}}
    compressed = {"quant_method": "compressed-tensors", "format": "pack-quantized", **scheme}
    written = {
        "gptq": (gptq_config(), gptq_layer()),
        "awq": (awq_config(), awq_layer()),
        "nf4": (nf4_config(), nf4_layer()),
        "packed": (compressed, compressed_layer("pack-quantized", group)),
    }
    for name, (said, layer) in written.items():
        quantized, plain = write(folder / f"{name}.made", said, layer, num_hidden_layers=1)
        quantized.rename(folder / name)
        shutil.move(plain, folder.parent / FLOATS / name)
        shutil.rmtree(folder / f"{name}.made")
    for place in folder.iterdir():
        tokenizer = Tokenizer(models.WordLevel({"a": 3, "b": 4, "c": 5}, unk_token="a"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(place / "tokenizer.json"))
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
        (place / "tokenizer_config.json").write_text(json.dumps(said))


# -- mutations


def mutate(rng: random.Random, folder: Path) -> str:
    """Change one file of a folder; says how."""
    kinds = ["config"] * 6 + ["settings"] * 3 + ["weights"] * 3
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    kinds += ["quantized"] * 8 * quantized + ["index"] * 8 * (folder / INDEX).exists()
    kind = rng.choice(kinds)
    if kind == "weights":
        name = rng.choice(sorted(path.name for path in folder.glob("*.safetensors")))
        return f"{name} {in_weights(rng, folder, name)}"
    names = {"config": "config.json", "quantized": "config.json", "index": INDEX}
    name = names.get(kind) or rng.choice(SETTINGS)
    path = folder / name
    if not path.exists():
        path.write_text("{}")
    if rng.random() < 0.1 or path.read_text() == "{}":
        text = character(rng, path.read_text())
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return f"{name} character"
    if kind == "quantized" and rng.random() < 0.2:
        whole = json.loads(path.read_text())
        whole["quantization_config"] = rng.choice(JUNK)
        path.write_text(json.dumps(whole))
        return f"{name} quantization_config {str(whole['quantization_config'])[:40]}"
    under = ("quantization_config",) if kind == "quantized" else ()
    return f"{name} {in_json(rng, path, JUNK, *under)}"


# -- what became of it


def ours(folder: Path) -> list[int]:
    """The tokens that graftwork generates; a text is encoded, too."""
    fast = gw.optimize(folder, target="eager:cpu:float32")
    found = fast.generate(IDS, max_new_tokens=NEW, do_sample=False, eos_token_id=[])
    tokens: list[int] = found[0].tolist()
    fast.tokenizer.encode(TEXT)
    return tokens


def theirs(folder: Path) -> list[int] | None:
    """The tokens that transformers generates, None where it cannot."""
    from transformers import AutoModelForSeq2SeqLM

    try:
        if json.loads((folder / "config.json").read_text()).get("model_type") == "t5":
            kind: Any = AutoModelForSeq2SeqLM
            model = kind.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32)
        else:
            model = load_model(folder, dtype=torch.float32)
        model.generation_config.eos_token_id = None
    except Exception:  # whatever it raises
        return None
    for cached in (True, False):  # its caches do not fit every configuration that it runs
        with contextlib.suppress(Exception):
            found = model.eval().generate(
                IDS, max_new_tokens=NEW, do_sample=False, use_cache=cached
            )
            tokens: list[int] = found[0].tolist()
            return tokens
    return None


def dequantized(folder: Path, plain: Path) -> Path:
    """A copy of the floats that a quantized folder stood for, its configuration as it is now."""
    copied = Path(tempfile.gettempdir()) / FLOATS
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(plain, copied)
    said = json.loads((folder / "config.json").read_text())
    said.pop("quantization_config", None)
    (copied / "config.json").write_text(json.dumps(said))
    return copied


def verdict(folder: Path, base: Path, plain: Path, done: str) -> str:
    """ "refused", "accepted", or what is wrong. base: the folder as it was. plain: a quantized
    folder's values, if it was one. done: what was changed."""
    try:
        tokens = ours(folder)
    except GraftworkError as error:
        return "refused" if len(str(error)) < 20_000 else "fault: an endless message"
    if plain.exists() and "weights" in done:
        return "accepted"  # other bits are other values
    expected = theirs(dequantized(folder, plain) if plain.exists() else folder) or ours(base)
    if tokens != expected:
        return f"fault: other tokens {tokens}, expected {expected}"
    return "accepted"


# -- processes


def work(folder: Path, seed: int, first: int, last: int) -> None:
    """Make and try mutants."""
    import transformers

    mutants.confined()
    logging.disable(logging.CRITICAL)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    os.environ["GRAFTWORK_CACHE"] = str(Path(os.getcwd()) / "tmp" / "cache")
    places = sorted((folder / "bases").iterdir())

    def make(rng: random.Random, index: int, target: Path) -> tuple[str, Callable[[], str]]:
        base = rng.choice(places)
        shutil.copytree(base, target)
        done = mutate(rng, target)
        return f"{base.name}: {done}", lambda: verdict(
            target, base, folder / FLOATS / base.name, done
        )

    mutants.work(make, seed, first, last)


def summary(seed: int, mutations: int, processes: int = 2) -> tuple[Counter[str], list[str]]:
    """How many mutations ended how, and the faulty ones."""
    with tempfile.TemporaryDirectory() as name:
        bases(Path(name) / "bases")
        return counted(spread(Path(name), seed, mutations, processes, __file__))


def main() -> int:
    """The command line; 1 if there was a fault."""
    given = mutants.arguments(__doc__, 1000).parse_args()
    if given.work:
        work(given.bases, given.seed, *given.work)
        return 0
    counts, faults = summary(given.seed, given.mutations, given.processes)
    for fault in faults[:60]:
        print(fault)
    print(
        f"{counts['mutations']} mutated folders: {counts['refused']} refused, "
        f"{counts['accepted']} accepted and as transformers reads them, {counts['faults']} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
