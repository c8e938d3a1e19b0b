"""Train graftwork's bundled demo model from nothing: a small llama that writes Python.

    python examples/train_demo_model.py --out DIR [--minutes 20] [--threads N] [--seed 0]

What: a byte-level BPE tokenizer (2,048 tokens) and a llama of 3.05 million parameters (6 layers,
hidden 192, 4 query heads over 2 key/value heads of 64, tied embeddings, context 1,024), trained
in float32 on the running interpreter's own standard library. No download: the text is already on
every machine that can run this script. Every tenth file is held out of both trainings. Needs
transformers besides graftwork itself: `pip install -e '.[huggingface]'` in the clone.

How long: `--minutes` of training, plus about three minutes for the tokenizer and for the loss over
the held-out files. The learning rate follows the clock, so a short run is a complete run. The
bundled model is `--minutes 35 --threads 1 --seed 0` on one core of a busy machine.

Which loss: see EXPECTED below; it is in nats a token, over all held-out files. A seed fixes the
data order and the initial weights; the number of steps depends on the machine, and so do the
last digits of the loss.

DIR gets config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json,
tokenizer_config.json, prompts.jsonl (12 prompts cut from held-out files: file, text, ids) and
heldout_files.json (the held-out files and the facts of the run). It is written beside DIR and
renamed when complete, so an interrupted run leaves an earlier DIR as it was.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

EXPECTED = "about 3.35 nats a token after 2,340 steps (seed 0, Python 3.11)"

END = "<|endoftext|>"
VOCABULARY = 2048
CONTEXT = 1024
# (share of the time budget at which the stage starts, sequence length). Attention is the dearest
# part of a step at this size, and most of what a small model learns first is local.
STAGES = ((0.0, 128), (0.25, 256), (0.7, 512))
WINDOW = 512  # tokens that the held-out loss sees at once
TOKENS_A_STEP = 1024
PEAK_LR, FINAL_LR, WARMUP = 3e-3, 3e-5, 0.02
PROMPTS, PROMPT_TOKENS = 12, (48, 160)
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "prompts.jsonl",
    "heldout_files.json",
}
# In the repository the folder is a Python package too; this file moves to the new folder.
MARKER = "__init__.py"


@dataclass(frozen=True)
class Corpus:
    """Source files by path relative to the standard library, split into training and held out."""

    train: dict[str, str]
    heldout: dict[str, str]


def read_corpus() -> Corpus:
    """Read the standard library; index % 10 == 7 in path order is held out.

    Skips installed packages, files that are not UTF-8 (test fixtures of the tokenizer modules) and
    `_sysconfigdata*`, which records the paths of the machine that built the interpreter.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if {"site-packages", "dist-packages"} & set(relative.parts):
            continue
        if path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts[relative.as_posix()] = text
    if len(texts) < 100:
        raise SystemExit(
            f"expected at least 100 source files under {root}, found {len(texts)}: this "
            "interpreter has no standard library sources; run with one that does"
        )
    names = list(texts)
    held = {name for index, name in enumerate(names) if index % 10 == 7}
    return Corpus(
        train={name: texts[name] for name in names if name not in held},
        heldout={name: texts[name] for name in names if name in held},
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016): every text round-trips, nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_stream(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one i64[N], each followed by the end token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(0)
    return torch.tensor(ids, dtype=torch.int64)


def llama_config(hidden: int, inner: int, layers: int, heads: int, groups: int) -> LlamaConfig:
    """A llama over this script's tokenizer: `heads` query heads of 64 over `groups` of keys."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )


def build_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialised float32 model; the seed fixes every weight."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.float32)
    # GPT-2's rule: what writes to the residual stream starts smaller, the deeper the model.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
            if name.endswith("embed_tokens.weight"):
                # transformers leaves the padding row at zero; here that row is the end token.
                weight[0].normal_(std=config.initializer_range)
    return model


def draw_batch(
    stream: torch.Tensor, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets from random places, i64[TOKENS_A_STEP / length, length]; no padding."""
    count = TOKENS_A_STEP // length
    starts = torch.randint(len(stream) - length, (count, 1), generator=generator)
    rows = stream[starts + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a token, f32[]."""
    # A model in train mode without dropout is the same function as in eval mode.
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine, over the share of the time budget that is spent."""
    if progress < WARMUP:
        return PEAK_LR * (progress + 1e-3) / (WARMUP + 1e-3)
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))
    return FINAL_LR + (PEAK_LR - FINAL_LR) * cosine


