"""Pages of methods for the site, drawn from the recipes: one table a family, one page a method.

`pages()` gives them as Markdown by path. What a page says comes from the recipe's file, from the
passes' options and docstrings, from the paragraphs of recipes.md that name the recipe, and from the
rows of real_models.md, lossless.md and measured.md that measure it, with the command that they
stand below.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from graftwork.ir.plan.base import RECORDS
from graftwork.ir.plan.contract import changes
from graftwork.passes import Pass
from graftwork.recipe import Recipe, recipes

DOCS = Path(__file__).parent
MEASURED = ("real_models.md", "lossless.md", "measured.md")
BELONGING = 6
"""Paragraphs and tables that a page shows at most."""

FAMILIES = {
    "Plain decoding": "The step with a KV cache and fusions, which the others extend.",
    "Drafts without training": "For texts that repeat themselves or their prompt (code, summaries, "
    "edits, answers about a document), with any model as it is. Texts do not change.",
    "Drafts by trained heads": "For one model that serves much: heads are trained on its own text "
    "(`graftwork train`), or come as published weights. Texts do not change.",
    "Drafts by a tuned target": "For one model that serves much and may change a little: it is "
    "trained with its drafts, and texts are the tuned model's own, to the token.",
    "Drafts by the target's own layers": "For models that agree with themselves early, as trained "
    "for it (`train_exits`) or with a trained exit. Texts do not change.",
    "Drafts by another model": "For a large model that has a small one with its tokenizer.",
    "Drafts over few bits": "Both savings at once: the texts are those of the few bits.",
    "Fewer bits": "For memory and speed where steps wait for weights, as on CPUs. Texts may "
    "differ, and `graftwork eval` says by how much.",
    "The cache": "For long texts and many sequences: smaller caches, or fewer rows read.",
    "Fewer layers": "For speed at a measured loss of quality; on most models layers can be left "
    "out only after healing or training.",
    "Other scores": "For texts that are meant to differ: what the model says is weighed otherwise.",
    "Several processes": "For one model on several processes or devices.",
}
REAL = (
    "Of real models, *weights*, *speed* and *prompt* (the time until the first token) are over the "
    "unchanged model's, 1.00; *texts* are how many of eight prompts gave its own text, and how "
    "much of them; *prose* and *code* are nats a token from its distribution, perplexity over its, "
    "and how often the likeliest token is the same ([how this was taken](../real_models.md))."
)
"""What the columns of real_models.md say."""

ELSEWHERE = re.compile(r"(?:[Ss]ee|as in|as of) (?:the record|`(\w+)`)[.;]?")
"""What a docstring says where the words stand in another one."""

CONTRACTS = {
    "exact": "Logits stay as they are, up to float error.",
    "lossless": "The output distribution stays: decoding greedily, every token.",
    "tuned": "Texts are the tuned target's own, to the token; training says how far it moved.",
    "approximate": "Texts may differ from the model's own; `graftwork eval` says how far.",
}


@dataclass(frozen=True)
class Measured:
    """Rows of a table that name a recipe. source: the page; section: its heading; command: what
    gave the figures, or ""."""

    source: str
    section: str
    head: tuple[str, str]
    rows: tuple[str, ...]
    command: str


def pages() -> dict[str, str]:
    """Markdown by path below docs/: ``methods/index.md``, and ``methods/NAME.md`` for all."""
    known = recipes()
    made = {f"methods/{recipe.name}.md": method_page(recipe) for recipe in known}
    return {"methods/index.md": index(known), **made}


def by_family(known: list[Recipe]) -> dict[str, list[Recipe]]:
    """Recipes by family, families in the order of `FAMILIES`."""
    found: dict[str, list[Recipe]] = {family: [] for family in FAMILIES}
    for recipe in known:
        found[family_of(recipe)].append(recipe)
    return {family: chosen for family, chosen in found.items() if chosen}


def own_passes(recipe: Recipe) -> list[Pass]:
    """The recipe's passes besides those of plain decoding."""
    plain = {use.name for use in Recipe.load("baseline").passes}
    return [step.pass_ for step in recipe.steps if step.pass_.name not in plain]


