"""Lazy weights: a name, a type, and the call that computes the tensor.

Passes derive weights from others without loading data (`derive`). Backends and the artifact writer
load them one by one.

    >>> w = Weight.of("w", torch.ones(2, 3))
    >>> t = derive("w.t", TensorType.parse("f32[3,2]"), torch.ops.aten.t.default, w)
    >>> t.load().shape
    torch.Size([3, 2])

A derivation is data: a `Call` of an op or of a function registered by `derivation`, on other
weights, or on a file and a tensor's name. Calls can be compared and have a text form (see
`weights_text`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx.node import map_aggregate

from .support.errors import InputError
from .types import TensorType

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Weight:
    """A named constant. Its tensor is `made(*inputs)`, computed at each load."""

    name: str
    type: TensorType
    made: Call
    inputs: tuple[Weight, ...] = ()

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Weight:
        """A weight held in memory."""
        return cls(name, TensorType.of(tensor), Call(Held(tensor)))

    def load(self) -> torch.Tensor:
        """The tensor, contiguous, on the CPU. Errors: `InputError` if its type is not `type`."""
        several = SEVERAL.get(self.made.target)
        made = self.computed() if several is None else _LATEST.part(self, *several)
        tensor = made.detach().cpu().contiguous()
        if TensorType.of(tensor) != self.type:
            raise InputError(
                f"weight {self.name}: expected {self.type}, its source gave {TensorType.of(tensor)}"
            )
        return tensor

    def computed(self) -> Any:
        """What the call gives for the inputs, which are loaded."""
        return self.made(*(w.load() for w in self.inputs))

    def renamed(self, name: str) -> Weight:
        """The same tensor under another name."""
        return replace(self, name=name)

    def cast(self, dtype: torch.dtype) -> Weight:
        """The weight in another floating dtype; integers stay as they are."""
        if self.type.dtype == dtype or not self.type.dtype.is_floating_point:
            return self
        type = self.type.with_dtype(dtype)
        return derive(self.name, type, torch.ops.aten._to_copy.default, self, dtype=dtype)


DERIVATIONS: dict[str, Callable[..., torch.Tensor]] = {}
"""Functions registered by `derivation`, by name."""

OPTIONS: dict[str, type] = {}
"""Classes registered by `option`, by name."""


def derivation(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Decorator: register a function that derives weights, of tensors and keyword options. Errors:
    `InputError` if the name is taken."""
    name = function.__name__
    if name in DERIVATIONS:
        raise InputError(f"two functions that derive weights are called {name}")
    DERIVATIONS[name] = function
    return function


SEVERAL: dict[Callable[..., Any], tuple[str, Callable[..., Mapping[Any, torch.Tensor]]]] = {}
"""Of derivations that compute several weights at once: the option that says which is wanted, and
what computes all of them."""


