"""Recipes: lists of passes with options, read from YAML and checked.

A recipe file::

    title: What it does, in one line
    paper: Where it comes from                       # optional
    differs: Where it departs from that              # optional
    contract: lossless                               # checked against the passes' own
    extends: baseline                                # optional: its passes come first
    needs: [data]                                    # optional: sample text that passes look at
    passes:
      - insert_kv_cache                              # a pass
      - draft_suffix: {tokens: 8}                    # with options
      - {pass: fuse_gate_up, optional: true}         # may match nothing
      - {pass: quantize_weights, options: {embedding: true}, optional: true}
    knob: {draft_suffix.tokens: [8, 6, 4]}           # optional: an option that a text decides

A pass of the extended recipe keeps its place; options given here override its own. The n-th entry
of a repeatable pass (`Pass.repeatable`) overrides the extended recipe's n-th. A knob lists values
of an option from the one that saves most to the one that costs least; `optimize` takes the first
that costs a text no more than it may. Whoever sets the option has decided: the knob is gone.

    >>> Recipe.load("baseline").name
    'baseline'
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .drawing.cards import card
from .ir import InputError
from .ir.support.discovery import brought
from .ir.support.files import plain_path, read_text
from .ir.support.scratch import write_text
from .ir.support.yamlfile import Document, parse, parse_value
from .passes import Contract, Pass, all_passes
from .passes.engine.manager import Step, weakest

KEYS = ("title", "paper", "differs", "contract", "extends", "needs", "passes", "knob")
NEEDS = {"data": "sample text or prompts, given as data="}
TEXT = "calibration text"

_document = lru_cache(maxsize=256)(parse)
"""Cached, because a recipe is read again for each one that extends it."""


@dataclass(frozen=True)
class Use:
    """One pass of a recipe. options: as given. optional: it may match nothing. where: for
    errors."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False
    where: str = ""

    def build(self) -> Pass:
        """The pass. Errors: `InputError` naming file, line, pass and option."""
        known = all_passes()
        if self.name not in known:
            raise InputError(
                f"{self.where}: no pass is called {self.name!r}{_near(self.name, known)}"
            )
        kind = known[self.name]
        unknown = sorted(set(self.options) - set(kind.model_fields))
        if unknown:
            fields = ", ".join(sorted(kind.model_fields)) or "none"
            raise InputError(
                f"{self.where}: pass {self.name!r} has no option {unknown[0]!r}"
                f"{_near(unknown[0], kind.model_fields)} (its options: {fields})"
            )
        try:
            # Through JSON: strict validation then accepts lists for tuples.
            return kind.model_validate_json(json.dumps(dict(self.options)))
        except TypeError as error:
            raise InputError(
                f"{self.where}: pass {self.name!r}: options are plain data; {error}"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{self.where}: pass {self.name!r}"
            if not first["loc"]:  # options that contradict each other
                message = first["msg"].removeprefix("Value error, ")
                raise InputError(f"{where}: {message}") from error
            option = ".".join(str(part) for part in first["loc"])
            raise InputError(
                f"{where}, option {option!r}: {first['msg']}; got {first['input']!r}"
            ) from error


@dataclass(frozen=True)
class Knob:
    """An option (``pass.option``) and its values, from what saves most to what costs least."""

    option: str
    values: tuple[Any, ...]

    def is_in(self, use: Use) -> bool:
        """Whether a pass's options say what it is."""
        name, _, option = self.option.partition(".")
        return use.name == name and option in use.options

    def is_moot(self, recipe: Recipe) -> bool:
        """Whether other options leave it nothing to say."""
        name, _, option = self.option.partition(".")
        return any(use.name == name and option in use.build().moot for use in recipe.passes)


@dataclass(frozen=True)
class Recipe:
    """A named, checked list of passes. needs: keys of `NEEDS`. extends: the name of the extended
    recipe, or "". differs: differences from the paper's method. knob: see the module."""

    name: str
    title: str = ""
    paper: str = ""
    differs: str = ""
    needs: tuple[str, ...] = ()
    extends: str = ""
    passes: tuple[Use, ...] = ()
    knob: Knob | None = None

    @property
    def contract(self) -> str:
        """The weakest contract of its passes: exact, lossless, tuned or approximate."""
        return weakest(step.pass_.contract for step in self.steps).value

    @property
    def reads_text(self) -> bool:
        """Whether it needs the user's text."""
        wanted = any(p.text and not p.bundled for p in (step.pass_ for step in self.steps))
        return "data" in self.needs or wanted

    @property
    def reads_bundled(self) -> bool:
        """Whether it reads the bundled text where the user gives none."""
        passes = (step.pass_ for step in self.steps)
        return any((p.text or p.helpful) and p.bundled for p in passes)

    @property
    def asks_for_text(self) -> bool:
        """Whether it cannot do without any text, the user's or the bundled one."""
        return any(step.pass_.text for step in self.steps)

    @property
    def takes_text(self) -> bool:
        """Whether it needs the user's text, or does better with some."""
        helped = any(step.pass_.helpful for step in self.steps)
        return helped or self.reads_text or self.reads_bundled or self.knob is not None

    @property
    def brought(self) -> tuple[str, ...]:
        """Inputs besides the model that the recipe and its passes need, as short texts."""
        passes = [step.pass_ for step in self.steps]
        needs = [TEXT if p.text and not p.bundled else p.needs() for p in passes]
        return tuple(dict.fromkeys([*self.needs, *filter(None, needs)]))

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps for the pass manager."""
        return tuple(Step(use.build(), use.optional) for use in self.passes)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
        """Load a recipe by name, from a file or from a dict. Errors: `InputError` with file and
        line for unknown names and wrong types."""
        if isinstance(source, Recipe):
            return source
        if isinstance(source, Mapping):
            name = str(source.get("name", "custom"))
            data = {key: value for key, value in source.items() if key != "name"}
            return _Reader(Document(data, "recipe")).recipe(name, ())
        return _read(_find(source), ())

    def with_options(self, settings: Iterable[str]) -> Recipe:
        """The recipe with ``pass.option=value`` settings, whose values are YAML. Errors:
        `InputError` naming the setting, and the known passes or options."""
        recipe = self
        for setting in settings:
            recipe = recipe._with_option(setting)
        return recipe

    def _with_option(self, setting: str) -> Recipe:
        where = f"--set {setting}"
        target, equals, text = setting.partition("=")
        name, dot, option = target.strip().partition(".")
        if not (equals and dot and option):
            raise InputError(f"{where}: expected pass.option=value")
        names = [use.name for use in self.passes]
        if name not in names:
            raise InputError(
                f"{where}: recipe {self.name!r} has no pass {name!r}{_near(name, names)} "
                f"(it has {', '.join(names)})"
            )
        if names.count(name) > 1:
            raise InputError(
                f"{where}: recipe {self.name!r} has pass {name!r} {names.count(name)} times, and a "
                f"setting cannot say which: write the option into a recipe of your own"
            )
        changed, place = list(self.passes), names.index(name)
        options = {**changed[place].options, option: parse_value(text, where)}
        changed[place] = replace(changed[place], options=options, where=where)
        changed[place].build()
        made, knob = replace(self, passes=tuple(changed)), self.knob
        decided = knob and (knob.option == f"{name}.{option}" or knob.is_moot(made))
        return replace(made, knob=None) if decided else made

    def turned(self, value: Any) -> Recipe:
        """The recipe with its knob at a value, and without it."""
        assert self.knob is not None
        return self.with_options([f"{self.knob.option}={json.dumps(value)}"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `load`, with all passes."""
        entries = [
            {"pass": use.name, "options": dict(use.options), "optional": use.optional}
            for use in self.passes
        ]
        head = {"name": self.name, "title": self.title, "paper": self.paper}
        head |= {"differs": self.differs} if self.differs else {}
        rest: dict[str, Any] = {"contract": self.contract, "needs": list(self.needs)}
        if self.knob is not None:
            rest["knob"] = {self.knob.option: list(self.knob.values)}
        return {**head, **rest, "passes": entries}

    def _repr_html_(self) -> str:
        facts = [f"{name}: {text}" for name, text in self.said().items()]
        rows = [
            (use.name, step.pass_.contract.value, _cut(use.options))
            for step, use in zip(self.steps, self.passes, strict=True)
            if use.options or step.pass_.contract is not Contract.EXACT
        ]
        if rest := len(self.passes) - len(rows):
            rows.append((f"and {rest} others", Contract.EXACT.value, ""))
        return card(f"{self.name}: {self.title}", facts, ("pass", "contract", "options"), rows)

    def said(self) -> dict[str, str]:
        """What is known of it besides its passes, for people: contract, needs, paper, ..."""
        names = ("contract", "paper", "differs", "extends")
        known = {name: str(getattr(self, name)) for name in names}
        needs = {"needs": ", ".join(self.brought) or "nothing"}
        return {**{name: text for name, text in known.items() if text}, **needs}

    def save(self, path: str | Path) -> Path:
        """Write the recipe as YAML for `load`; its name is the file's."""
        data = {key: value for key, value in self.as_dict().items() if key != "name"}
        text = yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False, width=100)
        where = plain_path("recipe", path)
        write_text(where, text)
        return where


