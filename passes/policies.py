"""Passes that are derived from the records that they put into the decode plan.

A record says its fields with their bounds, its contract, what it needs, and how it goes into a
plan. The pass ``length_svip`` is derived from `SvipLength` alone. Before::

    decode {
      length = fixed()

After (threshold=0.3)::

    decode {
      length = svip(threshold=0.3, scale=1.0)

The functions stay as they are. Refuses options out of the record's bounds, a plan whose slot is
taken, and one whose other parts the record contradicts. Matches nothing where the step does not
return what the record reads.

A record that comes with functions or weights needs a pass class that makes those: `builds` adds the
record's fields to its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import cleandoc, signature
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

from pydantic import create_model, model_validator

from ..ir import InputError, Program
from ..ir.plan import DecodePlan, Record
from ..ir.plan.base import POLICIES, RECORDS
from ..ir.plan.bounds import FILLED
from .engine.base import Effect, Outcome, Pass, PassDefinitionError, derives, register
from .engine.plan_edits import with_record


class RecordPass(Pass):
    """Base of passes that make a record. record: its class. taken: its fields that are options."""

    record: ClassVar[type[Record]]
    taken: ClassVar[frozenset[str]] = frozenset()
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def made(self, **filled: Any) -> Any:
        """The record, of type `record`. filled: the fields that are no options. Errors:
        `InputError` if the values contradict each other."""
        return self.record.maker()(**{name: getattr(self, name) for name in self.taken}, **filled)


class CheckedPass(RecordPass):
    """Base of passes whose options are refused where the record refuses them."""

    @model_validator(mode="after")
    def _makes_a_record(self) -> Self:
        try:
            self.made()
        except InputError as error:
            raise ValueError(str(error)) from error
        return self


class PolicyPass(CheckedPass):
    """Base of passes that only put a record into the plan."""

    def run(self, program: Program) -> Outcome:
        record, outputs = self.made(), program.step.outputs
        missing = record.lacking({name: node.meta["type"] for name, node in outputs.items()})
        if missing is not None:
            return Outcome(program, 0, missing)
        return Outcome(with_record(program, self.name, record), 1)


P = TypeVar("P", bound=type[RecordPass])


def builds(record: type[Record], *fills: str, **defaults: Any) -> Callable[[P], P]:
    """Class decorator: the pass makes functions or weights, and such a record that names them.

    Options, besides those of the class: the record's fields but those that are `Filled`. fills:
    further fields that the pass fills itself. defaults: of options, where they are not the
    record's. Contract, needs and facts are the record's, the name is ``slot_kind`` unless the class
    says another one. Errors: `PassDefinitionError` for fields that there are not, for a field that
    has the name of something else, and for a class that is no `@record`.
    """

    def add(cls: P) -> P:
        name = cls.name or f"{record.slot}_{record.kind}"
        if RECORDS.get((record.slot, record.kind)) is not record or name in POLICIES:
            now = "a @policy, whose pass is derived," if name in POLICIES else "not a @record"
            raise PassDefinitionError(
                f"{record.__name__} is {now} and {cls.__name__} builds it: decorate it with @record"
            )
        options = {
            name: (hint, defaults.get(name, default))
            for name, (hint, default) in _options(record).items()
            if name not in fills
        }
        if unknown := sorted(defaults.keys() - options.keys()):
            raise PassDefinitionError(
                f"{cls.__name__}: {unknown[0]!r} is no option that {record.__name__} gives it; "
                f"those are {', '.join(options)}"
            )
        doc = cls.__doc__ or ""
        made: P = _derived(cls, name, record, options, cls.__name__, doc)
        return register(made)

    return add


@derives
def policy_passes() -> Iterator[type[Pass]]:
    """The pass of every record that is a policy."""
    for name, record in POLICIES.items():
        if record not in _PASS_OF:
            _PASS_OF[record] = derived(name, record)
        yield _PASS_OF[record]


_PASS_OF: dict[type[Record], type[PolicyPass]] = {}


def derived(name: str, record: type[Record]) -> type[PolicyPass]:
    """The pass of a record. Errors: `PassDefinitionError` if a field has a name that passes use."""
    title, doc = f"{record.__name__}Pass", _doc(record)
    made: type[PolicyPass] = _derived(PolicyPass, name, record, _options(record), title, doc)
    return made


Options = dict[str, tuple[Any, Any]]
"""Annotation and default of options by name."""


def _options(record: type[Record]) -> Options:
    """Of the fields that nobody fills."""
    make = record.maker()
    hints = get_type_hints(make, include_extras=True)
    return {
        option.name: (hints[option.name], option.default)
        for option in signature(make).parameters.values()
        if FILLED not in getattr(hints[option.name], "__metadata__", ())
    }


def _derived(
    base: Any, name: str, record: type[Record], options: Options, title: str, doc: str
) -> Any:
    """The pass class, with these options besides those of `base`."""
    if taken := sorted(options.keys() & (set(dir(base)) | base.model_fields.keys())):
        raise PassDefinitionError(
            f"{record.__name__}: the field {taken[0]!r} cannot be an option of the pass {name}, "
            f"because passes have something else of that name: rename it"
        )
    module = record.__module__ if base is PolicyPass else base.__module__
    given: dict[str, Any] = dict(options)
    made = create_model(title, __base__=base, __module__=module, __doc__=doc, **given)
    made.name, made.record, made.taken = name, record, frozenset(options)
    made.contract, made.requires = record.contract, record.requires
    made.provides, made.brings = record.provides, record.brings or base.brings
    made.repeatable = record.repeatable
    return made


def _doc(record: type[Record]) -> str:
    """What the record says, and the plan before and after its pass."""
    slot = record.slot
    return (
        f"{cleandoc(record.__doc__ or '')}\n\n"
        f"Before::\n\n    decode {{\n      {slot} = {getattr(DecodePlan(), slot)}\n\n"
        f"After::\n\n    decode {{\n      {slot} = {record()}\n"
    )
