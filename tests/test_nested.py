"""A draft model cut into nested depths, and one that starts as some of the target's layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import CPU, checkpoint, run  # noqa: F401  (a fixture)
from test_runtime_cached import PROMPTS, decode, plainly
from tiny import in_int8, named, tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import ParseError, PassError, Program, parse_program, program_text
from graftwork.ir.text.parser import parse_record
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_layers import DraftLayers
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.nested import NestedDraft, NestedProposer
from graftwork.passes.drafting.nested.graph import CutDraft
from graftwork.passes.drafting.nested.objective import sorted_loss
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime.speculate.draft_cache import DraftCache, DraftCall
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch

COUNT = 1 + 8 * 7
SEVERAL = 0.15
"""A threshold at which a tiny model's tokens leave at every depth."""


def drafting(*more: Pass, seed: int = 0, layers: int = 4, **shape: int) -> Program:
    """A tiny model that another one drafts for; with the same seed it is the same one."""
    start = tiny_llama(layers, **shape)
    start = start.replace(guests={"other": tiny_llama(layers, seed=seed, **shape)})
    draft = DraftModel(model="other", levels=6)
    passes = (draft, InsertKvCache(), PickLogits(), AddArgmax(), *more)
    return run_passes(start, [Step(each) for each in passes])[0]


def nested(threshold: float, *more: Pass, exits: tuple[int, ...] = (1, 3), **shape: int) -> Program:
    return drafting(*more, CutDraft(exits=exits, threshold=threshold), **shape)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, DraftCall]]:
    """The calls of draft functions, in order."""
    seen: list[tuple[str, DraftCall]] = []
    make = DraftCache.make

    def noting(this: DraftCache, call: DraftCall) -> Any:
        seen.append((this.function, call))
        return make(this, call)

    monkeypatch.setattr(DraftCache, "make", noting)
    return seen


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Drafted tokens by the parts that they took."""
    found: Counter[int] = Counter()
    decide = NestedProposer._decide

    def noting(this: NestedProposer, part: int, asking: Any) -> Any:
        left = decide(this, part, asking)
        found[part] += sum(asking) - sum(left)
        return left

    monkeypatch.setattr(NestedProposer, "_decide", noting)
    return found


# -- what is drafted


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_whole_draft_decides_where_none_is_sure(backend: str, batch: int) -> None:
    """A draft equal to the target is accepted whole, so every mistake in a row costs tokens."""
    executable = compile(nested(1.0), Target.parse(backend))
    result = decode(executable, PROMPTS[:batch], COUNT)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:batch], COUNT))
    assert (result.stats.steps, result.stats.accepted_tokens) == (8, 8 * 6 * batch)


@pytest.mark.parametrize("exit", [1, 3])
def test_where_all_are_sure_it_is_a_model_of_the_first_layers(exit: int) -> None:
    """Through the model's last norm and head: the same drafts as those layers made by themselves,
    with the same weights."""
    cut = decode(compile(nested(0.0, exits=(exit,)), Target("eager")), PROMPTS, 40)
    first = DraftLayers(count=exit, levels=6)
    passes = (first, InsertKvCache(), PickLogits(), AddArgmax())
    alone = run_passes(tiny_llama(4), [Step(each) for each in passes])[0]
    wanted = decode(compile(alone, Target("eager")), PROMPTS, 40)
    assert torch.equal(cut.sequences, wanted.sequences)
    for name in ("steps", "draft_tokens", "accepted_tokens"):
        assert getattr(cut.stats, name) == getattr(wanted.stats, name)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("seed", [0, 5])
def test_tokens_leave_at_every_depth(backend: str, seed: int, decided: Counter[int]) -> None:
    executable = compile(nested(SEVERAL, seed=seed), Target.parse(backend))
    for prompts in (PROMPTS[:1], PROMPTS):
        result = decode(executable, prompts, 40)
        assert torch.equal(result.sequences, plainly(executable, prompts, 40))
    assert min(decided[part] for part in range(3)) > 10


def test_what_a_token_lacks_is_made_with_the_next_that_goes_deep(
    calls: list[tuple[str, DraftCall]],
) -> None:
    """No row of any part twice, but those of drafts that were wrong; later parts in fewer calls."""
    result = decode(compile(nested(SEVERAL), Target("eager")), PROMPTS[:1], 57)
    runs = Counter(name for name, _ in calls)
    assert runs["draft.0"] > runs["draft.1"] > runs["draft.2"] > 0
    ends = {"draft.0": 0, "draft.1": 0, "draft.2": 0}
    lacking = 0
    for name, call in calls:
        if name not in ends:
            continue
        (past,), width = call.past, call.tokens.shape[1]
        assert past <= ends[name]  # nothing is left out; what is made again was rolled back
        ends[name] = past + width
        lacking += name != "draft.0" and width > 1
        if name != "draft.0":
            assert ends[name] == ends["draft.0"]
    made = sum(call.tokens.shape[1] for name, call in calls if name == "draft.0")
    wrong = result.stats.draft_tokens - result.stats.accepted_tokens
    assert lacking > 3 and made <= len(PROMPTS[0]) + 57 + wrong


def test_later_rows_are_those_of_the_whole_model() -> None:
    """Of the text, all parts' cache rows as the uncut model makes them, once a token has gone all
    the way down: also where some sequences go deep while others do not."""
    cut, whole = nested(SEVERAL), drafting()
    held = compile(cut, Target("eager")), compile(whole, Target("eager"))
    prompts = [[3, 4, 5, 6, 7, 8, 3, 4] * 3, [9, 8, 7] * 4, [5, 6] * 9]
    for executable in held:
        decode(executable, prompts, 24)
    names = [name for name in whole.states if name.startswith("draft.kv.")]
    for index, prompt in enumerate(prompts):
        last = len(prompt) + 16
        ours, theirs = (executable.read_rows(names, index, 0, last) for executable in held)
        for name in names:
            off = (ours[name] - theirs[name]).abs().amax((0, 2))
            assert len(off) == last and (off < 1e-5).sum() >= last - 4, name  # may be lacking


def test_a_token_that_some_sequences_need_deeper_costs_the_others_nothing() -> None:
    """Each sequence's drafts are those that it has alone."""
    program = nested(SEVERAL, seed=5)
    together = decode(compile(program, Target("eager")), PROMPTS, 30).stats
    alone = [decode(compile(program, Target("eager")), [p], 30).stats for p in PROMPTS]
    assert together.accepted_tokens == sum(stats.accepted_tokens for stats in alone)


