"""Terms of a row of `architectures`: entries of a file's metadata, and the options of transformers'
configuration that they are. Each is said once and used both ways: a file is read and written by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .metadata import Metadata

Entries = dict[str, Any]
"""Entries of the architecture, without its name in front. Lists of floats under the name of a
tensor (``rope_factors_long.weight``) are a tensor f32."""

SAME = object()


class Term:
    """An entry and an option, or several of each."""

    def read(self, meta: Metadata) -> dict[str, Any]:
        """Options by the entries. Errors: `InputError`, `UnsupportedError` for what they cannot
        say."""
        return {}

    def write(self, config: Any) -> Entries:
        """Entries by the options. Options that no entry says are compared after all is written."""
        return {}


@dataclass(frozen=True)
class Key(Term):
    """An entry that is a number or a flag. option: "": called like the entry. default: what
    llama.cpp takes where it is missing; None: it may not be. zero: what the entry 0 stands for."""

    key: str
    option: str = ""
    kind: Any = int
    default: Any = None
    zero: Any = SAME

    @property
    def name(self) -> str:
        """The option."""
        return self.option or self.key.rpartition(".")[2]

    def read(self, meta: Metadata) -> dict[str, Any]:
        if self.kind is bool:
            return {self.name: meta.flag(self.key, self.default)}
        found = meta.number(self.key, self.kind, self.default)
        return {self.name: found or (found if self.zero is SAME else self.zero)}

    def write(self, config: Any) -> Entries:
        value = getattr(config, self.name, None)
        return {} if value is None else {self.key: self.kind(value)}


@dataclass(frozen=True)
class Present(Term):
    """An option that says whether there is a tensor."""

    option: str
    tensor: str

    def read(self, meta: Metadata) -> dict[str, Any]:
        return {self.option: meta.has(self.tensor)}


@dataclass(frozen=True)
class Fixed(Term):
    """Options that are the same in all models of the architecture."""

    options: Mapping[str, Any]

    def read(self, meta: Metadata) -> dict[str, Any]:
        return dict(self.options)


@dataclass(frozen=True)
class Both(Term):
    """Options and entries that are not each other's, by a function each way."""

    reads: Callable[[Metadata], dict[str, Any]]
    writes: Callable[[Any], Entries] = lambda config: {}

    def read(self, meta: Metadata) -> dict[str, Any]:
        return self.reads(meta)

    def write(self, config: Any) -> Entries:
        return self.writes(config)


def both(
    writes: Callable[[Any], Entries] = lambda config: {},
) -> Callable[[Callable[[Metadata], dict[str, Any]]], Both]:
    """Decorator: of the function that reads, with the one that writes."""
    return lambda reads: Both(reads, writes)


def read_all(terms: tuple[Term, ...], meta: Metadata) -> dict[str, Any]:
    """The options of terms; of several of one name the last."""
    found: dict[str, Any] = {}
    for term in terms:
        found |= term.read(meta)
    return found


def write_all(terms: tuple[Term, ...], config: Any) -> Entries:
    """The entries of terms; of several of one name the last."""
    found: Entries = {}
    for term in terms:
        found |= term.write(config)
    return found