def _cut(options: Mapping[str, Any]) -> str:
    """Options as a text of at most a hundred characters."""
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    return text if len(text) <= 100 else f"{text[:100]}..."


def recipes() -> list[Recipe]:
    """All recipes by name: graftwork's, and those of packages under the entry point group
    ``graftwork.recipes``. Errors: `InputError` for a name with two owners."""
    return [_read(path, ()) for _, path in sorted(_known().items())]


def _folder() -> Path:
    return Path(str(importlib.resources.files(f"{__package__}.recipe_files")))


def _known() -> dict[str, Path]:
    """Files of recipes by name. Errors: see `recipes`."""
    found: dict[str, Path] = {}
    owners: dict[str, str] = {}
    for owner, folder in [("graftwork", _folder()), *_brought()]:
        for path in folder.glob("*.yaml"):
            if path.stem in found:
                raise InputError(
                    f"{owners[path.stem]} and {owner} both bring a recipe called {path.stem!r} "
                    f"({found[path.stem]} and {path}): rename or uninstall one"
                )
            found[path.stem], owners[path.stem] = path, owner
    return found


def _brought() -> Iterator[tuple[str, Path]]:
    """Folders of recipes of installed packages, with the packages' names."""
    for owner, package in brought("graftwork.recipes"):
        if not hasattr(package, "__path__"):
            raise InputError(
                f"{owner} names {package.__name__} as its graftwork.recipes, which is a module; "
                f"expected a package, a folder of .yaml files with an __init__.py"
            )
        yield owner, Path(str(importlib.resources.files(package)))


