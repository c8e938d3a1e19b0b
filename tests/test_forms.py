"""Methods that store weights in forms of their own: outliers in pairs, signs, learned codebooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from evidence import evidence_for
from selection import rarely
from test_gptq import correlated, moments
from tiny import MASK, PROMPTS, tiny_llama

import graftwork.passes.numerics.methods.jlcm as jlcm
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, parse_program, program_text
from graftwork.ir.ops.numerics import Numeric, unpack
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.moments import loss
from graftwork.passes.numerics.methods.base import method_of
from graftwork.passes.numerics.methods.olive import codebook, pairs
from graftwork.passes.numerics.vq_logits import clustered, means
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.scoring import score

ASKED: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "eos_token_id": []}
FORMS = {
    "olive": {"group": 16},
    "ptq161": {"group": 0},
    "jlcm": {"group": 0, "bits": 2, "tuning": {"books": 2, "steps": 4}},
}


def heavy(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A weight with values far from the others."""
    torch.manual_seed(seed)
    return torch.distributions.StudentT(3.0).sample((rows, columns))


def test_pairs_are_these_numbers() -> None:
    """7 and 12 meet at 9.5, 12 and 16 at 14; a victim is nothing, the smaller outlier is one."""
    given = torch.tensor([[2.6, -6.4, 9.4, 9.6, -60.0, 1.0, 20.0, 90.0, 13.0, -13.9]])
    found, codes = pairs(given)
    assert found.tolist() == [[3.0, -6.0, 0.0, 12.0, -64.0, 0.0, 0.0, 96.0, 0.0, -12.0]]
    assert codes.tolist() == [[3, 10, 8, 1, 14, 8, 8, 7, 8, 9]]
    book = codebook()
    assert book[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert book[9:16].tolist() == [-7, -6, -5, -4, -3, -2, -1]
    assert book[17:24].tolist() == [12, 16, 24, 32, 48, 64, 96]
    assert book[25:].tolist() == [-12, -16, -24, -32, -48, -64, -96]
    # No outlier has the mark's code, so that a mark never stands beside a mark but for nothing.
    assert not (pairs(torch.tensor([[-1e9, 1e9]]))[1] == 8).all()


def test_outliers_cost_their_neighbours_less_than_all() -> None:
    """Of a row with outliers, OliVe's error is less than that of one scale for all of it."""
    weight, numeric = heavy(24, 256), Numeric(4, 256, "affine")
    method = method_of("olive", {})
    form = method.form(numeric, 24, 256)
    stored = method.stored(weight, form, None)
    plain = numeric.dequantize(numeric.quantize(weight))
    found = form.values(stored)
    assert (found - weight).square().mean() < 0.8 * (plain - weight).square().mean()
    codes = unpack(stored.terms[0].weight, 4).unflatten(-1, (-1, 2))
    assert 0.002 < (codes == 8).float().mean() < 0.2
    assert not (codes == 8).all(-1).any()  # no pair gives up both


def test_a_fifth_of_the_channels_keep_four_bits_and_the_others_a_sign() -> None:
    x = torch.randn(512, 160, generator=torch.Generator().manual_seed(0))
    x[:, ::5] *= 20  # the channels that are salient
    weight, method = heavy(12, 160), method_of("ptq161", {})
    seen = method.prepared(moments(x))
    form = method.form(Numeric(4, 160, "affine"), 12, 160)
    stored = method.stored(weight, form, seen)
    assert stored.columns[0].tolist() == list(range(0, 160, 5))
    values = form.values(stored)
    for row in values[:, stored.columns[1]]:
        assert len(row.unique()) == 2
    assert all(len(row.unique()) <= 16 for row in values[:, stored.columns[0]])
    # By hand: without turns signs are those around the mean, and scales the best for them.
    signs = (weight > weight[:, stored.columns[1]].mean(1, keepdim=True))[:, stored.columns[1]]
    first = method_of("ptq161", {"rounds": 0})
    plain = form.values(first.stored(weight, form, seen))
    low, high = plain[:, stored.columns[1]].aminmax(dim=1, keepdim=True)
    assert torch.equal(plain[:, stored.columns[1]] > (low + high) / 2, signs)
    was = loss(plain - weight, seen.hessian)
    for change in (0.97, 1.03):  # no other scale is better
        moved = plain.clone()
        moved[:, stored.columns[1]] *= change
        assert (loss(moved - weight, seen.hessian) > was * 0.999).all()
    assert (loss(values - weight, seen.hessian) <= was * 1.001).all()
    bits = (
        sum(t.nbytes for t in form.tensors(stored) if t.dtype == torch.uint8) * 8 / weight.numel()
    )
    assert bits == pytest.approx(0.2 * 4 + 0.8)


def test_leanings_move_less_the_farther_an_entry_is() -> None:
    book = torch.tensor([-3.0, 0.0, 1.0, 5.0])
    pull, codes = torch.tensor([[-2.0]]), torch.tensor([[1]])
    slope = jlcm.slopes(pull, book, codes)[0, 0]
    # Larger values would lower the loss: the entries above gain, the nearest most.
    assert slope[2] < slope[3] < 0 == slope[1] < slope[0]
    assert float(slope[2] / slope[3]) == pytest.approx(5.0)


def test_outputs_that_are_alike_stand_together() -> None:
    torch.manual_seed(0)
    flat, peaked = torch.rand(16, 400) * 2 - 1, torch.randn(16, 400).clamp(-4, 4) / 4
    mixed = torch.stack([flat, peaked], 1).flatten(0, 1)
    order = jlcm.alike(mixed, 2)
    assert {len({int(i) % 2 for i in half}) for half in order.chunk(2)} == {1}


@pytest.mark.parametrize("bits", [2, 3])
def test_learned_codebooks_lose_less_than_steps_of_equal_size(bits: int) -> None:
    weight, seen = heavy(64, 96), moments(correlated(96))
    numeric = Numeric(bits, 96, "affine", torch.float16)
    plain = method_of("gptq", {"fitted": False})
    even = plain.quantize(weight.clone(), numeric, plain.prepared(moments(correlated(96))))
    losses = {"even": loss(numeric.dequantize(even) - weight, seen.hessian).sum()}
    for name, options in {"start": {"steps": 0}, "learned": {"steps": 60}}.items():
        method = method_of("jlcm", {"books": 4, **options})
        form = method.form(numeric, 64, 96)
        assert form.numerics[0].books == 4 and form.reordered
        stored = method.stored(weight.clone(), form, method.prepared(moments(correlated(96))))
        values = form.values(stored)
        assert len(values[0].unique()) <= 2**bits
        losses[name] = loss(values - weight, seen.hessian).sum()
    assert losses["learned"] <= losses["start"] < 0.7 * losses["even"]


def made(name: str, **options: Any) -> Program:
    given = {"method": name, "windows": 4, "length": 32, **options}
    recipe = {"name": "few", "extends": "baseline", "passes": [{"quantize_weights": given}]}
    program = tiny_llama()
    return run_passes(program, Recipe.load(recipe).steps, evidence=evidence_for(program, 400))[0]


@pytest.mark.parametrize("backend", ["onnxruntime", pytest.param("torch", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", rarely(("ptq161", "olive", "jlcm"), 9))
def test_forms_run_alike_on_both_backends_and_print(name: str, backend: str) -> None:
    program = made(name, **FORMS[name])
    text = program_text(program)
    assert program_text(parse_program(text)) == text
    want = generate(compile(program, Target("eager", "cpu")), PROMPTS, **ASKED)
    for backend in ("onnxruntime", "torch"):
        assert torch.equal(
            generate(compile(program, Target(backend, "cpu")), PROMPTS, **ASKED), want
        )


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("olive", {"bits": 3}, "expected 4 bits"),
        ("ptq161", {"group": 8}, r"group: 0"),
        ("jlcm", {"group": 0, "bits": 6}, "at most 4 bits"),
        ("jlcm", {"group": 8}, r"group: 0"),
    ],
)
def test_what_a_form_has_no_use_for_is_refused(name: str, options: dict[str, Any], reason) -> None:
    with pytest.raises((PassError, InputError), match=reason):
        made(name, **options)


def test_codewords_are_means_of_clusters_by_hand() -> None:
    """Rows on a line; the two that come most begin, and the mean leans to who comes more."""
    rows = torch.tensor([[0.0], [1.0], [10.0], [12.0], [14.0]])
    often = torch.tensor([5.0, 1.0, 1.0, 4.0, 1.0])
    codes = clustered(rows, often, 2, 20)
    assert codes.tolist() == [0, 0, 1, 1, 1]
    want = [[1 / 6], [(10 + 48 + 14) / 6]]
    torch.testing.assert_close(means(rows, often, codes, 2), torch.tensor(want))


def test_clusters_are_those_of_a_search_that_looks_at_all() -> None:
    """Words that did not move are not looked at again."""
    generator = torch.Generator().manual_seed(0)
    rows, often = torch.randn(400, 6, generator=generator), torch.rand(400, generator=generator)
    for count in (200, 30):
        words = rows[often.argsort(descending=True, stable=True)[:count]]
        codes = torch.cdist(rows, words).argmin(-1)
        for rounds in range(1, 8):
            words = means(rows, often, codes, count, words)
            codes = torch.cdist(rows, words).argmin(-1)
            assert torch.equal(clustered(rows, often, count, rounds), codes)


def test_a_head_of_codewords_gives_tokens_of_one_the_same_logit() -> None:
    program = tiny_llama()
    options = {"codewords": 20, "windows": 4, "length": 32}
    recipe = {"name": "few", "extends": "baseline", "passes": [{"vq_logits": options}]}
    steps = Recipe.load(recipe).steps
    made = run_passes(program, steps, evidence=evidence_for(program, 400))[0]
    codes = made.weights["head.codes"].load()
    assert len(codes) == 32 and len(codes.unique()) == 20
    model = compile(made, Target("onnxruntime", "cpu"))
    logits = score(model, PROMPTS[2:3])[0]
    for code in codes.unique():
        alike = logits[:, codes == code]
        assert torch.equal(alike, alike[:, :1].expand_as(alike))
    want = generate(compile(made, Target("eager", "cpu")), PROMPTS, **ASKED)
    assert torch.equal(generate(model, PROMPTS, **ASKED), want)
