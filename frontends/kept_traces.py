"""Traces that are kept on disk: a model that was traced before is read in a fraction of the time.

What is kept is what `import_exported` gives, as text: the function, how its constants follow from
the weights (a second function), and of the weights only their names and types. Tensors that the
trace itself holds lie beside it in the same safetensors file. Nothing in it is code, and reading it
checks a hash over all of it. A file that is damaged, or that does not fit the weights at hand,
counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..ir import Function, GraftworkError, InputError, Weight, WeightStore, type_of
from ..ir.support.cache_folder import kept_folder
from ..ir.support.scratch import replacing_file
from ..ir.text.parser import parse_function
from ..ir.text.printer import function_text
from ..ir.weights import Call, Operand, computed, open_safetensors
from .importer import Imported

ALSO = (torch.ops.aten.scaled_dot_product_attention.default,)
"""Ops of traces that programs do not have, see `raise_attention`."""

MOST = 256 * 2**20
"""Bytes of all kept traces together; of more, those go that were not used for longest."""


def kept_trace(
    key: str | None, weight_of: Callable[[str], Weight], make: Callable[[], Imported]
) -> Imported:
    """The trace that `make` would make, from its file where one is kept, else made and kept.

    key: of the trace, see `trace_key`; None: nothing is kept. weight_of: the weight for a parameter
    or buffer, by its path in the model.
    """
    if key is None:
        return make()
    with kept_folder("traces") as kept:
        path = kept / "traces" / f"{key}.safetensors"
        found = _read(path, weight_of)
        if found is not None:
            return found
        made = make()
        with contextlib.suppress(OSError, InputError):  # a full disk costs time, not the model
            _write(path, made)
        # What is read has other names for values: a program is to be the same the first time.
        return _read(path, weight_of) or made


def _read(path: Path, weight_of: Callable[[str], Weight]) -> Imported | None:
    if not path.is_file():
        return None
    try:
        os.utime(path)
        return _parsed(path, weight_of)
    except (GraftworkError, ValueError, KeyError, TypeError, OSError):
        return None


def _parsed(path: Path, weight_of: Callable[[str], Weight]) -> Imported:
    file = open_safetensors(path)
    said = file.metadata()
    about: dict[str, Any] = json.loads(said["about"])
    tensors = {name: file.tensor(name) for name in file.keys()}  # noqa: SIM118
    if _hash(said["about"], said["function"], said["constants"], tensors) != said["sha256"]:
        raise ValueError(f"{path} is damaged")
    weights: dict[str, Weight] = {}
    for name, text, origin in about["weights"]:
        weight = weight_of(origin) if origin is not None else Weight.of(name, tensors[name])
        if weight.name != name or str(weight.type) != text:
            raise ValueError(f"{path} is of other weights")
        weights[name] = weight
    constants = (
        parse_function(said["constants"], WeightStore(weights), ALSO) if about["made"] else None
    )
    if constants is not None:
        _derive(constants, about["made"], weights)
    ordered = {name: weights[name] for name in about["order"]}
    function = parse_function(said["function"], WeightStore(ordered), ALSO)
    return Imported(function, ordered, about["longest"], {})


def _derive(constants: Function, names: list[str], weights: dict[str, Weight]) -> None:
    """Add the weights that a function computes of others, one a call."""
    made: dict[torch.fx.Node, Weight] = {}
    calls = list(constants.calls())
    for node, name in zip(calls, names, strict=True):
        inputs = [made.get(n) or weights[str(n.target)] for n in node.all_input_nodes]
        place = {n: Operand(index) for index, n in enumerate(node.all_input_nodes)}
        args: Any = map_aggregate(node.args, lambda a, place=place: place.get(a, a))  # type: ignore
        kwargs: Any = map_aggregate(node.kwargs, lambda a, place=place: place.get(a, a))  # type: ignore
        call = Call(node.target, args, kwargs)  # type: ignore[arg-type]
        made[node] = weights[name] = computed(name, type_of(node), call, *inputs)


def _write(path: Path, trace: Imported) -> None:
    """Keep a trace, if it is one that text can say."""
    given = {name: trace.origins[name] for name in trace.weights if name in trace.origins}
    constants, made = _constants(trace, given)
    if constants is None:
        return
    tensors = {n: trace.weights[n].load() for n, origin in given.items() if origin is None}
    about = json.dumps(
        {
            "longest": trace.longest,
            "order": list(trace.weights),
            "weights": [[n, str(trace.weights[n].type), origin] for n, origin in given.items()],
            "made": made,
        }
    )
    said = {
        "about": about,
        "function": function_text(trace.fn),
        "constants": function_text(constants) if made else "",
    }
    said["sha256"] = _hash(about, said["function"], said["constants"], tensors)
    _save(path, tensors, said)


def _constants(
    trace: Imported, given: Mapping[str, str | None]
) -> tuple[Function | None, list[str]]:
    """A function that computes the weights that follow from those given, and their names in order;
    None if one of them comes about otherwise than by a call."""
    fn, made = Function("constants"), list[str]()
    nodes: dict[str, torch.fx.Node] = {}

    def node_of(weight: Weight) -> torch.fx.Node:
        if weight.name not in nodes:
            nodes[weight.name] = fn.weight(weight)
        return nodes[weight.name]

    for name, weight in trace.weights.items():
        if name in given:
            continue
        call, operands = weight.made, [node_of(part) for part in weight.inputs]
        args, kwargs = _filled((call.args, dict(call.kwargs)), operands)
        nodes[name] = fn.call(call.target, *args, **kwargs)
        made.append(name)
    fn.set_outputs({f"w{index}": nodes[name] for index, name in enumerate(made)})
    return fn, made


def _filled(arguments: Any, operands: list[torch.fx.Node]) -> Any:
    return map_aggregate(arguments, lambda a: operands[a.place] if isinstance(a, Operand) else a)


def _hash(about: str, function: str, constants: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for text in (about, function, constants):
        digest.update(f"{len(text)} {text}".encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _save(path: Path, tensors: Mapping[str, torch.Tensor], said: Mapping[str, str]) -> None:
    """Write the file whole or not at all, and make room for it."""
    from safetensors.torch import save_file

    path.parent.mkdir(mode=0o700, exist_ok=True)
    with replacing_file(path) as part:
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, part, dict(said))
    _make_room(path.parent)


def _make_room(folder: Path) -> None:
    """Remove the traces that were not used for longest, while there are more than `MOST` bytes."""
    found = sorted(
        ((path.stat().st_mtime, path) for path in folder.iterdir() if path.is_file()), reverse=True
    )
    total = 0
    for _, path in found:
        total += path.stat().st_size
        if total > MOST:
            path.unlink(missing_ok=True)
