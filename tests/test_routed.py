"""Routing: easy prompts are the smaller model's, hard ones the target's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_texts import check_kept
from safetensors.torch import save_file
from selection import mostly_long
from test_rewarded import NEW, PLAIN, PROMPTS, drafter, next_of, target
from test_rewarded import folders as folders
from test_runtime_sampling import assert_distributed
from test_serving_engine import served
from test_valued import said
from tiny import tiny_llama

import graftwork as gw
from graftwork.ir import PassError
from graftwork.ir.plan.contract import Contract
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.routed import Routed
from graftwork.passes.drafting.routed.graph import VerifyRouted
from graftwork.passes.drafting.routed.objective import AHEAD, LEAST, routed_loss, shares
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.training import fit
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch

LEVELS = 5


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that finds some of the prompts easy."""
    torch.manual_seed(11)
    tensors = {
        "0.weight": torch.randn(32, 32),
        "0.bias": torch.randn(32),
        "head.weight": torch.randn(1, 32),
        "head.bias": torch.zeros(1),
    }
    path = tmp_path_factory.mktemp("head") / "heads.safetensors"
    save_file(tensors, path)
    return path


def model(folders: Path, *more: str, on: str = "eager", **options: Any) -> gw.Model:
    passes: list[Any] = [
        *more,
        {"draft_model": {"model": str(folders / "draft"), "levels": LEVELS}},
        {"tree_chain": {"depth": LEVELS}},
        {"verify_routed": {"inner": 32, **options}},
    ]
    recipe = gw.Recipe.load({"name": "routed", "extends": "baseline", "passes": passes})
    return gw.optimize(folders / "target", recipe, target=on)


def ease(prompt: list[int], head: Path) -> float:
    """What the head says of a prompt, from transformers' states."""
    from safetensors.torch import load_file

    weights = load_file(head)
    with torch.no_grad():
        state = target().model(torch.tensor([prompt])).last_hidden_state[0, -1]
        inner = torch.nn.functional.silu(state @ weights["0.weight"].T + weights["0.bias"])
        return float((inner @ weights["head.weight"].T + weights["head.bias"]).sigmoid())


def written(prompt: list[int], by: Any, new: int = NEW) -> list[int]:
    """The target's first token, and what a model writes behind it."""
    text = [*prompt, next_of(target(), prompt)]
    while len(text) < len(prompt) + new:
        text.append(next_of(by, text))
    return text[len(prompt) :]


TARGETS = ["eager", "onnxruntime:cpu:float32", "torch:cpu:float32"]


@pytest.mark.parametrize("on", mostly_long(TARGETS, TARGETS[:2]))
def test_easy_prompts_are_the_drafters_and_hard_ones_the_targets(
    on: str, folders: Path, head: Path
) -> None:
    """Alone, side by side, and in slots of a server."""
    fast = model(folders, on=on, weights=str(head), threshold=0.5)
    easy = [ease(prompt, head) > 0.5 for prompt in PROMPTS]
    assert 0 < sum(easy) < len(easy)
    wanted = [
        written(p, drafter() if light else target()) for p, light in zip(PROMPTS, easy, strict=True)
    ]
    assert sum(written(p, drafter()) != written(p, target()) for p in PROMPTS) > 2
    rows = fast.generate([*PROMPTS], **PLAIN)[:, -NEW:].tolist()
    assert rows == wanted
    assert [fast.generate([p], **PLAIN)[0, len(p) :].tolist() for p in PROMPTS] == wanted
    if on != "torch:cpu:float32":
        clients, _ = served(fast, [(prompt, {**PLAIN, "do_sample": False}) for prompt in PROMPTS])
        assert [client.tokens for client in clients] == wanted


def test_the_target_reads_what_was_drafted_in_few_steps(folders: Path, head: Path) -> None:
    """A step for each draft, and a next turn goes on from its rows."""
    fast = model(folders, weights=str(head), threshold=0.0)
    found = fast.generate([PROMPTS[0]], return_dict_in_generate=True, **PLAIN)
    assert found.stats.steps <= 1 + -(-(NEW - 1) // LEVELS)
    assert found.stats.accepted_per_step > LEVELS - 1


def test_each_turn_is_judged_anew(folders: Path, head: Path) -> None:
    fast = model(folders, weights=str(head), threshold=0.5)
    text = fast.generate([PROMPTS[0] * 3], **PLAIN)[0].tolist()
    turns = [[*text, token] for token in range(12)]
    kinds = [ease(turn, head) > 0.5 for turn in turns]
    assert 0 < sum(kinds) < len(kinds)
    for turn, light in zip(turns[::3], kinds[::3], strict=True):
        found = fast.generate(
            [turn], return_dict_in_generate=True, **{**PLAIN, "max_new_tokens": 8}
        )
        assert found.stats.reused_tokens > 0
        wanted = written(turn, drafter() if light else target(), 8)
        assert found.sequences[0, len(turn) :].tolist() == wanted


def test_untrained_and_at_1_nothing_is_easy(folders: Path, head: Path) -> None:
    plain = gw.optimize(folders / "target", "baseline", target="eager")
    wanted = plain.generate([*PROMPTS], **PLAIN)
    assert torch.equal(model(folders).generate([*PROMPTS], **PLAIN), wanted)
    none = model(folders, weights=str(head), threshold=1.0)
    assert torch.equal(none.generate([*PROMPTS], **PLAIN), wanted)


def test_easy_texts_are_drawn_as_the_drafter_says(folders: Path, head: Path) -> None:
    fast, prompt = model(folders, weights=str(head), threshold=0.0), PROMPTS[1]
    asked: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None, "do_sample": True}
    rows = fast.generate([prompt] * 2000, seed=1, top_k=0, **asked).tolist()
    first = Counter(row[-2] for row in rows).most_common(1)[0][0]
    after = Counter((row[-1],) for row in rows if row[-2] == first)
    chances = said(drafter(), [*prompt, first]).exp()
    assert_distributed(after, {(token,): float(p) for token, p in enumerate(chances)})


