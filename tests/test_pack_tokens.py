"""Packed steps: the tokens of a ragged batch in one row (EMS-SD), with the same texts."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from archs import ARCHS, build
from feeds import step_inputs
from recurrent_archs import RECURRENT
from tiny import MASK, PROMPTS, cached_llama, drafting_llama, named

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.onnxruntime.routing import Router
from graftwork.backends.target import Target
from graftwork.choosing import joined
from graftwork.cli.demo import demo_folder
from graftwork.ir import InputError, Program, UnsupportedError, run
from graftwork.ir.execution.executable import Executable
from graftwork.ir.ops.select import take_tokens
from graftwork.ir.plan.inputs import whole_rows
from graftwork.passes.stepping.pack_tokens import PackTokens
from graftwork.recipe import Recipe
from graftwork.runtime.feeding.step_inputs import StepInputs
from graftwork.runtime.generation import generate

FIELDS = frozenset({"tokens", "positions", "past", "select", *whole_rows(1, 1)})
ASKED = {"max_new_tokens": 24, "eos_token_id": [], "return_dict_in_generate": True}


def packed(program: Program) -> Program:
    outcome = PackTokens().apply(program)
    assert outcome.matches
    return outcome.program


def inputs(rows: list[list[int]], width: int) -> StepInputs:
    """What a step of these rows is fed."""
    made = StepInputs(("step",), len(rows), width, FIELDS, 99, 99, max(1, sum(map(len, rows))))
    made.fill(rows, [0] * len(rows))
    made.chains([0] * len(rows))
    return made


def test_packing_by_hand():
    """Three texts feed 3, 0 and 1 tokens."""
    fed = inputs([[5, 6, 7], [], [8]], 4).chain.inputs
    assert fed["packed"].tolist() == [[0, 1, 2, 8]]
    assert fed["places"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    row = take_tokens(fed["tokens"][..., None], fed["packed"])
    assert row[..., 0].tolist() == [[5, 6, 7, 8]]
    apart = take_tokens(row, fed["places"])[..., 0]
    assert apart.tolist() == [[5, 6, 7, 5], [5, 5, 5, 5], [8, 5, 5, 5]]
    assert fed["picked"] is fed["packed"] and fed["shown"] is fed["places"]


def test_buffers_say_anew_which_columns_have_tokens():
    made = inputs([[5, 6, 7], [], [8]], 4)
    made.fill([[1], [2, 3], [4]], [0] * 3)
    assert made.chain.inputs["packed"].tolist() == [[0, 4, 5, 8]]
    assert made.chain.inputs["places"].tolist() == [[0, 0, 0, 0], [1, 2, 0, 0], [3, 0, 0, 0]]
    assert inputs([[], []], 2).chain.inputs["packed"].tolist() == [[0]]
    whole = inputs([[1, 2], [3, 4]], 2).chain.inputs
    assert whole["packed"].tolist() == [[0, 1, 2, 3]] and whole["places"].tolist() == [
        [0, 1],
        [2, 3],
    ]


def test_one_column_of_each_text():
    """A prompt's last tokens alone go through the head."""
    made = inputs([[5, 6, 7], [], [8]], 4)
    fed = made.picked([0] * 3, [2, 0, 0])
    assert fed["select"].tolist() == [[2], [0], [0]]
    assert fed["picked"].tolist() == [[0, 1, 2]] and fed["shown"].tolist() == [[0], [1], [2]]


def test_logits_of_tokens_are_those_of_a_padded_step():
    before = cached_llama(trees=False)
    after, rows = packed(before), [[3, 9, 4, 1], [7], [], [2, 2, 8]]
    fed = step_inputs(before, 4, 4) | inputs(rows, 4).chain.inputs
    wanted = {name: fed[name] for name in map(str, (n.target for n in before.step.inputs))}
    padded, found = run(before, "step", wanted), run(after, "step", fed)
    for index, row in enumerate(rows):
        for name in ("logits", "argmax"):
            expected = padded[name][index, : len(row)]
            torch.testing.assert_close(found[name][index, : len(row)], expected)
        for name in before.states:
            written = padded[name][index, :, : len(row)]
            torch.testing.assert_close(found[name][index, :, : len(row)], written)


@cache
def compiled(backend: str, pack: bool, tree: bool) -> Executable:
    trees = [named("draft_recycling"), named("add_top_tokens")]
    passes = trees if tree else [named("draft_suffix", tokens=5, shortest=1)]
    program = drafting_llama(*passes, *[PackTokens()] * pack)
    return compile(program, Target(backend, "cpu"))


