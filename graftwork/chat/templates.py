"""Chat templates: Jinja texts that write the messages of a conversation as one prompt.

A template comes with a checkpoint and is hostile until shown otherwise. It runs in Jinja's sandbox,
sees plain JSON values alone, and has a budget of characters: what it writes, joins or repeats, and
every turn of a loop or call of a macro, is paid from it, so that no template runs for ever. (Memory
of a single filter is not bounded: see docs/security.md.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..ir.support.errors import InputError
from ..ir.support.names import shown

MOST_TEMPLATE = 2**20
"""Characters of a template at most."""

BUDGET = 2**28
"""Characters that a template may handle while it writes one prompt."""

_EACH = 1024
"""What a turn of a loop, or a call of a macro, costs besides the text in it, in characters."""

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template. where: it came from, for messages. tokens: special tokens by the names
    that templates give them (``bos_token``, ...). Errors: `InputError` for a text that is too long
    or is no template."""

    def __init__(self, source: str, where: str, tokens: Mapping[str, str]) -> None:
        self.source, self.where, self.tokens = source, where, dict(tokens)
        if len(source) > MOST_TEMPLATE:
            raise InputError(
                f"{where}: expected a chat template of at most {MOST_TEMPLATE} characters, got "
                f"{len(source)}"
            )
        environment = _Environment()
        try:
            tree = _Counting().visit(environment.parse(source))
            self._template = environment.from_string(tree.set_environment(environment))
        except TemplateSyntaxError as error:
            raise InputError(
                f"{where}: expected a Jinja chat template; line {error.lineno}: {error.message}"
            ) from error
        except (Exception, RecursionError) as error:
            raise InputError(f"{where}: expected a Jinja chat template: {_said(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The messages as one text, as transformers' ``apply_chat_template`` writes them.

        tools: JSON schemas, or functions with type hints and a docstring (needs transformers).
        documents: with ``title`` and ``text``. add_generation_prompt: end with what begins an
        answer. variables: further ones that the template reads. Errors: `InputError` for what is no
        list of messages, and with what the template itself says of them.
        """
        known = {
            "messages": check_messages(messages),
            "tools": None if tools is None else [_schema(tool) for tool in tools],
            "documents": documents,
            "add_generation_prompt": bool(add_generation_prompt),
            **self.tokens,
            **variables,
        }
        values = {name: _plain(name, value) for name, value in known.items()}
        left = _LEFT.set(BUDGET)
        try:
            return "".join(self._template.generate(values))
        except _Refused as error:
            raise InputError(f"the chat template refuses this conversation: {error}") from error
        except (Exception, RecursionError) as error:
            raise InputError(
                f"{self.where}: the chat template fails on this conversation: {_said(error)}"
            ) from error
        finally:
            _LEFT.reset(left)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages without what is None. Errors: `InputError` naming the one that is none."""
    expected = 'messages: expected a list of {"role": ..., "content": ...}'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"{expected}, got {shown(messages)}")
    if not messages:
        raise InputError(f"{expected}, got none")
    checked = []
    for place, message in enumerate(messages):
        if callable(dump := getattr(message, "model_dump", None)):  # of OpenAI's client
            message = dump()
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise InputError(f"{expected}, got {shown(message)} at place {place}")
        checked.append({name: value for name, value in message.items() if value is not None})
    return checked


def _plain(name: str, value: Any) -> Any:
    """A copy of JSON values alone: a template must not reach an object's methods."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: expected what JSON can say: {error}") from error


def _schema(tool: Any) -> Any:
    if not callable(tool):
        return tool
    try:
        from transformers.utils import get_json_schema
    except ImportError as error:
        raise InputError(
            "tools: a function's schema is made by transformers, which is not installed; give the "
            'tool as {"type": "function", "function": {...}}'
        ) from error
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise InputError(f"tools: no schema of {shown(tool)}: {error}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# -- the sandbox


class _Refused(TemplateError):
    """What a template says by `raise_exception`."""


_LEFT: ContextVar[int | None] = ContextVar("what is left of a rendering's budget", default=None)


def _spend(count: int) -> None:
    """Errors: `SecurityError` where the budget is spent."""
    left = _LEFT.get()
    if left is None:  # a constant, while the template is compiled
        return
    if count > left:
        raise SecurityError(f"it handles more than {BUDGET} characters, or loops for ever")
    _LEFT.set(left - count)


def _paid(value: Any) -> Any:
    """A value that is about to be written, or was made."""
    _spend(len(value) if isinstance(value, (str, list, dict)) else 1)
    return value


def _size(operator: str, left: Any, right: Any) -> int:
    """Characters or bits of what an operator makes."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        return bits[0] * min(abs(right), BUDGET) if operator == "**" else sum(bits)
    sizes = [len(side) for side in (left, right) if hasattr(side, "__len__")]
    times = [side for side in (left, right) if isinstance(side, int)]
    return sum(sizes) * max([abs(n) for n in times] or [1]) if operator == "*" else sum(sizes)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' conventions, and a budget."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        extensions: list[Any] = [loopcontrols, _Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_paid
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _Names,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be large."""
        _spend(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def turn(self, cost: int) -> str:
        """A loop's body, or a macro, begins."""
        _spend(cost)
        return ""

    def joined(self, *parts: Any) -> str:
        """The operator ``~``."""
        return str(_paid("".join(map(str, parts))))


class _Generation(Extension):
    """``{% generation %}``, which marks what an assistant said, for training: its text is kept."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Counting(NodeTransformer):
    """Has loops, macros and ``~`` paid for."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """As a call, which counts what it makes."""
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A turn of it is a call of `turn` first."""
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """As a loop's body."""
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """As a loop's body."""
        return self._counted(node)

    def _counted(self, node: Any) -> nodes.Node:
        cost = _EACH + sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        call = _call("turn", [nodes.Const(cost, lineno=node.lineno)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call(method: str, operands: list[Any], line: int) -> nodes.Call:
    """A call of a method of the environment, whatever the template calls so."""
    whose = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(whose, operands, [], None, None, lineno=line)


class _Names(Namespace):
    """A namespace without private names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace holds no {name!r}")
        super().__setitem__(name, value)


def _refuse(message: Any) -> NoReturn:
    raise _Refused(str(message)[:1000])


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes what HTML would read."""
    dumps: Callable[..., str] = json.dumps
    return dumps(value, ensure_ascii=ensure_ascii, **options)
