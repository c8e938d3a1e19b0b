"""Servers whose executable is replaced, and whose drafters learn from what they write."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from served import served as on_loopback
from test_learner import DEMO, TEXTS, accepted
from test_learner import drafting as drafting
from test_serving_engine import Client, some_ids

import graftwork as gw
from graftwork.ir import GraftworkWarning, InputError, UnsupportedError
from graftwork.runtime.serving.engine import Engine
from graftwork.runtime.serving.ticket import Reason
from graftwork.serving.service import Service

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def text_of(model: gw.Model, ids: list[int], new: int) -> list[int]:
    found: torch.Tensor = model.generate([ids], max_new_tokens=new, pad_token_id=0, **GREEDY)
    return found[0, len(ids) :].tolist()


def test_an_executable_takes_the_place_of_another_where_no_request_runs() -> None:
    """What runs ends where it began, and who waits or comes later goes to the new one."""
    plain, fast = (
        gw.optimize(DEMO, name, target="onnxruntime") for name in ("baseline", "copyspec")
    )
    prompts = [some_ids(length, length) for length in (9, 14, 5)]
    wanted = [text_of(plain, prompt, 40) for prompt in prompts]
    engine = Engine(plain.executable, slots=2, context=256)
    try:
        asked = [(prompt, {"max_new_tokens": 40, **GREEDY}) for prompt in prompts]
        first = Client(held=True).ask(engine, asked[0])
        assert first.begun.wait(60)
        before = engine.executable
        engine.renew(fast.executable)
        second = Client().ask(engine, asked[1])
        assert not second.begun.is_set() and engine.executable is before
        first.go.set()
        assert second.reason() == Reason.LENGTH
        assert engine.executable is not before and engine.program.plan.draft.kind == "suffix"
        third = Client().ask(engine, asked[2])
        assert third.reason() == Reason.LENGTH
        assert [c.tokens for c in (first, second, third)] == wanted
        assert engine.figures.ended[Reason.LENGTH] == 3
    finally:
        engine.close()
    assert text_of(plain, prompts[0], 40) == wanted[0]  # each is its owner's again


def test_what_cannot_be_shared_is_refused_and_what_cannot_begin_ends_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gw.optimize(DEMO, "baseline", target="eager")
    engine = Engine(model.executable, slots=1, context=64)
    try:
        with pytest.raises(UnsupportedError, match="cannot be served with this recipe"):
            engine.renew(gw.optimize(DEMO, "hydragen", target="eager").executable)
        other = gw.optimize(DEMO, "baseline", target="eager").executable

        def full(*given: Any) -> None:
            raise InputError("no memory")

        client = Client(held=True).ask(engine, ([3, 4, 5], {"max_new_tokens": 9, **GREEDY}))
        assert client.begun.wait(60)
        waiting = Client().ask(engine, ([3, 4, 5], {"max_new_tokens": 9, **GREEDY}))
        monkeypatch.setattr(other, "begin", full)
        engine.renew(other)
        client.go.set()
        assert client.reason() == Reason.LENGTH and waiting.reason() == Reason.CLOSED
        assert waiting.end is not None and str(waiting.end.error) == "no memory"
        assert not engine.alive
    finally:
        engine.close()


def test_tokens_that_drafts_brought_are_known_of_each_request(drafting: gw.Model) -> None:
    engine = Engine(drafting.executable, slots=3, context=256)
    try:
        prompts = [drafting.tokenizer(text[:90])["input_ids"] for text in TEXTS[:3]]
        clients = [Client().ask(engine, (p, {"max_new_tokens": 30, **GREEDY})) for p in prompts]
        for client in clients:
            assert client.reason() == Reason.LENGTH and client.ticket is not None
            assert client.end is not None and client.end.stats is not None
            foreseen = client.ticket.foreseen
            assert foreseen == sorted(set(foreseen)) and all(0 < n < 30 for n in foreseen)
            assert len(foreseen) == client.end.stats.accepted_tokens
        assert sum(len(c.ticket.foreseen) for c in clients if c.ticket is not None) > 5
    finally:
        engine.close()


def test_a_server_learns_what_it_writes(drafting: gw.Model, tmp_path: Path) -> None:
    """Answers are the target's all the time, and later ones need fewer steps."""
    from openai import OpenAI

    plain = gw.optimize(DEMO, "baseline", target="onnxruntime")
    prompts = [drafting.tokenizer(text)["input_ids"] for text in TEXTS]
    rows = [plain.generate([p], max_new_tokens=40, do_sample=False)[0, len(p) :] for p in prompts]
    wanted = [plain.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    before = accepted(drafting)
    options = {"every": len(TEXTS), "passes": 6, "rate": 1e-3}
    service = Service(drafting, "demo", learn=tmp_path / "learned", learner=options, slots=2)
    assert service.learner is not None
    first = service.engine.executable
    with on_loopback(service) as port:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

        def answers() -> list[str]:
            made = [
                client.completions.create(
                    model="demo",
                    prompt=prompt,
                    max_tokens=40,
                    temperature=0,
                )
                for prompt in prompts
            ]
            return [one.choices[0].text for one in made]

        assert answers() == wanted
        thread = service.learner._thread
        assert thread is not None
        thread.join(120)
        assert answers() == wanted
        assert service.engine.executable is not first
    assert accepted(service.model) > 1.15 * before
    assert (tmp_path / "learned" / "heads.safetensors").is_file()
    assert len(service.learner.updates) >= 1


def test_what_cannot_learn_is_refused_and_a_failed_update_harms_no_answer(
    drafting: gw.Model, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="is untrained"):
        Service(gw.optimize(DEMO, "eagle", target="eager"), "demo", learn=tmp_path / "a")
    with pytest.raises(UnsupportedError):
        Service(gw.optimize(DEMO, "copyspec", target="eager"), "demo", learn=tmp_path / "b")
    options = {"every": 1, "rate": 1e30, "passes": 3}
    service = Service(drafting, "demo", learn=tmp_path / "c", learner=options, slots=1)
    assert service.learner is not None
    try:
        asked = (some_ids(9, 1), {"max_new_tokens": 8, **GREEDY})
        client = Client().ask(service.engine, asked)
        assert client.reason() == Reason.LENGTH
        late = time.monotonic() + 120
        while service.learner._made.error is None and time.monotonic() < late:
            time.sleep(0.05)
        with pytest.warns(GraftworkWarning, match="the drafter did not learn: the loss became"):
            again = Client().ask(service.engine, asked)
            assert again.reason() == Reason.LENGTH and again.tokens == client.tokens
            service.engine.close()
    finally:
        service.engine.close()


ENDING = """
import sys
sys.path.insert(0, {tests!r})
from test_learner import ASKED, DEMO, SAMPLE
import graftwork as gw

made = gw.optimize(DEMO, gw.Recipe.load("eagle").with_options([{weights!r}]), target="eager")
learner = gw.Learner(made, {out!r}, background=True, every=1, passes=10_000)
learner.generate(SAMPLE[:200], **ASKED)
assert learner._thread is not None and learner._thread.is_alive()
print("said")
"""


def test_a_process_ends_while_an_update_runs(drafting: gw.Model, tmp_path: Path) -> None:
    """At once, and with nothing of the update; a server's end ends it, too."""
    service = Service(
        drafting, "demo", learn=tmp_path / "a", learner={"every": 1, "passes": 10_000}
    )
    assert service.learner is not None
    before = (tmp_path / "a").exists()
    client = Client().ask(service.engine, (some_ids(9, 1), {"max_new_tokens": 8, **GREEDY}))
    assert client.reason() == Reason.LENGTH
    service.close()
    assert not service.learner.updates and (tmp_path / "a").exists() == before
    weights = tmp_path / "given"
    gw.Learner(drafting, weights, renewed=lambda folder: drafting)
    script = ENDING.format(
        tests=str(Path(__file__).parent),
        weights=f"draft_eagle.weights={weights}",
        out=str(tmp_path / "b"),
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "said\n"), done.stderr