def columns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and columns of each step that is fed from now on."""
    seen: list[tuple[int, int]] = []
    fill = StepInputs.fill

    def noted(self, rows, past, **how):
        fill(self, rows, past, **how)
        seen.append((len(self.packed), self.batch * self.width))

    monkeypatch.setattr(StepInputs, "fill", noted)
    return seen


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_texts_are_the_targets_own(backend: str, tree: bool, monkeypatch) -> None:
    plain = generate(compiled(backend, False, tree), PROMPTS, attention_mask=MASK, **ASKED)
    fast, seen = compiled(backend, True, tree), columns(monkeypatch)
    found = generate(fast, PROMPTS, attention_mask=MASK, **ASKED)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.stats.accepted_tokens == plain.stats.accepted_tokens > 0
    assert all(tokens <= wide for tokens, wide in seen)
    assert sum(tokens for tokens, _ in seen) < 0.9 * sum(wide for _, wide in seen)
    alone = generate(fast, PROMPTS[2:3], **ASKED)
    assert torch.equal(alone.sequences, plain.sequences[2:3])
    drawn = ASKED | {"do_sample": True, "seed": 3}
    sampled = [
        generate(compiled(backend, pack, tree), PROMPTS, attention_mask=MASK, **drawn).sequences
        for pack in (False, True)
    ]
    assert torch.equal(*sampled)


def test_few_bits_without_kernels_of_our_own_give_the_same_bits(monkeypatch) -> None:
    """A lone token is then fed twice, packed as well (see `Router`)."""
    program = packed(cached_llama())
    router = Router(program, program.step, Target(), native=False)
    router.rounds = router.widens = True
    fed = inputs([[5], [], [8]], 1).chain.inputs
    feeds = router.route(fed | {"past": torch.tensor([3, 0, 2])}, ()).feeds
    assert feeds["tokens"].tolist() == [[5, 5], [0, 0], [8, 8]]
    assert feeds["packed"].tolist() == [[0, 1, 4, 5]]
    assert feeds["places"].tolist() == [[0, 1], [0, 1], [2, 3]]


@cache
def demo(recipe: str, bits: str, target: str) -> gw.Model:
    return gw.optimize(demo_folder(), joined(Recipe.load(recipe), Recipe.load(bits)), target=target)


@pytest.mark.parametrize(("bits", "target"), [("float32", "onnxruntime"), ("int8", "onnxruntime")])
def test_ems_sd_writes_the_bundled_models_texts(bits: str, target: str) -> None:
    lines = (demo_folder() / "prompts.jsonl").read_text().splitlines()[:4]
    prompts = [json.loads(line)["ids"][: 40 + 9 * n] for n, line in enumerate(lines)]
    weights = {"float32": "baseline"}.get(bits, bits)
    plain, fast = demo("baseline", weights, target), demo("ems_sd", weights, target)
    asked = {"max_new_tokens": 40, "eos_token_id": []}
    for batch in (prompts[:1], prompts):
        texts = [list(map(list, model.generate(batch, **asked))) for model in (fast, plain)]
        assert texts[0] == texts[1]


KINDS = ("gpt2", "mixtral", "gemma3_text", "phi3", "bloom", "gpt_oss")


@pytest.mark.long
@pytest.mark.parametrize("name", [*KINDS, "mamba2", "qwen3_next"])
def test_texts_of_other_models(name: str) -> None:
    """Positions that are embedded, experts, windows, biases by distance, recurrences."""
    model = build(RECURRENT[name] if name in RECURRENT else ARCHS[name])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    asked = {"max_new_tokens": 20, "attention_mask": MASK, "return_dict_in_generate": True}
    recipe = Recipe.load("ems_sd").with_options(["draft_suffix.shortest=1"])
    for target in ("eager", "onnxruntime"):
        plain = gw.optimize(model, "baseline", target=target).generate(PROMPTS, **asked)
        fast = gw.optimize(model, recipe, target=target).generate(PROMPTS, **asked)
        assert torch.equal(fast.sequences, plain.sequences)


def test_places_that_there_are_not_are_refused() -> None:
    program = packed(cached_llama())
    fed = step_inputs(program, 2, 3)
    with pytest.raises((InputError, IndexError), match=r"index|range"):
        run(program, "step", fed | {"packed": torch.tensor([[0, 6]])})
    with pytest.raises(InputError, match="packed"):
        run(program, "step", {name: value for name, value in fed.items() if name != "packed"})


@pytest.mark.parametrize("format_", ["onnx", "onnx_plan", "onnx_loop"])
def test_exports_say_what_to_do(format_: str, tmp_path) -> None:
    options = {} if format_ == "onnx_plan" else {"plain": True}
    with pytest.raises(UnsupportedError, match="without pack_tokens"):
        getattr(demo("ems_sd", "baseline", "eager"), f"export_{format_}")(tmp_path / "x", **options)
