"""Reading the text form (see `printer`). Every error names line and column and what was expected.

The reader takes untrusted text: it looks up ops in core ATen and graftwork only, never runs or
imports anything, bounds nesting and numbers, and infers every type again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

import torch.fx
from pydantic import TypeAdapter, ValidationError

from .defaults import Defaults
from .errors import GraftworkError, InputError
from .expressions import Build, Expression
from .function import NOWHERE, Function, Site
from .infer import infer
from .lexer import Cursor, Source, Token
from .plan import RECORDS, DecodePlan, Record
from .program import ModelInfo, PassRecord, Program, State
from .signature import placed
from .stages import find_op
from .types import TensorType, ValueType, type_text
from .weights import Weight, WeightStore

T = TypeVar("T")

_SITE = re.compile(
    r'#(?: (?P<module>(?!layer=|at )(?:"(?:[^"\\]|\\.)*"|\S+)))?'
    r"(?: layer=(?P<layer>-?\d{1,9}))?(?: at (?P<line>.+))?"
)
_STOP_EQUALS = frozenset({"="})
_STOP_COLON = frozenset({":"})


def parse_program(text: str, weights: WeightStore | None = None) -> Program:
    """Read a program.

    weights: where the declared weights are; without it the program holds placeholders that know
    their types and refuse to load. Errors: `ParseError` with line, column and what was expected.
    """
    return _Parser(text, weights).program()


def parse_function(text: str, weights: WeightStore) -> Function:
    """Read one ``func name(...) -> ... { ... }``; `weights` says which weights there are."""
    parser = _Parser(text, weights)
    parser.weights = dict(weights)
    parser.cursor.skip_lines()
    parser.cursor.expect("func")
    return parser.function()


class _Parser:
    def __init__(self, text: str, store: WeightStore | None) -> None:
        self.cursor = Cursor(Source(text))
        self.store = store
        self.weights: dict[str, Weight] = {}
        self.states: dict[str, State] = {}
        self.functions: dict[str, Function] = {}
        self.passes: list[PassRecord] = []
        self.info: ModelInfo | None = None
        self.plan: DecodePlan | None = None
        # Names of graph nodes that values will want; weights and inputs stay clear of them.
        self.wanted = {t.text[1:] for t in self.cursor.tokens if t.kind == "value"}

    # -- the program

    def program(self) -> Program:
        cursor = self.cursor
        cursor.skip_lines()
        cursor.expect("program")
        name = cursor.unquote(cursor.take("string", 'the program\'s name in quotes, as in "llama"'))
        cursor.expect("stage")
        cursor.expect("=")
        stage = cursor.dotted("a stage")
        if cursor.accept(":"):
            stage += ":" + cursor.dotted("a backend")
        cursor.expect("{")
        self.block(self.section, "info, pass, state, weight, func, decode or }")
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
        """Lines up to the closing brace; `line` reads one and says whether it knew it."""
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
            "func": self.read_function,
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
        said = {f.name: values.pop(f.name) for f in fields(Defaults) if f.name in values}
        defaults = self.build(Defaults, said, start)
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
        name = cursor.dotted("a state's name")
        cursor.expect(":")
        state_type = self.tensor_type()
        layer = self.number(self.attribute("layer", "number"), int)
        part = cursor.unquote(self.attribute("part", "string"))
        self.declare(self.states, name, State(name, state_type, layer, part), start)
        cursor.end_line()

    def read_weight(self) -> None:
        cursor = self.cursor
        cursor.expect("weight")
        start = cursor.here
        name = cursor.dotted("a weight's name")
        cursor.expect(":")
        weight_type = self.tensor_type()
        self.declare(self.weights, name, self.find_weight(name, weight_type, start), start)
        cursor.end_line()

    def find_weight(self, name: str, weight_type: TensorType, start: Token) -> Weight:
        if self.store is None:
            return Weight(name, weight_type, _no_data(name))
        if name not in self.store:
            self.cursor.fail("a weight that the given store holds", start)
        if self.store[name].type != weight_type:
            self.cursor.fail(f"{self.store[name].type} as in the given store", start)
        return self.store[name]

    def declare(self, table: dict[str, T], name: str, value: T, at: Token) -> None:
        if name in table:
            self.cursor.fail(f"another name ({name} is declared already)", at)
        table[name] = value

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
            self.declare(slots, slot, self.plan_record(slot), start)
            self.cursor.end_line()
            return True

        self.block(line, " = , ".join(f.name for f in fields(DecodePlan)) + " = or }")
        self.plan = DecodePlan(**slots)

    def plan_record(self, slot: str) -> Record:
        start = self.cursor.here
        kinds = sorted(kind for known, kind in RECORDS if known == slot)

        def build(kind: str, values: dict[str, Any], at: Token) -> Record:
            if (slot, kind) not in RECORDS:
                self.cursor.fail(f"one of {', '.join(kinds)}", at)
            return self.build(RECORDS[slot, kind], values, at)

        return build(*self.record(f"one of {', '.join(kinds)}", build), start)

    def record(self, what: str, build: Build | None = None) -> tuple[str, dict[str, Any]]:
        """``name(key=literal, ...)``, which ends where its bracket closes."""
        cursor, first = self.cursor, self.cursor.here
        if first.kind != "name":
            cursor.fail(what)
        tokens, depth = [cursor.next()], 0
        while cursor.here.kind not in ("newline", "comment", "end"):
            depth += (cursor.here.text in ("(", "[", "{")) - (cursor.here.text in (")", "]", "}"))
            tokens.append(cursor.next())
            if not depth:
                break
        expression = Expression(cursor, tokens, None, build)
        node, name = expression.call()
        args, kwargs = expression.arguments(node)
        if args:
            cursor.fail("keyword arguments only", first)
        return name, kwargs

    def build(self, cls: type[T], values: dict[str, Any], at: Token) -> T:
        """An instance of a plain dataclass, its fields checked against their annotations."""
        hints = get_type_hints(cls)
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
        for name, value in values.items():
            if name not in known:
                self.cursor.fail(f"one of {', '.join(known)} (not {name!r})", at)
            try:
                TypeAdapter(hints[name]).validate_python(value, strict=True)
            except ValidationError as error:
                self.cursor.fail(f"a valid {name} ({error.errors()[0]['msg']})", at)
        needed = {n for n, f in known.items() if f.default is f.default_factory is MISSING}
        if missing := needed - set(values):
            self.cursor.fail(f"also {', '.join(sorted(missing))}", at)
        try:
            return cls(**values)
        except InputError as error:
            return self.cursor.fail(f"valid fields ({error})", at)

    # -- types

    def tensor_type(self) -> TensorType:
        start = self.cursor.take("name", "a tensor type, such as f32[B,T,384]")
        if not self.cursor.at("["):
            self.cursor.fail("[", self.cursor.here)
        opening = end = self.cursor.next()
        depth = 1
        while depth:
            end = self.cursor.next()
            depth += (end.text == "[") - (end.text == "]")
            if end.kind == "end":
                self.cursor.fail("]", opening)
        try:
            return TensorType.parse(self.cursor.source.text[start.start : end.end])
        except InputError as error:
            self.cursor.source.fail(start.start, f"expected a tensor type: {error}")

    def value_type(self) -> ValueType:
        if not self.cursor.accept("("):
            return self.tensor_type()
        parts: list[ValueType] = []
        while not self.cursor.accept(")"):
            parts.append(self.value_type())
            if not self.cursor.at(")"):
                self.cursor.expect(",")
        return tuple(parts)

    # -- functions

    def read_function(self) -> None:
        self.cursor.expect("func")
        start = self.cursor.here
        function = self.function()
        self.declare(self.functions, function.name, function, start)

    def function(self) -> Function:
        cursor = self.cursor
        body = _Body(self, Function(cursor.dotted("the function's name")))
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
            name = cursor.dotted("an output's name")
            self.declare(found, name, (self.tensor_type(), start), start)
            if not cursor.at(closing):
                cursor.expect(",")
        if closing == ")":
            cursor.expect(")")
        return found


class _Body:
    """The inside of a function: builds the graph line by line."""

    def __init__(self, parser: _Parser, function: Function) -> None:
        self.parser, self.cursor, self.function = parser, parser.cursor, function
        self.values: dict[str, torch.fx.Node] = {}
        self.weights: dict[str, torch.fx.Node] = {}
        self.returned = False

    def free_name(self, name: str) -> str:
        """A node name that no value of the text wants."""
        plain = "".join(c if c.isalnum() else "_" for c in name)
        while plain in self.parser.wanted:
            plain += "_"
        return plain

    def parameter(self) -> None:
        cursor, start = self.cursor, self.cursor.here
        name = cursor.dotted("an input's name")
        cursor.expect(":")
        node_type = self.parser.tensor_type()
        node = self.function.graph.create_node("placeholder", name, name=self.free_name(name))
        node.meta = {"type": node_type, "site": NOWHERE}
        self.parser.declare(self.values, name, node, start)

    def line(self, results: dict[str, tuple[TensorType, Token]]) -> bool:
        if self.returned:
            return False
        if self.cursor.at("return"):
            self.output(results)
            return True
        if self.cursor.here.kind != "value":
            return False
        self.statement()
        return True

    def statement(self) -> None:
        cursor = self.cursor
        target = cursor.next()
        name = cursor.unquote(target, 1)
        cursor.expect(":", "': type = ...'")
        stated = cursor.here
        value_type = self.parser.value_type()
        cursor.expect("=")
        expression = Expression(cursor, cursor.span(frozenset()), self.lookup)
        site = self.site()
        node = self.build(expression, name, site)
        if node.meta["type"] != value_type:
            found = type_text(node.meta["type"])
            cursor.source.fail(
                stated.start,
                f"expected {found}, which the op gives; the text says {type_text(value_type)}",
            )
        self.parser.declare(self.values, name, node, target)
        cursor.end_line()

    def build(self, expression: Expression, name: str, site: Site) -> torch.fx.Node:
        target, args, kwargs = self.operation(expression)
        try:
            node_type = infer(target, tuple(args), kwargs)
        except GraftworkError as error:
            self.cursor.source.fail(expression.tokens[0].start, f"expected a valid call: {error}")
        node = self.function.graph.create_node(
            "call_function", target, *placed(target, args, kwargs), name=name.replace(".", "_")
        )
        node.meta = {"type": node_type, "site": site}
        return node

    def operation(self, expression: Expression) -> tuple[Any, list[Any], dict[str, Any]]:
        import ast

        tree = expression.tree
        if isinstance(tree, ast.Subscript):
            index = expression.value(tree.slice)
            if type(index) is not int:
                expression.fail(tree.slice, "an integer, the number of the result")
            return operator.getitem, [expression.value(tree.value), index], {}
        node, op = expression.call()
        target = find_op(op)
        if target is None:
            expression.fail(tree, "a core ATen op (aten.add.Tensor) or a graftwork op")
        args, kwargs = expression.arguments(node)
        return target, args, kwargs

    def lookup(self, token: Token) -> torch.fx.Node:
        name = self.cursor.unquote(token, 1)
        if token.kind == "weight":
            return self.weight(name, token)
        if name not in self.values:
            self.cursor.fail("a value defined above", token)
        return self.values[name]

    def weight(self, name: str, token: Token) -> torch.fx.Node:
        if name not in self.parser.weights:
            self.cursor.fail("a declared weight", token)
        if name not in self.weights:
            node = self.function.graph.create_node("get_attr", name, name=self.free_name(name))
            node.meta = {"type": self.parser.weights[name].type, "site": NOWHERE}
            self.weights[name] = node
        return self.weights[name]

    def site(self) -> Site:
        cursor = self.cursor
        if cursor.here.kind != "comment":
            return NOWHERE
        token = cursor.here
        match = _SITE.fullmatch(token.text.rstrip())
        if match is None:
            cursor.fail("# module layer=N at file:line", token)
        assert match is not None
        module, layer, line = match["module"] or "", match["layer"], match["line"] or ""
        texts = [self.unquoted(text, token) for text in (module, line)]
        return Site(texts[0], None if layer is None else int(layer), texts[1])

    def unquoted(self, text: str, token: Token) -> str:
        return self.cursor.unquote(Token("string", text, token.start))

    def output(self, results: dict[str, tuple[TensorType, Token]]) -> None:
        cursor = self.cursor
        start = cursor.expect("return")
        bracket = cursor.accept("(")
        outputs: dict[str, torch.fx.Node] = {}
        while cursor.here.kind not in ("newline", "comment", "end") and not cursor.at(")"):
            at = cursor.here
            name = cursor.dotted("an output's name")
            cursor.expect("=")
            if cursor.here.kind not in ("value", "weight"):
                cursor.fail("a value")
            self.parser.declare(outputs, name, self.lookup(cursor.next()), at)
            if not cursor.accept(","):
                break
        if bracket:
            cursor.expect(")")
        cursor.end_line()
        self.check_outputs(outputs, results, start)
        self.function.set_outputs(outputs)
        self.returned = True

    def check_outputs(
        self,
        outputs: dict[str, torch.fx.Node],
        results: dict[str, tuple[TensorType, Token]],
        start: Token,
    ) -> None:
        if list(outputs) != list(results):
            stated = ", ".join(results)
            self.cursor.fail(f"the outputs that the header states, in order: {stated}", start)
        for name, node in outputs.items():
            stated_type, at = results[name]
            if node.meta["type"] != stated_type:
                found = type_text(node.meta["type"])
                self.cursor.source.fail(
                    at.start,
                    f"expected {name} {found}, which the body returns, found {stated_type}",
                )


def _no_data(name: str) -> Callable[[], Any]:
    def load() -> Any:
        raise InputError(
            f"weight {name} has no data: the program was read from text without a weight store"
        )

    return load
