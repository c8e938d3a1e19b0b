"""Parser of a function's body: parameters, one call a line, and the outputs."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch.fx

from ..function import NOWHERE, Function, Site
from ..inference.infer import infer
from ..inference.signature import placed
from ..ops.stages import find_op
from ..support.errors import GraftworkError
from ..types import TensorType, type_text
from ..weights import Weight
from .expressions import Expression
from .lexer import Cursor, Token

_SITE = re.compile(
    r'#(?: (?P<module>(?!layer=|at )(?:"(?:[^"\\]|\\.)*"|\S+)))?'
    r"(?: layer=(?P<layer>-?\d{1,9}))?(?: at (?P<line>.+))?"
)


class Body:
    """Builds a function's graph line by line.

    known: the program's weights. wanted: names of the text's values, which their nodes get. also:
    ops that may be called besides core ATen and graftwork ops, by name.
    """

    def __init__(
        self,
        cursor: Cursor,
        function: Function,
        known: Mapping[str, Weight],
        wanted: set[str],
        also: Mapping[str, Any],
    ) -> None:
        self.cursor, self.function = cursor, function
        self.known, self.wanted, self.also = known, wanted, also
        self.values: dict[str, torch.fx.Node] = {}
        self.weights: dict[str, torch.fx.Node] = {}
        self.returned = False

    def free_name(self, name: str) -> str:
        """A node name that no value of the text has."""
        plain = "".join(c if c.isalnum() else "_" for c in name)
        while plain in self.wanted:
            plain += "_"
        return plain

    def parameter(self) -> None:
        cursor, start = self.cursor, self.cursor.here
        name = cursor.identifier("an input's name")
        cursor.expect(":")
        node_type = self.cursor.tensor_type()
        node = self.function.graph.create_node("placeholder", name, name=self.free_name(name))
        node.meta = {"type": node_type, "site": NOWHERE}
        self.cursor.declare(self.values, name, node, start)

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
        value_type = self.cursor.value_type()
        cursor.expect("=")
        expression = Expression(cursor, cursor.span(), self.lookup)
        site = self.site()
        node = self.build(expression, name, site)
        if node.meta["type"] != value_type:
            found = type_text(node.meta["type"])
            cursor.source.fail(
                stated.start,
                f"expected {found}, which the op gives, found {type_text(value_type)}",
            )
        self.cursor.declare(self.values, name, node, target)
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
        tree = expression.tree
        if isinstance(tree, ast.Subscript):
            index = expression.value(tree.slice)
            if type(index) is not int:
                expression.fail(tree.slice, "an integer, the number of the result")
            return operator.getitem, [expression.value(tree.value), index], {}
        node, op = expression.call()
        target = find_op(op) or self.also.get(op)
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
        if name not in self.known:
            self.cursor.fail("a declared weight", token)
        if name not in self.weights:
            node = self.function.graph.create_node("get_attr", name, name=self.free_name(name))
            node.meta = {"type": self.known[name].type, "site": NOWHERE}
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
            name = cursor.identifier("an output's name")
            cursor.expect("=")
            if cursor.here.kind not in ("value", "weight"):
                cursor.fail("a value")
            self.cursor.declare(outputs, name, self.lookup(cursor.next()), at)
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