def _find(source: str | Path) -> Path:
    text = str(source)
    if isinstance(source, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        return plain_path("recipe", source)
    if text not in (known := _known()):
        raise InputError(
            f"no recipe is called {text!r}{_near(text, known) or ':'} `graftwork recipes` lists "
            f"all {len(known)}, and one of your own is a path that ends in .yaml"
        )
    return known[text]


def _read(path: Path, below: tuple[Path, ...]) -> Recipe:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the recipe {path}: {error}") from error
    origin = f"recipes/{path.name}" if path.parent == _folder() else str(path)
    if path.resolve() in below:
        raise InputError(f"{origin}: recipes extend each other in a circle")
    return _Reader(_document(text, origin), path.parent).recipe(path.stem, (*below, path.resolve()))


class _Reader:
    """Builds a recipe from a document, with checks."""

    def __init__(self, document: Document, folder: Path | None = None) -> None:
        self.document = document
        self.folder = folder

    def recipe(self, name: str, below: tuple[Path, ...]) -> Recipe:
        """Build the recipe. below: files that extend it, to detect cycles."""
        data = self.document.data
        if not isinstance(data, Mapping):
            raise self.error((), f"expected a mapping with {', '.join(KEYS)}")
        for key in data:
            if key not in KEYS:
                raise self.error((key,), f"unknown key {key!r}{_near(str(key), KEYS)}")
        base = self.base(below)
        recipe = Recipe(
            name=name,
            title=self.text("title") or base.title,
            paper=self.text("paper"),
            differs=self.text("differs"),
            needs=self.needs(base.needs),
            extends=base.name,
            passes=self.passes(base.passes),
        )
        recipe = replace(recipe, knob=self.knob(base.knob, recipe))
        self.check_contract(recipe)
        return recipe

    def knob(self, base: Knob | None, recipe: Recipe) -> Knob | None:
        """The document's knob, or the base's where no option given here decides."""
        if "knob" not in self.document.data:
            given = [self.use(entry, ()) for entry in self.document.data.get("passes", [])]
            decided = base and (any(map(base.is_in, given)) or base.is_moot(recipe))
            return None if decided else base
        said = self.document.data["knob"]
        if not isinstance(said, Mapping) or len(said) != 1:
            raise self.error(("knob",), f"knob: expected pass.option: [values], got {said!r}")
        ((option, values),) = said.items()
        if not isinstance(values, list) or not values:
            raise self.error(("knob",), f"knob: expected a list of values, got {values!r}")
        made = Knob(str(option), tuple(values))
        try:
            for value in values:
                replace(recipe, knob=made).turned(value)
        except InputError as error:
            raise self.error(("knob",), f"knob: {error}") from error
        return made

    def error(self, path: tuple[str | int, ...], message: str) -> InputError:
        """An error with the line of a path in the document."""
        return InputError(f"{self.document.at(*path)}: {message}")

    def text(self, key: str) -> str:
        """A text field; default: empty."""
        value = self.document.data.get(key, "")
        if not isinstance(value, str):
            raise self.error((key,), f"{key}: expected text, got {value!r}")
        return value

    def base(self, below: tuple[Path, ...]) -> Recipe:
        """The extended recipe; an empty one if there is none."""
        name = self.text("extends")
        if not name:
            return Recipe("")
        try:
            return _read(self.beside(name) or _find(name), below)
        except InputError as error:
            raise self.error(("extends",), str(error)) from error

    def beside(self, name: str) -> Path | None:
        """The file in this one's folder: of a relative path, or of one of graftwork's recipes."""
        if self.folder is None:
            return None
        if name.endswith((".yaml", ".yml")):
            return self.folder / name
        path = self.folder / f"{name}.yaml"
        return path if self.folder == _folder() and path.is_file() else None

    def needs(self, base: tuple[str, ...]) -> tuple[str, ...]:
        """The document's needs and the base's."""
        given = self.document.data.get("needs", [])
        if not isinstance(given, list):
            raise self.error(("needs",), f"needs: expected a list, got {given!r}")
        for i, need in enumerate(given):
            if need not in NEEDS:
                known = ", ".join(NEEDS)
                raise self.error(("needs", i), f"unknown need {need!r}; known are {known}")
        return tuple(dict.fromkeys([*base, *given]))

    def passes(self, base: tuple[Use, ...]) -> tuple[Use, ...]:
        """The base's passes, overridden and extended by the document's; all are checked."""
        given = self.document.data.get("passes", [])
        if not isinstance(given, list) or not (given or base):
            raise self.error(("passes",), f"passes: expected a list of passes, got {given!r}")
        merged = dict(zip(_numbered(base), base, strict=True))
        uses = [self.use(entry, ("passes", i)) for i, entry in enumerate(given)]
        for i, (key, use) in enumerate(zip(_numbered(uses), uses, strict=True)):
            before = merged.get(key, Use(use.name))
            merged[key] = replace(use, options={**before.options, **use.options})
            if key[1] and not all_passes()[use.name].repeatable:
                raise self.error(("passes", i), f"pass {use.name!r} is given twice")
            merged[key].build()
        return tuple(merged.values())

    def use(self, entry: Any, path: tuple[str | int, ...]) -> Use:
        """One entry, in any form of the module's docstring."""
        where = self.document.at(*path)
        if isinstance(entry, str):
            return Use(entry, where=where)
        if not isinstance(entry, Mapping) or not entry:
            raise self.error(path, f"expected a pass, got {entry!r}")
        if "pass" not in entry:
            entry = self.short(entry, path)
        for key in entry:
            if key not in ("pass", "options", "optional"):
                raise self.error(
                    (*path, key), f"unknown key {key!r}; a pass takes options and optional"
                )
        name, options = entry["pass"], entry.get("options") or {}
        optional = entry.get("optional", False)
        if not isinstance(name, str):
            raise self.error((*path, "pass"), f"expected the name of a pass, got {name!r}")
        if not isinstance(options, Mapping):
            raise self.error((*path, "options"), f"{name}: expected options, got {options!r}")
        if not isinstance(optional, bool):
            raise self.error((*path, "optional"), f"optional: expected a bool, got {optional!r}")
        return Use(name, deepcopy(dict(options)), optional, where)

    def short(self, entry: Mapping[str, Any], path: tuple[str | int, ...]) -> Mapping[str, Any]:
        """``name: {options}`` as its long form."""
        if len(entry) != 1:
            names = ", ".join(str(key) for key in entry)
            raise self.error(path, f"expected one pass in an item of the list, got {names}")
        ((name, options),) = entry.items()
        return {"pass": name, "options": options}

    def check_contract(self, recipe: Recipe) -> None:
        """The stated contract must be that of the passes."""
        claimed = self.text("contract")
        known = [contract.value for contract in Contract]
        if claimed and claimed not in known:
            raise self.error(("contract",), f"expected one of {', '.join(known)}; got {claimed!r}")
        if claimed and claimed != recipe.contract:
            passes = [step.pass_ for step in recipe.steps]
            reason = [p.name for p in passes if p.contract.value == recipe.contract]
            raise self.error(
                ("contract",),
                f"claims {claimed!r}, but the passes together are {recipe.contract!r} "
                f"(because of {', '.join(reason)})",
            )


def _numbered(uses: Iterable[Use]) -> list[tuple[str, int]]:
    """Each pass's name, and the number of earlier passes of this name."""
    counts: Counter[str] = Counter()
    keys = []
    for use in uses:
        keys.append((use.name, counts[use.name]))
        counts[use.name] += 1
    return keys


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
