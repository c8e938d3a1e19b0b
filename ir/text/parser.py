"""Parser of the text form (see `printer`). Errors name line, column and what was expected.

Text is untrusted: ops are core ATen and graftwork ops only, nothing that the text names is run or
imported, nesting and numbers are bounded, and every type is inferred again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ..function import Function, Role
from ..ops.stages import op_name
from ..plan import RECORDS, DecodePlan, Record
from ..plan.defaults import Defaults
from ..program import ModelInfo, PassRecord, Program, State
from ..support.discovery import import_methods
from ..support.errors import InputError
from ..support.names import check_program_name
from ..types import TensorType
from ..weights import Call, Weight, WeightStore
from .body import Body
from .expressions import Build, Expression
from .lexer import Cursor, Source, Token

T = TypeVar("T")

ROLES = {role.value: role for role in Role if role is not Role.TARGET}
"""Roles by the word before ``func``; a function without one is the target's."""


def parse_program(text: str, weights: WeightStore | None = None) -> Program:
    """Read a program.

    weights: the declared weights; None: placeholders with types, which cannot be loaded. Errors:
    `ParseError` with line, column and what was expected.
    """
    return Parser(text, weights).program()


def parse_function(text: str, weights: WeightStore, also: Sequence[Any] = ()) -> Function:
    """Read one ``func name(...) -> ... { ... }``. weights: those that it may use. also: ops that it
    may call besides core ATen and graftwork ops."""
    parser = Parser(text, weights)
    parser.also = {op_name(op): op for op in also}
    parser.weights = dict(weights)
    parser.cursor.skip_lines()
    return parser.function()


