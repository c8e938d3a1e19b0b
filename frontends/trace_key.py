"""What a trace depends on, as one hash; equal keys give equal traces.

That is the code that is traced and traces (versions of packages, this package's own files), the
modules with their attributes, the types of their parameters, the values of their buffers and the
types of the inputs. Parameters have no data when a model is traced, so their values do not count.
A model has no key where something in it cannot be told from another by value: hooks, patched
functions, classes that are not transformers' or torch's, objects of other packages.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ir import TensorType
from ..ir.support.discovery import sources_of, versions_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TORCH = (torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)
_ROOTS = {
    *("transformers", "torch", "graftwork", "safetensors", "huggingface_hub", "numpy"),
    *sys.stdlib_module_names,
}
"""Packages whose functions and classes are known by their names."""

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_always_called",
)
_ORIGINS = {
    *("_name_or_path", "name_or_path", "_commit_hash", "architectures", "transformers_version"),
    *("_is_hf_initialized", "generation_config"),
}
"""Attributes that say where a model is from, or how it writes: forward passes do not read them."""

_KEPT_BY_MODULES = {*vars(nn.Module()), *_ORIGINS}


class _Unknown(Exception):
    """Something that has no value to tell it by."""


def trace_key(wrapper: nn.Module, *asked: object) -> str | None:
    """The key of a module's trace, None if it has none. asked: what else the trace depends on, as
    values whose text says all (types, names, numbers)."""
    try:
        digest = hashlib.sha256()
        for part in _parts(wrapper, asked):
            digest.update(part.encode())
            digest.update(b"\0")
        return digest.hexdigest()
    except (_Unknown, RecursionError):
        return None


def _parts(wrapper: nn.Module, asked: tuple[object, ...]) -> Iterator[str]:
    yield sources_of(Path(inspect.getfile(TensorType)).parent, Path(__file__).parent)
    yield repr((sys.version_info[:3], torch.__version__, versions_of("transformers")))
    yield repr(asked)
    shown = _Shown({id(module): path for path, module in wrapper.named_modules()})
    for path, module in wrapper.named_modules(remove_duplicate=False):
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            raise _Unknown(f"{path} has hooks")
        given = {k: v for k, v in vars(module).items() if k not in _KEPT_BY_MODULES}
        yield f"{path} {shown.name(type(module))} {module.training} {shown.value(given)}"
    named = [
        *wrapper.named_parameters(remove_duplicate=False),
        *wrapper.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    for path, tensor in named:
        yield f"{path} {first.setdefault(id(tensor), path)} {shown.value(tensor)}"
    for kind in dict.fromkeys(type(module) for module in wrapper.modules()):
        yield from _code_of(kind, shown)


def _code_of(kind: type, shown: _Shown) -> Iterator[str]:
    """The methods of a class and the functions beside it, by name: what another package has put in
    the place of one shows by where it is from."""
    for owner in kind.__mro__:
        for name, member in vars(owner).items():
            if isinstance(member, FunctionType):
                yield f"{owner.__qualname__}.{name} {shown.name(member)}"
    if kind.__module__.partition(".")[0] == "transformers":
        yield from _functions_in(kind.__module__)


@functools.lru_cache(maxsize=256)
def _functions_of(module: str, stamp: int) -> tuple[str, ...]:
    functions = (
        (n, f) for n, f in vars(sys.modules[module]).items() if isinstance(f, FunctionType)
    )
    return tuple(f"{name} {_Shown({}).name(function)}" for name, function in functions)


def _functions_in(module: str) -> tuple[str, ...]:
    found = vars(sys.modules[module])
    stamp = hash(tuple(id(f) for f in found.values() if isinstance(f, FunctionType)))
    return _functions_of(module, stamp)


class _Shown:
    """Values as text. paths: of modules by id."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self.seen: dict[int, tuple[int, Any]] = {}  # what has been seen stays: ids are given again

    def name(self, thing: Any) -> str:
        """A class or function by its place. Errors: `_Unknown` for packages that are not known."""
        place = getattr(thing, "__module__", None) or ""
        if place.partition(".")[0] not in _ROOTS:
            raise _Unknown(f"{place}.{thing!r}")
        return f"{place}.{thing.__qualname__}"

    def value(self, item: Any) -> str:
        """Any value. Errors: `_Unknown`."""
        if isinstance(item, enum.Enum):
            return f"{self.name(type(item))}.{item.name}"
        if isinstance(item, (*_PLAIN, *_TORCH)):
            return repr(item)
        if isinstance(item, TensorType):
            return str(item)
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if isinstance(item, nn.Module):
            if id(item) not in self.paths:
                raise _Unknown("a module that is no part of the model")
            return f"module {self.paths[id(item)]}"
        if isinstance(item, (type, BuiltinFunctionType)):
            return self.name(item)
        if isinstance(item, ModuleType):
            return item.__name__
        if id(item) in self.seen:
            return f"again {self.seen[id(item)][0]}"
        self.seen[id(item)] = len(self.seen), item
        return self._made_of_others(item)

    def _tensor(self, tensor: torch.Tensor) -> str:
        text = f"{tensor.dtype} {tuple(tensor.shape)}"
        if isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor):
            return f"{text} without data"
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return f"{text} {hashlib.sha256(flat.numpy().data).hexdigest()}"

    def _made_of_others(self, item: Any) -> str:
        if isinstance(item, Mapping):
            pairs = (f"{self.value(k)}: {self.value(v)}" for k, v in item.items())
            return f"{type(item).__name__} {{{', '.join(pairs)}}}"
        if isinstance(item, (list, tuple)):
            return f"{type(item).__name__} [{', '.join(map(self.value, item))}]"
        if isinstance(item, (set, frozenset)):
            return f"set {sorted(map(self.value, item))}"
        if isinstance(item, functools.partial):
            return f"partial {self.value([item.func, item.args, item.keywords])}"
        if isinstance(item, MethodType):
            return f"method {self.name(item.__func__)} of {self.value(item.__self__)}"
        if isinstance(item, FunctionType):
            cells = [cell.cell_contents for cell in item.__closure__ or ()]
            return f"{self.name(item)} {self.value(cells)}"
        if not hasattr(item, "__dict__"):
            raise _Unknown(f"{item!r}")
        kind, given = type(item), vars(item)
        said = {n: v for n, v in given.items() if n not in _ORIGINS and not _is_said(kind, n, v)}
        if "dtype" in said:  # of a configuration: a dtype or its name
            said["dtype"] = str(said["dtype"]).removeprefix("torch.")
        return f"{self.name(kind)} {self.value(said)}"


def _is_said(kind: type, name: str, value: Any) -> bool:
    """Whether an attribute of an object says what its class says."""
    return isinstance(value, str) and getattr(kind, name, None) == value
