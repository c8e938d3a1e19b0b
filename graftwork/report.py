"""Reports of `optimize`: passes with matches, seconds and contracts."""

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
from .drawing.parts import weights_by_part
from .drawing.reported import Told
from .ir import InputError, PassRecord, Program
from .ir.execution.executable import Executable, KernelUse, Memory
from .ir.plan.contract import Contract, changes
from .ir.text.printer import fields_of
from .passes.engine.manager import PassReport
from .runtime.cache.conversations import Conversations
from .runtime.generation import drafted_so_far
from .runtime.stats import by_depth

APPROXIMATE = (
    "approximate: texts may differ from the target's own; graftwork bench measures how much is kept"
)

TUNED = (
    "tuned: texts are the tuned target's own, to the token, and may differ from the original's; "
    "optimize with cost=True measures how far"
)
NOTES = {Contract.APPROXIMATE.value: APPROXIMATE, Contract.TUNED.value: TUNED}


class Frozen(BaseModel):
    """Base of immutable, strictly validated records."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Measured(Frozen):
    """A contract check on sample prompts; see `passes.engine.validate.Check`."""

    error: float
    agreement: float
    divergence: float
    width_error: float | None = None


class Cost(Frozen):
    """What a recipe costs a text. tokens: that were predicted. divergence: mean KL(model || recipe)
    in nats a token. ratio: perplexity over the model's, and the standard error of that. perplexity:
    of what the recipe made; None in older reports; a million stands for more in both. agreement:
    share of tokens whose likeliest is the model's. speed: tokens a second when decoding, over the
    model's; None if that was not measured. prompts: these alone run otherwise, and the speed is
    theirs."""

    text: str
    tokens: int
    divergence: float
    ratio: float
    error: float
    agreement: float
    perplexity: float | None = None
    speed: float | None = None
    prompts: bool = False

    def lines(self) -> list[tuple[str, str]]:
        """The figures, with names."""
        found = [
            ("text", f"{self.text}, {self.tokens} tokens"),
            ("KL(model || recipe)", f"{self.divergence:.5f} nats a token"),
            ("perplexity over the model's", f"{self.ratio:.4f} ± {self.error:.4f}"),
            ("the same likeliest token", f"{self.agreement:.1%}"),
        ]
        if self.speed is not None:
            what = "speed of prompts" if self.prompts else "decoding speed"
            found.append((f"{what} over the model's", f"{self.speed:.2f}"))
        return found

    def __str__(self) -> str:
        does = "reads prompts" if self.prompts else "decodes"
        speed = "" if self.speed is None else f"; {does} at {self.speed:.2f} times its speed"
        return (
            f"on {self.text} of {self.tokens} tokens: KL {self.divergence:.4f} nats a token, "
            f"perplexity {self.ratio:.3f} +- {self.error:.3f} of the model's, "
            f"{self.agreement:.1%} of the likeliest tokens the same{speed}"
        )


class Choice(Frozen):
    """What a recipe's knob was turned to. note: for the report."""

    value: Any
    cost: Cost
    note: str


class PassLine(Frozen):
    """One pass. matches: their number. nodes_before / after: numbers of calls of ops. check: None
    without validation. remarks: notes for the user."""

    name: str
    options: dict[str, Any]
    contract: str
    matches: int
    seconds: float
    nodes_before: int
    nodes_after: int
    check: Measured | None = None
    remarks: tuple[str, ...] = ()


