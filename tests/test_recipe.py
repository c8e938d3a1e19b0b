"""Recipes: what they read to, and that everything wrong is refused with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_runtime_cached import decode, plainly
from tiny import tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.draft_option import with_draft
from graftwork.ir import InputError
from graftwork.ir.support.yamlfile import parse
from graftwork.passes import Contract, Pass, all_passes
from graftwork.passes.engine import base as pass_base
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe


class Fold(Pass):
    name: ClassVar[str] = "test_fold"
    sizes: tuple[int, ...] = (1,)
    scale: float = 1.0


class Guess(Pass):
    name: ClassVar[str] = "test_guess"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    tokens: int = 4


class Shrink(Pass):
    name: ClassVar[str] = "test_shrink"
    contract: ClassVar[Contract] = Contract.APPROXIMATE


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {p.name: p for p in (Fold, Guess, Shrink)}
    monkeypatch.setattr(pass_base, "_PASSES", {**all_passes(), **known})


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def refused(source: Any, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.load(source)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_reads_all_three_ways_to_name_a_pass(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "mine",
        "title: Mine\npaper: A. Author, 2024\ncontract: lossless\npasses:\n"
        "  - test_guess\n  - test_fold: {sizes: [2, 3], scale: 1e-3}\n"
        "  - {pass: add_top_tokens, options: {count: 4}, optional: true}\n",
    )
    recipe = Recipe.load(path)
    assert (recipe.name, recipe.title, recipe.contract) == ("mine", "Mine", "lossless")
    guess, fold, best = recipe.steps
    assert guess.pass_ == Guess() and not guess.optional
    assert fold.pass_ == Fold(sizes=(2, 3), scale=1e-3)
    assert best.pass_.model_dump() == {"count": 4} and best.optional


def test_extends_keeps_places_and_lays_options_over(tmp_path: Path) -> None:
    write(tmp_path, "base", "passes: [{test_fold: {scale: 2.0}}, test_guess]")
    child = write(
        tmp_path,
        "child",
        "extends: base.yaml\npasses: [test_shrink, {test_fold: {sizes: [7]}}]",
    )
    recipe = Recipe.load(child)
    assert [step.pass_ for step in recipe.steps] == [
        Fold(sizes=(7,), scale=2.0),
        Guess(),
        Shrink(),
    ]
    assert (recipe.extends, recipe.contract) == ("base", "approximate")


def test_a_dict_and_its_plain_data_read_to_the_same_recipe() -> None:
    source = {"name": "d", "title": "t", "passes": ["test_guess", {"test_fold": {"sizes": [4]}}]}
    recipe = Recipe.load(source)
    again = Recipe.load(recipe.as_dict())
    assert again.steps == recipe.steps and again.as_dict() == recipe.as_dict()
    assert Recipe.load(recipe) is recipe


def test_set_overrides_one_option() -> None:
    recipe = Recipe.load({"passes": [{"test_fold": {"scale": 2.0}}, "test_guess"]})
    changed = recipe.with_options(["test_fold.sizes=[5, 6]", "test_guess.tokens=9"])
    assert changed.steps[0].pass_ == Fold(sizes=(5, 6), scale=2.0)
    assert changed.steps[1].pass_ == Guess(tokens=9)
    assert recipe.steps[1].pass_ == Guess()


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("test_fold", ["pass.option=value"]),
        ("test_fold=1", ["pass.option=value"]),
        ("test_fodl.scale=1", ["no pass 'test_fodl'", "did you mean 'test_fold'"]),
        ("test_fold.scael=1.0", ["no option 'scael'", "did you mean 'scale'"]),
        ("test_fold.scale=yes", ["test_fold", "scale", "got True"]),
        ("test_fold.scale=", ["scale", "got ''"]),
        ("test_fold.scale=!!python/name:os.system", ["--set"]),
    ],
)
def test_set_refuses(setting: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.load({"passes": ["test_fold"]}).with_options([setting])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("title: x\npases: []", ["r.yaml:2", "unknown key 'pases'", "did you mean 'passes'"]),
        ("passes:\n  - test_gues", ["r.yaml:2", "'test_gues'", "did you mean 'test_guess'"]),
        ("passes:\n  - test_guess\n  - test_guess: {token: 3}", ["r.yaml:3", "given twice"]),
        ("passes:\n- test_guess:\n    token: 3", ["r.yaml:2", "'token'", "mean 'tokens'"]),
        ("passes:\n- test_guess: {tokens: !!int ''}", ["r.yaml:2", "cannot read '' as int"]),
        ("passes:\n- test_guess: {tokens: !!bool x}", ["r.yaml:2", "cannot read 'x' as bool"]),
        (f"passes:\n- test_guess: {{tokens: {'9' * 30}}}", ["r.yaml:2", "of at most 64 bits"]),
        (f"passes:\n- test_guess: {{tokens: {'9' * 5000}}}", ["r.yaml:2", "cannot read"]),
        ("passes:\n- test_guess: {tokens: '3'}", ["r.yaml:2", "tokens", "got '3'"]),
        ("passes:\n- test_guess: {tokens: 3.5}", ["r.yaml:2", "tokens", "got 3.5"]),
        ("passes:\n- test_guess: 3", ["r.yaml:2", "expected options"]),
        ("passes:\n- {pass: test_guess, optional: 1}", ["r.yaml:2", "expected a bool"]),
        ("passes:\n- {pass: test_guess, tokens: 3}", ["r.yaml:2", "unknown key 'tokens'"]),
        ("passes:\n- {test_guess: {}, test_fold: {}}", ["r.yaml:2", "one pass"]),
        ("passes: test_guess", ["r.yaml:1", "expected a list"]),
        ("passes: []", ["r.yaml:1", "expected a list of passes"]),
        ("title: only", ["r.yaml:1", "passes"]),
        ("title: [1]\npasses: [test_guess]", ["r.yaml:1", "expected text"]),
        ("\ntitle: a\ntitle: b", ["r.yaml:3", "'title' is given twice"]),
        ("contract: exact\npasses: [test_guess]", ["r.yaml:1", "'lossless'", "test_guess"]),
        ("contract: approximate\npasses: [test_fold]", ["r.yaml:1", "'exact'"]),
        ("contract: perfect\npasses: [test_fold]", ["r.yaml:1", "got 'perfect'"]),
        ("needs: [gpu]\npasses: [test_fold]", ["r.yaml:1", "unknown need 'gpu'"]),
        ("needs: data\npasses: [test_fold]", ["r.yaml:1", "expected a list"]),
        ("extends: nothing\npasses: [test_fold]", ["r.yaml:1", "no recipe is called 'nothing'"]),
        ("extends: r.yaml\npasses: [test_fold]", ["r.yaml:1", "circle"]),
        ("a: &x 1\nb: *x", ["r.yaml:2", "aliases"]),
        ("a: &x [*x]", ["aliases"]),
        ("title: !!python/object/apply:os.system [ls]", ["r.yaml:1", "tag"]),
        ("title: 2024-01-01", ["r.yaml:1", "timestamp"]),
        ("1: x", ["r.yaml:1", "name as key"]),
        ("[a]: x", ["r.yaml:1", "name as key"]),
        ("- a\n- b", ["r.yaml:1", "expected a mapping"]),
        ("a: [1, 2", ["r.yaml:1", "not valid YAML"]),
        ("a: b: c", ["r.yaml:1", "not valid YAML"]),
        ("a: 1\n---\nb: 2", ["r.yaml:", "not valid YAML"]),
        ("a: \x00", ["r.yaml", "not valid YAML"]),
        ("", ["r.yaml", "empty"]),
        ("[" * 500 + "]" * 500, ["r.yaml", "too deeply"]),
    ],
)
def test_refuses_with_file_and_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    refused(write(tmp_path, "r", text), *parts)


def test_refuses_files_it_cannot_read(tmp_path: Path) -> None:
    refused(tmp_path / "none.yaml", "cannot read", "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"title: \xff")
    refused(tmp_path / "latin.yaml", "cannot read", "latin.yaml")
    refused("baselin", "'baselin'; did you mean 'baseline'? `graftwork recipes` lists all")
    refused("xyzzy", "no recipe is called 'xyzzy': `graftwork recipes` lists all")
    refused({"passes": [{"test_fold": {"scale": object()}}]}, "test_fold", "plain data")


def test_numbers_read_as_json_reads_them() -> None:
    assert parse("[1e-5, -2.5E3, 1e5, '1e5', 1e, .5, true, null]", "x").data == [
        1e-5,
        -2.5e3,
        1e5,
        "1e5",
        "1e",
        0.5,
        True,
        None,
    ]


def test_every_bundled_recipe_says_what_it_is() -> None:
    listed = gw.recipes()
    assert "baseline" in [recipe.name for recipe in listed]
    for recipe in listed:
        assert recipe.title and recipe.contract in ("exact", "lossless", "tuned", "approximate")
        assert Recipe.load(recipe.name) == recipe


@pytest.mark.parametrize(
    ("name", "brought"),
    [
        ("baseline", ()),
        ("gptq", ("calibration text",)),
        ("copyspec", ()),
        ("medusa", ("trained heads",)),
        ("eagle2", ("trained heads",)),
        ("mtp", ("a checkpoint with an MTP layer",)),
        ("judge", ("trained heads",)),
        ("draft_model_staged", ("a draft model",)),
        ("corpus", ("a corpus file",)),
        ("aggressive", ("an input text",)),
    ],
)
def test_what_the_user_must_bring_follows_from_the_passes(
    name: str, brought: tuple[str, ...]
) -> None:
    assert Recipe.load(name).brought == brought


def test_a_draft_model_goes_where_one_is_taken_and_drafts_for_what_does_not_draft() -> None:
    given = with_draft(Recipe.load("sequoia"), "small: 1.gguf")
    assert [use.options for use in given.passes if use.name == "draft_model"] == [
        {**use.options, "model": "small: 1.gguf"}
        for use in Recipe.load("sequoia").passes
        if use.name == "draft_model"
    ]
    added = with_draft(Recipe.load("int8"), Path("small"))
    assert [use.name for use in added.passes[-2:]] == ["draft_model", "length_goodput"]
    assert added.contract == "approximate" and added.passes[-2].options == {"model": "small"}
    weak = with_draft(Recipe.load("contrastive_decoding"), "small")
    assert [use.options["model"] for use in weak.passes if "model" in use.options] == ["small"]
    for drafts in (added, Recipe.load("medusa")):
        with pytest.raises(InputError, match=r"draft=other: the recipe .* has the pass draft_m"):
            with_draft(drafts, "other")


def test_the_models_first_layers_draft_by_the_same_option() -> None:
    """All weights are the model's own, and the text is."""
    first = with_draft(Recipe.load("baseline"), "first:2")
    assert [use.name for use in first.passes[-4:]] == [
        *("draft_exit", "cut_depth", "tree_chain", "length_goodput")
    ]
    plain, made = (
        run_passes(tiny_llama(4), recipe.steps)[0] for recipe in (Recipe.load("baseline"), first)
    )
    assert set(made.weights) == set(plain.weights)
    assert (made.plan.draft.kind, made.plan.step.exits) == ("exit", (2,))
    executable = compile(made, Target.parse("eager"))
    result = decode(executable, [[3, 4, 5]], 30)
    assert torch.equal(result.sequences, plainly(executable, [[3, 4, 5]], 30))
    for recipe in (first, Recipe.load("draft_model")):
        with pytest.raises(InputError, match=r"draft=first:3: the recipe .* has the pass draft_"):
            with_draft(recipe, "first:3")
