"""Superposed decoding: the paper's words as loops, on a llama of random weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from hypothesis import given
from hypothesis import strategies as st
from recurrent_archs import RECURRENT
from small_llama import small_llama

import graftwork as gw
from graftwork.exporting.loop import export_onnx_loop
from graftwork.exporting.onnx_folder import export_onnx
from graftwork.exporting.plan import export_onnx_plan
from graftwork.ir import InputError, ModelInfo, PassError, UnsupportedError
from graftwork.ir.plan import SuperposedStep
from graftwork.runtime.asking.ngrams import END, Ngrams
from graftwork.runtime.asking.options import GenerationOptions
from graftwork.runtime.asking.stopping import Stopping
from graftwork.runtime.asking.superposed import Superposition, mixed
from graftwork.runtime.asking.text import Text

VOCAB, STOP, PAD = 24, 16, 1
IDS = torch.tensor([[3, 4, 12, 5, 9, 2, 6, 5], [PAD, PAD, PAD, 2, 7, 8, 2, 8]])
RAGGED = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
CORPUS = [[3, 4, 12, 5, 9, 2, 6, 5, 11, 4, 7], [2, 7, 8, 2, 8, 20, 21, 2, 8, 3], list(range(24))]
BESIDE = {"do_sample": False, "return_dict_in_generate": True}
Counts = list[dict[tuple[int, ...], Counter[int]]]


@cache
def llama() -> Any:
    return small_llama(VOCAB, STOP, pad_token_id=PAD)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.json"
    path.write_text(json.dumps(CORPUS))
    return path


def fast(target: str = "eager", *passes: Any, source: Any = None, **options: Any) -> gw.Model:
    recipe = {"name": "mine", "extends": "baseline", "passes": [{"superpose": options}, *passes]}
    return gw.optimize(source or llama(), gw.Recipe.load(recipe), target=target)


def counted(longest: int) -> Counts:
    """What follows each context of 0, 1, ... tokens in the corpus, in dictionaries."""
    counts: Counts = [{} for _ in range(longest + 1)]
    for document in CORPUS:
        for place, token in enumerate(document):
            for size in range(min(place, longest) + 1):
                context = tuple(document[place - size : place])
                counts[size].setdefault(context, Counter())[token] += 1
    return counts


def by_hand(
    model: Any, prompt: list[int], width: int, new: int, plan: SuperposedStep, counts: Counts | None
) -> list[tuple[list[int], float]]:
    """The drafts of a prompt and their mean scores, in plain loops over the model itself."""
    embed = model.get_input_embeddings()
    rows = embed(torch.tensor(prompt))
    going: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []

    def mean(draft: tuple[list[int], float]) -> float:
        return draft[1] / len(draft[0])

    for _ in range(new):
        with torch.no_grad():
            logits = model(inputs_embeds=rows[None]).logits[0, -1].double()
        top = sorted(range(VOCAB), key=lambda t: -float(logits[t]))[: width * plan.spread]
        total = sum(math.exp(float(logits[t]) / plan.temperature) for t in top)
        grown = []
        for tokens, score in going:
            text = [*prompt, *tokens]
            told = {}
            for t in top:
                told[t] = 0.0
                for size, weight in enumerate(plan.orders):
                    after = (counts or [{}] * 9)[size].get(tuple(text[len(text) - size :]), {})
                    if after and size <= len(text):
                        told[t] += weight * after[t] / sum(after.values())
            for t in top:
                gain = float(logits[t]) / plan.temperature - math.log(total)
                if counts is not None and not any(told.values()):
                    gain = (1 - plan.alpha) * gain - plan.penalty
                elif counts is not None:
                    known = math.log(told[t]) if told[t] else -1e6
                    gain = (1 - plan.alpha) * gain + plan.alpha * known
                grown.append(([*tokens, t], score + gain))
        grown.sort(key=lambda one: -one[1])
        going = []
        for draft in grown:
            full = draft[0][-1] == STOP or len(draft[0]) == new
            (ended if full else going).append(draft)
            if len(going) == width:
                break
        ended = sorted(ended, key=lambda one: -mean(one))[:width]
        if not going or (len(ended) == width and mean(going[0]) <= mean(ended[-1])):
            going = []
            break
        weights = [math.exp(score - going[0][1]) for _, score in going]
        last = [embed(torch.tensor(tokens[-1])) for tokens, _ in going]
        mixture = sum(w * e for w, e in zip(weights, last, strict=True)) / sum(weights)
        rows = torch.cat([rows, mixture[None]])  # type: ignore[list-item]
    both = sorted([*ended, *going], key=lambda one: -mean(one))
    return [(tokens, mean((tokens, score))) for tokens, score in both[:width]]


SETTINGS: dict[str, dict[str, Any]] = {
    "model alone": {"drafts": 3, "temperature": 1.0},
    "k tokens": {"drafts": 4, "temperature": 0.7, "spread": 1},
    "smoothed": {"drafts": 3, "temperature": 0.5, "alpha": 0.4, "orders": [0.1, 0.2, 0.3]},
    "as the authors": {"drafts": 3},
}


def check(model: gw.Model, source: Any, settings: str, smooth: bool, new: int = 9) -> None:
    plan = model.program.plan.step
    assert isinstance(plan, SuperposedStep)
    width = plan.drafts
    asked = {"max_new_tokens": new, "num_return_sequences": width, **BESIDE}
    found = model.generate(IDS, attention_mask=RAGGED, **asked)
    assert found.sequences.shape[0] == 2 * width
    counts = counted(len(plan.orders) - 1) if smooth else None
    for row in range(2):
        prompt = IDS[row][RAGGED[row] == 1].tolist()
        wanted = by_hand(source, prompt, width, new, plan, counts)
        for place, (tokens, score) in enumerate(wanted):
            at = row * width + place
            assert found.sequences[at, 8 : 8 + len(tokens)].tolist() == tokens, (settings, place)
            assert float(found.sequences_scores[at]) == pytest.approx(score, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_drafts_are_those_of_the_paper(settings: str, corpus: Path) -> None:
    smooth = settings not in ("model alone", "k tokens")
    path = {"path": str(corpus)} if smooth else {}
    check(fast(**SETTINGS[settings], **path), llama(), settings, smooth)


@pytest.mark.parametrize("target", ["onnxruntime", pytest.param("torch", marks=pytest.mark.long)])
def test_on_other_targets(target: str, corpus: Path) -> None:
    """And what asks for one text at a time is plain decoding, before and after."""
    model = fast(target, path=str(corpus), **SETTINGS["smoothed"])
    plain = llama().generate(IDS, attention_mask=RAGGED, do_sample=False, max_new_tokens=12)
    for _ in range(2):
        asked = {"max_new_tokens": 12, "do_sample": False}
        assert torch.equal(model.generate(IDS, attention_mask=RAGGED, **asked), plain)
        check(model, llama(), "smoothed", smooth=True)


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("mamba2", marks=pytest.mark.long)])
def test_of_models_that_scale_embeddings_or_keep_states(name: str) -> None:
    source = build(ARCHS.get(name) or RECURRENT[name])
    model = fast(source=source, drafts=3, temperature=1.0, spread=1)
    prompt = [5, 9, 77, 30, 5, 9]
    asked = {"max_new_tokens": 6, "num_return_sequences": 3, "eos_token_id": None, **BESIDE}
    found = model.generate([prompt], **asked).sequences[:, 6:]
    embed = source.get_input_embeddings()
    rows, going = embed(torch.tensor(prompt)), [([], 0.0)]
    for _ in range(6):
        with torch.no_grad():
            logs = source(inputs_embeds=rows[None]).logits[0, -1].double()
        values, top = logs.topk(3)
        gains = values.log_softmax(-1).tolist()
        grown = [
            ([*tokens, t], score + gain)
            for tokens, score in going
            for t, gain in zip(top.tolist(), gains, strict=True)
        ]
        going = sorted(grown, key=lambda one: -one[1])[:3]
        shares = torch.tensor([score for _, score in going]).softmax(-1)
        last = embed(torch.tensor([tokens[-1] for tokens, _ in going]))
        rows = torch.cat([rows, (shares[:, None] * last).sum(0)[None]])
    assert found.tolist() == [tokens for tokens, _ in going]


def test_a_case_by_hand() -> None:
    """Two drafts of a vocabulary of four, at temperature 1, smoothed by bigrams alone."""
    plan = SuperposedStep(
        weight="ngrams", drafts=2, spread=1, temperature=1.0, alpha=0.5, orders=(0.0, 1.0)
    )
    # Behind 0: half 1, half 2. Behind 1: always 3. Behind 2: always 0.
    ngrams = Ngrams([0, 1, 3, END, 0, 2, 0, END], 1)
    text = Text([0], 1, 20)
    options = GenerationOptions(eos_token_id=())
    stopping = Stopping(options, ModelInfo("tiny", 4, 32))
    drafts = Superposition([text], 2, plan, stopping, ngrams)
    first = torch.tensor([0.0, 0.6, 0.3, 0.1]).log()
    assert drafts.advance(0, drafts.scores(0, first))
    # sqrt(p q): of the two best, renormalised, sqrt(2/3 1/2) and sqrt(1/3 1/2)
    one, other = math.sqrt(1 / 3), math.sqrt(1 / 6)
    assert [draft.tokens for draft in drafts.going[0]] == [[1], [2]]
    scores = [math.exp(draft.score) for draft in drafts.going[0]]
    assert scores == pytest.approx([one, other])
    assert text.tokens == [0]  # the likeliest draft but for its last token
    assert [token for token, _ in text.mixture] == [2]
    assert text.mixture[0][1] == pytest.approx(other / (one + other))
    text.tokens.append(1)
    # The next distribution is one for both: behind 1 comes 3, and behind 2 comes 0.
    assert drafts.advance(0, drafts.scores(0, torch.tensor([0.5, 0.1, 0.1, 0.3]).log()))
    assert [draft.tokens for draft in drafts.going[0]] == [[1, 3], [2, 0]]
    wanted = [one * math.sqrt(3 / 8), other * math.sqrt(5 / 8)]
    assert [math.exp(draft.score) for draft in drafts.going[0]] == pytest.approx(wanted)
    assert text.tokens == [0, 1]
    # Behind 3 and 0 alike nothing is known of these two: both lose the penalty.
    text.tokens.append(3)
    before = [draft.score for draft in drafts.going[0]]
    assert drafts.advance(0, drafts.scores(0, torch.tensor([0.7, 0.0, 0.0, 0.3]).log()))
    best = drafts.going[0][0]
    assert best.tokens == [1, 3, 0]
    assert best.score == pytest.approx(before[0] + 0.5 * math.log(0.7) - plan.penalty)


def test_one_draft_is_greedy_decoding() -> None:
    plan = SuperposedStep(temperature=1.0)
    for prompt in ([3, 4, 12, 5], [2, 7, 8], [9]):
        text = Text(list(prompt), len(prompt), len(prompt) + 12)
        options = GenerationOptions(eos_token_id=(STOP,))
        info = ModelInfo("tiny", VOCAB, 64)
        drafts, going = Superposition([text], 1, plan, Stopping(options, info)), True
        while going:
            with torch.no_grad():
                logits = llama()(torch.tensor([text.tokens])).logits[0, -1]
            going = drafts.advance(0, drafts.scores(0, logits))
            assert not text.mixture
            text.tokens += drafts.going[0][0].tokens[-1:] if going else []
        wanted = llama().generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        assert [*prompt, *drafts.best[0].tokens] == wanted[0].tolist()


TOKENS = st.lists(st.integers(-1, 3), max_size=30)


@given(TOKENS, st.lists(st.integers(0, 3), max_size=5), st.integers(0, 3))
def test_ngrams_are_counted_within_documents(corpus: list[int], text: list[int], size: int) -> None:
    found = Ngrams(corpus, 3).following(text, size, [0, 1, 2, 3])
    after: Counter[int] = Counter()
    if size <= len(text):
        context = text[len(text) - size :]
        for place in range(size, len(corpus)):
            if corpus[place - size : place] == context and corpus[place] != END:
                after[corpus[place]] += 1
    total = max(sum(after.values()), 1)
    assert found.tolist() == [after[token] / total for token in range(4)]


def test_shares_of_equal_tokens_are_one_token() -> None:
    assert mixed([3], [-5.0]) == []
    assert mixed([3, 3, 4], [0.0, 0.0, 0.0]) == [(4, pytest.approx(1 / 3))]
    assert mixed([3, 4], [0.0, -1e9]) == []


def test_what_is_not_mixed_is_the_model_bit_for_bit() -> None:
    model, plain = fast(), gw.optimize(llama(), "baseline", target="eager")
    assert torch.equal(model(IDS), plain(IDS))
    model.generate(IDS, num_return_sequences=3, do_sample=False)
    assert torch.equal(model(IDS), plain(IDS))
    sampled = {"do_sample": True, "num_return_sequences": 3, "seed": 3, "max_new_tokens": 9}
    beams = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    for asked in (sampled, beams):
        assert torch.equal(model.generate(IDS, **asked), plain.generate(IDS, **asked))


def test_processors_follow_each_draft() -> None:
    prompt = [[3, 4, 12, 5, 9, 2, 6, 5, 3, 4, 12, 5, 9]]
    asked = {"do_sample": False, "num_return_sequences": 3, "max_new_tokens": 16}
    model = fast(temperature=1.0)
    found = model.generate(prompt, no_repeat_ngram_size=2, eos_token_id=None, **asked)
    for text in found.tolist():
        pairs = list(pairwise(text[12:]))
        assert len(set(pairs)) == len(pairs)
    free = model.generate(prompt, eos_token_id=None, **asked)
    assert not torch.equal(found, free)
    stopped = model.generate(prompt, stop=[[int(free[0, 15])]], eos_token_id=None, **asked)
    assert int(free[0, 15]) in stopped[0, 13:].tolist()


@pytest.mark.parametrize(
    "passes",
    [
        [{"quantize_weights": {"bits": 4, "group": 16, "embedding": True}}],
        [{"quantize_cache": {}}],
        [{"evict_cache": {"method": "window", "budget": 16, "block": 4}}],
    ],
    ids=["int4", "cache", "evicted"],
)
def test_with_other_weights_and_caches(passes: list[Any]) -> None:
    asked = {"do_sample": False, "num_return_sequences": 3, "max_new_tokens": 20}
    both = [
        fast(target, *passes, temperature=1.0).generate(IDS, attention_mask=RAGGED, **asked)
        for target in ("eager", "onnxruntime")
    ]
    assert torch.equal(*both) and len(both[0].unique(dim=0)) == 6
    names = fast("eager", *passes).program.weights
    assert "quantize_weights" not in passes[0] or "model.embed_tokens.weight" not in names


def test_later_prompts_go_on_from_the_prompt_alone() -> None:
    """What lies in the caches behind it is of mixtures."""
    prompt = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))
    plain, model = gw.optimize(llama(), "baseline", target="eager"), fast()
    found = model.generate(prompt, num_return_sequences=3, do_sample=False, eos_token_id=None)
    asked = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    for text in found:
        wanted = plain.generate(text[None], **asked)
        now = model.generate(text[None], **asked, return_dict_in_generate=True)
        assert torch.equal(now.sequences, wanted)
    again = model.generate(prompt, num_return_sequences=3, **BESIDE, eos_token_id=None)
    assert torch.equal(again.sequences, found) and again.stats.reused_tokens == 29


def test_an_artifact_takes_its_text_along(corpus: Path, tmp_path: Path) -> None:
    model = fast(path=str(corpus), **SETTINGS["smoothed"])
    asked = {"max_new_tokens": 9, "num_return_sequences": 3, **BESIDE}
    wanted = model.generate(IDS, **asked)
    model.save(tmp_path / "saved")
    found = gw.load(tmp_path / "saved").generate(IDS, **asked)
    assert torch.equal(found.sequences, wanted.sequences)
    assert torch.equal(found.sequences_scores, wanted.sequences_scores)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more": ({"num_return_sequences": 4}, "at most 3 texts in a row .superpose.drafts"),
    "regex": ({"regex": "a"}, "regex: .* a grammar follows one: sample"),
    "guided": ({"guidance_scale": 1.5}, "guidance_scale: .* guides follow one"),
    "sampler": ({"logits_processor": [gw.Momentum()]}, "Momentum: .* take one of the two"),
    "last": ({"forced_eos_token_id": 3}, "forced_eos_token_id: .* leave it out"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "sequences_scores comes"),
    "race": ({"first_finish": True}, "first_finish: expected several texts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_follows_one_text_is_refused(case: str) -> None:
    asked, said = REFUSED[case]
    model = fast()
    with pytest.raises(InputError, match=said):
        model.generate(IDS, **{"num_return_sequences": 3, "do_sample": False, **asked})
    assert model.compiled is None  # before the slow part


def test_a_streamer_is_refused() -> None:
    from runtime_models import Recorder

    with pytest.raises(InputError, match=r"streamer: .* leave it out"):
        asked = {"num_return_sequences": 3, "do_sample": False, "streamer": Recorder()}
        fast().generate(IDS, **asked)


def test_other_recipes_still_ask_for_sampling() -> None:
    plain = gw.optimize(llama(), "baseline", target="eager")
    with pytest.raises(InputError, match="no effect on greedy decoding; add do_sample=True"):
        plain.generate(IDS, num_return_sequences=3, do_sample=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[[3, 99]]", "outside 0..23"), ("{}", "no JSON list"), ("[]", "no JSON list|holds no")],
)
def test_files_that_hold_no_tokens_of_the_model(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(PassError, match=said):
        fast(path=str(path))


def test_recipes_that_look_at_one_text_are_refused() -> None:
    for other, said in (
        ("draft_suffix", "drafts for one: leave the drafter out"),
        ("verify_typical", "superpose|drafts"),
    ):
        with pytest.raises((InputError, PassError), match=said):
            fast("eager", other)


def test_no_more_texts_than_there_are() -> None:
    def only(place: int, ids: torch.Tensor) -> list[int]:
        return [5]

    asked = {"num_return_sequences": 3, "do_sample": False, "max_new_tokens": 4}
    with pytest.raises(InputError, match="no more than 1 texts may follow"):
        fast().generate(IDS, prefix_allowed_tokens_fn=only, **asked)


def test_exports_refuse_what_runners_do_not_feed(tmp_path: Path) -> None:
    program = fast().program
    for export in (export_onnx, export_onnx_loop, export_onnx_plan):
        with pytest.raises(UnsupportedError, match=r"superpose.*export the recipe without"):
            export(program, tmp_path / "out")
