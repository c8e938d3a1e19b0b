"""While a length policy rests, steps are plain, and drafters learn afterwards what they missed.

A drafter that missed something would still draft, and the text would still be right: what is
compared is every draft, with those of a run in which it saw each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from runtime_models import TableExecutable, program, whole
from selection import one_in
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan import FixedLength
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.draft_merged import DraftMerged
from graftwork.passes.drafting.fuse_draft import FuseDraft
from graftwork.passes.drafting.ppd.graph import DraftPpd
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.memo import learnt
from graftwork.runtime.rounds import plain
from graftwork.runtime.rounds.chained import ChainedRound
from graftwork.runtime.rounds.general import GeneralRound
from graftwork.runtime.rounds.plain import RestingRound
from graftwork.runtime.speculate.drafters.fused import FusedDrafter
from graftwork.runtime.speculate.lengths.base import LengthPolicy
from graftwork.runtime.speculate.lengths.goodput import GoodputPolicy, Knowledge

pytestmark = pytest.mark.measured

CHAIN = named("tree_chain", depth=2)
TREE = (AcceptTrees(), named("tree_best_first", nodes=5, depth=2, width=2))
RECYCLED = named("draft_recycling", nodes=4, depth=2, successors=2)
DRAFTERS: dict[str, Sequence[Pass]] = {
    "suffix": (named("draft_suffix"), named("draft_suffix", shortest=1)),
    "recycling": (AddTopTokens(), AcceptTrees(), RECYCLED),
    "merged": (AddTopTokens(), AcceptTrees(), named("draft_suffix"), RECYCLED, DraftMerged()),
    "lookahead": (AcceptTrees(), named("draft_lookahead", window=3, ngram=3, pool=2)),
    "jacobi": (named("draft_jacobi", tokens=4),),
    "medusa": (DraftMedusa(heads=2), CHAIN),
    "hydra": (DraftHydra(heads=2, layers=1, prefix=True), CHAIN),
    "ppd": (DraftPpd(after=2, prompts=2), *TREE),
    "eagle": (DraftEagle(), CHAIN),
    "eagle tree": (DraftEagle(), *TREE),
    "unrolled": (DraftEagle(), CHAIN, UnrollDraft()),
    "fused": (DraftEagle(), CHAIN, UnrollDraft(), FuseDraft()),
    "copied or fused": (
        named("draft_suffix", shortest=2),
        DraftEagle(),
        CHAIN,
        UnrollDraft(),
        FuseDraft(),
    ),
}
SHARING = ("recycling", "merged")
"""They learn from all sequences together: the order counts."""

PLAIN = 9
"""Steps between two drafts."""


def executable_of(passes: Sequence[Pass], backend: str) -> Executable:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax(), named("length_goodput"))
    return compile(run_passes(tiny_llama(), [Step(p) for p in every])[0], Target.parse(backend))


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A policy that wants a draft in every tenth step; how long each plain stretch was."""

    def size(policy: GoodputPolicy) -> int:
        known = policy.known
        if known.steps % (PLAIN + 1) == 0:
            known.until = 0
            return policy.most
        known.until = known.steps - known.steps % (PLAIN + 1) + PLAIN + 1
        return 0

    monkeypatch.setattr(GoodputPolicy, "_size", size)
    # Less than a stretch: a drafter is told of it in pieces.
    monkeypatch.setattr(plain, "MISSED", 4)
    made: list[int] = []
    run = RestingRound.run
    monkeypatch.setattr(RestingRound, "run", lambda *given: made.append(run(*given)) or made[-1])
    return made


def decoded(monkeypatch: pytest.MonkeyPatch, executable: Executable, batch: int) -> Any:
    """Texts, and every draft that was made."""
    learnt(executable, Knowledge).clear()
    drafts: list[Any] = []
    propose = GeneralRound.propose

    def noting(this: GeneralRound) -> Any:
        made = propose(this)
        drafts.append([list(draft.fed) for draft in made])
        return made

    monkeypatch.setattr(GeneralRound, "propose", noting)
    ids = torch.arange(1, 1 + 7 * batch).reshape(batch, 7) % 31 + 1
    mask = torch.ones_like(ids)
    for index in range(batch):
        mask[index, :index] = 0
    texts = generate(executable, ids, attention_mask=mask, max_new_tokens=50, eos_token_id=[])
    monkeypatch.setattr(GeneralRound, "propose", propose)
    return texts.tolist(), [made for made in drafts if any(made)]


