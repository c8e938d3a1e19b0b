"""Drafters with a cache of their own, on real backends: EAGLE's layer and a second model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorded, whole
from selection import one_in
from tiny import in_int8, named, tiny_llama
from tokenizers import Tokenizer, models

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.backends.torch import TorchExecutable
from graftwork.ir import PassError, Program, UnsupportedError, arguments
from graftwork.ir.execution.executable import Planned, Widths
from graftwork.ir.plan import CachedDraft, NoDraft
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.speculate.proposers.cached import CachedProposer

CHAIN = named("tree_chain", depth=3)
WIDE = named("tree_static", paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))
LATE = named("tree_static", paths=((0,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1)))
BEST = named("tree_best_first", nodes=9, depth=3, width=3)
PROMPTS = [[3, 4, 5, 6, 7, 8, 3, 4], [5, 6], [9], [1, 2, 3, 4, 5, 6, 7]]
BACKENDS = ["eager", "onnxruntime"]


def drafting(draft: Pass, tree: Pass, start: Program | None = None, *more: Pass) -> Program:
    """A tiny model with a drafter, as recipes make it."""
    passes = (draft, *more, InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax(), tree)
    return run_passes(start or tiny_llama(), [Step(p) for p in passes])[0]


def with_itself(**shape: int) -> Program:
    """A model whose guest is the same model."""
    return tiny_llama(**shape).replace(guests={"same": tiny_llama(**shape)})


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and their attention mask, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def decode(executable: Any, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> Any:
    """Greedy decoding of `count` tokens, with stats."""
    ids, mask = padded(prompts)
    options = {"max_new_tokens": count, "eos_token_id": [], "pad_token_id": 0, **options}
    return generate(executable, ids, attention_mask=mask, return_dict_in_generate=True, **options)


def plainly(executable: Any, prompts: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """The same without drafts."""
    plan = with_plan(executable.program, draft=NoDraft()).plan
    return decode(Planned(executable, plan), prompts, count).sequences


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", [CHAIN, LATE, BEST], ids=["chain", "static", "best"])
def test_eagle_gives_the_targets_own_text(backend: str, tree: Pass) -> None:
    executable = compile(drafting(DraftEagle(), tree), Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 24)
        assert torch.equal(result.sequences, plainly(executable, prompts, 24))
        assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


@pytest.mark.parametrize("exclude", [(), ("*mlp.down_proj*",)])
def test_eagle_in_int8_gives_the_text_of_int8(exclude: tuple[str, ...]) -> None:
    """Also where float products are left, which take a lone token, its state with it, twice."""
    quantized = in_int8(exclude=exclude)
    executable = compile(drafting(DraftEagle(), LATE, None, quantized), Target("onnxruntime"))
    result = decode(executable, PROMPTS[:1], 24)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:1], 24))
    assert result.stats.draft_tokens > 2 * result.stats.sequence_steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", one_in(2, [CHAIN, WIDE, LATE]), ids=["chain", "static", "late"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_draft_equal_to_the_target_is_accepted_whole(
    backend: str, tree: Pass, batch: int
) -> None:
    """Every mistake in a cache row, a position or a mask costs some tokens."""
    program = drafting(DraftModel(model="same"), tree, with_itself())
    executable = compile(program, Target.parse(backend))
    result = decode(executable, PROMPTS[:batch], 1 + 6 * 4)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:batch], 25))
    assert (result.stats.steps, result.stats.accepted_tokens) == (6, 6 * 3 * batch)


def test_without_a_tree_it_drafts_a_chain_of_its_levels() -> None:
    passes = (DraftModel(model="same", levels=2), InsertKvCache(), PickLogits(), AddArgmax())
    program = run_passes(with_itself(), [Step(p) for p in passes])[0]
    result = decode(compile(program, Target.parse("eager")), PROMPTS, 1 + 3 * 4)
    assert (result.stats.steps, result.stats.draft_tokens) == (4, 4 * 2 * 4)
    assert result.stats.accepted_tokens == 4 * 2 * 4


class FewWidths(TorchExecutable):
    """Only some widths are compiled, as with inductor."""

    def widths(self, function: str) -> Widths:
        return Widths((1, 4, 9))


@pytest.mark.parametrize("tree", [CHAIN, WIDE])
def test_compiled_widths(tree: Pass) -> None:
    """Prompts come in pieces, and rows are filled up with garbage that nothing sees."""
    program = drafting(DraftModel(model="same"), tree, with_itself())
    prompts = [[*range(1, 31)], *PROMPTS[:2]]
    executable = FewWidths(program, Target.parse("eager"))
    result = decode(executable, prompts, 1 + 4 * 4)
    assert (result.stats.steps, result.stats.accepted_tokens) == (4, 4 * 3 * 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_up_to_the_end_of_the_context(backend: str) -> None:
    program = drafting(DraftModel(model="same"), BEST, with_itself(context=40))
    executable = compile(program, Target.parse(backend))
    count = 40 - len(PROMPTS[0])
    result = decode(executable, PROMPTS[:3], count)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:3], count))


def test_a_draft_with_a_shorter_context_stops_there() -> None:
    start = tiny_llama(context=64).replace(guests={"short": tiny_llama(context=20)})
    program = drafting(DraftModel(model="short"), CHAIN, start)
    assert isinstance(program.plan.draft, CachedDraft) and program.plan.draft.context == 20
    executable = compile(program, Target.parse("eager"))
    for prompts in ([[3, 4, 5]], [[3, 4, 5], [*range(1, 26)]]):
        result = decode(executable, prompts, 30)
        assert torch.equal(result.sequences, plainly(executable, prompts, 30))
        assert 9 <= result.stats.draft_tokens <= 20


def test_after_another_drafter_had_its_turn() -> None:
    """Text that others drafted is caught up with."""
    program = drafting(
        named("draft_suffix", tokens=2), CHAIN, with_itself(), DraftModel(model="same")
    )
    executable = compile(program, Target.parse("eager"))
    result = decode(executable, PROMPTS, 40)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS, 40))
    assert result.stats.accepted_per_step > 2


# -- EAGLE: what is drafted step by step is what whole sequences give


class RecordedCached(Recorded, CachedProposer):
    """Notes what a layer with a cache predicts."""


def expected(program: Program, text: list[int], path: Sequence[int]) -> torch.Tensor:
    """EAGLE's logits after a text and a path below it."""
    features = whole(program, "step", text)["hidden.normed"][:, :-1]
    for length in range(len(path) + 1):
        tokens = [*text[1:], *path[:length]]
        outputs = whole(program, "eagle", tokens, hidden=features)
        features = torch.cat([features, outputs["hidden"][:, -1:]], 1)
    return outputs["draft_logits"][0, -1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", [CHAIN, LATE, WIDE])
def test_eagle_predicts_what_whole_sequences_give(
    monkeypatch: pytest.MonkeyPatch, backend: str, tree: Pass
) -> None:
    from graftwork.runtime.speculate.drafters import grown

    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: RecordedCached)
    RecordedCached.notes = []
    program = drafting(DraftEagle(), tree)
    decode(compile(program, Target.parse(backend)), [PROMPTS[0], PROMPTS[1], PROMPTS[3]], 8)
    assert {len(path) for _, path, _ in RecordedCached.notes} == {0, 1, 2}
    for text, path, logits in RecordedCached.notes[::5]:
        wanted = expected(program, text, path)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-4, rtol=2e-4)


