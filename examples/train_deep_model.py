"""Train a deep llama whose first layers can speak for it, with LayerSkip's objective.

    python examples/train_deep_model.py --out DIR [--minutes 60 | --steps N] [--seed 0]

What: a llama of 14.6 million parameters (20 layers, hidden 256, 4 query heads over one key/value
head of 64, tied embeddings, context 1,024), trained from nothing on the running interpreter's own
standard library with the tokenizer of graftwork's bundled model (2,048 tokens). The objective is
LayerSkip's, for training from scratch: dropout up to 0.1 that rises with the depth and over the
training, early-exit losses of every fourth layer in turn. DIR is a checkpoint folder after every
250 steps, so it can be used while training goes on; an interrupted run goes on with --resume.
prompts.jsonl has 24 prompts cut from files that were kept apart, heldout_files.json their names.

Why this shape: drafts of the first layers pay where a step of a few tokens costs what a step of one
does. At hidden 256 the weights of 20 layers, 58 MB, come from memory; at hidden 128 those of 24 lie
in a processor's cache, and five tokens cost 2.4 times what one does.

On a machine that others use, too, several threads wait for each other: see --threads, and set
OMP_WAIT_POLICY=PASSIVE. Then:

    python benchmarks/speculation.py DIR --prompts DIR/prompts.jsonl --recipes layerskip ...

Needs transformers besides graftwork itself: `pip install -e '.[huggingface]'` in the clone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer
from train_demo_model import build_model, cut_prompts, llama_config, read_corpus
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

import graftwork as gw
from graftwork.training import FitState, LayerSkip, Report

TOKENIZER = Path(gw.__file__).parent / "demo_model"
END = 0
PROMPTS = 24


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Each text's token ids, followed by the end token."""
    return [[*encoding.ids, END] for encoding in tokenizer.encode_batch(texts)]


def fresh_model(folder: Path, seed: int) -> None:
    """Write an untrained model with its tokenizer into a folder."""
    model = build_model(llama_config(256, 704, 20, heads=4, groups=1), seed)
    model.config.use_cache = True
    model.generation_config = GenerationConfig(bos_token_id=END, eos_token_id=END)
    model.save_pretrained(folder)
    for path in TOKENIZER.glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)


def report(console: Console, every: int) -> Report:
    """Prints a line each `every` steps."""
    average = [0.0]

    def show(state: FitState) -> None:
        average[0] += (state.loss - average[0]) / min(state.step, 50)
        if state.step % every == 0:
            console.print(f"  {state.share:4.0%} step {state.step:5d} loss {average[0]:.3f}")

    return show


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time of training")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of a time")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's)")
    parser.add_argument("--seed", type=int, default=0, help="initial weights, data, prompts")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    disable_progress_bar()  # transformers' own
    console, out = Console(), args.out.resolve()
    corpus, tokenizer = read_corpus(), Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    documents = encoded(tokenizer, list(corpus.train.values()))
    console.print(f"{len(documents)} files, {sum(map(len, documents)):,} tokens")
    with tempfile.TemporaryDirectory() as folder:
        fresh_model(Path(folder), args.seed)
        trained = gw.train_exits(
            folder,
            documents,
            out=out,
            objective=LayerSkip(dropout=0.1, scale=1.0, every=4, scratch=True),
            minutes=None if args.steps else args.minutes,
            steps=args.steps,
            device=args.device,
            batch=2,
            window=256,
            rate=2e-3,
            decay=0.1,
            half=True,
            save_every=250,
            seed=args.seed,
            resume=args.resume,
            progress=report(console, 100),
        )
    prompts = cut_prompts(tokenizer, corpus.heldout, args.seed, PROMPTS)
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    (out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (out / "heldout_files.json").write_text(json.dumps({"files": list(corpus.heldout)}, indent=1))
    console.print(f"{trained.steps} steps; held-out loss in nats a token by layers:")
    console.print(", ".join(f"{n + 1}: {loss:.2f}" for n, loss in enumerate(trained.after)))


if __name__ == "__main__":
    main()
