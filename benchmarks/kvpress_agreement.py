"""Rows that evicting recipes keep next to those that kvpress keeps (pip install kvpress).

    python benchmarks/kvpress_agreement.py MODEL --text FILE_OR_FOLDER [--budget 256] [--block 256]
        [--count 4] [--methods window,norm,...]

Windows of the text have as many tokens as a cache holds before it loses rows: `budget` and `block`
of them, of which `budget` stay. graftwork runs its recipe; kvpress scores the rows of the same
transformers model, layer by layer, by its own `score`. `agreement`: of the rows that one keeps,
those that the other keeps, too, over windows, layers and heads; `least`: of a layer and a head.
`by_chance`: what choosing at random gives. Methods that kvpress has in another form are named with
what differs.

Where layers or heads have budgets of their own, rows are dropped `UNEVEN` at a time, and each cache
is looked at where it first loses some, if no layer below has lost any before: kvpress chooses as
many of its text so far (`caches`: how many could be looked at). How many rows each keeps is a row
of its own: `budgets`, by layer or head, next to kvpress's for the same windows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoTokenizer, DynamicCache

import graftwork as gw
from graftwork.frontends.huggingface.model import load_model
from graftwork.ir.plan import Evict

UNEVEN = 64
"""Rows dropped at a time where caches have budgets of their own, which are multiples of it."""

Scores = Callable[[torch.Tensor, int], torch.Tensor]


def as_they_are(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """A press's scores f32[G,N]."""
    return scores


