"""A tiny program of every bundled recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from evidence import evidence_for
from selection import rarely
from tiny import layer_ahead, tiny_llama

from graftwork.frontends.huggingface.masked import both_ways
from graftwork.ir import Program
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.recipe import Recipe, recipes

QUANTIZED = ("round_activations",)
"""Recipes for checkpoints that are quantized already."""

SPREAD = ("tensor_parallel",)
"""Recipes whose programs several processes run together: `test_shard_tensors` has those."""

RECURRENT = ("quamba2",)
"""Recipes for models with recurrences: `test_quantize_scan` has those."""

WINDOWED = ("hold_windows",)
"""Recipes for models with sliding windows: `test_windows` has those."""

TRANSLATED = ("token_intersection", "universal_assisted", "reward_guided", "transfer_q")
"""Recipes for models with tokenizers: `test_other_vocabulary`, `test_rewarded` and `test_valued`
have those."""

OTHERS = (*QUANTIZED, *SPREAD, *RECURRENT, *WINDOWED, *TRANSLATED)
NAMES = [recipe.name for recipe in recipes() if recipe.name not in OTHERS]

FLOAT32 = ("kv_int8_static", "kv_int4_static")
"""Recipes that refuse other dtypes."""

CASES = rarely(
    NAMES, 3, keep=("baseline", "eagle_chain", "medusa", "lookahead", "snapkv", "free", "kangaroo")
)
"""All of them as parameters: one of each kind every day, of the others a third in the long run and
the rest in the sweep."""


def program_of(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Program:
    """A recipe's program, given what it needs: another model, a corpus, calibration text."""
    return made_by(steps_of(name, folder), dtype)


def made_by(steps: Sequence[Step], dtype: torch.dtype = torch.float32) -> Program:
    """What passes make of a tiny model that has other models beside it, given text."""
    other = tiny_llama(seed=1, dtype=dtype)
    guests = {"other": other, "both ways": both_ways(other), "mtp.0": layer_ahead(dtype=dtype)}
    start = tiny_llama(4, dtype=dtype).replace(guests=guests)
    evidence = evidence_for(start) if any(step.pass_.text for step in steps) else None
    return run_passes(start, steps, evidence=evidence)[0]


def steps_of(name: str, folder: Path) -> Sequence[Step]:
    """A recipe's passes, with options that fit the tiny model."""
    corpus = folder / "corpus.json"
    corpus.write_text("[[1, 2, 3]]")
    brought = {"draft_model.model": "other", "draft_corpus.path": str(corpus)}
    brought |= {"depth_entropy.model": "other", "contrast_model.model": "other"}
    brought |= {"verify_suspicion.model": "other"}
    brought |= {"draft_fastcot.answer": "[1]"}
    brought |= {"draft_diffusion_model.model": "both ways", "draft_diffusion_model.token": "5"}
    brought |= {"draft_diffusion_model.window": "16"}
    few = {"budget": "64", "block": "32", "ahead": "64"}  # of a context of 128
    few |= {"sinks": "32"} if name == "moa" else {}
    brought |= {f"evict_cache.{name}": rows for name, rows in few.items()}
    brought |= {"quantize_old_rows.residual": "64", "quantize_old_rows.block": "64"}
    brought |= {"read_sparse.rows": "16", "read_sparse.picks": "1", "read_sparse.channels": "4"}
    brought |= {"read_chunks.rows": "16"}
    brought |= {"sum_dropped.steps": "2", "sum_dropped.windows": "1"}
    brought |= {"predict_cache.windows": "2", "predict_cache.length": "96"}
    brought |= {"depth_mlp.first": "1", "depth_mlp.last": "1"}  # of four layers
    recipe = Recipe.load(name)
    uses = {use.name for use in recipe.passes}
    given = [f"{key}={value}" for key, value in brought.items() if key.split(".")[0] in uses]
    return recipe.with_options(given).steps
