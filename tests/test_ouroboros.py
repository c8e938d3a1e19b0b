"""Ouroboros: phrases by hand, drafts that they lengthen, and the text of plain decoding."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from every_recipe import steps_of
from runtime_drafts import RuleDraft
from runtime_models import TableExecutable, markov, plain, program, setting
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_runtime_sampling import assert_distributed, texts_drawn
from test_runtime_verifiers import DRAFT, LENGTH, PROMPT, RULE, VOCAB, exact
from tiny import MASK, PROMPTS, named, tiny_llama

from graftwork.backends import Target, compile
from graftwork.ir import InputError, PassError
from graftwork.ir.plan import Chain, Lossless, Rejection, StaticTree
from graftwork.passes.drafting import ouroboros
from graftwork.passes.drafting.ouroboros import (
    LengthenedDraft,
    PhrasesDraft,
    PhrasesDrafter,
    Pool,
    lengthened,
)
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.runtime import forget, generate
from graftwork.runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from graftwork.runtime.lore_files import load_learnt, save_learnt
from graftwork.runtime.sealed_files import seal

MANY = 12
TREES = ("tokens", "positions", "past", "select", "ancestors")
PHRASES = PhrasesDraft(tokens=3, pool=4, phrases=2)
RULES = markov(MANY, seed=3)
SMALL = RuleDraft(lambda seen: RULES(seen) + markov(MANY, seed=4)(seen) / 8)
DRAFTS = {
    "phrases": PHRASES,
    "lengthened": LengthenedDraft((SMALL, PHRASES)),
    "copies": LengthenedDraft((SMALL, SuffixDraft(tokens=3, shortest=1))),
}


def model(name: str) -> TableExecutable:
    draft, tree = DRAFTS[name], Chain(depth=2)
    return TableExecutable(RULES, program(MANY, draft=draft, tree=tree))


def run(executable, prompt, count=40, **options):
    ids = torch.tensor([prompt])
    return generate(executable, ids, max_new_tokens=count, return_dict_in_generate=True, **options)


def drafter(**options) -> PhrasesDrafter:
    record = PhrasesDraft(**{"tokens": 3, "pool": 4, "phrases": 2, **options})
    return PhrasesDrafter(record, setting(TableExecutable(RULES, program(MANY, draft=record))))


def test_phrases_of_texts():
    pool = Pool(PhrasesDraft(tokens=2, pool=2))
    pool.read([1, 2, 3, 1, 4, 5, 1, 6, 7, 1])
    assert pool.after(1) == [(6, 7), (4, 5)] and pool.after(2) == [(3, 1)]
    pool.read([1, 4, 5])
    assert pool.after(1) == [(4, 5), (6, 7)]
    pool.correct(1, (6, 7), (6, 8))
    assert pool.after(1) == [(6, 8), (4, 5)]
    pool.correct(1, (9, 9), (6, 7))  # it has no such phrase
    assert pool.after(1) == [(6, 8), (4, 5)] and pool.after(8) == []


def test_rejected_parts_that_the_target_agrees_with_are_phrases():
    made = drafter()
    made.begin([[9]])
    # The target said 7 where the draft has 1, and then goes on with the draft from 2: 3, 4, 5.
    draft = Draft([1, 2, 3, 4])
    outputs = {"argmax": torch.tensor([[7, 0, 3, 4, 5]])}
    made.observe(VerifiedStep([draft], [[]], [[7]], [0], outputs))
    assert made.pool.after(2) == [(3, 4, 5)] and made.pool.after(3) == [(4, 5)]
    assert made.pool.after(1) == [] and made.pool.after(4) == []  # of one token: none
    assert made.pool.after(9) == []
    # What is accepted is the text's: phrases of that are whole.
    made.observe(VerifiedStep([NO_DRAFT], [[]], [[5, 6, 8]], [0], outputs))
    assert made.pool.after(7) == [(5, 6, 8)] and made.pool.after(9) == [(7, 5, 6)]


def test_phrases_that_were_not_said_become_what_was():
    made = drafter()
    made.begin([[1, 2, 3, 4, 1, 2, 5, 6, 1]])
    (draft,) = made.propose([9])
    assert list(draft.tokens) == [2, 5, 6, 3, 4] and draft.parents == (-1, 0, 1, 0, 3)
    said = torch.tensor([[2, 9, 7, 1, 8, 1]])  # after the root, 2, 5, 6, 3 and 4
    made.observe(VerifiedStep([draft], [[0]], [[2, 9]], [0], {"argmax": said}))
    assert set(made.pool.after(1)) == {(2, 9, 7), (2, 9, 8)}


def test_the_latest_phrases_are_drafted():
    made = drafter()
    made.begin([[1, 2, 3, 4, 1, 2, 5, 6, 1, 7, 8, 9, 1]])
    (draft,) = made.propose([9])
    assert list(draft.tokens) == [7, 8, 9, 2, 5, 6]
    assert list(made.propose([1])[0].tokens) == [7, 2] and not made.propose([0])[0].tokens
    assert made.ahead([[]], [7]) == [[7, 8, 9]] and made.ahead([[2]], [3]) == [[5, 6, 1]]
    assert made.ahead([[2]], [6]) == [[5, 6, 1, 7, 8, 9]] and made.ahead([[9]], [3]) == [[]]
    assert list(made.branches([[2]], [2])[0].tokens) == [5, 6, 3, 4]
    made.begin([[11]])
    assert made.propose([4]) == [NO_DRAFT]


def test_a_lengthened_chain_by_hand():
    probs = torch.tensor([[0.1, 0.9, 0, 0], [0.2, 0.3, 0.5, 0]])
    tail = Draft([3, 0, 1], None, (-1, 0, -1))
    draft = lengthened(Draft([1, 2], probs), tail)
    assert list(draft.tokens) == [1, 2, 3, 0, 1] and draft.parents == (-1, 0, 1, 2, 1)
    assert draft.independent and torch.equal(draft.probs[:2], probs)
    assert torch.equal(draft.probs[2:], torch.eye(4)[[3, 0, 1]])
    assert lengthened(Draft([1, 2]), tail).probs is None
    assert lengthened(NO_DRAFT, tail) is tail and lengthened(Draft([1]), NO_DRAFT).parents is None


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_are_those_of_plain_decoding(name):
    executable = model(name)
    for prompt in ([1, 2, 3], [4], [7, 7, 2, 7, 7]):
        out = run(executable, prompt).sequences[0].tolist()
        assert out == prompt + plain(RULES, prompt, 40)
    ids, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    out = generate(executable, ids, attention_mask=mask, max_new_tokens=30, pad_token_id=0)
    assert out[0, 3:].tolist() == plain(RULES, [5], 30)
    assert out[1, 3:].tolist() == plain(RULES, [1, 2, 3], 30)


def test_longer_drafts_are_kept():
    found = {}
    for name in ("phrases", "lengthened"):
        executable = model(name)
        first = run(executable, [1, 2, 3], 56).stats.accepted_per_step
        found[name] = run(executable, [1, 2, 3], 56).stats.accepted_per_step
        assert found[name] > first  # the pool stays from call to call
        forget(executable)
        assert run(executable, [1, 2, 3], 56).stats.accepted_per_step == first
    alone = TableExecutable(RULES, program(MANY, draft=SMALL, tree=Chain(depth=2)))
    assert run(alone, [1, 2, 3], 56).stats.accepted_per_step <= 3 < found["lengthened"]
    assert found["phrases"] > 2.5


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.95, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize(
    ("size", "verify"), [((1, 160), Rejection()), ((4, 60), Rejection()), ((4, 60), Lossless())]
)
def test_samples_follow_the_models_distribution(size, verify, options):
    draft = LengthenedDraft((DRAFT, PhrasesDraft(tokens=2, pool=3, phrases=2)))
    held = program(VOCAB, draft=draft, tree=Chain(depth=1), verify=verify)
    found, accepted, drafted = texts_drawn(
        TableExecutable(RULE, held), PROMPT, LENGTH, size, options
    )
    assert_distributed(found, exact(options))
    assert 0.05 < accepted / drafted < 0.95


def test_wrong_distributions_show(monkeypatch):
    """The test can fail: phrases that count as sampled evenly are not lossless."""
    honest = lengthened

    def lying(chain, tail):
        draft = honest(chain, tail)
        if draft.probs is not None:
            draft.probs[len(chain.tokens) :] = 1 / VOCAB
        return draft

    monkeypatch.setattr(ouroboros, "lengthened", lying)
    draft = LengthenedDraft((DRAFT, PhrasesDraft(tokens=2, pool=3, phrases=2)))
    held = program(VOCAB, draft=draft, tree=Chain(depth=1), verify=Rejection())
    found, _, _ = texts_drawn(TableExecutable(RULE, held), PROMPT, LENGTH, (300, 4), {})
    with pytest.raises(AssertionError):
        assert_distributed(found, exact({}))


def compiled(name: str, backend: str, guest: int = 0):
    with TemporaryDirectory() as folder:
        steps = steps_of(name, Path(folder))
    start = tiny_llama(4)
    made = run_passes(start.replace(guests={"other": tiny_llama(4, seed=guest)}), steps)[0]
    return compile(made, Target(backend, "cpu"))


@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.long)])
@pytest.mark.parametrize("guest", [0, 1])
def test_the_recipe_writes_the_targets_text(backend: str, guest: int) -> None:
    asked = {"max_new_tokens": 48, "eos_token_id": []}
    wanted = generate(compiled("baseline", backend), PROMPTS, attention_mask=MASK, **asked)
    fast = compiled("ouroboros", backend, guest)
    asked["return_dict_in_generate"] = True
    found = generate(fast, PROMPTS, attention_mask=MASK, **asked)
    assert torch.equal(found.sequences, wanted)
    again = generate(fast, PROMPTS[2:3], **asked)
    assert torch.equal(again.sequences, wanted[2:3])
    # Six drafted tokens and the target's own make seven; phrases add to that.
    assert guest or again.stats.accepted_per_step > 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(tokens=t["tokens"].long()), "expected tokens i32"),
        (lambda t: t.update(phrases=t["phrases"][:, :2].contiguous()), "expected tokens i32"),
        (lambda t: t["tokens"].fill_(MANY), "outside 0..11"),
        (lambda t: t["phrases"].fill_(-1), "gaps"),
        (lambda t: t["phrases"][:, 1].fill_(-1), "gaps"),
        (lambda t: t.pop("tokens"), "expected tokens and phrases"),
    ],
)
def test_a_pool_goes_into_a_file(change, message, tmp_path: Path) -> None:
    path = tmp_path / "learnt.safetensors"
    first, second = model("phrases"), model("phrases")
    run(first, [1, 2, 3])
    save_learnt(first, path)
    load_learnt(second, path)
    assert run(second, [1, 2, 3]).stats.steps == run(first, [1, 2, 3]).stats.steps < 20
    with safe_open(path, "pt") as file:
        marks = file.metadata()
    tensors = {name.removeprefix("0.phrases."): t for name, t in load_file(path).items()}
    change(tensors)
    save_file({f"0.phrases.{name}": t for name, t in tensors.items()}, path, marks)
    seal(path)
    with pytest.raises(InputError, match=message):
        load_learnt(second, path)


def test_refusals() -> None:
    passes = [named("insert_kv_cache"), named("add_argmax"), named("accept_trees")]
    with pytest.raises(PassError, match=r"and then one that copies.* got draft=suffix"):
        steps = (*passes, named("draft_suffix"), named("draft_lengthened"))
        run_passes(tiny_llama(), [Step(p) for p in steps])
    held = program(MANY, draft=DRAFTS["lengthened"], tree=StaticTree(((0,), (1,))))
    assert "lengthens chains" in "".join(DRAFTS["lengthened"].misfits(held.plan))
