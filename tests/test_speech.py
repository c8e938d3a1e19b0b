"""Languages and tasks of speech: as whisper's own `generate` takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from selection import one_in
from source_models import made, sources

import graftwork as gw
from graftwork.ir import InputError, program_text, verify

LANGUAGES = {"<|en|>": 80, "<|de|>": 81, "<|fr|>": 82}
TASKS = {"transcribe": 85, "translate": 86}
UNTIMED = 90
NEW = 12
CALLS: list[dict[str, Any]] = [
    {},
    {"language": "de", "task": "translate"},
    {"language": ["fr", "english"]},
    {"task": "translate"},
    {"language": "<|en|>"},
]
FORCED = [None, [[1, None], [2, 86]], [[1, 81], [2, 86]]]


def speaker(forced: Any = None, many: bool = True) -> Any:
    """A tiny whisper of three languages, or of English alone; forced: what texts begin with, as old
    checkpoints say it."""
    model = made("whisper")
    said = model.generation_config
    said.is_multilingual, said.forced_decoder_ids = many, forced
    said.no_timestamps_token_id = UNTIMED
    if many:
        said.lang_to_id, said.task_to_id = LANGUAGES, TASKS
    return model


@pytest.mark.parametrize("forced", one_in(2, FORCED), ids=["free", "old", "in German"])
def test_texts_are_those_of_whispers_own_generate(forced: Any) -> None:
    """Languages that nobody says are heard, each source's its own; what texts begin with, which
    transformers leaves out of what it returns, stands before them."""
    model, given = speaker(forced), sources("whisper", 2)
    fast = gw.optimize(model, "copyspec", target="eager")
    begun = set()
    for call in CALLS:
        want = model.generate(**given, max_new_tokens=NEW, do_sample=False, **call)
        found = fast.generate(**given, max_new_tokens=NEW, **call)
        assert torch.equal(found[:, -NEW:], want)
        begun |= set(map(tuple, found[:, :-NEW].tolist()))
    assert all(row[0] == 3 and row[-1] == UNTIMED for row in begun)
    assert {row[1] for row in begun} == set(LANGUAGES.values())


@pytest.mark.parametrize(
    "said",
    one_in(3, [{"language": "fr", "task": "translate"}, {"task": "translate"}, {"language": "de"}]),
)
def test_what_a_generation_config_says_holds_where_a_call_does_not(said: dict[str, str]) -> None:
    model, given = speaker(), sources("whisper", 2)
    for name, value in said.items():
        setattr(model.generation_config, name, value)
    fast = gw.optimize(model, "copyspec", target="eager")
    for call in CALLS:
        want = model.generate(**given, max_new_tokens=NEW, do_sample=False, **call)
        found = fast.generate(**given, max_new_tokens=NEW, **call)
        assert torch.equal(found[:, -NEW:], want), call
        if "task" not in call:
            assert found[0, 2] == TASKS[said.get("task", "transcribe")]
        if "language" not in call and "language" in said:
            assert found[0, 1] == LANGUAGES[f"<|{said['language']}|>"]


@pytest.mark.long
@pytest.mark.parametrize("target", ["onnxruntime", "torch"])
def test_languages_on_targets_and_in_saved_models(target: str, tmp_path: Any) -> None:
    model, given = speaker(), sources("whisper", 3)
    gw.optimize(model, "recycling", target="eager").save(tmp_path / "saved")
    fast = gw.load(tmp_path / "saved", target=target)
    for call in CALLS[:2]:
        want = model.generate(**given, max_new_tokens=NEW, do_sample=False, **call)
        assert torch.equal(fast.generate(**given, max_new_tokens=NEW, **call)[:, -NEW:], want)
    twice = fast.generate(
        **given, max_new_tokens=4, do_sample=True, top_k=1, num_return_sequences=2
    )
    assert torch.equal(twice[::2], twice[1::2])


def test_what_is_known_of_languages_is_told() -> None:
    fast, given = gw.optimize(speaker(), target="eager"), sources("whisper", 2)
    verify(fast.program)
    assert 'languages=("en", "de", "fr", ' in program_text(fast.program)

    def refused(model: Any, why: str, **call: Any) -> None:
        with pytest.raises(InputError, match=why):
            model.generate(**given, max_new_tokens=3, **call)

    refused(fast, "language='xx': the model knows en, de, fr$", language="xx")
    refused(fast, "task='sing': the model knows transcribe, translate", task="sing")
    refused(fast, "one for each of 2 sources, got 1", language=["en"])
    refused(fast, "task: expected text, got 3", task=3)
    both = {"language": "en", "decoder_input_ids": torch.tensor([[3], [3]])}
    refused(fast, "both decoder_input_ids and a language or task", **both)
    english = gw.optimize(speaker(many=False), target="eager")
    refused(english, "language='en': the model knows none", language="en")
    text = english.generate(**given, max_new_tokens=NEW)
    assert text[:, :2].tolist() == [[3, UNTIMED]] * 2
    want = speaker(many=False).generate(**given, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(text[:, 2:], want)
    with pytest.raises(InputError, match=r"expected places 1, 2, 3, .*, got 2 as number 1"):
        gw.optimize(speaker([[2, 81]]), target="eager")