def family_of(recipe: Recipe) -> str:
    """The family, by the rooms of its own passes and by what it needs."""
    rooms = {_room(pass_) for pass_ in own_passes(recipe)}
    drafts = any(pass_.name.startswith("draft_") for pass_ in own_passes(recipe))
    if "placement" in rooms:
        return "Several processes"
    if recipe.contract == "tuned":
        return "Drafts by a tuned target"
    if drafts and "numerics" in rooms:
        return "Drafts over few bits"
    if drafts and "depth" in rooms:
        return "Drafts by the target's own layers"
    if drafts:
        needs = " ".join(recipe.brought)
        if "model" in needs:
            return "Drafts by another model"
        return (
            "Drafts by trained heads"
            if "trained" in needs or "MTP" in needs
            else "Drafts without training"
        )
    rules = {"depth": "Fewer layers", "numerics": "Fewer bits", "caching": "The cache"}
    rules["stepping"] = "Other scores"
    return next((family for room, family in rules.items() if room in rooms), "Plain decoding")


def index(known: list[Recipe]) -> str:
    """The table of contents: a table a family."""
    lines = [
        "# Methods",
        "",
        f"{len(known)} recipes by what they change. Each is a file of a few lines; "
        "[recipes](../recipes.md) says how their passes work and combine, "
        "[real models](../real_models.md) sets their figures side by side, and "
        "[recipe.schema.json](../recipe.schema.json) lets an editor complete and check recipes of "
        "your own.",
    ]
    for family, chosen in by_family(known).items():
        lines += ["", f"## {family}", "", FAMILIES[family], ""]
        lines += ["| method | what it does | contract | needs |", "|---|---|---|---|"]
        for recipe in chosen:
            needs = ", ".join(recipe.brought) or "nothing"
            link = f"[{recipe.name}]({recipe.name}.md)"
            lines.append(f"| {link} | {_cell(recipe.title)} | {recipe.contract} | {needs} |")
    return "\n".join([*lines, ""])


