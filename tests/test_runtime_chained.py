"""Chains have steps of their own: they do what the general loop does, and are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import Recorder, TableExecutable, markov, plain, program
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, Program
from graftwork.ir.execution.executable import Planned
from graftwork.ir.plan import (
    DraftRecord,
    FirstDraft,
    GoodputLength,
    NoDraft,
    ThompsonLength,
    Typical,
)
from graftwork.ir.weights import Weight, WeightStore
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.corpus import CorpusDraft
from graftwork.passes.drafting.input import InputDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.drafting.verify_judge import VerifyJudge
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.rounds.base import SOON
from graftwork.runtime.rounds.chained import ChainedRound
from graftwork.runtime.rounds.general import GeneralRound

VOCAB = 9
RULE = markov(VOCAB, seed=5)
DRAFTS: dict[str, DraftRecord] = {
    "suffix": SuffixDraft(tokens=4),
    "corpus": CorpusDraft(tokens=4),
    "input": InputDraft(tokens=4),
}


def model(draft: DraftRecord, context: int = 64, **more: Any) -> Program:
    made = program(VOCAB, context=context, draft=draft, **more)
    corpus = torch.tensor([*plain(RULE, [1, 2, 3], 30), -1, 4, 5, 6, 7])
    return made.replace(weights=WeightStore({"corpus": Weight.of("corpus", corpus)}))


def decoded(executable: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, ...]:
    """What a generation returns, streams and counts."""
    recorder = Recorder()
    options |= {"streamer": recorder, "return_dict_in_generate": True, "pad_token_id": 0}
    result = generate(executable, ids, attention_mask=torch.ones_like(ids), **options)
    counts = {k: v for k, v in result.stats.to_dict().items() if isinstance(v, int)}
    return result.sequences.tolist(), recorder.streamed(), counts


@settings(deadline=None, max_examples=150)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6), min_size=1, max_size=4
    ),
    draft=st.sampled_from(list(DRAFTS.values())),
    widths=st.sampled_from([None, (1, 5), (5, 9), (1, 3, 8, 40)]),
    count=st.integers(1, 30),
    eos=st.lists(st.integers(0, VOCAB - 1), max_size=1),
    roomy=st.booleans(),
    spare=st.integers(0, 9),
)
def test_as_the_general_loop(prompts, draft, widths, count, eos, roomy, spare):
    """The same tokens, streamed alike, and the same counts: caches that grow step by step, a
    context that ends with the text, ends at different places."""
    made = model(draft, context=max(6 + count + spare, 9))

    def run() -> tuple[Any, ...]:
        executable = TableExecutable(RULE, made, widths, roomy)
        return decoded(executable, torch.tensor(prompts), max_new_tokens=count, eos_token_id=eos)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainedRound, "fits", lambda *_: False)
        want = run()
    assert run() == want
    if not eos:
        assert [row[6:] for row in want[0]] == [plain(RULE, prompt, count) for prompt in prompts]


@pytest.mark.measured
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("widths", [None, (1, 3, 8, 40)])
def test_goodput_decides_in_the_same_steps(
    batch: int, widths: tuple[int, ...] | None, never_general: None
) -> None:
    """Texts are plain decoding's, and chains are accepted, although what steps take is noise."""
    made = model(SuffixDraft(tokens=4), context=128)
    made = made.replace(plan=replace(made.plan, length=GoodputLength(loss=0.9)))
    prompts = [plain(RULE, [1, 2, first], 17) for first in range(batch)]
    executable = TableExecutable(RULE, made, widths)
    for _ in range(3):
        texts, _, counts = decoded(
            executable, torch.tensor(prompts), max_new_tokens=90, eos_token_id=[]
        )
        assert [row[17:] for row in texts] == [plain(RULE, prompt, 90) for prompt in prompts]
    assert counts["accepted_tokens"] > 10