def summed(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """Means over the queries that see a row as sums, and the latest half of the budget first."""
    count = scores.shape[-1]
    sums = scores * torch.arange(count, 0, -1)
    sums[..., count - budget // 2 :] = float("inf")
    return sums


def pyramid_budgets(model: Any, press: Any, windows: torch.Tensor, budget: int) -> list[int]:
    """What kvpress leaves each layer of texts i64[N,1,T]."""
    press.compression_ratio = 1 - budget / windows.shape[-1]
    modules = [layer.self_attn for layer in model.model.layers]
    return [press.get_layer_budget(module, windows.shape[-1]) for module in modules]


def head_budgets(model: Any, press: Any, windows: torch.Tensor, budget: int) -> list[int]:
    """What kvpress's AdaKV leaves each head of texts i64[N,1,T], on average."""
    whole = kvpress.AdaKVPress(press)
    counts = []
    for ids in windows:
        whole.compression_ratio = 1 - budget / ids.shape[1]
        for layer, module, given in attended(model, ids):
            whole.compress(module, given["hidden_states"], layer.keys, layer.values, None, given)
            dropped = torch.bincount(module.masked_key_indices[1], minlength=layer.keys.shape[1])
            counts.append(ids.shape[1] - dropped)
            module.masked_key_indices = None
    kept = torch.stack(counts).reshape(len(windows), -1)
    return kept.float().mean(0).round().int().tolist()


@dataclass(frozen=True)
class Comparison:
    """A method of both.

    press: kvpress's. options: of evict_cache. differs: what kvpress has otherwise. scores: what its
    scores become. budgets: what it leaves each cache, where that differs.
    """

    press: Callable[[], Any]
    options: dict[str, Any]
    differs: str = ""
    scores: Scores = as_they_are
    budgets: Callable[[Any, Any, torch.Tensor, int], list[int]] | None = None
    before: tuple[str, ...] = field(default=())


snapkv = partial(kvpress.SnapKVPress, window_size=32)
COMPARISONS = {
    "window": Comparison(
        partial(kvpress.StreamingLLMPress, n_sink=4), {"method": "window", "sinks": 4}
    ),
    "norm": Comparison(kvpress.KnormPress, {"method": "norm"}),
    "keydiff": Comparison(kvpress.KeyDiffPress, {"method": "keydiff"}),
    "tova": Comparison(
        kvpress.TOVAPress, {"method": "tova"}, "kvpress keeps the last row in any case"
    ),
    "snapkv": Comparison(snapkv, {"method": "snapkv", "recent": 32}),
    "expected": Comparison(
        partial(kvpress.ExpectedAttentionPress, n_future_positions=512),
        {"method": "expected", "ahead": 512},
        "queries of the last block, where kvpress has those of the whole text",
    ),
    "h2o": Comparison(
        kvpress.ObservedAttentionPress,
        {"method": "h2o"},
        "kvpress's scores times the queries that see a row, which it divides by, and the latest "
        "half of the budget, which it does not keep",
        scores=summed,
    ),
    "h2o as it is": Comparison(
        kvpress.ObservedAttentionPress,
        {"method": "h2o"},
        "kvpress divides by the queries that see a row, and keeps no latest rows",
    ),
    "pyramidkv": Comparison(
        partial(kvpress.PyramidKVPress, window_size=32),
        {"method": "snapkv", "layers": "pyramid", "recent": 32},
        "kvpress counts the latest rows among those that are chosen: its last layer keeps no other",
        budgets=pyramid_budgets,
    ),
    "adakv": Comparison(
        snapkv,
        {"method": "snapkv", "layers": "adaptive", "recent": 32},
        "kvpress finds the budgets of each text, and a head's fifth counts the latest rows",
        budgets=head_budgets,
        before=("split_heads",),
    ),
}


@dataclass(frozen=True)
class Cache:
    """A state of keys: of a layer, its heads from `first` on, and how many rows it keeps."""

    name: str
    layer: int
    first: int
    heads: int
    budget: int


def caches_of(model: gw.Model) -> list[Cache]:
    """The model's caches, layer by layer."""
    record, found, heads = model.program.plan.cache, list[Cache](), dict[int, int]()
    assert isinstance(record, Evict)
    budgets = dict(zip(record.capacities, record.budgets, strict=True))
    for state in model.program.states.values():
        if state.part != "key":
            continue
        first, count = heads.get(state.layer, 0), int(str(state.type.dims[1]))
        budget = budgets.get(state.capacity or "", record.budget)
        found.append(Cache(state.name, state.layer, first, count, budget))
        heads[state.layer] = first + count
    return found


def attended(model: Any, ids: torch.Tensor) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Of each layer its cache, its module, and what that was given with a text i64[1,N]; the
    weights of its attention are `attentions`."""
    cache, seen, hooks = DynamicCache(config=model.config), [], []

    def watch(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append((module, {**kwargs, "attentions": output[1]}))

    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(watch, with_kwargs=True))
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    for module, given in seen:
        yield cache.layers[module.layer_idx], module, given


def theirs(model: Any, press: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each layer kvpress's scores f32[G,N] of a text i64[1,N]."""
    return [
        press.score(
            *(module, given["hidden_states"], layer.keys, layer.values),
            given["attentions"],
            given,
        )[0]
        for layer, module, given in attended(model, ids)
    ]


def fed(model: gw.Model, ids: torch.Tensor) -> None:
    """Let the caches take in a text i64[1,N] and lose rows."""
    model.forget()
    more = torch.cat([ids, ids[:, -1:]], 1)  # rows are lost before the next token is fed
    model.generate(more, max_new_tokens=1, do_sample=False, eos_token_id=[])


def ours(model: gw.Model, full: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Rows i64[G,budget] that a cache keeps of the text that was fed, in order.

    full: keys f32[G,N,D] of its heads, among which those in the cache are found again.
    """
    rows = model.executable.read_rows([cache.name], 0, 0, cache.budget)[cache.name]
    exact = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(rows.reshape(full.shape[0], -1, full.shape[2]).float(), full.float())
    near = distances.argmin(-1)
    picked = full.gather(1, near[..., None].expand(-1, -1, full.shape[2]))
    away = torch.cdist(rows.reshape(picked.shape).float(), picked, compute_mode=exact)
    assert float(away.diagonal(dim1=-2, dim2=-1).max()) < 1e-3, "rows that the text has not"
    return near.sort(-1).values


def shares(
    model: gw.Model, reference: Any, comparison: Comparison, windows: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[Cache]]:
    """Of the rows that are kept, what both keep, f32[windows,heads], and of which caches: see the
    module docstring."""
    caches, found = caches_of(model), []
    record = model.program.plan.cache
    assert isinstance(record, Evict)
    looked = [
        cache
        for cache in caches
        if all(other.budget >= cache.budget for other in caches if other.layer < cache.layer)
        and cache.budget + record.block <= windows[0].shape[1]
    ]
    for ids in windows:
        row = []
        for budget in dict.fromkeys(cache.budget for cache in looked):
            part, press = ids[:, : budget + record.block], comparison.press()
            press.compression_ratio = 1 - budget / part.shape[1]
            scores = theirs(reference, press, part)
            keys = [layer.keys[0] for layer, _, _ in attended(reference, part)]
            fed(model, part)
            for cache in (cache for cache in looked if cache.budget == budget):
                heads = slice(cache.first, cache.first + cache.heads)
                weighed = comparison.scores(scores[cache.layer][heads], budget)
                kept = ours(model, keys[cache.layer][heads], cache)
                row.append(shared(kept, weighed.topk(budget).indices))
        found.append(torch.cat(row))
    return torch.stack(found), looked


def shared(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of the rows [G,budget], the share f32[G] that both have."""
    both = (one[..., :, None] == other[..., None, :]).any(-1)
    return both.float().mean(-1)


def compare(
    args: argparse.Namespace, comparison: Comparison, reference: Any, windows: torch.Tensor
) -> dict[str, Any]:
    """The figures of a method."""
    block = UNEVEN if comparison.budgets else args.block
    given = {"budget": args.budget, "block": block, **comparison.options}
    adaptive = given.get("layers") == "adaptive"
    if adaptive:
        given |= {"windows": len(windows), "length": windows.shape[-1]}
    passes = [*comparison.before, {"evict_cache": given}]
    recipe = {"title": "compared", "contract": "approximate", "extends": "baseline"}
    data = [ids[0].tolist() for ids in windows] if adaptive else None
    model = gw.optimize(
        args.model, recipe | {"passes": passes}, target="eager:cpu:float32", data=data
    )
    found, looked = shares(model, reference, comparison, list(windows))
    heads = [cache for cache in looked for _ in range(cache.heads)]
    chance = sum(cache.budget / (cache.budget + block) for cache in heads) / len(heads)
    row: dict[str, Any] = {
        "agreement": round(float(found.mean()), 4),
        "least": round(float(found.min()), 4),
        "by_chance": round(chance, 3),
    }
    if comparison.budgets is not None:
        caches = caches_of(model)
        row["caches"] = f"{len(looked)} of {len(caches)}"
        row["budgets"] = [cache.budget for cache in caches]
        row["theirs"] = comparison.budgets(reference, comparison.press(), windows, args.budget)
    return row | ({"differs": comparison.differs} if comparison.differs else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder of a llama")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--count", type=int, default=4, help="windows")
    parser.add_argument("--methods", default=",".join(COMPARISONS))
    args = parser.parse_args()
    files = sorted(args.text.glob("*.*")) if args.text.is_dir() else [args.text]
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    text = "\n".join(file.read_text(errors="ignore") for file in files[: args.count])
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    size = args.budget + args.block
    windows = tokens[: len(tokens) // size * size].reshape(-1, 1, size)[: args.count]
    load = partial(load_model, args.model, dtype=torch.float32)
    plain, eager = load().eval(), load(attn_implementation="eager").eval()
    for name in args.methods.split(","):
        comparison = COMPARISONS[name]
        weighs = comparison.press is kvpress.ObservedAttentionPress
        row = compare(args, comparison, eager if weighs else plain, windows)
        print(f"{name:<13} {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
