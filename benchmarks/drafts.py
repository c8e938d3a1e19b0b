"""What drafts gain by kind of text: tokens a step, and speed over plain decoding of the same bits.

    python benchmarks/drafts.py MODEL --prompts FILE.jsonl --recipes copyspec,recycling
        [--bits float32,int8,int4] [--target onnxruntime:cpu:float32] [--tokens 96] [--rounds 3]
        [--set copyspec.draft_suffix.tokens=8] --json F [--markdown F]

MODEL is a checkpoint folder or a .gguf file. A line of FILE has ``kind`` and ``text``, or token ids
under the name of the model's folder or file. A recipe's passes run over weights of each of `bits`;
what stands in `json` is not measured again. Each row:

    speed       tokens a second over plain decoding's in the same bits, which is timed before and
                after, median of rounds; what was learned from one text is forgotten before the
                next (`forget`), what steps take is not
    itself      plain decoding after over before, likewise: how far 1.00 is to be believed
    accepted    tokens a step, of the last round
    sampled     tokens a step at temperature 1, one round
    same        whether the greedy text is plain decoding's
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from real import prompts_of, rounded, write
from systems import BITS, over

import graftwork as gw
from graftwork.backends import Target


def measured(
    plain: gw.Model, fast: gw.Model, prompts: list[torch.Tensor], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each prompt."""
    rows = []
    for prompt in prompts:
        for model in (plain, fast):  # steps of drafts are compiled
            write(model, prompt, args.tokens)
        speeds, itself = [], []
        for _ in range(args.rounds):
            one, other, again = (write(m, prompt, args.tokens) for m in (plain, fast, plain))
            before, after = one.stats.tokens_per_second, again.stats.tokens_per_second
            speeds.append(2 * other.stats.tokens_per_second / (before + after))
            itself.append(after / before)
        fast.forget()
        drawn = fast.generate(
            prompt,
            max_new_tokens=args.tokens,
            do_sample=True,
            top_k=0,
            seed=0,
            eos_token_id=[],
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        rows.append(
            {
                "speed": statistics.median(speeds),
                "itself": statistics.median(itself),
                "accepted": other.stats.accepted_per_step,
                "sampled": drawn.stats.accepted_per_step,
                "same": torch.equal(one.sequences, other.sequences),
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table: speed over plain, and tokens a step, by kind; how far plain decoding is off itself,
    by kind, in the mean and at most."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [f"| recipe | bits | {' | '.join(kinds)} | mean | least | noise |"]
    lines.append("|" + "---|" * (len(kinds) + 5))
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["recipe"], row["bits"]), {})[row["kind"]] = row
    for (name, bits), found in cells.items():
        shown = [
            f"{each['speed']:.2f} ({each['accepted']:.2f})" + ("" if each["same"] else " other")
            for each in (found[kind] for kind in kinds)
        ]
        speeds = [each["speed"] for each in found.values()]
        mean, least = statistics.mean(speeds), min(speeds)
        off = [abs(each["itself"] - 1) for each in found.values()]
        noise = f"{statistics.mean(off):.2f}, {max(off):.2f}"
        lines.append(
            f"| `{name}` | {bits} | {' | '.join(shown)} | {mean:.2f} | {least:.2f} | {noise} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--recipes", required=True)
    parser.add_argument("--bits", default=",".join(BITS))
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", action="append", default=[], metavar="RECIPE.PASS.OPTION=VALUE")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = Target.parse(args.target, threads=args.threads)
    said = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    kinds = [row.get("kind", str(index)) for index, row in enumerate(said)][: args.count]
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    for bits in args.bits.split(","):
        known = {row["recipe"] for row in rows if row["bits"] == bits}
        left = [name for name in args.recipes.split(",") if name not in known]
        if not left:
            continue
        plain = gw.optimize(args.model, over("baseline", bits, []), target=target)
        prompts = prompts_of(args.prompts, plain, args.model.stem, args.count)
        for name in left:
            fast = gw.optimize(args.model, over(name, bits, args.set), target=target)
            found = zip(kinds, measured(plain, fast, prompts, args), strict=True)
            rows += [
                rounded({"model": args.model.name, "recipe": name, "bits": bits, "kind": k} | row)
                for k, row in found
            ]
            args.json.write_text(json.dumps(rows, indent=1))
            print(markdown([row for row in rows if row["recipe"] == name]), flush=True)
    if args.markdown:
        args.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
