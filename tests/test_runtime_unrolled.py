"""Chains that one call makes, and steps that make the next chain themselves, on real backends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import Recorder
from selection import one_in
from test_runtime_cached import PROMPTS, FewWidths, decode, plainly, with_itself
from tiny import in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, UnsupportedError
from graftwork.ir.plan import BestFirst, FusedDraft, UnrolledDraft
from graftwork.model import Model, load
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_eagle3 import DraftEagle3
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.fuse_draft import FuseDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import forget
from graftwork.runtime.rounds.chained import ChainedRound
from graftwork.runtime.rounds.general import GeneralRound
from graftwork.training import fit

BACKENDS = ["eager", "onnxruntime"]
LONG = [[(7 * i + i * i) % 31 + 1 for i in range(30)], *PROMPTS[:3]]


def drafting(*passes: Pass, start: Program | None = None, grows: bool = True) -> Program:
    """A tiny model with a drafter that makes chains, of three tokens if it predicts them."""
    every = (
        *passes,
        InsertKvCache(),
        PickLogits(),
        AddArgmax(),
        *[named("tree_chain", depth=3)] * grows,
    )
    return run_passes(start or tiny_llama(), [Step(p) for p in every])[0]


def drafts_of(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, list[Any]]:
    """What `run` returns, and the chains that were drafted, step by step, in general steps."""
    seen: list[Any] = []
    propose = GeneralRound.propose

    def noting(this: GeneralRound) -> Any:
        drafts = propose(this)
        seen.append([list(d.tokens) for d in drafts])
        return drafts

    with monkeypatch.context() as patch:
        patch.setattr(ChainedRound, "fits", lambda *_: False)
        patch.setattr(GeneralRound, "propose", noting)
        return run(), seen


def same_drafts(seen: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether chains agree, but for those of finished sequences, which nobody looks at."""
    pairs = [(a, b) for x, y in zip(seen, wanted, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(map(len, (b for _, b in pairs))) > 0 and all(a == b for a, b in pairs if a and b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_draft_equal_to_the_target_is_accepted_whole(backend: str, batch: int) -> None:
    """Every mistake in a cache row, a position or a mask of any level costs some tokens."""
    program = drafting(DraftModel(model="same"), UnrollDraft(), start=with_itself())
    assert isinstance(program.plan.draft, UnrolledDraft) and program.plan.draft.levels == 3
    executable = compile(program, Target.parse(backend))
    for prompts in (PROMPTS[:batch], LONG[:batch]):
        result = decode(executable, prompts, 1 + 6 * 4)
        assert torch.equal(result.sequences, plainly(executable, prompts, 25))
        assert (result.stats.steps, result.stats.accepted_tokens) == (6, 6 * 3 * batch)


@pytest.mark.parametrize(
    ("drafter", "backend"),
    one_in(3, product([DraftEagle(inner=0), DraftEagle3(levels=3), DraftEagle()], BACKENDS)),
)
def test_the_chains_are_those_of_single_calls(
    backend: str, drafter: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unrolled, and made by the step itself: token for token, alone and in a ragged batch."""
    target = Target.parse(backend)
    plain, unrolled, fused = (
        compile(drafting(drafter, *more), target)
        for more in ((), (UnrollDraft(),), (UnrollDraft(), FuseDraft()))
    )
    for prompts in (PROMPTS[:1], LONG):
        want, chains = drafts_of(monkeypatch, lambda p=prompts: decode(plain, p, 24))
        assert torch.equal(want.sequences, plainly(plain, prompts, 24))
        for executable in (unrolled, fused):
            found, seen = drafts_of(monkeypatch, lambda p=prompts, e=executable: decode(e, p, 24))
            assert torch.equal(found.sequences, want.sequences)
            assert same_drafts(seen, chains)
            assert found.stats.accepted_tokens == want.stats.accepted_tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_drafts_is_one_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the step runs, prompts included."""
    executable: Any = compile(
        drafting(DraftEagle(), UnrollDraft(), FuseDraft()), Target.parse(backend)
    )
    called: set[str] = set()
    for name in ("run", "hold"):
        method = getattr(type(executable), name)

        def noting(self: Any, function: str, *rest: Any, method: Any = method) -> Any:
            called.add(function)
            return method(self, function, *rest)

        monkeypatch.setattr(type(executable), name, noting)
    assert isinstance(executable.program.plan.draft, FusedDraft)
    assert decode(executable, LONG[:1], 20).stats.draft_tokens > 30
    assert called == {"step.drafting"}


@pytest.mark.parametrize("prompts", [PROMPTS[:1], LONG], ids=["alone", "ragged"])
@pytest.mark.parametrize("ends", [False, True])
def test_its_own_steps_are_those_of_the_general_loop(
    prompts: Any, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same texts, streamed alike, and the same counts, whatever ends them."""
    executable = compile(drafting(DraftEagle(), UnrollDraft(), FuseDraft()), Target.parse("eager"))
    taken: list[int] = []
    steps = ChainedRound._steps

    def noting(self: ChainedRound, *rest: Any) -> int:
        taken.append(1)
        return steps(self, *rest)

    monkeypatch.setattr(ChainedRound, "_steps", noting)
    texts = plainly(executable, prompts, 30)[:, -30:].tolist()
    late = (t for said in texts for place, t in enumerate(said) if place > 5 and t not in said[:6])
    eos = [next(late)] if ends else []
    for count in (2, 9, 30):
        results = []
        for itself in (True, False):
            recorder = Recorder()
            with monkeypatch.context() as patch:
                if not itself:
                    patch.setattr(ChainedRound, "fits", lambda *_: False)
                before = len(taken)
                forget(executable)
                options = {"eos_token_id": eos, "streamer": recorder}
                result = decode(executable, prompts, count, **options)
                assert (len(taken) > before) == itself
            numbers = {k: v for k, v in result.stats.to_dict().items() if isinstance(v, int)}
            results.append((result.sequences.tolist(), recorder.streamed(), numbers))
        assert results[0] == results[1]
        assert results[0][2]["draft_tokens"] > 0 or count == 2
        if not ends or count == 30:
            assert (numbers["new_tokens"] < count * len(prompts)) == ends


@pytest.mark.parametrize("exclude", [(), ("layers.0.down",)])
@pytest.mark.parametrize("more", [(UnrollDraft(),), (UnrollDraft(), FuseDraft())])
def test_in_int8_the_text_is_that_of_int8(exclude: tuple[str, ...], more: tuple[Pass, ...]) -> None:
    """Also where float products are left, which take a lone token twice."""
    quantized = in_int8(exclude=exclude)
    executable = compile(drafting(DraftEagle(), quantized, *more), Target("onnxruntime"))
    alone = compile(drafting(quantized, grows=False), Target("onnxruntime"))
    for prompts in (PROMPTS[:1], LONG):
        result = decode(executable, prompts, 24)
        assert torch.equal(result.sequences, decode(alone, prompts, 24).sequences)
        assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


@pytest.mark.parametrize("more", [(UnrollDraft(),), (UnrollDraft(), FuseDraft())])
def test_compiled_widths(more: tuple[Pass, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in pieces, and rows are filled up with garbage that nothing sees."""
    plain = compile(drafting(DraftEagle()), Target.parse("eager"))
    want, chains = drafts_of(monkeypatch, lambda: decode(plain, PROMPTS, 20))
    executable = FewWidths(drafting(DraftEagle(), *more), Target.parse("eager"))
    found, seen = drafts_of(monkeypatch, lambda: decode(executable, PROMPTS, 20))
    assert torch.equal(found.sequences, want.sequences)
    assert same_drafts(seen, chains)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [(UnrollDraft(),), (UnrollDraft(), FuseDraft())])
def test_up_to_the_end_of_the_context(backend: str, more: tuple[Pass, ...]) -> None:
    program = drafting(DraftEagle(), *more, start=tiny_llama(context=40))
    executable = compile(program, Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        count = 40 - max(map(len, prompts))
        result = decode(executable, prompts, count)
        assert result.stats.new_tokens == count * len(prompts)
        assert torch.equal(result.sequences, plainly(executable, prompts, count))


@pytest.mark.parametrize("options", [{"do_sample": True, "seed": 3}, {"repetition_penalty": 1.3}])
def test_where_not_the_argmax_decides_the_chain_is_a_call_of_its_own(
    options: dict[str, Any],
) -> None:
    target = Target.parse("eager")
    unrolled, fused = (
        compile(drafting(DraftEagle(), UnrollDraft(), *more), target)
        for more in ((), (FuseDraft(),))
    )
    want = decode(unrolled, PROMPTS, 16, **options)
    found = decode(fused, PROMPTS, 16, **options)
    assert torch.equal(found.sequences, want.sequences)
    assert found.stats.draft_tokens == want.stats.draft_tokens > 0


def test_another_drafter_may_come_first() -> None:
    """What it drafts, the step verifies too, and goes on from there."""
    program = drafting(named("draft_suffix", tokens=3), DraftEagle(), UnrollDraft(), FuseDraft())
    assert [part.kind for part in program.plan.draft.of] == ["suffix", "fused"]
    executable = compile(program, Target.parse("eager"))
    result = decode(executable, LONG, 24)
    assert torch.equal(result.sequences, plainly(executable, LONG, 24))
    alone = compile(drafting(named("draft_suffix", tokens=3), grows=False), Target.parse("eager"))
    assert result.stats.draft_tokens > decode(alone, LONG, 24).stats.draft_tokens


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((named("draft_suffix"), UnrollDraft()), "has no function with a cache"),
        ((DraftEagle(), named("length_svip"), UnrollDraft()), "looks at each level"),
        ((DraftModel(model="same"), UnrollDraft(), FuseDraft()), "no unrolled drafter on features"),
        ((DraftEagle(), FuseDraft()), "requires 'unrolled'"),
    ],
)
def test_what_cannot_be_put_into_one_call_is_refused(
    passes: tuple[Pass, ...], message: str
) -> None:
    with pytest.raises(PassError, match=message):
        drafting(*passes, start=with_itself())


def test_a_plan_with_a_tree_is_refused_when_it_runs() -> None:
    program = drafting(DraftEagle(), UnrollDraft(), AcceptTrees())
    executable = compile(with_plan(program, tree=BestFirst()), Target.parse("eager"))
    with pytest.raises(UnsupportedError, match="makes chains"):
        decode(executable, PROMPTS[:1], 4)


def test_training_reaches_the_chain_and_an_artifact_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged weights of a chain are made anew from the trained ones, and saved as they are."""
    eager = Target.parse("eager")
    chained = (UnrollDraft(), FuseDraft())
    model = Model(drafting(DraftEagle(), *chained), eager, {"name": "test"})
    text = [[(i * i + j) % 32 for i in range(90)] for j in range(12)]
    few = {"batch": 2, "window": 24, "own": 0.5, "rate": 1e-2}
    fitted = fit(model, text, out=tmp_path / "heads", steps=8, **few)
    apart = compile(drafting(DraftEagle(weights=str(tmp_path / "heads"))), eager)
    fitted.model.save(tmp_path / "artifact")
    loaded = load(tmp_path / "artifact", target=eager)
    _, untrained = drafts_of(monkeypatch, lambda: decode(model.executable, LONG, 16))
    want, chains = drafts_of(monkeypatch, lambda: decode(apart, LONG, 16))
    for one in (fitted.model, loaded):
        found, seen = drafts_of(monkeypatch, lambda m=one: decode(m.executable, LONG, 16))
        assert torch.equal(found.sequences, want.sequences)
        assert same_drafts(seen, chains) and seen != untrained
    with pytest.raises(InputError, match="not made from the weights that are trained"):
        fit(loaded, text, out=tmp_path / "again", steps=1, **few)
