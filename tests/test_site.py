"""The documentation as a site: a page a method, drawn from the recipes, and no dead links."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from graftwork.recipe import recipes
from graftwork.recipe_schema import recipe_schema

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import methods_pages  # noqa: E402


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return methods_pages.pages()


def test_every_recipe_has_a_page_and_a_row_in_its_familys_table(made: dict[str, str]) -> None:
    known = recipes()
    assert made.keys() == {"methods/index.md", *(f"methods/{r.name}.md" for r in known)}
    index = made["methods/index.md"]
    for recipe in known:
        assert index.count(f"[{recipe.name}]({recipe.name}.md)") == 1
        page = made[f"methods/{recipe.name}.md"]
        assert recipe.title in page and f"--recipe {recipe.name} " in page
        assert recipe.paper.replace("|", "\\|") in page and "```yaml" in page


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("baseline", "Plain decoding"),
        ("copyspec", "Drafts without training"),
        ("medusa", "Drafts by trained heads"),
        ("swift", "Drafts by the target's own layers"),
        ("draft_model", "Drafts by another model"),
        ("int8_copyspec", "Drafts over few bits"),
        ("gptq", "Fewer bits"),
        ("h2o", "The cache"),
        ("calm", "Fewer layers"),
        ("tensor_parallel", "Several processes"),
    ],
)
def test_families(name: str, family: str) -> None:
    (recipe,) = [recipe for recipe in recipes() if recipe.name == name]
    assert methods_pages.family_of(recipe) == family


def test_options_say_what_they_mean(made: dict[str, str]) -> None:
    """In a row each, also those that passes share; nothing points at a class."""
    page = made["methods/copyspec.md"]
    assert "| `tokens` | `10` | `10` | draft tokens a step at most. |" in page
    rows = re.findall(r"^\| `(?:longest|shortest)` .*lengths of suffix that count", page, re.M)
    assert len(rows) == 2 and "    graftwork generate DIR --prompt TEXT" in page
    weights = re.search(r"^\| `weights` \|.*\| (.*) \|$", made["methods/eagle2.md"], re.M)
    assert weights is not None and weights[1].strip()
    assert not [name for name, text in made.items() if "The rest: see" in text]


def test_no_option_is_left_without_words(made: dict[str, str]) -> None:
    rows = re.compile(r"^\| `(\w+)` \| `.*` \| `.*` \| (.*) \|$", re.M)
    found = [row for page in made.values() for row in rows.findall(page)]
    assert len(found) > 300
    unsaid = [name for name, said in found if not said or methods_pages.ELSEWHERE.fullmatch(said)]
    assert not unsaid


def test_figures_stand_beside_the_command_that_gave_them(made: dict[str, str]) -> None:
    page = made["methods/int4.md"]
    cost = page.partition("## What it cost")[2].partition("\n## ")[0]
    (row,) = [
        line
        for line in (ROOT / "docs" / "real_models.md").read_text().splitlines()
        if line.startswith("| `int4` | smollm2")
    ]
    assert row in cost and "../real_models.md#fewer-bits" in cost
    assert "    python benchmarks/real.py SMOLLM2" in cost
    assert "Not measured" in made["methods/tensor_parallel.md"]


def test_the_schema_takes_all_recipes_and_refuses_others() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator(recipe_schema())
    checker.check_schema(recipe_schema())
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        assert not [*checker.iter_errors(yaml.safe_load(path.read_text()))], path.name
    good = {"title": "x", "passes": ["insert_kv_cache", {"draft_suffix": {"tokens": 6}}]}
    assert checker.is_valid(good)
    bad = [
        {**good, "titel": "x"},
        {**good, "contract": "good"},
        {**good, "passes": ["draft_sufix"]},
        {**good, "passes": [{"draft_suffix": {"tokns": 6}}]},
        {**good, "passes": [{"draft_suffix": {"tokens": "six"}}]},
        {**good, "passes": [{"pass": "draft_suffix", "options": {"tokens": -1}}]},
        {**good, "knob": {"draft_suffix": [1]}},
    ]
    assert [recipe for recipe in bad if checker.is_valid(recipe)] == []


@pytest.mark.long
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in ("index.html", "methods/medusa/index.html", "api/index.html"):
        assert (tmp_path / name).is_file()
    assert json.loads((tmp_path / "recipe.schema.json").read_text()) == recipe_schema()
    first = (tmp_path / "index.html").read_text()
    assert 'href="methods/copyspec/"' in first  # one click
    assert 'href="../methods/int4/"' in (tmp_path / "real_models" / "index.html").read_text()
    assert "gptq" in (tmp_path / "search" / "search_index.json").read_text()
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    loaded = [
        re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?://[^"]+)', p) for p in pages
    ]
    assert not any(loaded), "pages load something from elsewhere"
    assert "generate" in (tmp_path / "api" / "index.html").read_text()
