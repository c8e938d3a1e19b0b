"""Passes that put one record into the decode plan, derived from the records (`plan.base.policy`).

A record says its fields with their bounds, its contract, what it needs, and how it goes into a
plan. The pass ``length_svip`` is derived from `SvipLength`. Before::

    decode {
      length = fixed()

After (threshold=0.3)::

    decode {
      length = svip(threshold=0.3, scale=1.0)

The functions stay as they are. Refuses options out of the record's bounds, a plan whose slot is
taken, and one whose other parts the record contradicts. Matches nothing where the step does not
return what the record reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc, signature
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import create_model, model_validator

from ..ir import InputError, Program
from ..ir.plan import DecodePlan, Record
from ..ir.plan.base import POLICIES
from .drafting.plan_edits import with_record
from .engine.base import Effect, Outcome, Pass, PassDefinitionError, derives


class PolicyPass(Pass):
    """Base of derived passes. Its options make a record of the class `record`."""

    record: ClassVar[type[Record]]
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    @model_validator(mode="after")
    def _makes_a_record(self) -> Self:
        try:
            self.made()
        except InputError as error:
            raise ValueError(str(error)) from error
        return self

    def made(self) -> Record:
        """The record. Errors: `InputError` if its options contradict each other."""
        options = {name: getattr(self, name) for name in type(self).model_fields}
        return self.record.maker()(**options)

    def run(self, program: Program) -> Outcome:
        """Put the record into the plan."""
        record, outputs = self.made(), program.step.outputs
        missing = record.lacking({name: node.meta["type"] for name, node in outputs.items()})
        if missing is not None:
            return Outcome(program, 0, missing)
        return Outcome(with_record(program, self.name, record), 1)


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
    make = record.maker()
    hints = get_type_hints(make, include_extras=True)
    options: dict[str, Any] = {
        option: (hints[option], parameter.default)
        for option, parameter in signature(make).parameters.items()
    }
    if taken := sorted(options.keys() & set(dir(PolicyPass))):
        raise PassDefinitionError(
            f"{record.__name__}: the field {taken[0]!r} cannot be an option of the pass {name}, "
            f"because passes have something else of that name: rename it"
        )
    made: type[PolicyPass] = create_model(
        f"{record.__name__}Pass",
        __base__=PolicyPass,
        __module__=record.__module__,
        __doc__=_doc(record),
        **options,
    )
    made.name, made.record, made.contract = name, record, record.contract
    made.requires, made.provides = record.requires, record.provides
    made.brings, made.repeatable = record.brings, record.repeatable
    return made


def _doc(record: type[Record]) -> str:
    """What the record says, and the plan before and after its pass."""
    slot = record.slot
    return (
        f"{cleandoc(record.__doc__ or '')}\n\n"
        f"Before::\n\n    decode {{\n      {slot} = {getattr(DecodePlan(), slot)}\n\n"
        f"After::\n\n    decode {{\n      {slot} = {record()}\n"
    )
