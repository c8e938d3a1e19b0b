"""Models with recurrences and convolutions: what transformers computes, in steps of all widths."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from archs import Arch, build, error, logits_of, text_config, tokens_and_positions
from recurrent_archs import RECURRENT
from test_architectures import same_tokens
from tiny import named

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.frontends import import_model
from graftwork.frontends.huggingface import recurrences
from graftwork.ir import InputError, PassError, Program, UnsupportedError
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.validate import reference_logits

WIDTHS = (7, 1, 1, 3, 8, 1, 2, 5, 12)
NEW = 24
TOLERANCE = 1e-4
SHORT = ("lfm2", "mamba2", "qwen3_next")
"""Of each kind of state, one."""
FAMILIES = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in RECURRENT
]
TARGETS = ("eager", "onnxruntime")


@lru_cache(maxsize=2)
def imported(name: str) -> tuple[Any, Program]:
    """A family's model and its program; no token ends a text. Change neither."""
    model = build(RECURRENT[name])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model, import_model(model)


@lru_cache(maxsize=2)
def prompts(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three prompts of different lengths, the first repeating itself, and their greedy texts."""
    generator = torch.Generator().manual_seed(5)
    part, more, other, one = (
        torch.randint(3, 128, (1, n), generator=generator) for n in (6, 3, 7, 1)
    )
    given = [torch.cat([part, part, more, part], 1), other, one]
    return given, [_greedy(imported(name)[0], ids) for ids in given]


@torch.no_grad()
def _greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """By whole forward passes: transformers' own loop keeps states that families carry in their
    modules."""
    for _ in range(NEW):
        logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_transformers_whatever_the_widths_of_steps(name):
    model, program = imported(name)
    ids, positions = tokens_and_positions(tokens=sum(WIDTHS))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    assert error(logits_of(program, ids, positions), want) < TOLERANCE
    cached, _ = run_passes(program, gw.Recipe.load("baseline").steps)
    assert error(reference_logits(cached, ids, list(WIDTHS)), want) < TOLERANCE
    for target in TARGETS:
        for certain in (1, 100):
            got = _in_steps(cached, target, ids, certain)
            assert error(got, want) < TOLERANCE, (target, certain)


@pytest.mark.sweep
@pytest.mark.parametrize("name", RECURRENT)
def test_logits_are_transformers_when_compiled(name):
    """Steps are as wide as what was compiled, with garbage behind their tokens."""
    model, program = imported(name)
    ids, _ = tokens_and_positions(tokens=sum(WIDTHS))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    cached, _ = run_passes(program, gw.Recipe.load("baseline").steps)
    assert error(_in_steps(cached, "torch", ids, 1), want) < TOLERANCE


def _in_steps(program: Program, target: str, ids: torch.Tensor, certain: int) -> torch.Tensor:
    """Logits of steps of `WIDTHS`, of whose tokens so many are certain at once; before each,
    another one is taken back."""
    executable = compile(program, Target.parse(target, threads=1))
    widest = max((*executable.widths("step").each, *WIDTHS))
    executable.begin(len(ids), ids.shape[1] + widest)
    executable.reserve(ids.shape[1] + widest)
    executable.reserve(max(WIDTHS), "W")
    parts, past = [], 0
    for width in WIDTHS:
        wrong = torch.randint(3, 128, (len(ids), 4), generator=torch.Generator().manual_seed(past))
        if past:
            _run(executable, wrong, past, 0)
        parts.append(_run(executable, ids[:, past : past + width], past, min(certain, width)))
        past += width
    return torch.cat(parts, 1)


def _run(executable: Any, tokens: torch.Tensor, past: int, certain: int) -> torch.Tensor:
    count = tokens.shape[1]
    tokens = torch.nn.functional.pad(tokens, (0, executable.widths("step").holding(count) - count))
    batch, width = tokens.shape
    steps = torch.arange(width).expand(batch, width)
    positions = (steps + past).clamp(max=executable.program.info.context - 1)
    inputs = {"tokens": tokens.contiguous(), "positions": positions.contiguous()}
    inputs |= {"past": torch.full((batch,), past), "certain": torch.full((batch,), certain)}
    if executable.program.step.has_input("select"):
        inputs["select"] = steps.contiguous()
    given = {n: t for n, t in inputs.items() if executable.program.step.has_input(n)}
    return executable.run("step", given, ("logits",))["logits"][:, :count].clone()


def _check(name: str, recipe: str, target: str) -> Any:
    """Texts alone and together are transformers'; the statistics of the first."""
    model, _ = imported(name)
    given, want = prompts(name)
    fast = gw.optimize(model, recipe, target=target)
    plain: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0}
    alone = fast.generate(given[0], return_dict_in_generate=True, **plain)
    assert same_tokens(model, alone.sequences[0], want[0][0])
    length = given[0].shape[1]
    ids = torch.zeros(len(given), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(given):
        ids[row, length - text.shape[1] :] = text
        mask[row, length - text.shape[1] :] = 1
    both = fast.generate(ids, attention_mask=mask, **plain)
    for row, (text, expected) in enumerate(zip(given, want, strict=True)):
        assert same_tokens(model, both[row, length - text.shape[1] :], expected[0])
    again = fast.generate(given[0], **plain)  # what the states held is forgotten
    assert torch.equal(again, alone.sequences)
    return alone.stats


OFTEN = ("qwen3_5_text", "recurrent_gemma", "lfm2", "bamba", "jamba")
"""Of these texts are in the long tests, of other families in the sweep; logits are of all."""


def _seldom(name: str, target: str) -> Any:
    if (name, target) == ("mamba2", "onnxruntime"):
        return ()
    return pytest.mark.long if name in OFTEN and target == "onnxruntime" else pytest.mark.sweep


TEXTS = [
    pytest.param(name, target, marks=_seldom(name, target))
    for name in RECURRENT
    for target in TARGETS
]


@pytest.mark.parametrize(("name", "target"), TEXTS)
def test_texts_are_transformers(name, target):
    _check(name, "baseline", target)


COMPILED = [
    pytest.param(name, marks=pytest.mark.long if name == "lfm2" else pytest.mark.sweep)
    for name in RECURRENT
]


@pytest.mark.parametrize("name", COMPILED)
def test_texts_are_transformers_when_compiled(name):
    _check(name, "baseline", "torch")


SPECULATIVE = ("lfm2", "mamba2", "bamba", "qwen3_5_text", "recurrent_gemma")
COMPILED_DRAFTS = (("mamba2", "copyspec"),)


def _marks(name: str, recipe: str, target: str) -> Any:
    """How often a text with drafts is made: always, in the long tests, or in the sweep."""
    if target == "torch":
        return pytest.mark.long if (name, recipe) in COMPILED_DRAFTS else pytest.mark.sweep
    short = {("lfm2", "recycling", "eager")}
    if (name, recipe, target) in short:
        return ()
    # Chains and trees of every family on one target, and every recipe on the other.
    often = target == "onnxruntime" if recipe in ("copyspec", "recycling") else "2" in name
    return pytest.mark.long if often else pytest.mark.sweep


DRAFTED = [
    pytest.param(name, recipe, target, marks=_marks(name, recipe, target))
    for name in SPECULATIVE
    for recipe in ("copyspec", "recycling", "medusa", "eagle_chain")
    for target in (*TARGETS, "torch")
]


@pytest.mark.parametrize(("name", "recipe", "target"), DRAFTED)
def test_drafts_change_no_text(name, recipe, target):
    if name in ("lfm2", "mamba2") and recipe == "recycling":
        assert _check(name, recipe, target).draft_tokens > 0
    else:
        _check(name, recipe, target)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize("recipe", ["medusa", "eagle_chain"])
def test_sampled_texts_keep_their_distribution(recipe):
    """The last of three tokens, over many short texts: chi-square against plain decoding's."""
    model, _ = imported("mamba2")
    ids = torch.tensor([[5, 9, 30, 9, 7]]).expand(600, -1)
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.3, "seed": 7}
    counts = []
    for name in ("baseline", recipe):
        found = gw.optimize(model, name, target="eager").generate(
            ids, pad_token_id=0, return_dict_in_generate=True, **asked
        )
        assert (found.stats.draft_tokens > 0) == (name == recipe)
        counts.append(torch.bincount(found.sequences[:, -1], minlength=128).double())
    plain, fast = counts
    often = (plain + fast) >= 10
    chi = ((plain - fast) ** 2 / (plain + fast).clamp(min=1))[often].sum()
    free = int(often.sum()) - 1
    assert free >= 5 and chi < free + 4 * (2 * free) ** 0.5