class Parser:
    """Reads a text; errors name line and column."""

    def __init__(self, text: str, store: WeightStore | None) -> None:
        self.cursor = Cursor(Source(text))
        self.store = store
        self.also: dict[str, Any] = {}
        self.weights: dict[str, Weight] = {}
        self.states: dict[str, State] = {}
        self.functions: dict[str, Function] = {}
        self.passes: list[PassRecord] = []
        self.info: ModelInfo | None = None
        self.plan: DecodePlan | None = None
        # Names that values of the text have: nodes of weights and inputs get others.
        self.wanted = {t.text[1:] for t in self.cursor.tokens if t.kind == "value"}

    # -- the program

    def program(self) -> Program:
        cursor = self.cursor
        cursor.skip_lines()
        cursor.expect("program")
        start = cursor.take("string", 'the program\'s name in quotes, as in "llama"')
        name = cursor.unquote(start)
        try:
            check_program_name(name)
        except InputError as error:
            cursor.source.fail(start.start, str(error))
        cursor.expect("stage")
        cursor.expect("=")
        stage = cursor.dotted("a stage")
        if cursor.accept(":"):
            stage += ":" + cursor.dotted("a backend")
        cursor.expect("{")
        funcs = ", ".join(["func", *(f"{role} func" for role in ROLES)])
        self.block(self.section, f"info, pass, state, weight, {funcs}, decode or }}")
        cursor.skip_lines()
        if cursor.here.kind != "end":
            cursor.fail("the end of the text")
        if self.info is None:
            cursor.fail("a program with an info(...) line")
        assert self.info is not None
        return Program(
            name,
            self.functions,
            WeightStore(self.weights),
            self.info,
            states=self.states,
            plan=self.plan or DecodePlan(),
            stage=stage,
            provenance=tuple(self.passes),
        )

    def block(self, line: Callable[[], bool], expected: str) -> None:
        """Read lines up to the closing brace. `line` reads one; False: it begins with no known
        word."""
        cursor = self.cursor
        cursor.end_line()
        while True:
            cursor.skip_lines()
            if cursor.accept("}"):
                return cursor.end_line()
            if not line():
                cursor.fail(expected)

    def section(self) -> bool:
        sections = {
            "info": self.read_info,
            "pass": self.read_pass,
            "state": self.read_state,
            "weight": self.read_weight,
            **dict.fromkeys(("func", *ROLES), self.read_function),
            "decode": self.read_plan,
        }
        reader = sections.get(self.cursor.here.text)
        if reader is None:
            return False
        reader()
        return True

    def read_info(self) -> None:
        start = self.cursor.here
        if self.info is not None:
            self.cursor.fail("one info line")
        _, values = self.record("info")
        given = {f.name: values.pop(f.name) for f in fields(Defaults) if f.name in values}
        defaults = self.build(Defaults, given, start)
        self.info = self.build(ModelInfo, {"defaults": defaults, **values}, start)
        self.cursor.end_line()

    def read_pass(self) -> None:
        cursor = self.cursor
        cursor.expect("pass")
        name, options = self.record("a pass with its options")
        contract = self.attribute("contract", "name")
        matches = self.attribute("matches", "number")
        seconds = self.attribute("seconds", "number")
        values = {
            "name": name,
            "options": tuple(options.items()),
            "contract": contract.text,
            "matches": self.number(matches, int),
            "seconds": self.number(seconds, float),
        }
        self.passes.append(self.build(PassRecord, values, contract))
        cursor.end_line()

    def number(self, token: Token, kind: Callable[[str], T]) -> T:
        try:
            return kind(token.text)
        except ValueError:
            self.cursor.fail("an integer" if kind is int else "a number", token)

    def attribute(self, name: str, kind: str) -> Token:
        self.cursor.expect(name, f"{name}=...")
        self.cursor.expect("=")
        return self.cursor.take(kind, f"a {kind}")

    def read_state(self) -> None:
        cursor = self.cursor
        cursor.expect("state")
        start = cursor.here
        name = cursor.identifier("a state's name")
        cursor.expect(":")
        values = {"name": name, "type": cursor.tensor_type()}
        values["layer"] = self.number(self.attribute("layer", "number"), int)
        values["part"] = cursor.unquote(self.attribute("part", "string"))
        cursor.declare(self.states, name, self.build(State, values, start), start)
        cursor.end_line()

    def read_weight(self) -> None:
        cursor = self.cursor
        cursor.expect("weight")
        start = cursor.here
        name = cursor.dotted("a weight's name")
        cursor.expect(":")
        weight = self.find_weight(name, cursor.tensor_type(), start)
        cursor.declare(self.weights, name, weight, start)
        cursor.end_line()

    def find_weight(self, name: str, weight_type: TensorType, start: Token) -> Weight:
        if self.store is None:
            return Weight(name, weight_type, Call(_no_data(name)))
        if name not in self.store:
            self.cursor.fail("a weight that the given store holds", start)
        if self.store[name].type != weight_type:
            self.cursor.fail(f"{self.store[name].type} as in the given store", start)
        return self.store[name]

    def read_plan(self) -> None:
        self.cursor.expect("decode")
        if self.plan is not None:
            self.cursor.fail("one decode block")
        self.cursor.expect("{")
        slots: dict[str, Any] = {}

        def line() -> bool:
            start = self.cursor.here
            if start.text not in {f.name for f in fields(DecodePlan)}:
                return False
            slot = self.cursor.next().text
            self.cursor.expect("=")
            self.cursor.declare(slots, slot, self.plan_record(slot), start)
            self.cursor.end_line()
            return True

        self.block(line, " = , ".join(f.name for f in fields(DecodePlan)) + " = or }")
        self.plan = DecodePlan(**slots)

    def plan_record(self, slot: str) -> Record:
        start = self.cursor.here

        def build(kind: str, values: dict[str, Any], at: Token) -> Record:
            if (slot, kind) not in RECORDS:
                import_methods()
            if (slot, kind) not in RECORDS:
                self.cursor.fail(_kinds(slot), at)
            return self.build(RECORDS[slot, kind], values, at)

        if start.kind != "name":
            self.cursor.fail(_kinds(slot))
        return build(*self.record("a record", build), start)

    def record(self, what: str, build: Build | None = None) -> tuple[str, dict[str, Any]]:
        """``name(key=literal, ...)``, which ends where its bracket closes."""
        cursor, first = self.cursor, self.cursor.here
        if first.kind != "name":
            cursor.fail(what)
        expression = Expression(cursor, cursor.span(call=True), None, build)
        node, name = expression.call()
        args, kwargs = expression.arguments(node)
        if args:
            cursor.fail("keyword arguments only", first)
        return name, kwargs

    def build(self, cls: type[T], values: dict[str, Any], at: Token) -> T:
        """An instance of a dataclass that checks its fields."""
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
        if strange := next((name for name in values if name not in known), None):
            self.cursor.fail(f"one of {', '.join(known)} (not {strange!r})", at)
        needed = {n for n, f in known.items() if f.default is f.default_factory is MISSING}
        if missing := needed - set(values):
            self.cursor.fail(f"also {', '.join(sorted(missing))}", at)
        try:
            return cls(**values)
        except InputError as error:
            return self.cursor.fail(f"valid fields ({error})", at)

    # -- functions

    def read_function(self) -> None:
        start = self.cursor.here
        function = self.function()
        self.cursor.declare(self.functions, function.name, function, start)

    def function(self) -> Function:
        cursor, role = self.cursor, Role.TARGET
        if cursor.here.text in ROLES:
            role = ROLES[cursor.next().text]
        cursor.expect("func")
        name = cursor.identifier("the function's name")
        body = Body(cursor, Function(name, role=role), self.weights, self.wanted, self.also)
        cursor.expect("(")
        while not cursor.accept(")"):
            body.parameter()
            if not cursor.at(")"):
                cursor.expect(",")
        cursor.expect("->")
        results = self.results()
        cursor.expect("{")
        self.block(lambda: body.line(results), "a value, return or }")
        if not body.returned:
            cursor.fail(f"a return in {body.function.name}", cursor.tokens[cursor.index - 1])
        return body.function

    def results(self) -> dict[str, tuple[TensorType, Token]]:
        """``name type, ...``, in brackets where they take several lines."""
        cursor, found = self.cursor, dict[str, tuple[TensorType, Token]]()
        closing = ")" if cursor.accept("(") else "{"
        while not cursor.at(closing):
            start = cursor.here
            name = cursor.identifier("an output's name")
            self.cursor.declare(found, name, (cursor.tensor_type(), start), start)
            if not cursor.at(closing):
                cursor.expect(",")
        if closing == ")":
            cursor.expect(")")
        return found


def _kinds(slot: str) -> str:
    """The kinds of a slot, for errors."""
    import_methods()
    return f"one of {', '.join(sorted(kind for known, kind in RECORDS if known == slot))}"


def _no_data(name: str) -> Callable[[], Any]:
    def load() -> Any:
        raise InputError(
            f"weight {name} has no data: the program was read from text without a weight store"
        )

    return load


def parse_record(text: str, slot: str) -> Record:
    """Read one record of a slot, such as ``suffix(tokens=4)``; fields left out have defaults.

    Errors: `ParseError` with line, column and what was expected.

    >>> str(parse_record("suffix(tokens=4)", "draft"))
    'suffix(tokens=4, longest=16, shortest=2)'
    """
    parser = Parser(text, None)
    found = parser.plan_record(slot)
    parser.cursor.skip_lines()
    if parser.cursor.here.kind != "end":
        parser.cursor.fail("nothing more")
    return found