@pytest.mark.parametrize(
    ("name", "batch", "backend"),
    one_in(2, [(name, 1, "eager") for name in DRAFTERS])
    + one_in(3, [(name, 3, "eager") for name in DRAFTERS if name not in SHARING])
    + one_in(
        2, [(name, 1, "onnxruntime") for name in ("recycling", "medusa", "eagle tree", "hydra")]
    ),
)
def test_drafts_are_what_they_were_without_a_rest(
    monkeypatch: pytest.MonkeyPatch, stretches: list[int], name: str, batch: int, backend: str
) -> None:
    monkeypatch.setattr(ChainedRound, "wants", lambda *_: 0)  # each draft is asked for
    # One each: some drafters remember what they met in earlier texts.
    first, second = (executable_of(DRAFTERS[name], backend) for _ in range(2))
    rested, drafts = decoded(monkeypatch, first, batch)
    assert len(stretches) > 2 and PLAIN - 1 in stretches
    del stretches[:]
    monkeypatch.setattr(RestingRound, "fits", lambda *_: False)
    awake, wanted = decoded(monkeypatch, second, batch)
    assert not stretches
    assert rested == awake
    assert len(drafts) > 1
    if name != "jacobi":  # its block is what it guessed, or after a rest the text's last tokens
        assert drafts == wanted


@pytest.mark.parametrize(
    ("batch", "backend"), [(1, "eager"), (3, "eager"), *one_in(2, [(1, "onnxruntime")])]
)
def test_steps_that_draft_go_on_after_a_rest(
    monkeypatch: pytest.MonkeyPatch, batch: int, backend: str
) -> None:
    """Chains are those of a model whose steps always draft: no row of the draft is lacking."""
    chains: dict[tuple[int, ...], list[int]] = {}
    chain, steps = FusedDrafter.chain, []

    def noting(this: Any, index: int, room: int) -> list[int]:
        made = chain(this, index, room)
        texts = this.setting.texts
        if room >= 2 and this.rested is False:
            steps.append((index, tuple(texts[index].tokens), made))
        return made

    monkeypatch.setattr(FusedDrafter, "chain", noting)
    monkeypatch.setattr(ChainedRound, "least", lambda *_: 1)  # texts are whole between steps
    executable = executable_of(DRAFTERS["fused"], backend)
    plan = executable.program.plan
    always = compile(
        executable.program.replace(plan=replace(plan, length=FixedLength())), Target.parse(backend)
    )
    wanted = decoded(monkeypatch, always, batch)[0]
    chains = {(index, *text): made for index, text, made in steps if made}
    del steps[:]
    count = [0]

    def size(policy: GoodputPolicy) -> int:
        """Three steps that draft, and five that do not."""
        known = policy.known
        if known.steps < known.until:
            return 0
        count[0] += 1
        if count[0] % 4:
            return policy.most
        known.until = known.steps + 5
        return 0

    monkeypatch.setattr(GoodputPolicy, "_size", size)
    assert decoded(monkeypatch, executable, batch)[0] == wanted
    found = {(index, *text): made for index, text, made in steps if made}
    both = found.keys() & chains.keys()
    assert len(both) > 6 and all(found[text] == chains[text] for text in both)
    assert len(found) < len(chains)


def test_outputs_that_are_not_plain_memory_are_kept_too(
    monkeypatch: pytest.MonkeyPatch, stretches: list[int]
) -> None:
    first, second = (executable_of(DRAFTERS["eagle"], "eager") for _ in range(2))
    wanted = decoded(monkeypatch, first, 3)
    monkeypatch.setattr(plain, "piece", lambda values: (values, 1))
    assert decoded(monkeypatch, second, 3) == wanted


def test_what_is_done_once_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is not what a draft or a step costs: policies hear of neither."""

    class Compiling(TableExecutable):
        """A thousand seconds for each width that is new."""

        def run(self, function: str, inputs: Any, fetch: Sequence[str]) -> dict[str, torch.Tensor]:
            widths = {width for width, *_ in self.fed}
            if inputs["tokens"].shape[1] not in widths:
                self.preparing += 1000.0
            return super().run(function, inputs, fetch)

    heard: list[float] = []
    monkeypatch.setattr(LengthPolicy, "observe", lambda self, taken, *spent: heard.extend(spent))
    executable = Compiling(whole(11), program(11, draft=SuffixDraft(4)))
    # A hook makes the loop take its general steps, which are those that policies hear of.
    options: dict[str, Any] = {"eos_token_id": [], "stopping_criteria": [lambda ids, _: False]}
    generate(executable, torch.tensor([[1, 2, 1, 2]]), max_new_tokens=30, **options)
    assert executable.preparing > 1000
    # It is taken off; nobody has really waited for it.
    assert min(heard) < -900 and max(heard) < 100