@pytest.mark.parametrize("target", TARGETS)
def test_a_path_of_a_tree_is_committed(target):
    """After a tree, the states are those of the path that is kept, and of it alone."""
    model, program = imported("mamba2")
    cached, _ = run_passes(program, gw.Recipe.load("recycling").steps)
    executable = compile(cached, Target.parse(target, threads=1))
    executable.begin(1, 64)
    executable.reserve(64)
    executable.reserve(8, "W")
    prompt = torch.tensor([[5, 9, 17, 33]])
    _run(executable, prompt, 0, 4)
    tree = torch.tensor([[7, 11, 12, 13, 14, 15]])  # 7 -> (11 -> (13 -> 15, 14), 12)
    parents = [-1, 0, 0, 1, 1, 3]
    seen = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    inputs = {
        "tokens": tree,
        "positions": 4 + seen.sum(1)[None] - 1,
        "past": torch.tensor([4]),
        "certain": torch.tensor([1]),
        "select": torch.arange(6)[None],
        "ancestors": seen[None],
    }
    given = {n: t for n, t in inputs.items() if cached.step.has_input(n)}
    logits = executable.run("step", given, ("logits",))["logits"].clone()
    paths = ([0, 1, 3, 5], [0, 2], [0, 1, 4])
    for path in paths:
        text = torch.cat([prompt, tree[:, path]], 1)
        assert error(logits[:, path], _logits(model, text)[:, 4:]) < TOLERANCE
    logged = [name for name, state in cached.states.items() if state.capacity == "W"]
    executable.commit(logged, torch.tensor([0]), torch.tensor([[0, 2, 4]]))
    got = _run(executable, torch.tensor([[21]]), 8, 1)
    text = torch.cat([prompt, tree[:, paths[0]], torch.tensor([[21]])], 1)
    assert error(got[:, 0], _logits(model, text)[:, -1]) < TOLERANCE


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.long
def test_no_step_copies_a_state():
    """Beside the states there are logs of the drafted rows: they grow with these, and states do
    not."""
    model, _ = imported("qwen3_next")
    sizes = []
    for recipe in ("baseline", "recycling"):
        fast = gw.optimize(model, recipe, target="eager")
        fast.generate(prompts("qwen3_next")[0][0], max_new_tokens=4)
        held = fast.executable.states
        log = sum(t.nbytes for n, t in held.items() if fast.program.states[n].capacity == "W")
        whole = sum(t.nbytes for n, t in held.items() if fast.program.states[n].capacity is None)
        sizes.append((log, whole))
    assert sizes[0][1] == sizes[1][1]
    assert sizes[0][0] < sizes[1][0] < 60 * sizes[0][0]