def test_options_bind_drafts_too(folders: Path, head: Path) -> None:
    fast = model(folders, weights=str(head), threshold=0.0)
    first = fast.generate([PROMPTS[0]], **PLAIN)[0, 8:].tolist()
    rest = fast.generate([PROMPTS[0]], suppress_tokens=[first[2]], **PLAIN)[0, 8:].tolist()
    assert first[2] not in rest


@pytest.mark.parametrize("name", mostly_long(["int4", "cache"], ["int4"]))
def test_artifacts_few_bits_streams_and_turns(
    name: str, folders: Path, head: Path, tmp_path: Path
) -> None:
    passes = {"int4": "quantize_weights", "cache": "quantize_cache"}
    check_kept(
        model(folders, passes[name], weights=str(head), threshold=0.5), PROMPTS, 12, tmp_path
    )


def test_the_share_is_that_of_the_tokens_behind() -> None:
    agreed = (torch.rand(2, AHEAD + 30, generator=torch.Generator().manual_seed(0)) < 0.7).float()
    found = shares(agreed)
    assert found.shape == (2, AHEAD + 30 - LEAST + 1)
    for first in (0, 7, 40, found.shape[1] - 1):
        torch.testing.assert_close(found[:, first], agreed[:, first : first + AHEAD].mean(1))
    assert shares(agreed[:, : LEAST - 1]).shape == (2, 0)


def test_the_loss_is_the_cross_entropy_of_the_share() -> None:
    """The answer begins behind the token that follows the prompt, which is the target's."""
    passes = [DraftModel(model="other", levels=3), VerifyRouted(inner=8)]
    guests = {"other": tiny_llama(1, vocab=16, seed=1)}
    program = run_passes(tiny_llama(2, vocab=16).replace(guests=guests), [Step(p) for p in passes])[
        0
    ]
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.randint(0, 16, (2, 24), generator=torch.Generator().manual_seed(1))
    made = net.run(None, tokens=tokens)
    batch = Batch(
        tokens, {"hidden.normed": made["hidden.normed"]}, made["logits"], program.plan.draft
    )
    drafted = net.run("draft", tokens=tokens)["draft_logits"].argmax(-1)
    right = (drafted == made["logits"].argmax(-1)).float()[:, 1:]
    wanted = torch.stack([right[:, t:].mean(1) for t in range(right.shape[1] - LEAST + 1)], 1)
    loss = routed_loss(Routed(threshold=0.4), net.run, batch)
    # Untrained it says one half, whatever is right.
    assert float(loss.total) == pytest.approx(0.6931, abs=1e-4)
    assert loss.hits == [pytest.approx(float((wanted > 0.4).float().mean()))]


def test_training_teaches_the_head_alone(folders: Path, tmp_path: Path) -> None:
    held = model(folders)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, 39, (60,), generator=generator).tolist() for _ in range(24)]
    options: dict[str, Any] = {"steps": 60, "batch": 4, "window": 48, "own": 0.0, "rate": 3e-3}
    fitted = fit(held, texts, out=tmp_path, **options)
    assert fitted.loss < 0.67  # untrained it is log 2
    before, after = held.program.weights, fitted.model.program.weights
    for name in before:
        same = torch.equal(before[name].load(), after[name].load())
        assert same is not name.startswith("routing."), name
    again = model(folders, weights=str(tmp_path)).program
    assert again.plan.verify.trained
    assert torch.equal(again.weights["routing.0.weight"].load(), after["routing.0.weight"].load())


def test_the_recipe_by_name(folders: Path) -> None:
    assert gw.Recipe.load("routing").contract == "approximate"
    assert Routed.contract is Contract.APPROXIMATE
    fast = gw.optimize(folders / "target", "routing", draft=folders / "draft", target="eager")
    plain = gw.optimize(folders / "target", "baseline", target="eager")
    wanted = plain.generate([PROMPTS[0]], **PLAIN)
    assert torch.equal(fast.generate([PROMPTS[0]], **PLAIN), wanted)


def test_refusals(folders: Path) -> None:
    without = {"name": "no", "extends": "baseline", "passes": ["verify_routed"]}
    with pytest.raises(PassError, match=r"verify_routed.*drafts"):
        gw.optimize(folders / "target", gw.Recipe.load(without), target="eager")
    passes = [
        {"draft_model": {"model": str(folders / "draft")}},
        *("accept_trees", {"tree_best_first": {"nodes": 8}}, "verify_routed"),
    ]
    tree = {"name": "tree", "extends": "baseline", "passes": passes}
    with pytest.raises(PassError, match="makes several: take tree_chain"):
        gw.optimize(folders / "target", gw.Recipe.load(tree), target="eager")