def test_sampled_drafts_say_what_they_were_sampled_from() -> None:
    """With the target's own distribution every sampled token passes."""
    tree = (AcceptTrees(), named("tree_sampled", widths=(1, 1, 1, 1)))
    executable = compile(nested(1.0, *tree), Target.parse("eager"))
    options = {"do_sample": True, "top_k": 0, "temperature": 0.5, "seed": 3}
    result = decode(executable, PROMPTS, 1 + 6 * 5, **options)
    assert (result.stats.steps, result.stats.accepted_tokens) == (6, 6 * 4 * 4)


def test_up_to_the_end_of_the_context() -> None:
    executable = compile(nested(SEVERAL, context=40), Target.parse("eager"))
    result = decode(executable, PROMPTS[:3], 32)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:3], 32))


def test_few_bits_and_the_text_form() -> None:
    start = tiny_llama(4).replace(guests={"other": tiny_llama(4)})
    passes = (DraftModel(model="other", levels=6), in_int8(), InsertKvCache(), PickLogits())
    last = (AddArgmax(), CutDraft(exits=(2,), threshold=1.0))
    program = run_passes(start, [Step(each) for each in (*passes, *last)])[0]
    executable = compile(program, Target.parse("onnxruntime"))
    result = decode(executable, PROMPTS, COUNT)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS, COUNT))
    assert result.stats.accepted_tokens > 0.9 * 8 * 6 * 4
    assert parse_program(program_text(program)).plan == program.plan


