"""Caches of few bits that lose rows: weighed as what they stand for, moved as they are."""

from __future__ import annotations

import pytest
import torch
from selection import one_in
from test_eviction import LAYERS, TEXT, Reference, asked, evicting, executable_of

import graftwork as gw
from graftwork.cli.demo import demo_folder
from graftwork.ir import PassError
from graftwork.ir.plan import DraftRecord
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate

CASES = [("keydiff", 8), ("h2o", 8), ("expected", 4), ("pyramid", 8)]


@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "bits"), CASES)
def test_it_keeps_what_the_papers_rule_keeps(name: str, bits: int, backend: str) -> None:
    """Tokens and codes, through a prompt of several blocks and in decoding."""
    reference, prompt = Reference(name, bits=bits), TEXT[0].tolist()
    wanted = reference.decode(prompt, 33)
    executable = executable_of(evicting(name, bits=bits), backend)
    assert generate(executable, TEXT, **asked(33))[0, len(prompt) :].tolist() == wanted
    for layer in range(LAYERS):
        name = f"kv.{layer}.value.codes"
        whole = reference.executable.states[name][0].int()
        whole = whole.repeat_interleave(reference.groups // 2, 0)
        found = executable.buffers.tensors[name][0].int()
        for group, held in enumerate(reference.held[layer]):
            # A last bit may move a number to the next code.
            apart = (found[group, : len(held)] - whole[group, held]) != 0
            assert apart.float().mean() < 0.01


@pytest.mark.parametrize("draft", [SuffixDraft(tokens=5), RecyclingDraft(nodes=7)])
@pytest.mark.parametrize("name", one_in(2, ["snapkv", "norm"]))
def test_drafts_change_nothing(name: str, draft: DraftRecord) -> None:
    plain = executable_of(evicting(name, bits=8), "onnxruntime")
    fast = executable_of(evicting(name, draft=draft, bits=8), "onnxruntime")
    found = generate(fast, TEXT, return_dict_in_generate=True, **asked(50))
    assert found.stats.accepted_tokens > 3
    assert torch.equal(found.sequences, generate(plain, TEXT, **asked(50)))


def test_codes_are_not_turned() -> None:
    with pytest.raises(PassError, match="stored in few bits: use positions='absolute'"):
        evicting("norm", bits=8, positions="cache")


@pytest.mark.long
def test_recipes_compose() -> None:
    evict = {"evict_cache": {"method": "norm", "budget": 64, "block": 32}}
    both = {"title": "both", "contract": "approximate", "extends": "kv_int8", "passes": [evict]}
    sizes = {}
    for name, recipe in {"full": "kv_int8", "both": both}.items():
        fast = gw.optimize(str(demo_folder()), recipe, target="onnxruntime")
        fast.generate(torch.arange(300)[None] % 50, max_new_tokens=4, do_sample=False)
        sizes[name] = fast.cache_bytes()
    assert sizes["both"] <= 0.5 * sizes["full"]


@pytest.mark.long
def test_it_runs_compiled() -> None:
    plain = generate(executable_of(evicting("keydiff", bits=8)), TEXT, **asked(20))
    compiled = executable_of(evicting("keydiff", bits=8), "torch")
    assert torch.equal(generate(compiled, TEXT, **asked(20)), plain)