# -- refusals


def test_no_cache_for_the_draft() -> None:
    program = drafting(DraftEagle(), CHAIN)
    bare = run_passes(tiny_llama(), [Step(DraftEagle())])[0].function("eagle")
    executable = compile(program.with_function(bare), Target.parse("eager"))
    with pytest.raises(UnsupportedError, match="its function eagle has no KV cache"):
        decode(executable, PROMPTS[:1], 4)


def test_a_models_products_are_merged_and_of_few_bits_whole_numbers() -> None:
    """Merged as the target's are; that a file means float activations holds of targets alone."""
    stored = run_passes(tiny_llama(), [Step(in_int8(rounded=False))])[0]
    program = tiny_llama().replace(guests={"same": stored})
    draft = drafting(DraftModel(model="same"), CHAIN, program).function("draft")
    products = draft.calls(torch.ops.graftwork.quantized_linear.default)
    whole = stored.step.calls(torch.ops.graftwork.quantized_linear.default)
    layers = len(stored.step.calls(torch.ops.graftwork.attention.default))
    assert len(products) == len(whole) - 2 * layers - layers * bool(
        stored.step.calls(torch.ops.graftwork.glu.default)
    )
    assert not any(arguments(node)["rounded"] for node in whole)
    assert all(arguments(node)["rounded"] for node in products)


def test_models_that_cannot_draft(tmp_path: Path) -> None:
    start = tiny_llama()
    with pytest.raises(PassError, match="expected the model 'other' beside the program, got none"):
        DraftModel(model="other").run(start)
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(ours))
    Tokenizer(models.WordLevel({"b": 0}, unk_token="b")).save(str(theirs))
    named = start.replace(assets={"tokenizer.json": ours})
    guest = tiny_llama().replace(assets={"tokenizer.json": theirs})
    with pytest.raises(PassError, match="tokenizers of tiny and tiny differ"):
        DraftModel(model="other").run(named.replace(guests={"other": guest}))
    spaced = {name: Tokenizer(models.WordLevel({f"{name}a": 0})) for name in ("▁", " ")}
    for name, path in (("▁", ours), (" ", theirs)):
        spaced[name].save(str(path))
    assert DraftModel(model="other").run(named.replace(guests={"other": guest})).matches == 1
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(ours))
    padding = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    padding.enable_padding(length=4)
    padding.save(str(theirs))
    assert DraftModel(model="other").run(named.replace(guests={"other": guest})).matches == 1