def train(
    model: LlamaForCausalLM, stream: torch.Tensor, minutes: float, seed: int, console: Console
) -> int:
    """Train in place for `minutes` of wall time; return the number of steps."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
        fused=True,
    )
    generator = torch.Generator().manual_seed(seed)
    columns = (
        TextColumn("training"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    budget, step, average, next_line = minutes * 60, 0, math.log(VOCABULARY), 0.0
    model.train()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=budget, step=0, loss=average)
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < budget:
            progress = elapsed / budget
            length = max(size for begin, size in STAGES if begin <= progress)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress)
            loss = loss_of(model, *draw_batch(stream, length, generator))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            average += (loss.item() - average) / min(step, 50)
            bar.update(task, completed=elapsed, step=step, loss=average)
            if progress >= next_line:
                # For logs, where the bar itself does not show.
                bar.console.print(f"  {progress:4.0%} step {step:5d} loss {average:.3f}")
                next_line += 0.05
        bar.update(task, completed=budget)
    return step


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, stream: torch.Tensor, console: Console) -> float:
    """Mean loss in nats a token over the whole stream, in windows of WINDOW without overlap."""
    model.eval()
    windows = stream[: (len(stream) - 1) // WINDOW * WINDOW].reshape(-1, WINDOW)
    targets = stream[1 : windows.numel() + 1].reshape(-1, WINDOW)
    total = 0.0
    columns = (TextColumn("held out"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(windows))
        for rows, wanted in zip(torch.split(windows, 8), torch.split(targets, 8), strict=True):
            total += float(loss_of(model, rows, wanted)) * len(rows)
            bar.advance(task, len(rows))
    return total / len(windows)


def cut_prompt(tokenizer: Tokenizer, text: str, rng: random.Random) -> str | None:
    """Whole lines of `text` from a random one on, or None where none of the right length are."""
    lines = text.split("\n")
    first = rng.randrange(len(lines))
    low, high = PROMPT_TOKENS
    limit, kept = rng.randint(low, high), None
    # A prompt starts and ends on ink: a trailing newline is a token that a model trained on whole
    # files, where the next line's indent belongs to the same token, has hardly ever seen.
    for last in range(first + 1, min(first + 40, len(lines)) + 1):
        candidate = "\n".join(lines[first:last]).strip("\n").rstrip()
        if len(tokenizer.encode(candidate).ids) > limit:
            break
        kept = candidate
    if kept is None or len(tokenizer.encode(kept).ids) < low:
        return None
    return kept


def cut_prompts(
    tokenizer: Tokenizer, heldout: dict[str, str], seed: int, count: int = PROMPTS
) -> list[dict[str, object]]:
    """`count` prompts, each from another held-out file, chosen by the seed alone."""
    rng = random.Random(seed)
    names = list(heldout)
    rng.shuffle(names)
    prompts: list[dict[str, object]] = []
    for name in names:
        text = cut_prompt(tokenizer, heldout[name], rng)
        if text is None:
            continue
        prompts.append({"file": name, "text": text, "ids": tokenizer.encode(text).ids})
        if len(prompts) == count:
            return prompts
    raise SystemExit(f"expected {count} prompts from {len(names)} files, got {len(prompts)}")


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(
    folder: Path,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    prompts: list[dict[str, object]],
    facts: dict[str, object],
) -> None:
    """Write every file of the model into an empty folder."""
    model.config.use_cache = True
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    write_json(folder / "tokenizer_config.json", settings)
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    write_json(folder / "heldout_files.json", facts)
    written = {path.name for path in folder.iterdir()}
    if written != FILES:
        raise SystemExit(f"expected the files {sorted(FILES)} in {folder}, got {sorted(written)}")


def check_out(out: Path) -> None:
    """Refuse, before any work, a DIR that the final rename would destroy something in."""
    if not out.exists():
        return
    if not out.is_dir():
        raise SystemExit(f"expected --out to be a folder, got the file {out}: choose another")
    others = sorted({path.name for path in out.iterdir()} - FILES - {MARKER})
    if others:
        raise SystemExit(
            f"expected --out {out} to be new, empty or an earlier demo model, but it holds "
            f"{', '.join(others[:5])}: choose another folder"
        )


def publish(staging: Path, out: Path) -> None:
    """Put the complete folder in place by renames; an earlier one is removed afterwards."""
    staging.chmod(0o755)
    for path in staging.iterdir():
        path.chmod(0o644)
    if not out.exists():
        staging.rename(out)
        return
    if (out / MARKER).exists():
        shutil.copy2(out / MARKER, staging / MARKER)
    old = staging.with_name(staging.name + ".old")
    out.rename(old)
    staging.rename(out)
    shutil.rmtree(old)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        epilog=f"Expected held-out loss: {EXPECTED}.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=20.0, help="wall time of training")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's)")
    parser.add_argument("--seed", type=int, default=0, help="initial weights, data order, prompts")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"expected --minutes above 0, got {args.minutes}")
    if args.threads < 0:
        parser.error(f"expected --threads of at least 0, got {args.threads}")
    out: Path = args.out.resolve()
    check_out(out)
    disable_progress_bar()  # transformers' own; one bar at a time
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console()

    corpus = read_corpus()
    console.print(f"{len(corpus.train)} files to train on, {len(corpus.heldout)} held out")
    tokenizer = train_tokenizer(list(corpus.train.values()))
    stream = encode_stream(tokenizer, list(corpus.train.values()))
    unseen = encode_stream(tokenizer, list(corpus.heldout.values()))
    console.print(f"{len(stream):,} tokens to train on, {len(unseen):,} held out")

    model = build_model(llama_config(192, 512, 6, heads=4, groups=2), args.seed)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} parameters, {torch.get_num_threads()} threads")
    steps = train(model, stream, args.minutes, args.seed, console)
    # The loss that counts is that of the weights as stored, so round first.
    model.to(torch.bfloat16).to(torch.float32)
    loss = heldout_loss(model, unseen, console)

    facts: dict[str, object] = {
        "rule": "standard library *.py in path order, index % 10 == 7",
        "python": platform.python_version(),
        "seed": args.seed,
        "minutes": args.minutes,
        "steps": steps,
        "trained_tokens": steps * TOKENS_A_STEP,
        "heldout_tokens": len(unseen),
        "heldout_loss_nats_per_token": round(loss, 4),
        "files": list(corpus.heldout),
    }
    prompts = cut_prompts(tokenizer, corpus.heldout, args.seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        write_folder(staging, model.to(torch.bfloat16), tokenizer, prompts, facts)
        publish(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    console.print(f"{steps} steps, {steps * TOKENS_A_STEP:,} tokens; wrote {out}")
    console.print(f"held-out loss: {loss:.3f} nats a token ({len(unseen):,} tokens)")


if __name__ == "__main__":
    main()
