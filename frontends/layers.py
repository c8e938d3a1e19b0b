"""Tracing a stack of layers by its kinds: of layers that are alike, three are traced.

While a model is traced, the calls of its outermost stacks' layers are watched. Layers are of a kind
if their modules are alike (types, attributes, sizes of parameters, but for the layer's number) and
they are called with the same things but for the hidden states. The first three of a kind run
between two marks, `mark(x, "begin" or "end", stack, layer, -1)`; every other one is a single call,
`mark(x, "like", stack, layer, second)`, in whose place the importer puts what is between the marks
of the second, with the layer's own weights (see `importer`), if second and third are equal there.

A model whose layers cannot be told apart like that raises `NotAlike`: it is traced whole. So is one
that uses a layer's number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

LEAST = 5
"""Layers that a stack has at least; of fewer, nothing is saved."""
TRACED = 3

_LIBRARY = torch.library.Library("graftwork_trace", "FRAGMENT")
_LIBRARY.define("mark(Tensor x, str what, str stack, int layer, int like) -> Tensor")
_LIBRARY.impl("mark", lambda x, *about: x.clone(), "CompositeExplicitAutograd")
MARK: Any = torch.ops.graftwork_trace.mark.default


torch.library.register_fake(
    "graftwork_trace::mark", lambda x, *about: torch.empty_like(x), lib=_LIBRARY
)


class NotAlike(Exception):
    """Layers cannot be traced by their kinds."""


class _Number:
    """A layer's number that tells when it is used."""

    def __init__(self, number: int, used: Callable[[], None]) -> None:
        self.number, self.used = number, used


def _telling(name: str) -> Callable[..., Any]:
    def method(self: _Number, *args: Any) -> Any:
        self.used()
        args = tuple(a.number if isinstance(a, _Number) else a for a in args)
        return getattr(self.number, name)(*args)

    return method


for _name in dir(int):
    if _name.startswith("__") and callable(getattr(int, _name)) and _name not in dir(object):
        setattr(_Number, _name, _telling(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__"):
    setattr(_Number, _name, _telling(_name))


@dataclass
class _Layer:
    """A layer of a stack. like: what tells its kind."""

    stack: str
    number: int
    like: object


@dataclass
class Kinds:
    """The kinds of a model's layers, found while it is traced. skipped: layers that were not."""

    model: nn.Module
    layers: dict[int, _Layer] = field(default_factory=dict)
    traced: dict[object, list[int]] = field(default_factory=dict)
    shapes: dict[object, Callable[[Tensor], Any]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    numbers: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    number_used: bool = False
    skipped: int = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls of layers are watched, by their classes' `forward`."""
        for path, stack in _stacks(self.model):
            for number, layer in enumerate(stack):
                self.layers[id(layer)] = _Layer(path, number, self._like(layer, number))
        kinds: set[Any] = {type(layer) for _, stack in _stacks(self.model) for layer in stack}
        own = {kind: (kind.forward, "forward" in vars(kind)) for kind in kinds}
        for module, name, number in self.numbers:
            vars(module)[name] = _Number(number, self._use)
        try:
            for kind, (forward, _) in own.items():
                kind.forward = self._watching(forward)
            yield
        finally:
            for kind, (forward, is_its_own) in own.items():
                if is_its_own:
                    kind.forward = forward
                else:
                    del kind.forward
            for module, name, number in self.numbers:
                vars(module)[name] = number

    def _use(self) -> None:
        self.number_used = True

    def _watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            layer = self.layers.get(id(module))
            if layer is None:
                return forward(module, *args, **kwargs)
            return self._run(layer, lambda *a, **k: forward(module, *a, **k), args, kwargs)

        return watched

    def _run(
        self, layer: _Layer, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        given = dict(kwargs)
        x = args[0] if args else given.pop("hidden_states", None)
        if not isinstance(x, Tensor):
            raise NotAlike(f"{layer.stack}: a layer's first argument is no tensor")
        self.alive += [args, kwargs]  # what lives has an id of its own
        kind = (layer.stack, layer.like, _called(args[1:]), _called(given), str(x.shape), x.dtype)
        traced = self.traced.setdefault(kind, [])
        place = (layer.stack, layer.number)
        if len(traced) >= TRACED:
            self.skipped += 1
            return self.shapes[kind](MARK(x, "like", *place, traced[1]))
        begun = MARK(x, "begin", *place, -1)
        if args:
            out = forward(begun, *args[1:], **kwargs)
        else:
            out = forward(**{**kwargs, "hidden_states": begun})
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        rest = tuple(out[1:]) if isinstance(out, (tuple, list)) else ()
        same = isinstance(first, Tensor) and str(first.shape) == str(x.shape)
        if not same or first.dtype != x.dtype or any(part is not None for part in rest):
            raise NotAlike(f"{layer.stack}: a layer gives something else than hidden states")
        self.shapes[kind] = (lambda y: y) if out is first else (lambda y: type(out)((y, *rest)))
        traced.append(layer.number)
        return self.shapes[kind](MARK(first, "end", *place, -1))

    def _like(self, layer: nn.Module, number: int) -> object:
        """What a layer's modules are, its own number aside."""
        parts: list[object] = []
        inside = {id(module): name for name, module in layer.named_modules()}
        for name, module in layer.named_modules(remove_duplicate=False):
            parts.append((name, type(module), module.training))
            for key, value in vars(module).items():
                if key in _PLUMBING:
                    continue
                if key in _NUMBERS and type(value) is int and value == number:
                    self.numbers.append((module, key, number))
                    value = "the layer's number"
                parts.append((key, _value(value, inside)))
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            parts.append((name, str(tensor.shape), tensor.dtype, type(tensor)))
        return tuple(parts)


_PLUMBING = set(vars(nn.Module()))
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "layer_depth"}


def _stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The outermost lists of many modules that share no parameter, by path."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        outermost = not any(path.startswith(f"{other}.") for other, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) >= LEAST and outermost:
            held = [id(p) for layer in module for p in layer.parameters()]
            if len(held) == len(set(held)):
                found.append((path, module))
    return found


def _value(value: Any, inside: dict[int, str]) -> object:
    """A value of a module's attribute, so that equal ones mean the same in their layers."""
    if isinstance(value, nn.Module):
        return ("module", inside.get(id(value), id(value)))
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size)):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_value(part, inside) for part in value))
    if isinstance(value, dict):
        return (dict, *((key, _value(part, inside)) for key, part in value.items()))
    if isinstance(value, partial):
        return (partial, *(_value(p, inside) for p in (value.func, value.args, value.keywords)))
    if isinstance(value, MethodType):
        return (MethodType, id(value.__func__), _value(value.__self__, inside))
    return ("the one", id(value))


def _called(value: Any) -> object:
    """A value that a layer is called with, so that equal ones are the same."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_called, value))
    if isinstance(value, dict):
        return (dict, *((key, _called(part)) for key, part in value.items()))
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return (type(value), value)
    return ("the one", id(value))
