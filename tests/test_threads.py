"""Threads that share models, and models that threads compile and trace at once."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fuzz.threads import FINE, Streamer, hammer
from selection import one_in
from tiny import cached_llama, drafting_llama, named

import graftwork as gw
from graftwork import backends
from graftwork.frontends.trace import fake_mode, parameters_without_data
from graftwork.ir import InputError, Program
from graftwork.ir.rewrite.rules import _traced
from graftwork.ir.support.threads import Turn
from graftwork.passes.raising.raise_norms import RULES


def model_of(program: Program, target: str, threads: int = 1) -> gw.Model:
    return gw.Model(program, gw.Target.parse(target, threads=threads), {"name": "test"})


def made(recipe: str, target: str) -> gw.Model:
    program = drafting_llama(named("draft_suffix")) if recipe == "copyspec" else cached_llama()
    return model_of(program, target)


@pytest.mark.parametrize(
    ("target", "recipes"),
    [
        ("eager", ["baseline", "copyspec"]),
        pytest.param("onnxruntime", ["baseline"], marks=pytest.mark.long),
        pytest.param("onnxruntime", ["copyspec"], marks=pytest.mark.long),
        ("onnxruntime", ["baseline", "copyspec"]),
        pytest.param("torch", ["baseline"], marks=pytest.mark.long),
    ],
)
def test_threads_that_share_models_get_right_tokens(target: str, recipes: list[str]) -> None:
    """Greedy, sampled, batched, nested and broken-off calls, from the first call on."""
    ended = hammer(lambda recipe: made(recipe, target), recipes, threads=4, calls=15)
    assert set(ended) <= FINE, ended
    assert ended["right"] > 30 and ended["stated"] and ended["broken off"]


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_generation_within_a_generation_is_refused(backend: str) -> None:
    """By a streamer and by a stopping criterion; the model goes on being right."""
    model, twin = (made("baseline", backend) for _ in range(2))
    prompt = [[3, 4, 5]]
    wanted = twin.generate(prompt, max_new_tokens=6).tolist()
    said: list[str] = []

    def nested(*args: Any) -> bool:
        with pytest.raises(InputError, match="from a streamer or a stopping criterion") as error:
            model.generate([[9, 9]])
        said.append(str(error.value))
        return False

    found = model.generate(prompt, max_new_tokens=6, streamer=Streamer(nested))
    assert found.tolist() == wanted and len(said) == 1
    found = model.generate(prompt, max_new_tokens=6, stopping_criteria=nested)
    assert found.tolist() == wanted and len(said) > 2
    # Another model may be asked, and this one by whoever comes after an error.
    other = Streamer(lambda: said.append(str(twin.generate(prompt, max_new_tokens=6).tolist())))
    assert model.generate(prompt, max_new_tokens=6, streamer=other).tolist() == wanted
    assert said[-1] == str(wanted)


def test_calls_in_executors_of_asyncio() -> None:
    model, twin = (made("copyspec", "onnxruntime") for _ in range(2))
    prompts = [[[token, 4, 5, token, 4]] for token in range(1, 9)]
    wanted = [twin.generate(prompt, max_new_tokens=8).tolist() for prompt in prompts]

    async def every() -> list[Any]:
        calls = [asyncio.to_thread(model.generate, p, max_new_tokens=8) for p in prompts]
        return [ids.tolist() for ids in await asyncio.gather(*calls)]

    assert asyncio.run(every()) == wanted


def test_a_model_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile = backends.compile

    def counted(program: Program, target: gw.Target) -> Any:
        compiled.append(target)
        return compile(program, target)

    monkeypatch.setattr("graftwork.model.compile_for", counted)
    model, start = made("baseline", "eager"), threading.Barrier(8)

    def first(number: int) -> object:
        start.wait()
        return model.executable

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(first, range(8))))) == 1
    assert len(compiled) == 1


@pytest.mark.long
@pytest.mark.parametrize("target", ["eager", "torch"])
def test_one_thread_generates_while_another_traces(target: str) -> None:
    """Torch refuses to run compiled code while anybody traces, unless they take turns."""
    model, twin = (made("baseline", target) for _ in range(2))
    prompts = [[list(range(1, size))] for size in range(2, 30, 3)]
    wanted = [twin.generate(prompt, max_new_tokens=2).tolist() for prompt in prompts]
    done, tracing = threading.Event(), threading.Event()

    def trace() -> None:
        while not done.is_set():
            _traced.cache_clear()
            for rule in RULES:
                rule.traced(torch.float32)
            tracing.set()

    with ThreadPoolExecutor(1) as pool:
        traced = pool.submit(trace)
        tracing.wait()
        try:
            for _ in range(5):
                found = [model.generate(p, max_new_tokens=2).tolist() for p in prompts]
                assert found == wanted
        finally:
            done.set()
        traced.result()


def test_only_the_tracing_thread_makes_parameters_without_data() -> None:
    with parameters_without_data(fake_mode()), ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(torch.nn.Linear, 2, 2).result()
        ours = torch.nn.Linear(2, 2)
    assert type(theirs.weight) is torch.nn.Parameter and theirs.weight.data_ptr()
    assert "Fake" in type(ours.weight.data).__name__


def test_each_target_has_its_own_number_of_threads() -> None:
    one, two = (model_of(cached_llama(), "eager", threads) for threads in (1, 2))
    before, seen = torch.get_num_threads(), []
    try:
        for model in (one, two, one):
            streamer = Streamer(lambda: seen.append(torch.get_num_threads()))
            model.generate([[3, 4]], max_new_tokens=2, streamer=streamer)
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 1]


@pytest.mark.parametrize("backend", one_in(2, ["eager", "onnxruntime"]))
def test_an_interrupted_generation_leaves_the_model_as_it_was(backend: str) -> None:
    """By Ctrl-C at any moment, in taking and leaving its turn, too: nobody waits for ever, and
    texts are right."""
    model, twin = (made("copyspec", backend) for _ in range(2))
    prompts = [[[3, 4, 5, 3, 4] * n] for n in (1, 3, 9)]
    wanted = [twin.generate(prompt, max_new_tokens=12).tolist() for prompt in prompts]
    interrupted, chosen = 0, random.Random(0)
    turn_file = Turn.__enter__.__code__.co_filename
    # Entering and leaving `torch.no_grad` is torch's own: interrupted there, gradients stay off.
    guards = (torch.no_grad.__enter__, torch.no_grad()(made))
    torch_guards = {guard.__code__.co_filename for guard in guards}
    for n in range(90):
        left = chosen.choice((chosen.randrange(30), chosen.randrange(400), chosen.randrange(9000)))
        in_turn = n < 6  # calls of its code are interrupted, one after the other
        left = n + 1 if in_turn else left

        def step(frame: Any, event: str, argument: Any, in_turn: bool = in_turn) -> Any:
            nonlocal left
            if frame.f_code.co_filename in torch_guards:
                return None
            frame.f_trace_opcodes = not in_turn
            left -= not in_turn or (event == "call" and frame.f_code.co_filename == turn_file)
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            return step

        before = sys.gettrace()
        sys.settrace(step)
        try:
            model.generate(prompts[n % 3], max_new_tokens=12)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        assert torch.is_grad_enabled(), f"call {n}"
        # A thread that does not own what was left behind.
        found: list[Any] = []
        asked, next_ = prompts[(n + 1) % 3], wanted[(n + 1) % 3]
        other = threading.Thread(
            target=lambda a=asked, f=found: f.append(model.generate(a, max_new_tokens=12).tolist()),
            daemon=True,
        )
        other.start()
        other.join(60)
        assert found == [next_], f"call {n}"
    assert interrupted > 30
