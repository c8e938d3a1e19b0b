"""The model card of an artifact, from its report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .._version import __version__
from ..ir.plan.contract import changes
from ..report import Report, megabytes

_CACHED = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]+)")


def base_of(report: Report) -> tuple[str, str]:
    """What an artifact was made of, as far as others know it: the Hub's id, or a name, and its
    revision, or "".

    >>> from types import SimpleNamespace
    >>> base_of(SimpleNamespace(source="/x/models--a--b-c/snapshots/0f3"))
    ('a/b-c', '0f3')
    """
    if found := _CACHED.search(report.source):
        owner, name, revision = found.groups()
        return f"{owner}/{name}", revision
    return Path(report.source).name, ""


def model_card(report: Report | None, recipe: Mapping[str, Any], name: str) -> str:
    """A README for the Hub: what was made of what by which recipe, what it cost, how to use it.
    report: None if a program was not made by `optimize`. name: of the repository."""
    title, contract = str(recipe.get("name", "")), str(recipe.get("contract", ""))
    about: dict[str, Any] = {
        "library_name": "graftwork",
        "pipeline_tag": "text-generation",
        "tags": ["graftwork", title],
    }
    lines: list[str] = []
    if report is not None:
        base, revision = base_of(report)
        if "/" in base:
            about["base_model"] = base
        at = f" at revision {revision}" if revision else ""
        lines += [
            f"{base}{at}, transformed by graftwork {__version__} with the recipe `{title}` "
            f"({contract}) for `{report.target}`.",
            "",
            "| | |",
            "|---|---|",
            f"| weights | {megabytes(report.weight_bytes_after)}, "
            f"before {megabytes(report.weight_bytes_before)} |",
        ]
        if report.cost is not None:
            lines += [f"| {what} | {figure} |" for what, figure in report.cost.lines()]
        elif changes(contract):
            lines.append("| what it costs | not measured: `optimize(..., cost=True)` does |")
        lines += ["", "Passes: " + ", ".join(f"`{line.name}`" for line in report.passes) + "."]
    lines += [
        "",
        "```python",
        "import graftwork as gw",
        "",
        f'fast = gw.Model.from_pretrained("{name}")',
        'fast.tokenizer.decode(fast.generate("Once upon a time", max_new_tokens=40)[0])',
        "```",
        "",
        "No pickle and no code: the program is text, the weights are safetensors.",
    ]
    head = yaml.safe_dump(about, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n# {name}\n\n" + "\n".join(lines) + "\n"
