"""Reward models that decide who writes: how they are read, and the paper's algorithm as loops."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_texts import check_kept
from selection import mostly_long
from small_llama import small_llama
from test_runtime_sampling import assert_distributed
from test_serving_engine import served
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

import graftwork as gw
from graftwork.frontends import import_scoring
from graftwork.ir import GraftworkWarning, InputError, PassError, Program, UnsupportedError, run

SIZE, END, NEW, MOST = 40, 39, 24, 6
WORDS = [f"{word} " for word in range(36)] + [".\n", "\n", "!\n\n", "<end>"]
ENDS = (36, 37, 38)
"""Tokens that write a new line."""

PROMPTS = [[5, 6, 7, 5, 6, 9, 5, 6], [11, 3, 11, 3, 12], [36, 8, 1, 2], [4, 4, 9]]
SCORED: dict[str, Any] = {
    **{"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": END},
    "initializer_range": 0.3,
}

PLAIN: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}


@cache
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return small_llama(SIZE, END, pad_token_id=END, num_hidden_layers=3, max_position_embeddings=96)


@cache
def drafter() -> LlamaForCausalLM:
    """The target with other weights in its last layer."""
    other = copy.deepcopy(target())
    torch.manual_seed(7)
    for weight in other.model.layers[-1].parameters():
        weight.data += 0.7 * weight.data.std() * torch.randn_like(weight)
    return other


@cache
def judge(kind: str) -> Any:
    """One score for a text, or two labels for each token."""
    torch.manual_seed(30)
    made = {"score": LlamaForSequenceClassification, "labels": LlamaForTokenClassification}[kind]
    return made(LlamaConfig(**SCORED, num_labels=1 + (kind == "labels"))).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three models, with a tokenizer of whole words."""
    whole = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<end>"))
    whole.decoder = decoders.Fuse()
    saved = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>")
    path = tmp_path_factory.mktemp("models")
    for name, made in (
        ("target", target()),
        ("draft", drafter()),
        ("score", judge("score")),
        ("labels", judge("labels")),
    ):
        made.save_pretrained(path / name)
        saved.save_pretrained(path / name)
    return path


def model(
    folders: Path, *more: str, threshold: float = 0.5, on: str = "eager", kind: str = "score"
) -> gw.Model:
    options = {
        "verify_rewarded": {"model": str(folders / kind), "threshold": threshold},
        "draft_model": {"model": str(folders / "draft"), "levels": MOST},
        "tree_chain": {"depth": MOST},
        "length_stretch": {"until": "\n", "most": MOST},
    }
    passes: list[Any] = [*more, *({name: given} for name, given in options.items())]
    recipe = gw.Recipe.load({"name": "guided", "extends": "baseline", "passes": passes})
    return gw.optimize(folders / "target", recipe, target=on)


def next_of(model: LlamaForCausalLM, text: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([text])).logits[0, -1].argmax())


def reward(text: list[int], kind: str) -> float:
    with torch.no_grad():
        scores = judge(kind)(input_ids=torch.tensor([text])).logits[0]
    return float(scores[0].sigmoid() if kind == "score" else scores[-1].softmax(-1)[1])


def by_hand(prompt: list[int], threshold: float, kind: str) -> tuple[list[int], int, int]:
    """The paper's Algorithm 1 with a threshold: the new tokens, and how many steps each model
    wrote. The first token is the target's, and steps are at most `MOST` tokens long."""
    text = [*prompt, next_of(target(), prompt)]
    limit, ours, theirs = len(prompt) + NEW, 0, 0
    while len(text) < limit:
        step: list[int] = []
        while len(text) + len(step) < limit and len(step) < MOST:
            step.append(next_of(drafter(), text + step))
            if step[-1] in (*ENDS, END):
                break
        if reward(text + step, kind) >= threshold:
            text, ours = text + step, ours + 1
            continue
        theirs += 1
        while len(text) < limit:
            text.append(next_of(target(), text))
            if text[-1] in (*ENDS, END):
                break
    return text[len(prompt) :], ours, theirs


TARGETS = ["eager", "onnxruntime:cpu:float32", "torch:cpu:float32"]


CASES = [f"{kind}-{on}" for kind in ("score", "labels") for on in TARGETS]


