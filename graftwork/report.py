"""What an optimization did: which passes ran, what they matched, what they cost and promised."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .backends.kernel_uses import kernels_line
from .ir import InputError, Program
from .ir.execution.executable import KernelUse, Memory
from .passes.engine.base import Contract
from .passes.engine.manager import PassReport

APPROXIMATE = (
    "approximate: texts may differ from the target's own; graftwork bench tells how much of them "
    "is kept, beside the speed"
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Measured(_Frozen):
    """A contract check on sample prompts.

    error: largest difference of logits, over their scale. agreement: share of equal argmaxes.
    divergence: nats a token. width_error: largest difference between running tokens one by one and
    together, over the scale of the logits (None where there is no cache).
    """

    error: float
    agreement: float
    divergence: float
    width_error: float | None = None


class PassLine(_Frozen):
    """One pass: its options and contract, how often it matched, its time in seconds, calls of ops
    before and after, the check if it was asked for, and what the user should know of it."""

    name: str
    options: dict[str, Any]
    contract: str
    matches: int
    seconds: float
    nodes_before: int
    nodes_after: int
    check: Measured | None = None
    remarks: tuple[str, ...] = ()


class Report(_Frozen):
    """The report of `optimize`. Prints as a table; `model_dump_json()` gives it to programs.

    trace_seconds: the frontend's time. weight_bytes_before / after: dense size of all weights.
    generates: the checkpoint's defaults for `generate`, if it has any.
    """

    source: str
    model_type: str
    recipe: str
    contract: str
    target: str
    trace_seconds: float
    weight_bytes_before: int
    weight_bytes_after: int
    passes: tuple[PassLine, ...]
    generates: str = ""
    _measure: Callable[[], Memory | None] | None = PrivateAttr(default=None)
    _uses: Callable[[], tuple[KernelUse, ...] | None] | None = PrivateAttr(default=None)

    def of(
        self,
        measure: Callable[[], Memory | None],
        uses: Callable[[], tuple[KernelUse, ...] | None],
    ) -> Report:
        """The same report, on a model whose memory `measure` tells, and whose kernels `uses`; None
        once it is gone."""
        made = self.model_copy()
        made._measure, made._uses = measure, uses
        return made

    def kernels(self) -> tuple[KernelUse, ...]:
        """What runs products, look-ups and experts with weights of few bits: graftwork's own
        kernels, ONNX Runtime's, or other ops on the floats that the weights stand for. Functions
        that were not run yet may be missing.
        """
        return (None if self._uses is None else self._uses()) or ()

    def memory(self) -> Memory:
        """Bytes that the model takes now: weights, caches, code. Functions that did not run yet
        have no code, and before the first run weights count as they are stored.

        Errors: `InputError` if the report's model is no more.
        """
        found = None if self._measure is None else self._measure()
        if found is None:
            raise InputError("report: there is no memory to tell of, the model itself is gone")
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self.model_dump() == other.model_dump()

    def __rich__(self) -> RenderableType:
        validated = any(line.check for line in self.passes)
        head = Text(
            f"{self.source} ({self.model_type}), recipe {self.recipe} ({self.contract}), "
            f"for {self.target}"
        )
        weights = Text(
            f"weights {megabytes(self.weight_bytes_before)} -> "
            f"{megabytes(self.weight_bytes_after)}; traced in {self.trace_seconds:.1f} s, "
            f"transformed in {sum(line.seconds for line in self.passes):.1f} s"
        )
        approximate = self.contract == Contract.APPROXIMATE.value
        notes = [Text(APPROXIMATE, style="yellow")] if approximate else []
        notes += [
            Text(f"note: {line.name}: {remark}", style="yellow")
            for line in self.passes
            for remark in line.remarks
        ]
        if kernels := kernels_line(self.kernels()):
            notes.append(Text(f"weights of few bits run by {kernels}"))
        if self.generates:
            notes.append(Text(f"generates, unless told otherwise, with {self.generates}"))
        return Group(head, self._table(validated), weights, *notes)

    def _table(self, validated: bool) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("pass", no_wrap=True)
        for name in ("matches", "nodes", "seconds"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("contract", no_wrap=True)
        for name in ("error", "same\nargmax", "width\nerror") if validated else ():
            table.add_column(name, justify="right")
        for line in self.passes:
            table.add_row(*self._row(line, validated))
        return table

    def _row(self, line: PassLine, validated: bool) -> Iterable[str]:
        yield line.name
        yield str(line.matches)
        yield f"{line.nodes_before} -> {line.nodes_after}"
        yield f"{line.seconds:.2f}"
        yield line.contract
        if not validated:
            return
        if line.check is None:
            yield from ("-", "-", "-")
            return
        yield f"{line.check.error:.1e}"
        yield f"{line.check.agreement:.1%}"
        yield "-" if line.check.width_error is None else f"{line.check.width_error:.1e}"

    def __str__(self) -> str:
        return render(self)


def pass_lines(reports: Sequence[PassReport]) -> tuple[PassLine, ...]:
    """The pass manager's reports as lines of a `Report`."""
    return tuple(_line(report) for report in reports)


def _line(report: PassReport) -> PassLine:
    record, check = report.record, report.check
    measured = None
    if check is not None:
        measured = Measured(
            error=check.error,
            agreement=check.agreement,
            divergence=check.divergence,
            width_error=check.width_error,
        )
    return PassLine(
        name=record.name,
        options={key: plain(value) for key, value in record.options},
        contract=record.contract,
        matches=record.matches,
        seconds=record.seconds,
        nodes_before=report.nodes_before,
        nodes_after=report.nodes_after,
        check=measured,
        remarks=report.remarks,
    )


def plain(value: Any) -> Any:
    """An option's value as JSON has it: enums by value, tuples as lists.

    >>> plain(("a", (1, 2)))
    ['a', [1, 2]]
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def weight_bytes(program: Program) -> int:
    """Dense size of all of a program's weights, in bytes."""
    return sum(weight.type.nbytes for weight in program.weights.values())


def megabytes(count: int) -> str:
    """A size for people.

    >>> megabytes(28_300_000), megabytes(6_400_000_000)
    ('28.3 MB', '6.40 GB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def render(thing: RenderableType, width: int = 100) -> str:
    """A rich renderable as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(thing)
    return out.getvalue().rstrip()