def test_the_delta_rule_by_hand():
    """Two tokens of one head with keys and values of size 1, and a third beside the second."""
    step = torch.ops.graftwork.linear_attention_step
    q, k = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 0.5, 2.0])
    v, beta = torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0.5, 1.0, 0.25])
    decay = torch.tensor([0.5, 0.25, 0.5])
    seen = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    before = 2.0
    after = decay[0] * before
    first = after + k[0] * beta[0] * (v[0] - k[0] * after)
    left = decay[1] * first
    second = left + k[1] * beta[1] * (v[1] - k[1] * left)
    right = decay[2] * first
    third = right + k[2] * beta[2] * (v[2] - k[2] * right)
    shape = (1, 1, 3, 1)
    state, log = torch.full((1, 1, 1, 1), before), torch.zeros(1, 1, 2, 1)
    five, one = torch.tensor([5]), torch.tensor([1])
    sequence = (x.reshape(shape) for x in (q, k, v, decay.log()))
    y, new, keys, values, decays = step(
        *(state, log, log, log, five, five, one, seen[None]), *sequence, beta.reshape(1, 1, 3)
    )
    want = torch.stack([q[0] * first, q[1] * second, q[2] * third])
    torch.testing.assert_close(y.flatten(), want)
    torch.testing.assert_close(new.flatten(), first.reshape(1))
    # The next step keeps the third token: its row comes first, and is folded.
    kept = (x.flip(2) for x in (keys, values, decays))
    nothing = torch.zeros(1, 1, 1, 1)
    folded, past, none = torch.tensor([6]), torch.tensor([7]), torch.tensor([0])
    _, new, *_ = step(
        *(new, *kept, folded, past, none, None), *(nothing,) * 4, torch.zeros(1, 1, 1)
    )
    torch.testing.assert_close(new.flatten(), third.reshape(1))


def test_what_cannot_go_back_is_refused():
    _, program = imported("mamba2")
    with pytest.raises(PassError, match="recurrences, which hold what all rows add up to"):
        run_passes(program, gw.Recipe.load("streaming_llm").steps)
    cached, _ = run_passes(program, gw.Recipe.load("baseline").steps)
    with pytest.raises(PassError, match="recurrences, whose states cannot go back"):
        named("cut_depth", exits=(1,)).run(cached)
    fast = gw.optimize(imported("lfm2")[0], target="eager")
    with pytest.raises(InputError, match="no rows that a prefix could keep"):
        fast.save_prefix(torch.arange(3, 43)[None], "prefix.safetensors")
    for export in (fast.export_onnx, fast.export_genai):
        with pytest.raises(UnsupportedError, match=r"has recurrences.*onnx-loop and onnx-plan"):
            export("out")


def test_functions_that_moved_are_named(monkeypatch):
    import transformers.models.lfm2.modeling_lfm2 as file

    model, _ = imported("lfm2")
    theirs = file.causal_conv1d_fn
    monkeypatch.setattr(file, "causal_conv1d_fn", lambda hidden_states, kernel: hidden_states)
    with pytest.raises(UnsupportedError, match=r"causal_conv1d_fn takes 'kernel'"):
        import_model(model)
    monkeypatch.delattr(file, "causal_conv1d_fn")
    monkeypatch.setattr(file, "causal_conv1d_other", theirs, raising=False)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.conv\.conv runs aten\.conv1d"):
        import_model(model)


def test_every_family_calls_functions_that_are_known():
    """Fails where a release of transformers renames one, before a user finds out."""
    used: set[str] = set()
    for name, arch in RECURRENT.items():
        model = build(arch)
        recurrences.check(model, name)
        used |= set(recurrences.FUNCTIONS) & {
            known for file in recurrences.files(model) for known in vars(file)
        }
    assert used == set(recurrences.FUNCTIONS)


@pytest.mark.long
def test_lfm2_without_convolutions_is_plain_attention():
    model = build(Arch("lfm2", text_config(layer_types=["full_attention"] * 2)))
    assert not gw.optimize(model, target="eager").program.recurrent