def derivation_of_parts(
    option: str,
) -> Callable[[Callable[..., Mapping[Any, torch.Tensor]]], Callable[..., torch.Tensor]]:
    """Decorator: register a function that computes several weights at once, by the value that this
    option of the derivation has. It is called once for weights that are loaded one after the other;
    what is not loaded yet of the latest is kept."""

    def register(every: Callable[..., Mapping[Any, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        @wraps(every)
        def part(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
            wanted = options.pop(option)
            return every(*tensors, **options)[wanted]

        SEVERAL[part] = option, every
        return derivation(part)

    return register


def option(kind: type[T]) -> type[T]:
    """Decorator: let instances of a class be options of derivations. Their text is
    ``Name(field=value, ...)`` with the fields of the dataclass or pydantic model, or those of its
    methods `text_fields` and `from_text`. Errors: `InputError` if the name is taken."""
    if OPTIONS.setdefault(kind.__name__, kind) is not kind:
        raise InputError(f"two classes of options of derivations are called {kind.__name__}")
    return kind


def option_fields(value: Any) -> dict[str, Any] | None:
    """Fields by name of an instance of a class in `OPTIONS`; None for other values."""
    if OPTIONS.get(type(value).__name__) is not type(value):
        return None
    if hasattr(value, "text_fields"):
        return dict(value.text_fields())
    kind: Any = type(value)
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else kind.model_fields
    return {name: getattr(value, name) for name in names}


def derive(
    name: str,
    type: TensorType,
    function: Callable[..., torch.Tensor],
    /,
    *inputs: Weight | None,
    **options: Any,
) -> Weight:
    """A weight computed from others when it is loaded. function: an op or a registered
    `derivation`. inputs: its tensors; None is passed on. options: its plain values."""
    given = [weight for weight in inputs if weight is not None]
    places = map(Operand, range(len(given)))
    args = tuple(None if weight is None else next(places) for weight in inputs)
    return computed(name, type, Call(function, args, options), *given)


def computed(name: str, type: TensorType, call: Call, *inputs: Weight) -> Weight:
    """A weight computed by a call. Errors: `InputError` for an unregistered function."""
    if not isinstance(call.target, torch._ops.OpOverload):
        known = DERIVATIONS.get(getattr(call.target, "__name__", ""))
        if known is not call.target:
            raise InputError(f"{name}: {call.target} derives no weights (see `derivation`)")
    return Weight(name, type, call, inputs)


@dataclass(frozen=True)
class Operand:
    """Stands in a `Call`'s arguments for the input weight of this index."""

    place: int


@dataclass(frozen=True)
class Call:
    """The call of an op or function that computes a weight, as data. args, kwargs: with `Operand`s
    in the place of weights."""

    target: Callable[..., torch.Tensor]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The result for the inputs' tensors."""

        def value(arg: Any) -> Any:
            return tensors[arg.place] if isinstance(arg, Operand) else arg

        args: Any = map_aggregate(self.args, value)
        kwargs: Any = map_aggregate(dict(self.kwargs), value)
        return self.target(*args, **kwargs)


class _Latest:
    """Parts that were computed with another, of the weights that were loaded last.

    What each load takes is let go, and of more weights than `MOST` the oldest's.
    """

    MOST = 2

    def __init__(self) -> None:
        self.left: list[tuple[Weight, dict[Any, torch.Tensor]]] = []
        self.lock = threading.RLock()  # what parts are made of may be parts

    def part(self, weight: Weight, option: str, every: Callable[..., Any]) -> torch.Tensor:
        """The tensor of a weight that is a part of several."""
        options = dict(weight.made.kwargs)
        wanted = options.pop(option)
        whole = replace(weight, made=Call(every, weight.made.args, options))
        with self.lock:
            at = next((i for i, (w, _) in enumerate(self.left) if _same(w, whole)), None)
            parts = {} if at is None else self.left.pop(at)[1]
            if wanted not in parts:
                parts = dict(whole.computed())
            found = parts.pop(wanted)
            self.left = [*self.left, (whole, parts)][-self.MOST :] if parts else self.left
        return found


_LATEST = _Latest()


def _same(first: Weight, second: Weight) -> bool:
    """Whether weights are computed by the same calls of the same tensors."""
    if first is second:
        return True
    alike = first.made == second.made and len(first.inputs) == len(second.inputs)
    return alike and all(map(_same, first.inputs, second.inputs))


@dataclass(frozen=True, eq=False)
class Held:
    """Returns a tensor in memory."""

    tensor: torch.Tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor


@derivation
def piece(tensor: torch.Tensor, *, axis: int, start: int, end: int) -> torch.Tensor:
    """Elements start..end of an axis, copied."""
    return tensor.narrow(axis, start, end - start).clone()


def _renewed(weight: Weight, given: Mapping[str, Weight]) -> Weight:
    """The weight with its inputs, transitively, replaced by `given` weights of the same name."""
    if weight.name in given:
        return given[weight.name]
    new = tuple(_renewed(part, given) for part in weight.inputs)
    changed = any(a is not b for a, b in zip(new, weight.inputs, strict=True))
    return replace(weight, inputs=new) if changed else weight


class WeightStore(Mapping[str, Weight]):
    """An immutable, ordered mapping from name to `Weight`."""

    def __init__(self, weights: Mapping[str, Weight] | None = None) -> None:
        self._weights = dict(weights or {})

    def __getitem__(self, name: str) -> Weight:
        if name not in self._weights:
            raise InputError(f"no weight named {name!r} in the program")
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def taken(self, weight: Weight) -> Weight:
        """The stored weight of this one's name, else this one."""
        return self._weights.get(weight.name, weight)

    def alike(self, weight: Weight) -> Weight:
        """A stored weight with the same inputs, call and type, else this one."""
        same = (w for w in self._weights.values() if w.inputs == weight.inputs)
        alike = (w for w in same if w.made == weight.made and w.type == weight.type)
        return next(alike, weight)

    def adding(self, *weights: Weight) -> WeightStore:
        """This store and more weights. Errors: `InputError` if a name is taken."""
        merged = dict(self._weights)
        for weight in weights:
            if merged.get(weight.name, weight) is not weight:
                raise InputError(f"a weight named {weight.name!r} exists already")
            merged[weight.name] = weight
        return WeightStore(merged)

    def replacing(self, *weights: Weight) -> WeightStore:
        """This store with some weights replaced by others of the same name and type, also as inputs
        of derived weights. Errors: `InputError` for another type."""
        given = {weight.name: weight for weight in weights}
        merged = {name: _renewed(weight, given) for name, weight in self._weights.items()}
        for weight in weights:
            if weight.type != self[weight.name].type:
                raise InputError(
                    f"weight {weight.name}: expected {self[weight.name].type}, got {weight.type}"
                )
            merged[weight.name] = weight
        return WeightStore(merged)

    def renewed(self, *weights: Weight) -> WeightStore:
        """This store with some inputs of derived weights replaced by others of the same name."""
        given = {weight.name: weight for weight in weights}
        return WeightStore(
            {name: _renewed(weight, given) for name, weight in self._weights.items()}
        )

    def only(self, names: set[str]) -> WeightStore:
        """The weights with these names, in this store's order."""
        return WeightStore({n: w for n, w in self._weights.items() if n in names})
