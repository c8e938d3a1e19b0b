"""Drafters that learn from what they drafted wrongly: notes, lessons, and who serves."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MASK, PROMPTS

import graftwork as gw
from graftwork.ir import InputError, UnsupportedError
from graftwork.ir.plan import NotedLength
from graftwork.runtime.speculate.lengths.noted import foreseen_by
from graftwork.training.objectives.base import Batch, distilled

DEMO = str(files("graftwork") / "demo_model")
SAMPLE = (files("graftwork.data") / "sample.txt").read_text()
TEXTS = [SAMPLE[at : at + 200] for at in range(0, 850, 170)]
ASKED: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": [], "pad_token_id": 0}


def noting(model: gw.Model) -> gw.Model:
    plan = model.program.plan
    return model.replanned(replace(plan, length=NotedLength(of=plan.length)))


PLACES = ("copyspec", "eager"), ("recycling", "onnxruntime"), ("layerskip", "eager")


@pytest.mark.parametrize(
    ("recipe", "target", "whole"),
    [
        *(pytest.param(*place, True) for place in PLACES),
        *(pytest.param(*place, False, marks=pytest.mark.measured) for place in PLACES[:2]),
    ],
)
def test_accepted_tokens_are_noted_by_their_place(recipe: str, target: str, whole: bool) -> None:
    """Also where nothing is drafted for a while."""
    model = noting(gw.optimize(DEMO, recipe, target=target))
    prompt = "def area(width, height):\n    return width * height\n\ndef area(width, height):\n"
    for _ in range(2):
        found = model.generate(prompt, return_dict_in_generate=True, **ASKED)
        (foreseen,) = foreseen_by(model.executable)
        stats = found.stats
        assert len(foreseen) == stats.decoded_tokens - stats.sequence_steps
        assert foreseen == sorted(set(foreseen)) and all(0 < n < 40 for n in foreseen)
        assert not whole or stats.accepted_per_step > 1.1


def test_a_batch_is_noted_text_by_text() -> None:
    """Each as alone, with whole drafts."""
    model = noting(gw.optimize(DEMO, "copyspec", target="eager"))
    rows = [model.tokenizer(text)["input_ids"] for text in (TEXTS[0], TEXTS[1][:90])]
    model.generate(rows, **ASKED)
    together = foreseen_by(model.executable)
    alone = []
    for row in rows:
        model.generate([row], **ASKED)
        alone += foreseen_by(model.executable)
    assert together == alone and any(alone)


def test_only_what_counts_is_taught() -> None:
    """Cross entropy by hand, of the places that count."""
    logits, student = torch.randn(2, 5, 7), torch.randn(2, 5, 7, requires_grad=True)
    tokens = torch.randint(0, 7, (2, 5))
    counted = torch.rand(2, 5) > 0.5
    batch = Batch(tokens, {}, logits, counted=counted)
    after = torch.cat([tokens[:, 1:], logits[:, -1:].argmax(-1)], 1)
    text = torch.nn.functional.one_hot(after, 7).float()
    teacher, best = logits.softmax(-1), torch.nn.functional.one_hot(logits.argmax(-1), 7)
    for aim, target in (
        ("text", text),
        ("distribution", teacher),
        ("both", (teacher + best) / 2),
    ):
        wanted = -(target * student.log_softmax(-1)).sum(-1)[counted].sum() / 10
        loss = distilled(student, batch.target(aim), 0)  # type: ignore[arg-type]
        assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
        (slope,) = torch.autograd.grad(loss, student)
        assert not slope[~counted].any() and slope[counted].any(-1).all()
    part = batch.part((slice(1, 2), slice(2, None)), tokens[1:, 2:], {})
    assert part.counted is not None and torch.equal(part.counted, counted[1:, 2:])


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> gw.Model:
    """The demo model with a drafter that knows a little, whole drafts."""
    out = tmp_path_factory.mktemp("heads") / "heads"
    made = gw.optimize(DEMO, "eagle", target="onnxruntime")
    fitted = gw.fit(made, [SAMPLE], out=out, steps=20, batch=2, window=128, own=0.25)
    plan = fitted.model.program.plan
    return fitted.model.replanned(replace(plan, length=plan.length.steady))


def accepted(model: gw.Model) -> float:
    """Tokens a step over the texts."""
    stats = [model.generate(t, return_dict_in_generate=True, **ASKED).stats for t in TEXTS]
    return sum(s.decoded_tokens for s in stats) / sum(s.sequence_steps for s in stats)


def test_a_drafter_learns_the_texts_that_it_drafts(drafting: gw.Model, tmp_path: Path) -> None:
    """Which stay the target's, and its weights serve elsewhere, too."""
    plain = gw.optimize(DEMO, target="onnxruntime")
    wanted = [plain.generate(text, **ASKED) for text in TEXTS]
    before = accepted(drafting)
    learner = gw.Learner(drafting, tmp_path / "heads", every=len(TEXTS), passes=6, rate=1e-3)
    for _ in range(2):
        for text, want in zip(TEXTS, wanted, strict=True):
            assert torch.equal(learner.generate(text, **ASKED), want)
    after = accepted(learner.model)
    assert after > 1.15 * before
    first, second = learner.updates
    assert (first.texts, len(first.losses)) == (len(TEXTS), 6 * -(-len(TEXTS) // 4))
    # Fewer tokens are left to be taught the better the drafter knows them.
    assert second.taught < first.taught < 40 / 100
    weights = tmp_path / "heads" / "heads.safetensors"
    recipe = gw.Recipe.load("eagle").with_options([f"draft_eagle.weights={weights}"])
    again = gw.optimize(DEMO, recipe, target="onnxruntime")
    assert accepted(again) == pytest.approx(after)


def test_a_lesson_says_what_no_draft_had(drafting: gw.Model, tmp_path: Path) -> None:
    learner = gw.Learner(drafting, tmp_path / "heads")
    ids = torch.tensor([drafting.tokenizer(TEXTS[0])["input_ids"]])
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    found = learner.generate(padded, attention_mask=mask, return_dict_in_generate=True, **ASKED)
    (lesson,) = learner.lessons
    assert lesson.tokens == found.sequences[0, 3:].tolist()
    prompt, new = ids.shape[1], 40
    assert not any(lesson.taught[: prompt - 1]) and lesson.taught[prompt - 1]
    assert len(lesson.taught) == prompt + new and not lesson.taught[-1]
    assert sum(lesson.taught) == 1 + found.stats.sequence_steps
    again = noting(drafting)
    again.generate(ids, **ASKED)
    (foreseen,) = foreseen_by(again.executable)
    known = {place for place in range(prompt - 1, prompt + new - 1) if not lesson.taught[place]}
    assert known == {prompt - 1 + place for place in foreseen} and known
    ended = learner.generate(ids, max_new_tokens=40, eos_token_id=lesson.tokens[prompt + 5])
    assert learner.lessons[1].tokens == ended[0].tolist()


def test_it_learns_beside_generation(drafting: gw.Model, tmp_path: Path) -> None:
    learner = gw.Learner(drafting, tmp_path / "heads", every=2, background=True)
    for text in TEXTS[:2]:
        learner.generate(text, **ASKED)
    served = learner.model
    learner.finish()
    assert learner.model is not served and len(learner.updates) == 1
    assert learner.generate(TEXTS[2], **ASKED).shape[1] > 40
    learner.learn()
    assert [update.texts for update in learner.updates] == [2, 1]
    learner.learn()  # of nothing
    assert len(learner.updates) == 2


def test_another_model_may_serve(drafting: gw.Model, tmp_path: Path) -> None:
    """Over few bits, with the drafter that learns in float32."""

    def renewed(folder: Path) -> gw.Model:
        made.append(folder)
        weights = f"draft_eagle.weights={folder / 'heads.safetensors'}"
        recipe = {"name": "few", "extends": "eagle", "passes": [{"quantize_weights": {"bits": 8}}]}
        return gw.optimize(
            DEMO, gw.Recipe.load(recipe).with_options([weights]), target="onnxruntime"
        )

    made: list[Path] = []
    learner = gw.Learner(drafting, tmp_path / "heads", every=2, renewed=renewed)
    first = learner.model
    for text in TEXTS[:2]:
        learner.generate(text, **ASKED)
    assert made == [tmp_path / "heads"] * 2 and learner.model is not first
    stored = {w.type.dtype for w in learner.model.program.weights.values()}
    assert torch.uint8 in stored or torch.int8 in stored


def test_what_cannot_learn_is_refused(drafting: gw.Model, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    with pytest.raises(InputError, match=r"is untrained.*graftwork train"):
        gw.Learner(gw.optimize(DEMO, "eagle", target="eager"), out)
    with pytest.raises(UnsupportedError, match="nothing to train"):
        gw.Learner(gw.optimize(DEMO, "copyspec", target="eager"), out)
    with pytest.raises(InputError, match="every=0: expected a positive number"):
        gw.Learner(drafting, out, every=0)
    learner = gw.Learner(drafting, out, every=1)
    learner.generate(TEXTS[0], **ASKED)
    with pytest.raises(InputError, match="holds a checkpoint already"):
        gw.Learner(drafting, out)


def test_an_update_that_fails_leaves_drafts_as_they_were(
    drafting: gw.Model, tmp_path: Path
) -> None:
    broken = gw.Learner(drafting, tmp_path / "heads", every=2, rate=1e30)
    for text in TEXTS[:2]:
        broken.generate(text, **ASKED)
    with pytest.raises(InputError, match=r"drafts stay as they were.*lower rate than 1e\+30"):
        broken.generate(TEXTS[2], **ASKED)
    assert broken.model is drafting and not broken.updates
    assert not (tmp_path / "heads").exists()
    found = broken.generate(TEXTS[0], **ASKED)
    assert torch.equal(found, drafting.generate(TEXTS[0], **ASKED)) and len(broken.lessons) == 1


def test_nothing_is_learned_of_calls_that_fail_or_draft_nothing(
    drafting: gw.Model, tmp_path: Path
) -> None:
    learner = gw.Learner(drafting, tmp_path / "heads")
    with pytest.raises(InputError):
        learner.generate(PROMPTS, attention_mask=MASK, max_new_tokens=0)
    learner.generate(TEXTS[0], num_beams=2, **ASKED)
    assert not learner.lessons and not (tmp_path / "heads").exists()


def test_texts_that_stop_are_learned_from_as_far_as_they_go(
    drafting: gw.Model, tmp_path: Path
) -> None:
    """In a batch, whose rows are filled up."""
    learner = gw.Learner(drafting, tmp_path / "heads")
    alone = [drafting.generate(t, stop_strings=["\n"], **ASKED)[0].tolist() for t in TEXTS[:3]]
    learner.generate(TEXTS[:3], stop_strings=["\n"], **ASKED)
    assert [lesson.tokens for lesson in learner.lessons] == alone
    assert len({len(lesson.tokens) for lesson in learner.lessons}) > 1


def test_texts_that_wait_are_few(drafting: gw.Model, tmp_path: Path) -> None:
    """Where more are written than can be learned from, the oldest are forgotten."""
    learner = gw.Learner(drafting, tmp_path / "heads", every=2)
    learner.stop()  # nobody learns
    for token in range(30):
        learner.hear([1, 2, token], 2, ())
    assert [lesson.tokens[-1] for lesson in learner.lessons] == list(range(22, 30))
    assert learner.lessons[0].taught == [False, True, False]