def test_a_long_prompt_is_made_up_for_before_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not while a draft's time is taken, by any part."""
    lacking: list[tuple[bool, int, int]] = []
    bring_up = NestedProposer.bring_up

    def noting(this: NestedProposer, usual: int) -> bool:
        late = bring_up(this, usual)
        most = max(sequence.rows[0] - sequence.rows[-1] for sequence in this.sequences)
        lacking.append((late, most, usual))
        return late

    monkeypatch.setattr(NestedProposer, "bring_up", noting)
    executable = compile(nested(0.3), Target("eager"))
    decode(executable, [[3, 4, 5, 6, 7, 8, 3, 4] * 8, [5, 6]], 24)
    assert lacking[0][0] and all(most <= usual for _, most, usual in lacking)


# -- learning


def test_the_loss_by_hand() -> None:
    """The mean over depths of the cross entropy, each through the one norm and head."""
    passes = (DraftLayers(count=3), InsertKvCache(), PickLogits(), AddArgmax())
    program = run_passes(tiny_llama(4), [Step(p) for p in (*passes, CutDraft(exits=(1, 2)))])[0]
    record = program.plan.draft
    assert isinstance(record, NestedDraft) and record.aim == "distribution"
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(3))
    logits = net.outputs("step", ("logits",), {"tokens": tokens})["logits"]
    batch = Batch(tokens, {}, logits)
    loss = sorted_loss(record, net.run, batch)
    parts = []
    for count in (1, 2, 3):  # the target's own first layers, as nobody has trained the draft
        alone = (DraftLayers(count=count), InsertKvCache(), PickLogits(), AddArgmax())
        one = Net(run_passes(tiny_llama(4), [Step(p) for p in alone])[0], [], torch.device("cpu"))
        said = one.run("short", tokens=tokens)["draft_logits"].log_softmax(-1)
        parts.append(-(logits.softmax(-1) * said).sum(-1).mean())
    torch.testing.assert_close(loss.total, torch.stack(parts).mean(), atol=1e-5, rtol=1e-5)
    assert len({round(float(part), 3) for part in parts}) == 3 and len(loss.hits) == 1


def test_one_command_trains_what_another_loads(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, heads = tmp_path / "model", tmp_path / "heads"
    config = LlamaConfig.from_pretrained(checkpoint, num_hidden_layers=4)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def f{n}(x): return x + {n}" for n in range(60)))
    args = ("--recipe", "s2d", "--set", "draft_layers.count=3", "--data", text, "--steps", 2)
    small = ("--batch", 2, "--window", 16, "--out", heads, "--target", CPU)
    code, said, errors = run(capsys, "train", folder, *args, *small)
    assert code == 0, errors
    assert f"--set draft_layers.weights={heads}" in said.strip().splitlines()[-1]
    settings = ["draft_layers.count=3", f"draft_layers.weights={heads}"]
    recipe = gw.Recipe.load("s2d").with_options(settings)
    model = gw.optimize(folder, recipe, target=CPU)
    draft = model.program.plan.draft
    assert isinstance(draft, NestedDraft) and draft.trained and draft.exits == (1, 2)
    plain = gw.optimize(folder, "baseline", target=CPU)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model.generate(ids, max_new_tokens=8), plain.generate(ids, max_new_tokens=8))


# -- what is refused


def test_refusals() -> None:
    with pytest.raises(PassError, match=r"one node a level, and tree=.* asks for up to 2"):
        nested(0.5, AcceptTrees(), named("tree_static", paths=((0,), (1,), (0, 0), (1, 0))))
    start = tiny_llama(2).replace(guests={"other": tiny_llama(2)})
    staged = (DraftModel(model="other", drafter="suffix(tokens=4)"), InsertKvCache(), PickLogits())
    with pytest.raises(PassError, match="expected a drafter that is a model of its own"):
        run_passes(start, [Step(each) for each in (*staged, CutDraft())])
    with pytest.raises(PassError, match=r"draft=none\(\): run draft_model or draft_layers before"):
        run_passes(tiny_llama(2), [Step(InsertKvCache()), Step(CutDraft())])
    with pytest.raises(ParseError, match="an exit behind each function but the last"):
        parse_record('nested(functions=("a", "b"), exits=(1, 2))', "draft")