class Report(Frozen):
    """The report of `optimize`. Prints as a table; `model_dump_json()` gives JSON.

    trace_seconds: of the frontend. weight_bytes_before / after: size of all weights. generates: the
    checkpoint's defaults for `generate`. cost: of an approximate recipe, where it was measured.
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
    cost: Cost | None = None
    notes: tuple[str, ...] = ()
    _model: Callable[[], Any] | None = PrivateAttr(default=None)

    def of(self, model: Callable[[], Any]) -> Report:
        """A copy of the report for a `Model`, given by a weak reference."""
        made = self.model_copy()
        made._model = model
        return made

    def kernels(self) -> tuple[KernelUse, ...]:
        """Kernels of products, look-ups and experts with quantized weights, in functions that are
        compiled."""
        model = self._model and self._model()
        executable: Executable | None = getattr(model, "compiled", None)
        return () if executable is None else executable.kernels()

    def memory(self) -> Memory:
        """Current bytes of weights, caches and compiled code; before the first run, of the stored
        weights. Errors: `InputError` if the model was deleted."""
        if self._model is None or (model := self._model()) is None:
            raise InputError("report: the memory is unknown, because the model was deleted")
        executable: Executable | None = model.compiled
        if executable is None:
            return Memory(weight_bytes(model.program), 0, 0)
        memory = executable.memory()
        return memory._replace(caches=memory.caches + Conversations.of(executable).nbytes)

    def acceptance(self) -> tuple[float, ...]:
        """Share of drafts whose first, second, ... token was kept, over all texts so far; () where
        nothing was drafted."""
        model = self._model and self._model()
        executable: Executable | None = getattr(model, "compiled", None)
        return () if executable is None else by_depth(drafted_so_far(executable))

    def html(self) -> str:
        """A page of one file that loads nothing: what passes matched and cost, memory by part,
        quality, and how far drafts were accepted. What the model has done so far counts: memory of
        caches is there after a first text."""
        return self._told().page()

    def _repr_html_(self) -> str:
        return self._told().card()

    def _told(self) -> Told:
        model = self._model and self._model()
        validated = any(line.check for line in self.passes)
        heads = ["pass", "matches", "nodes", "seconds", "contract"]
        rows = [tuple(self._row(line, validated)) for line in self.passes]
        if validated:
            heads += ["error", "same argmax", "width error"]
        facts = [
            ("model", f"{self.model_type}, for {self.target}"),
            ("contract", self.contract),
            ("weights", f"{megabytes(self.weight_bytes_before)} -> {self._after()}"),
            ("time", f"traced in {self.trace_seconds:.1f} s, transformed in {self._spent():.1f} s"),
        ]
        if kernels := kernels_line(self.kernels()):
            facts.append(("weights of few bits", f"run by {kernels}"))
        if self.generates:
            facts.append(("generates by default with", self.generates))
        remarks = [f"{line.name}: {remark}" for line in self.passes for remark in line.remarks]
        unmeasured = changes(self.contract) and self.cost is None
        options = [
            (line.name, ", ".join(f"{name}={value}" for name, value in line.options.items()))
            for line in self.passes
            if line.options
        ]
        return Told(
            title=f"{self.source}, recipe {self.recipe}",
            facts=facts,
            heads=heads,
            passes=rows,
            options=options,
            notes=[*([NOTES[self.contract]] if unmeasured else []), *remarks, *self.notes],
            quality=[] if self.cost is None else self.cost.lines(),
            memory={} if model is None else self._parts(model.program),
            acceptance=self.acceptance(),
            drafts=model is not None and model.program.plan.speculates,
        )

    def _after(self) -> str:
        return megabytes(self.weight_bytes_after)

    def _spent(self) -> float:
        return sum(line.seconds for line in self.passes)

    def _parts(self, program: Program) -> dict[str, int]:
        """Bytes by part: weights of the program, and what runs holds beside them."""
        parts = {f"weights of {name}": size for name, size in weights_by_part(program).items()}
        held = self.memory()
        prepared = held.weights - weight_bytes(program)
        others = {"prepared weights": prepared, "caches": held.caches, "code": held.code}
        return {**parts, **{name: size for name, size in others.items() if size > 0}}

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
        notes = []
        if changes(self.contract):
            cost = f"{self.contract}: {self.cost}"
            said = NOTES[self.contract] if self.cost is None else cost
            notes.append(Text(said, style="yellow"))
        notes += [
            Text(f"note: {line.name}: {remark}", style="yellow")
            for line in self.passes
            for remark in line.remarks
        ]
        notes += [Text(f"note: {note}", style="yellow") for note in self.notes]
        if kernels := kernels_line(self.kernels()):
            notes.append(Text(f"weights of few bits run by {kernels}"))
        if self.generates:
            notes.append(Text(f"generates by default with {self.generates}"))
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
    lines = []
    for report in reports:
        record, check = report.record, report.check
        checked: Any = {name: getattr(check, name, None) for name in Measured.model_fields}
        lines.append(
            PassLine(
                **plain_record(record),
                nodes_before=report.nodes_before,
                nodes_after=report.nodes_after,
                check=None if check is None else Measured(**checked),
                remarks=report.remarks,
            )
        )
    return tuple(lines)


def plain_record(record: PassRecord) -> dict[str, Any]:
    """The fields of a line of provenance, with options as JSON has them."""
    options = {key: plain(value) for key, value in record.options}
    return {**fields_of(record), "options": options}


def plain(value: Any) -> Any:
    """An option's value for JSON: enums by value, tuples as lists.

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
    """Size of a program's weights, in bytes."""
    return sum(weight.type.nbytes for weight in program.weights.values())


def megabytes(count: int) -> str:
    """A size as text.

    >>> megabytes(28_300_000), megabytes(6_400_000_000)
    ('28.3 MB', '6.40 GB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def render(thing: RenderableType, width: int = 100) -> str:
    """A rich renderable as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(thing)
    return out.getvalue().rstrip()