def method_page(recipe: Recipe) -> str:
    """One method's page."""
    family = family_of(recipe)
    lines = [f"# {recipe.name}", "", f"**{recipe.title}.**", ""]
    facts = [
        ("Family", f"[{family}](index.md#{anchor(family)})"),
        ("Contract", f"{recipe.contract}. {CONTRACTS[recipe.contract]}"),
        ("Needs", ", ".join(recipe.brought) or "nothing"),
        ("Paper", recipe.paper),
        ("Differs from it", recipe.differs),
        ("Extends", f"[{recipe.extends}]({recipe.extends}.md)" if recipe.extends else ""),
    ]
    (_, first), *others = [(name, _cell(text)) for name, text in facts if text]
    lines += [f"| Family | {first} |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in others]
    lines += ["", "## When to use it", "", FAMILIES[family], "", "## Try it", ""]
    lines += [*_tried(recipe), "", "## What it cost", "", *_cost(recipe.name)]
    lines += ["## Options", "", *_options(recipe)]
    if told := list(_told(recipe.name)):
        lines += ["## How it works", "", *told]
    lines += ["## The recipe", "", "```yaml", _source(recipe), "```", ""]
    return "\n".join(lines)


def _room(pass_: Pass) -> str:
    return type(pass_).__module__.removeprefix("graftwork.passes.").partition(".")[0]


def _tried(recipe: Recipe) -> list[str]:
    brings = [step.pass_.name for step in recipe.steps if step.pass_.models]
    learns = "".join(f" --set {name}.model=SMALL" for name in brings)
    learns += " --data TEXTS" if recipe.reads_text else ""
    lines = []
    if {"trained heads", "a tuned target"} & {*recipe.brought}:
        tunes = " --tune" if recipe.contract == "tuned" else ""
        train = f"graftwork train MODEL --recipe {recipe.name}{tunes} --data TEXTS --out HEADS"
        lines.append(f"    {train}")
        heads = [p.name for p in own_passes(recipe) if "weights" in type(p).model_fields]
        used = heads if tunes else heads[:1]
        learns += "".join(f" --set {name}.weights=HEADS" for name in used)
    lines.append(f"    graftwork optimize MODEL --recipe {recipe.name}{learns} --out DIR")
    if "tensor_parallel" not in recipe.name:
        lines.append("    graftwork generate DIR --prompt TEXT")
    if changes(recipe.contract):
        lines.append(f"    graftwork eval MODEL --recipes {recipe.name}{learns}")
    return lines


def _options(recipe: Recipe) -> Iterator[str]:
    """A table for each of the recipe's own passes, with the values that it gives."""
    shown = False
    for pass_ in own_passes(recipe):
        values = pass_.model_dump(mode="json")
        if not values:
            continue
        shown = True
        yield f"**{pass_.name}** (`--set {pass_.name}.OPTION=VALUE`)"
        yield ""
        about, meanings = _told_of(pass_, values)
        if about:
            yield _prose(about)
            yield ""
        yield "| option | here | default | what it says |"
        yield "|---|---|---|---|"
        fields = type(pass_).model_fields
        for name, value in values.items():
            usual = fields[name].get_default(call_default_factory=True)
            said = _cell(_prose(meanings.get(name, "")))
            yield f"| `{name}` | {_value(value)} | {_value(usual)} | {said} |"
        yield ""
    if not shown:
        yield "None of its own."
        yield ""


def _told_of(pass_: Pass, options: Iterable[str]) -> tuple[str, dict[str, str]]:
    """What is said of a pass, and of each of its options: by itself, by what passes share, by the
    record of the plan that it makes, and by those that these point to, the first that does."""
    record = getattr(pass_, "record", None)
    classes = [*type(pass_).__mro__, *(record.__mro__ if isinstance(record, type) else ())]
    abouts, listed, named = [], dict[str, str](), dict[str, str]()
    for each in classes:
        doc = " ".join((vars(each).get("__doc__") or "").split("Before::")[0].split())
        about, found = _meanings(doc, options)
        abouts += [about] if each in (type(pass_), record) else []
        named = {**_named(doc, options), **named}
        for name, said in found.items():
            there = ELSEWHERE.fullmatch(said)
            if there is None:
                listed.setdefault(name, said)
            elif there[1] in known_classes() and known_classes()[there[1]] not in classes:
                classes.append(known_classes()[there[1]])
    own = (about for about in abouts if about and not ELSEWHERE.fullmatch(about))
    return next(own, ""), {**named, **listed}


@lru_cache(maxsize=1)
def known_classes() -> dict[str, type]:
    """Passes by name, records and what they are made of by that of the class."""
    passes = {pass_.name: type(pass_) for recipe in recipes() for pass_ in own_passes(recipe)}
    classes = [*passes.values(), *RECORDS.values()]
    return {**passes, **{base.__name__: base for each in classes for base in each.__mro__}}


def _meanings(doc: str, options: Iterable[str]) -> tuple[str, dict[str, str]]:
    """What a docstring says of a pass, and of each of its options: "Copies. tokens: at most." """
    doc = re.sub(r" ?The rest: [Ss]ee .*$", "", doc)
    word = r"[a-z]\w*"
    pieces = re.split(rf"(?:^|(?<=[.;)] ))({word}(?:, {word})*): ", doc)
    found: dict[str, str] = {}
    for said, meaning in zip(pieces[1::2], pieces[2::2], strict=True):
        found |= dict.fromkeys(said.split(", "), meaning.strip())
    return pieces[0].strip(), {name: found[name] for name in options if name in found}


def _named(doc: str, options: Iterable[str]) -> dict[str, str]:
    """The first sentence that has each option as code: "Of each level the `width` best stay." """
    sentences = re.split(r"(?<=\.) (?=[A-Z`]|[a-z]\w*(?:, [a-z]\w*)*: )", doc)
    found = {o: next((s for s in sentences if f"`{o}`" in s), "") for o in options}
    return {option: sentence for option, sentence in found.items() if sentence}


def _prose(doc: str) -> str:
    """A docstring as Markdown: what stands between backticks is code, the rest plain text."""
    parts = doc.replace("``", "`").split("`")
    plain = [re.sub(r"([\[\]<>*_])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = plain
    return "`".join(parts)


def _value(value: object) -> str:
    text = repr(value)
    return f"`{_cell(text if len(text) <= 60 else text[:60] + '...')}`"


def _cost(name: str) -> Iterator[str]:
    found = [m for page in MEASURED for m in _measured(page, name)][:BELONGING]
    if not found:
        yield "Not measured on a real model yet: `graftwork eval` and `bench` do so on yours."
        yield ""
    if any(measured.source == "real_models.md" for measured in found):
        yield REAL
        yield ""
    for measured in found:
        yield f"[{measured.section}](../{measured.source}#{anchor(measured.section)}):"
        yield ""
        yield from _filled([*measured.head, *measured.rows])
        yield ""
        if measured.command:
            yield "by"
            yield ""
            yield measured.command
            yield ""


def _filled(table: list[str]) -> Iterator[str]:
    """A table's lines without the columns that hold nothing."""
    cells = [line.strip().strip("|").split("|") for line in table]
    kept = [
        column
        for column in range(len(cells[0]))
        if any(row[column].strip() for row in cells[2:] if column < len(row))
    ]
    for row in cells:
        yield "|" + "|".join(row[column] for column in kept if column < len(row)) + "|"


@lru_cache
def _lines(source: str) -> list[str]:
    return [*(DOCS / source).read_text(encoding="utf-8").splitlines(), ""]


def _measured(source: str, name: str) -> Iterator[Measured]:
    section, command, table = "", "", []
    lines = _lines(source)
    for i, line in enumerate(lines):
        if line.startswith("#"):
            section, command = line.lstrip("# "), command if section == "" else ""
        if line.startswith("    ") and not lines[i - 1].startswith("    "):
            command = "\n".join(_block(lines, i))
        if line.startswith("|"):
            table.append(line)
            continue
        rows = tuple(row for row in table[2:] if f"`{name}`" in row.split("|")[1])
        if rows:
            where = command or _first_command(source)
            yield Measured(source, section, (table[0], table[1]), rows, where)
        table = []


def _first_command(source: str) -> str:
    lines = _lines(source)
    first = next(i for i, line in enumerate(lines) if line.startswith("    "))
    return "\n".join(_block(lines, first))


def _block(lines: list[str], start: int) -> Iterator[str]:
    for line in lines[start:]:
        if not line.startswith("    "):
            return
        yield line


def _told(name: str) -> Iterator[str]:
    """Paragraphs of recipes.md that name the recipe, with a link to where they stand."""
    count = 0
    for block in (DOCS / "recipes.md").read_text(encoding="utf-8").split("\n\n"):
        plain = not block.startswith(("#", "|", " ", "`" * 3))
        if plain and f"`{name}`" in block and count < BELONGING:
            count += 1
            yield re.sub(r"\]\((?!http|#)", "](../", block).replace("](#", "](../recipes.md#")
            yield ""
    if count:
        yield "More: [recipes](../recipes.md)."
        yield ""


def _source(recipe: Recipe) -> str:
    path = DOCS.parent / "recipes" / f"{recipe.name}.yaml"
    return path.read_text(encoding="utf-8").rstrip()


def anchor(heading: str) -> str:
    """The id that Markdown gives a heading.

    >>> anchor("Drafts by the target's own layers")
    'drafts-by-the-targets-own-layers'
    """
    kept = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return re.sub(r"[-\s]+", "-", kept)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
