"""What a pass is: validated options, a contract, declared needs and effects, and `run`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ...ir import InputError, PassError, Program
from ...ir.plan.contract import Contract
from ...ir.support.discovery import import_passes
from .evidence import Evidence, TextSample
from .reopening import Reopened

__all__ = [
    "STATES",
    "Contract",
    "Effect",
    "Evidence",
    "LearningPass",
    "Length",
    "Outcome",
    "Pass",
    "PassDefinitionError",
    "TextSample",
    "Windows",
    "all_passes",
    "derives",
    "register",
]


class Effect(Enum):
    """What a pass may change that other passes care about."""

    HIDDEN_BASIS = "hidden basis"
    VOCABULARY = "vocabulary"
    LAYER_SET = "layer set"
    CACHE_LAYOUT = "cache layout"
    CACHE_CONTENTS = "cache contents"
    WEIGHT_NUMERICS = "weight numerics"
    LOGITS = "logits"
    DECODE_PLAN = "decode plan"
    FUNCTIONS = "functions"
    SEGMENTS = "segments"
    PLACEMENT = "placement"


STATES = frozenset({Effect.HIDDEN_BASIS, Effect.LAYER_SET, Effect.PLACEMENT})
"""What changes the layers, or the states between them: whoever taps those, or copies or merges
parts of a layer, reads these."""


@dataclass(frozen=True)
class Outcome:
    """What a pass did. `near_miss` says, when nothing matched, what came closest and why not.
    `remarks`: what is legal, and yet the user should know; the report shows them."""

    program: Program
    matches: int
    near_miss: str = ""
    remarks: tuple[str, ...] = ()


class Pass(BaseModel):
    """Base of all passes. Fields of a subclass are its options (unknown ones are errors).

    name: how recipes call it, unless it is the class's, in lower case (``DropThings``:
    ``drop_things``). contract: see `Contract`. requires / provides: facts about a program, such as
    "canonical", "cached", "trees"; a program starts with the fact "traced". Those that a program
    shows are checked (see `facts`). effects: what it changes. reads: effects of *other* passes that
    must be in place before this one runs. repeatable: whether a recipe may have it several times,
    because each adds something of its own (a drafter more). brings: what the user brings for it
    besides the model, if its options do not tell (see `needs`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str] = ""
    contract: ClassVar[Contract] = Contract.EXACT
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    effects: ClassVar[frozenset[Effect]] = frozenset()
    reads: ClassVar[frozenset[Effect]] = frozenset()
    repeatable: ClassVar[bool] = False
    brings: ClassVar[str] = ""

    @classmethod
    def needs(cls) -> str:
        """What the user must bring or make before the pass is of use, in a few words; or ""."""
        told = {"model": "a draft model", "weights": "trained heads"}
        return cls.brings or next((told[f] for f in cls.model_fields if f in told), "")

    @property
    def text(self) -> TextSample | None:
        """The text that the pass must see; None for none."""
        return None

    @property
    def helpful(self) -> TextSample | None:
        """The text that the pass learns from where the user gives some, and does without where
        not; None for none."""
        return None

    @property
    def bundled(self) -> bool:
        """Whether the bundled text will do for `text` and `helpful`, where the user gives none."""
        return False

    @property
    def moot(self) -> frozenset[str]:
        """Options that say nothing as the others stand."""
        return frozenset()

    @property
    def models(self) -> tuple[str, ...]:
        """Paths of other models that must be guests of the program, canonical, when `run` is
        called; "" for one that the user has yet to name."""
        return ()

    @property
    def models_are(self) -> Literal["language", "masked", "scoring"]:
        """What `models` are: language models, masked ones (see `frontends.import_masked`), or
        models that score texts (see `frontends.import_scoring`)."""
        return "language"

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of files, or folders of them, that it reads; "" for one that the user has yet to
        name by the option path."""
        return ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the model that importers leave out, and that must be guests of the program,
        canonical, when `run` is called (see `frontends.import_part`)."""
        return ()

    @property
    def model_recipes(self) -> Mapping[str, str]:
        """For those of `models` that draft for themselves: the recipe whose drafter they use."""
        return {}

    def reopen(self, program: Program, held: frozenset[str]) -> Reopened:
        """Weights that the source holds in few bits as floats, where the pass takes floats; asked
        for before `run`. held: the names of those that no pass has taken yet."""
        return Reopened(program)

    def run(self, program: Program) -> Outcome:
        """Transform a program. Pure: the argument is not edited, nothing is kept."""
        raise PassDefinitionError(f"pass {type(self).__name__} does not define run()")

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """Transform a program by what its text shows. Pure in the same way."""
        raise PassDefinitionError(f"pass {type(self).__name__} does not define learn()")

    def apply(self, program: Program, evidence: Evidence | None = None) -> Outcome:
        """Transform a program. Errors: `PassError` if the pass needs evidence that is not there,
        and whatever the pass raises."""
        self.check_evidence(program, evidence)
        if evidence is None or not (self.text or self.helpful):
            return self.run(program)
        return self.learn(program, evidence)

    def check_evidence(self, program: Program, evidence: Evidence | None) -> None:
        """Errors: `PassError` or `InputError` if the pass must see text and there is none, or there
        is too little for it."""
        if evidence is None and self.text is not None:
            width = self.text.width(program)
            raise PassError(
                f"pass {self.name!r} needs text to calibrate on, {self.text.windows} windows of "
                f"{width} tokens: give data= (--data), a file or folder of texts like those that "
                f"the model will see"
            )
        sample = self.text or self.helpful
        if evidence is not None and sample is not None:
            evidence.check(sample, program, f"pass {self.name!r}")


Windows = Annotated[int, Field(ge=1)]
Length = Annotated[int, Field(ge=2)]


class LearningPass(Pass):
    """Base of passes that learn from text: `windows` of it, of `length` tokens each (at most the
    model's context)."""

    windows: Windows = 8
    length: Length = 512

    @property
    def sample(self) -> TextSample:
        """How much text that is."""
        return TextSample(self.windows, self.length)

    @property
    def text(self) -> TextSample | None:
        return self.sample


class PassDefinitionError(InputError):
    """A pass class that is incomplete or whose name is taken."""


_PASSES: dict[str, type[Pass]] = {}
_DERIVED: list[Callable[[], Iterable[type[Pass]]]] = []
P = TypeVar("P", bound=type[Pass])
D = TypeVar("D", bound=Callable[[], Iterable[type[Pass]]])


def register(cls: P) -> P:
    """Class decorator: make a pass known under its name. Errors: `PassDefinitionError` naming both
    passes if another one has that name."""
    if "name" not in vars(cls):
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    known = _PASSES.setdefault(cls.name, cls)
    if _path(known) != _path(cls):
        raise PassDefinitionError(
            f"{_path(cls)} and {_path(known)} are both passes called {cls.name!r}: rename one"
        )
    _PASSES[cls.name] = cls
    return cls


def derives(source: D) -> D:
    """Decorator: the function gives passes that are derived from something else, such as records of
    plans. It is asked at each look-up, because there may be more of them by then."""
    _DERIVED.append(source)
    return source


def _path(cls: type[Pass]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def all_passes() -> dict[str, type[Pass]]:
    """Every pass by name: graftwork's, and those of installed packages that name a module under the
    entry point group ``graftwork.passes``. Importing a file registers its passes, and the records
    that passes are derived from."""
    import_passes()
    for source in _DERIVED:
        for cls in source():
            if _PASSES.get(cls.name) is not cls:
                register(cls)
    return dict(sorted(_PASSES.items()))
