"""Prompts as rows (`inputs_embeds`): the text of transformers, in batches and under drafts."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import graftwork as gw
from graftwork.ir import GraftworkWarning, InputError
from graftwork.runtime.asking.request import read_request

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 8},  # the embedding scales its rows
    "granite": {"embedding_multiplier": 3.0},  # the model does
    "gpt2": {"n_positions": 96},  # positions are added
}
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
ASKED: list[dict[str, Any]] = [
    {},
    {"attention_mask": MASK},
    {"attention_mask": MASK, "input_ids": IDS},
    {"repetition_penalty": 1.4, "min_length": 15},
    {"max_length": 20, "max_new_tokens": None},
    {"input_ids": IDS, "no_repeat_ngram_size": 2},
    {"num_beams": 3},
]
ALL = range(len(ASKED))


@cache
def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model


@cache
def rows_of(kind: str, noise: float = 0.05) -> torch.Tensor:
    """Near the rows of some tokens, but of none."""
    rows = model_of(kind).get_input_embeddings()(IDS).detach()
    return rows + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))


@cache
def made_of(kind: str, recipe: str, target: str) -> gw.Model:
    return gw.optimize(model_of(kind), recipe, target=target)


@cache
def expected(kind: str, number: int) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = {**GREEDY, **ASKED[number]}
        return model_of(kind).generate(inputs_embeds=rows_of(kind), **asked).tolist()


def check(kind: str, recipe: str, target: str, numbers: Any = ALL) -> None:
    made = made_of(kind, recipe, target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)
        for number in numbers:
            asked = {**GREEDY, **ASKED[number]}
            found = made.generate(inputs_embeds=rows_of(kind), **asked)
            assert found.tolist() == expected(kind, number), (kind, recipe, target, asked)


@pytest.mark.parametrize(
    "kind", ["llama", "granite", pytest.param("gemma3_text", marks=pytest.mark.long)]
)
def test_texts_are_those_of_transformers(kind: str) -> None:
    check(kind, "baseline", "eager", ALL if kind == "llama" else (0, 2))


@pytest.mark.parametrize(
    "recipe",
    ["copyspec", *(pytest.param(n, marks=pytest.mark.long) for n in ("eagle", "eagle_chain"))],
)
def test_drafts_change_no_text(recipe: str) -> None:
    """Those that copy have the known tokens alone; those that read the prompts' are left out."""
    check("llama", recipe, "eager", (0, 2))


@pytest.mark.long
@pytest.mark.parametrize("target", ["onnxruntime", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_targets(kind: str, target: str) -> None:
    check(kind, "baseline", target)
    check(kind, "copyspec", target, (0, 2))


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    ["recycling", "jacobi", "lookahead", "aggressive", "layerskip", "medusa", "calm", "swift"],
)
def test_recipes(recipe: str) -> None:
    check("llama", recipe, "eager", ALL[:-1])  # calm has no beams


@pytest.mark.parametrize("recipe", ["kv_int8", "int8"])
def test_rows_of_tokens_are_these_tokens(recipe: str, tmp_path: Path) -> None:
    """In any numerics; a saved artifact reads them, too, and samples alike."""
    made = made_of("llama", recipe, "eager")
    rows = model_of("llama").get_input_embeddings()(IDS).detach()
    if recipe == "int8":  # the model's own table has few bits
        made, rows = gw.load(made.save(tmp_path / "saved")), rows_of("llama", 0.0)
    asked = {**GREEDY, "attention_mask": MASK, "do_sample": True, "seed": 3}
    found = made.generate(inputs_embeds=rows, input_ids=IDS, **asked)
    assert found.shape == (2, 29) and torch.equal(found[:, :9], IDS)
    alone = made.generate(inputs_embeds=rows, **asked)
    assert torch.equal(alone, found[:, 9:])
    if recipe == "kv_int8":
        assert torch.equal(found, made.generate(IDS, **asked))
    # Prompts of tokens go on as before, and what is cached of them is theirs.
    first = made.generate(IDS, attention_mask=MASK, **GREEDY)
    made.generate(inputs_embeds=rows_of("llama"), **GREEDY)
    assert torch.equal(made.generate(IDS, attention_mask=MASK, **GREEDY), first)


def test_hooks_see_tokens_that_exist() -> None:
    made, seen = made_of("llama", "copyspec", "eager"), []

    def hook(ids: torch.Tensor, scores: Any) -> Any:
        seen.append(ids[0].tolist())
        return scores

    text = made.generate(inputs_embeds=rows_of("llama")[:1], logits_processor=[hook], **GREEDY)
    assert seen[0] == [] and all(ids == text[0, : len(ids)].tolist() for ids in seen[:1])
    request = read_request(
        torch.zeros(2, 0, dtype=torch.int64),
        {"inputs_embeds": rows_of("llama"), "attention_mask": MASK},
        made.program,
    )
    assert [text.unknown for text in request.texts] == [6, 9]
    assert all(text.known == [] for text in request.texts)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"inputs_embeds": torch.zeros(2, 9, 31)}, "expected rows of 32 numbers.*got 31"),
    ({"inputs_embeds": torch.zeros(2, 9, 32).long()}, "expected rows f.*int64"),
    ({"inputs_embeds": torch.zeros(9, 32)}, r"expected rows f.*\[9, 32\]"),
    ({"inputs_embeds": torch.zeros(2, 0, 32)}, r"expected rows f.*\[2, 0, 32\]"),
    ({"inputs_embeds": torch.full((1, 2, 32), float("nan"))}, "expected finite numbers"),
    ({"inputs_embeds": torch.zeros(2, 8, 32), "input_ids": IDS}, r"i64\[2, 8\], or none, got"),
    (
        {"inputs_embeds": torch.zeros(2, 9, 32), "attention_mask": MASK[:, 1:]},
        r"attention_mask: expected the shape of inputs_embeds \[2, 9\]",
    ),
    ({"inputs_embeds": torch.zeros(1, 96, 32)}, "the prompt has 96 tokens, and the model's"),
    ({"inputs_embeds": torch.zeros(1, 90, 32)}, "exceed the model's context"),
    ({"inputs_embeds": torch.zeros(1, 3, 32), "guidance_scale": 2.0}, "no guidance_scale beside"),
    ({"inputs_embeds": [[1.0]]}, "expected a tensor"),
]


@pytest.mark.parametrize(("asked", "message"), BAD, ids=lambda v: str(v)[:30])
def test_bad_input(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made_of("llama", "baseline", "eager").generate(**{**GREEDY, **asked})
