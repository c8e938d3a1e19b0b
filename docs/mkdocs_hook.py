"""What the site has besides the files of this folder: README as the first page, CHANGELOG and
CONTRIBUTING, a page a method, the API's names, and the recipes' JSON schema. See mkdocs.yml."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import methods_pages  # noqa: E402

import graftwork  # noqa: E402
from graftwork.recipe import recipes  # noqa: E402
from graftwork.recipe_schema import recipe_schema  # noqa: E402

TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}

_NAMES = "|".join(recipe.name for recipe in recipes())


def on_startup(command: str, dirty: bool) -> None:
    """Lay out the package as it is installed, for what reads docstrings: that leaves out folders
    which are not there when it is configured."""
    _lay_out(ROOT / "build" / "api" / "graftwork")


def on_config(config: Any) -> Any:
    """A page a method in the navigation, by family."""
    families = methods_pages.by_family(recipes())
    methods = [
        {family: [f"methods/{recipe.name}.md" for recipe in chosen]}
        for family, chosen in families.items()
    ]
    for part in config.nav:
        if "Methods" in part:
            part["Methods"] = ["methods/index.md", *methods]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is generated."""
    made = {there: (ROOT / here).read_text(encoding="utf-8") for here, there in TOP.items()}
    made |= methods_pages.pages()
    made["api.md"] = api_page()
    made["recipe.schema.json"] = json.dumps(recipe_schema(), indent=1)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they are in the repository lead to pages; those to files that the site does not
    have become their names."""
    here = page.file.src_uri
    folder = "" if here in TOP.values() else "docs/"
    if here.startswith("methods/"):
        return markdown

    def link(match: re.Match[str]) -> str:
        label, target, rest = match[1], match[2], match[3] or ""
        if target.startswith("methods/"):
            return match[0]
        path = _plain(folder + target)
        path = TOP.get(path, path.removeprefix("docs/")) if path else target
        if files.get_file_from_path(path) is None:
            return label.strip("`") and f"`{label.strip('`')}`"
        return f"[{label}]({path}{rest})"

    if here == "index.md":
        page.meta["hide"] = ["navigation"]
    markdown = re.sub(r"(?m)^\|.*$", _with_methods, markdown)
    image = re.sub(r"(!\[[^\]]*\]\()docs/", r"\1", markdown)
    return re.sub(r"(?<!!)\[([^\]\[]+)\]\((?!http)([^)#\s]+)(#[^)]*)?\)", link, image)


def _with_methods(row: re.Match[str]) -> str:
    """A row of a table, in which names of recipes lead to their pages."""
    linked = re.sub(rf"`({_NAMES})`", r"[`\1`](methods/\1.md)", row[0])
    return re.sub(rf"^\| ({_NAMES}) \|", r"| [\1](methods/\1.md) |", linked)


def api_page() -> str:
    """What `import graftwork` has, from the docstrings."""
    lines = ["# API", "", "What `import graftwork as gw` has.", ""]
    for name in graftwork.__all__:
        home = graftwork._HOMES[name]
        lines += [f"::: graftwork{_file_of(home, name)}.{name}", ""]
    return "\n".join(lines)


def _file_of(home: str, name: str) -> str:
    """The module that defines a name, for packages that only pass it on."""
    thing = getattr(graftwork, name)
    return str(thing.__module__).removeprefix("graftwork") or home


def _lay_out(there: Path) -> None:
    """Copies of the package's files, as pyproject.toml says where they belong."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shutil.rmtree(there, ignore_errors=True)
    for name, folder in project["tool"]["setuptools"]["package-dir"].items():
        inner = there.joinpath(*name.split(".")[1:])
        for file in (ROOT / folder).rglob("*.py"):
            copy = inner / file.relative_to(ROOT / folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _plain(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", ".", ".."):
            parts.append(part)
    return "/".join(parts)