@pytest.fixture
def never_general(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a general step")

    monkeypatch.setattr(GeneralRound, "propose", refuse)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_taken_where_chains_and_the_argmax_decide(draft: DraftRecord, never_general: None) -> None:
    """To the last token, for which a whole chain is too long: and chains are accepted."""
    executable = TableExecutable(RULE, model(draft))
    prompt = plain(RULE, [1, 2, 3], 20)
    _, _, counts = decoded(executable, torch.tensor([prompt]), max_new_tokens=20, eos_token_id=[])
    assert counts["accepted_tokens"] > 5 and counts["new_tokens"] == 20


@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "growing"])
def test_a_text_that_fits_is_decoded_in_one_go(
    roomy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every return to the loop costs time: with room for all of a text there is one, and caches
    that grow do so for many steps at once."""
    calls: list[int] = []
    run = ChainedRound.run

    def counted(self: ChainedRound, most: int | None) -> int:
        calls.append(run(self, most))
        return calls[-1]

    monkeypatch.setattr(ChainedRound, "run", counted)
    table = torch.eye(400).roll(1, 1)  # no token comes twice: no draft is accepted
    made = program(400, context=400, draft=SuffixDraft(tokens=4))
    executable = TableExecutable(lambda seen: table[seen[-1]], made, roomy=roomy)
    asked = {"max_new_tokens": 300, "eos_token_id": []}
    generate(executable, torch.arange(20)[None], **asked)  # type: ignore[arg-type]
    assert sum(calls) == 299
    assert len(calls) == 1 if roomy else len(calls) <= 299 // SOON


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backend", ["onnxruntime", "eager"])
def test_on_every_backend(backend: str, batch: int, never_general: None) -> None:
    """Caches grow on the way, so held calls are made anew."""
    passes = (named("draft_suffix", tokens=5), InsertKvCache(), PickLogits(), AddArgmax())
    made = run_passes(tiny_llama(context=300), [Step(p) for p in passes])[0]
    executable = compile(made, Target(backend, threads=1))
    plan = made.plan

    class Tight(Planned):
        """Makes room for a row and no more until it is told to."""

        def begin(self, batch: int, rows: int) -> None:
            self.executable.begin(batch, 1)

    ids = torch.randint(1, 30, (batch, 7), generator=torch.Generator().manual_seed(1))
    asked: dict[str, Any] = {"max_new_tokens": 280, "eos_token_id": []}
    found, _, counts = decoded(Tight(executable, plan), ids, **asked)
    assert counts["accepted_tokens"] > 100
    one = Planned(executable, replace(plan, draft=NoDraft()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainedRound, "run", None)
        assert found == decoded(one, ids, **asked)[0]


GENERAL = [
    {"do_sample": True, "seed": 0},
    {"repetition_penalty": 1.3},
    {"stop": [[1, 2]]},
    {"stopping_criteria": lambda ids, scores: False},
]


@pytest.mark.parametrize("options", GENERAL)
def test_not_taken_where_more_is_asked(options: Any, never_general: None) -> None:
    executable = TableExecutable(RULE, model(SuffixDraft(tokens=4)))
    with pytest.raises(AssertionError, match="a general step"):
        generate(executable, torch.tensor([[1, 2, 1, 2]]), eos_token_id=[], **options)


@pytest.mark.parametrize(
    ("made", "widths"),
    [
        (model(FirstDraft((SuffixDraft(tokens=4), InputDraft(tokens=4)))), None),
        (model(SuffixDraft(tokens=4), outputs=("logits",)), None),
        (model(SuffixDraft(tokens=4), verify=Typical()), None),
        (model(SuffixDraft(tokens=4)), (1, 4)),
    ],
    ids=["several drafters", "no argmax", "another verifier", "no step of a whole chain"],
)
def test_not_taken_where_the_program_does_more(made: Any, widths: Any, never_general: None):
    with pytest.raises(AssertionError, match="a general step"):
        generate(TableExecutable(RULE, made, widths), torch.tensor([[1, 2, 1, 2]]), eos_token_id=[])


def test_not_taken_where_a_length_policy_or_a_judge_has_a_say(never_general: None) -> None:
    """A judge takes the argmax where nothing is drafted, and more than it where something is."""
    made = model(SuffixDraft(tokens=4))
    thompson = made.replace(plan=replace(made.plan, length=ThompsonLength()))
    passes = (
        named("draft_suffix", tokens=5),
        VerifyJudge(),
        InsertKvCache(),
        PickLogits(),
        AddArgmax(),
    )
    judged = run_passes(tiny_llama(), [Step(p) for p in (*passes, AcceptTrees())])[0]
    for executable in (TableExecutable(RULE, thompson), compile(judged, Target("eager"))):
        with pytest.raises(AssertionError, match="a general step"):
            generate(executable, torch.tensor([[1, 2, 1, 2]]), eos_token_id=[])


def test_an_argmax_of_nothing_is_refused() -> None:
    class Broken(TableExecutable):
        def best(self, logits: torch.Tensor) -> torch.Tensor:
            return torch.full(logits.shape[:-1], -1)

    executable = Broken(RULE, model(SuffixDraft(tokens=4)))
    with pytest.raises(InputError, match="NaN"):
        generate(executable, torch.tensor([[1, 2, 1, 2]]), max_new_tokens=9, eos_token_id=[])
