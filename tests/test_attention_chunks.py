"""Attention within chunks of positions (Llama 4): steps, trees, ragged batches and few bits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from selection import mostly_long, on_backends
from test_architectures import same_tokens

import graftwork as gw

NEW = 14
EXACT = ("copyspec", "recycling", "medusa", "eagle_chain", "eagle2")

pytestmark = pytest.mark.filterwarnings("ignore:.*untrained")


@lru_cache
def model() -> Any:
    """One layer in chunks of five, one that sees everything."""
    made = build(ARCHS["llama4_text"])
    made.config.eos_token_id = made.generation_config.eos_token_id = None
    return made


@lru_cache
def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """i64[3,13] and its mask: texts that begin at other columns than chunks do."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 128, (3, 13), generator=generator)
    ids[0, 7:] = ids[0, 1:7]
    mask = torch.ones_like(ids)
    mask[1, :6], mask[2, :11] = 0, 0
    return ids * mask, mask


@lru_cache
@torch.no_grad()
def expected() -> list[torch.Tensor]:
    """Greedy texts of transformers, by whole forward passes, each alone."""
    found = []
    for row, own in zip(*prompts(), strict=True):
        ids = row[own.bool()][None]
        for _ in range(NEW):
            logits = model()(input_ids=ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        found.append(ids[0])
    return found


def check(fast: Any) -> None:
    ids, mask = prompts()
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [], "pad_token_id": 0}
    found = fast.generate(ids, attention_mask=mask, **options)
    for row, own, want in zip(found, mask, expected(), strict=True):
        assert same_tokens(model(), row[int((own == 0).sum()) :], want)
    alone = fast.generate(ids[:1], **options)
    assert same_tokens(model(), alone[0], expected()[0])


@pytest.mark.parametrize(
    ("recipe", "target"), on_backends(EXACT, ("recycling",), rare=tuple(set(EXACT) - {"recycling"}))
)
def test_drafts_change_no_text(recipe: str, target: str) -> None:
    check(gw.optimize(model(), recipe, target=target))


def test_without_our_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's kernels know no chunks: attention reads a mask."""
    from onnxruntime_helpers import without_own_attention

    without_own_attention(monkeypatch)
    check(gw.optimize(model(), "recycling", target="onnxruntime"))


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["baseline", "recycling"])
def test_texts_when_compiled(recipe: str) -> None:
    check(gw.optimize(model(), recipe, target="torch"))


@pytest.mark.parametrize("recipe", ["kv_int8", pytest.param("int8", marks=pytest.mark.long)])
def test_few_bits_are_the_same_on_both_backends(recipe: str) -> None:
    """And alone as among others."""
    ids, mask = prompts()
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [], "pad_token_id": 0}
    found = []
    for target in ("eager", "onnxruntime"):
        fast = gw.optimize(model(), recipe, target=target)
        found.append(fast.generate(ids, attention_mask=mask, **options))
        assert torch.equal(fast.generate(ids[:1], **options)[0], found[-1][0])
    assert torch.equal(*found)


def test_rows_that_a_batch_shares() -> None:
    """Some of them in a token's chunk, some before it."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 128, (1, 38), generator=generator).repeat(3, 1)
    ids[:, 33:] = torch.randint(3, 128, (3, 5), generator=generator)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [], "pad_token_id": 0}
    found, plain = (
        gw.optimize(model(), recipe, target="eager").generate(ids, **options)
        for recipe in ("hydragen", "baseline")
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize(
    "recipe", mostly_long(("streaming_llm", "shadowkv", "pie"), keep=("streaming_llm",))
)
def test_what_would_shift_chunks_is_refused(recipe: str) -> None:
    with pytest.raises(gw.GraftworkError, match=r"(looks back over|see other rows|chunks of) ?"):
        gw.optimize(model(), recipe, target="eager")
