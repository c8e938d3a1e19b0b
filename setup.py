"""Finds the packages: every folder with an __init__.py in those of pyproject.toml's package-dir."""

import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def packages() -> list[str]:
    """Their names, such as graftwork.passes.drafting."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = []
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        for file in sorted((ROOT / folder).rglob("__init__.py")):
            found.append(".".join([package, *file.parent.relative_to(ROOT / folder).parts]))
    return found


if __name__ == "__main__":
    setup(packages=packages())
