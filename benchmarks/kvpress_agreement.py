"""Rows that evicting recipes keep next to those that kvpress keeps (pip install kvpress).

    python benchmarks/kvpress_agreement.py MODEL --text FILE_OR_FOLDER [--budget 256] [--block 256]
        [--count 4]

Windows of the text have as many tokens as a cache holds before it loses rows: `budget` and `block`
of them, of which `budget` stay. graftwork runs its recipe; kvpress scores the rows of the same
transformers model, layer by layer, by its own `score`. `agreement`: of the rows that one keeps,
those that the other keeps, too, over windows, layers and heads; `least`: of a layer and a head.
`by_chance`: what choosing at random gives. Methods that kvpress has in another form are named with
what differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import graftwork as gw
from graftwork.runtime.cache.conversations import Conversations

METHODS: dict[str, tuple[dict[str, Any], Callable[[], Any], str]] = {
    "window": ({"sinks": 4}, lambda: kvpress.StreamingLLMPress(n_sink=4), ""),
    "norm": ({}, kvpress.KnormPress, ""),
    "keydiff": ({}, kvpress.KeyDiffPress, ""),
    "tova": ({}, kvpress.TOVAPress, "kvpress keeps the last row in any case"),
    "snapkv": ({"recent": 32}, lambda: kvpress.SnapKVPress(window_size=32), ""),
    "expected": (
        {"ahead": 512},
        lambda: kvpress.ExpectedAttentionPress(n_future_positions=512),
        "queries of the last block, where kvpress has those of the whole text",
    ),
}
"""By method of evict_cache: its options, the press, what differs."""


def theirs(model: Any, press: Any, ids: torch.Tensor, budget: int) -> torch.Tensor:
    """Rows i64[L,G,budget] that the press keeps of a text i64[1,N], in order."""
    cache, kept, hooks = DynamicCache(config=model.config), [], []
    press.compression_ratio = 1 - budget / ids.shape[1]

    def choose(module: Any, _: Any, kwargs: dict[str, Any], __: Any) -> None:
        layer = cache.layers[module.layer_idx]
        scores = press.score(
            module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs
        )
        kept.append(scores.topk(budget, dim=-1).indices[0].sort(-1).values)

    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(choose, with_kwargs=True))
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return torch.stack(kept)


def ours(model: gw.Model, full: list[torch.Tensor], ids: torch.Tensor, budget: int) -> torch.Tensor:
    """Rows i64[L,G,budget] that the recipe keeps of a text i64[1,N], in order.

    full: keys f32[G,N,D] of each layer, among which those in the cache are found again.
    """
    model.forget()
    more = torch.cat([ids, ids[:, -1:]], 1)  # rows are lost before the next token is fed
    model.generate(more, max_new_tokens=1, do_sample=False, eos_token_id=[])
    executable = model.executable
    conversation = Conversations.of(executable).lying[0]
    assert conversation is not None and conversation.rows == budget + 1, conversation
    kept = []
    for layer, keys in enumerate(full):
        name = f"kv.{layer}.key"
        rows = executable.read_rows([name], 0, 0, budget)[name]
        exact = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(rows.float(), keys.float(), compute_mode=exact)
        assert float(distances.min(-1).values.max()) < 1e-3, "rows that the text has not"
        kept.append(distances.argmin(-1).sort(-1).values)
    return torch.stack(kept)


def keys_of(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Keys f32[G,N,D] of each layer."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return [layer.keys[0] for layer in cache.layers]


def shared(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of the rows [L,G,budget], the share f32[L,G] that both have."""
    both = (one[..., :, None] == other[..., None, :]).any(-1)
    return both.float().mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder of a llama")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--count", type=int, default=4, help="windows")
    args = parser.parse_args()
    files = sorted(args.text.glob("*.*")) if args.text.is_dir() else [args.text]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = "\n".join(file.read_text(errors="ignore") for file in files[: args.count])
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    size = args.budget + args.block
    windows = tokens[: len(tokens) // size * size].reshape(-1, 1, size)[: args.count]
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    for method, (options, press, differs) in METHODS.items():
        given = {"method": method, "budget": args.budget, "block": args.block, **options}
        recipe = {"title": method, "contract": "approximate", "extends": "baseline"}
        model = gw.optimize(
            args.model, recipe | {"passes": [{"evict_cache": given}]}, target="eager:cpu:float32"
        )
        shares = []
        for ids in windows:
            full = keys_of(reference, ids)
            kept = theirs(reference, press(), ids, args.budget)
            shares.append(shared(kept, ours(model, full, ids, args.budget)))
        found = torch.stack(shares)
        row = {
            "agreement": round(float(found.mean()), 4),
            "least": round(float(found.min()), 4),
            "by_chance": round(args.budget / size, 3),
            **({"differs": differs} if differs else {}),
        }
        print(f"{method:<9} {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