@pytest.mark.parametrize("case", mostly_long(CASES, [CASES[0], CASES[1], CASES[3]]))
def test_texts_are_the_papers(case: str, folders: Path) -> None:
    """Alone and side by side, where one text's step may be the target's and another's is not."""
    kind, on = case.split("-")
    fast = model(folders, on=on, kind=kind)
    wanted = [by_hand(prompt, 0.5, kind) for prompt in PROMPTS]
    assert sum(ours for _, ours, _ in wanted) > 2 and sum(theirs for *_, theirs in wanted) > 2
    together = fast.generate([*PROMPTS], return_dict_in_generate=True, **PLAIN)
    for prompt, row, (text, *_) in zip(PROMPTS, together.sequences.tolist(), wanted, strict=True):
        assert row[-NEW:] == text
        assert fast.generate([prompt], **PLAIN)[0, len(prompt) :].tolist() == text


def test_the_ends_of_the_threshold(folders: Path) -> None:
    """From 0 on everything is kept, and at 1 nothing: one model writes alone."""
    kept = model(folders, threshold=0.0).generate([PROMPTS[0]], **PLAIN)[0, 8:].tolist()
    text = [*PROMPTS[0], kept[0]]
    for _ in range(NEW - 1):
        text.append(next_of(drafter(), text))
    assert kept == text[8:] and kept[0] == next_of(target(), PROMPTS[0])
    none = model(folders, threshold=1.0)
    found = none.generate([*PROMPTS], return_dict_in_generate=True, **PLAIN)
    plain = gw.optimize(folders / "target", "baseline", target="eager")
    assert torch.equal(found.sequences, plain.generate([*PROMPTS], **PLAIN))
    # Its turn lasts to the end of a line, and nothing is drafted for it.
    assert found.stats.accepted_tokens == 0


def test_a_turn_lasts_to_the_end_of_a_line(folders: Path) -> None:
    """As many drafts as there are stretches of the target's own, by the stats."""
    prompt = PROMPTS[0]
    fast = model(folders, threshold=1.0)
    found = fast.generate([prompt], return_dict_in_generate=True, **PLAIN)
    text = found.sequences[0, len(prompt) :].tolist()
    stretches = 1 + sum(token in ENDS for token in text[1:-1])
    drafted = found.stats.draft_tokens
    assert stretches <= drafted <= stretches * MOST
    assert drafted < NEW * MOST / 2


KINDS = {
    "token": (LlamaForTokenClassification, LlamaConfig, 2),
    "sequence": (LlamaForSequenceClassification, LlamaConfig, 1),
    "qwen": (Qwen2ForTokenClassification, Qwen2Config, 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_read(kind: str, tmp_path: Path) -> None:
    made, config, labels = KINDS[kind]
    theirs = made(config(**SCORED, num_labels=labels)).eval()
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, SIZE, (2, 7))
    with torch.no_grad():
        wanted = theirs.score(theirs.model(input_ids=tokens).last_hidden_state)
    assert torch.allclose(scored(import_scoring(tmp_path), tokens), wanted, atol=1e-5)


def scored(program: Program, tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return run(program, "step", {"tokens": tokens, "positions": places})["logits"]


def test_a_value_head_is_read(tmp_path: Path) -> None:
    """As trl names it, beside a head of words that is not used."""
    from safetensors.torch import save_file

    theirs = LlamaForCausalLM(LlamaConfig(**SCORED, tie_word_embeddings=False)).eval()
    theirs.save_pretrained(tmp_path)
    head = {"weight": torch.randn(1, 32), "bias": torch.randn(1)}
    tensors = {**theirs.state_dict(), **{f"v_head.summary.{n}": t for n, t in head.items()}}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = torch.randint(0, SIZE, (2, 7))
    with torch.no_grad():
        hidden = theirs.model(input_ids=tokens).last_hidden_state
    wanted = hidden @ head["weight"].T + head["bias"]
    assert torch.allclose(scored(import_scoring(tmp_path), tokens), wanted, atol=1e-5)


def test_options_bind_drafts_too(folders: Path) -> None:
    """What a call forbids is in no draft that is kept; scores are there for each token."""
    fast = model(folders, threshold=0.0)
    first = fast.generate([PROMPTS[0]], **PLAIN)[0, 8:].tolist()
    told: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    found = fast.generate([PROMPTS[0]], suppress_tokens=[first[2]], **told, **PLAIN)
    assert first[2] not in found.sequences[0, 8:].tolist()
    assert len(found.scores) == NEW


def test_sampled_steps_are_the_drafters(folders: Path) -> None:
    """Under a threshold of 0 the second token is drawn from what the draft says of the first."""
    fast, prompt = model(folders, threshold=0.0), PROMPTS[1]
    asked: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None, "do_sample": True}
    rows = fast.generate([prompt] * 3000, seed=1, top_k=0, **asked).tolist()

    def said(model: LlamaForCausalLM, text: list[int]) -> dict[tuple[int], float]:
        with torch.no_grad():
            probs = model(torch.tensor([text])).logits[0, -1].softmax(-1)
        return {(token,): float(share) for token, share in enumerate(probs)}

    assert_distributed(Counter((row[len(prompt)],) for row in rows), said(target(), prompt))
    first = Counter(row[-2] for row in rows).most_common(1)[0][0]
    after = Counter((row[-1],) for row in rows if row[-2] == first)
    assert_distributed(after, said(drafter(), [*prompt, first]))


@pytest.mark.parametrize("name", mostly_long(["int4", "cache"], ["int4"]))
def test_artifacts_few_bits_streams_and_turns(name: str, folders: Path, tmp_path: Path) -> None:
    passes = {"int4": "quantize_weights", "cache": "quantize_cache"}
    fast = model(folders, passes[name])
    check_kept(fast, PROMPTS, 12, tmp_path)


def test_requests_that_share_steps_have_turns_of_their_own(folders: Path) -> None:
    fast = model(folders, on="onnxruntime:cpu:float32")
    clients, _ = served(fast, [(prompt, {**PLAIN, "do_sample": False}) for prompt in PROMPTS])
    wanted = [by_hand(prompt, 0.5, "score")[0] for prompt in PROMPTS]
    assert [client.tokens for client in clients] == wanted


def test_a_reward_that_is_no_number_is_an_error(folders: Path) -> None:
    broken = copy.deepcopy(judge("score"))
    broken.score.weight.data.fill_(float("nan"))
    broken.save_pretrained(folders / "broken")
    with pytest.raises(InputError, match="NaN"):
        model(folders, kind="broken").generate([PROMPTS[0]], **PLAIN)


def test_the_recipe_by_name(folders: Path) -> None:
    """draft= is the smaller model; the reward model is named by its option."""
    options = [f"verify_rewarded.model={folders / 'score'}", r'length_stretch.until="\n"']
    recipe = gw.Recipe.load("reward_guided").with_options(options)
    fast = gw.optimize(folders / "target", recipe, draft=folders / "draft", target="eager")
    assert fast.generate([PROMPTS[0]], **PLAIN).shape == (1, 8 + NEW)
    assert fast.executable.program.plan.length.ends == (*ENDS, END)


def test_refusals(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="verify_rewarded"):
        gw.optimize(folders / "target", "reward_guided", draft=folders / "draft", target="eager")
    with pytest.raises(InputError, match="a model that scores texts, with a matrix"):
        import_scoring(folders / "draft")
    with pytest.raises(InputError, match="expected the folder of a model that scores texts"):
        import_scoring(folders / "nothing")
    deep = {**json.loads((folders / "score" / "config.json").read_text()), "num_hidden_layers": 99}
    shutil.copytree(folders / "score", folders / "deep")
    (folders / "deep" / "config.json").write_text(json.dumps(deep))
    with pytest.raises(InputError, match="num_hidden_layers=99"):
        import_scoring(folders / "deep")
    LlamaForTokenClassification(LlamaConfig(**SCORED, num_labels=3)).save_pretrained(
        folders / "three"
    )
    with pytest.raises(PassError, match="two labels of which the second is good, got 3"):
        model(folders, kind="three")
    with pytest.raises(PassError, match="makes several: take tree_chain"):
        tree = {"tree_best_first": {"nodes": 8}}
        passes = [
            {"verify_rewarded": {"model": str(folders / "score")}},
            {"draft_model": {"model": str(folders / "draft")}},
            *("accept_trees", tree),
        ]
        recipe = {"name": "tree", "extends": "baseline", "passes": passes}
        gw.optimize(folders / "target", gw.Recipe.load(recipe), target="eager")
    without = {"name": "no", "extends": "baseline", "passes": ["draft_suffix", "length_stretch"]}
    with pytest.raises(PassError, match="came without a tokenizer"):
        gw.optimize(target(), gw.Recipe.load(without), target="eager")
    several = {**without, "passes": ["draft_suffix", {"length_stretch": {"until": "5 6"}}]}
    with pytest.raises(PassError, match="which the tokenizer of llama writes by several"):
        gw.optimize(folders / "target", gw.Recipe.load(several), target="eager")
    fast = model(folders)
    with pytest.raises(UnsupportedError, match="has another model read along"):
        fast.export_onnx(tmp_path / "onnx")
    with pytest.warns(GraftworkWarning, match="the target decodes alone"):
        fast.generate([PROMPTS[0]], num_beams=2, **PLAIN)
