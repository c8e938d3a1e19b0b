"""Export of plan folders: every function as ONNX files with one file of weights.

    plan.json           functions, states and the decode plan
    plan.schema.json    its format (JSON Schema)
    0.chain.onnx, ...   a function in one variant: chain (consecutive tokens), tree (batch 1, with
                        an ancestor mask), batch (several sequences)
    weights.data        the weights, each once
    run.py, run.js      reference runners: Python with onnxruntime and numpy (and
                        plan_functions.py), Node with onnxruntime-node

`requires` in `plan.json` lists what a runner must support.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..artifact.destinations import MARKS
from ..backends.onnxruntime.attention import OVERHANG, SEQLENS, TOTAL
from ..backends.onnxruntime.emit import emit, output_name
from ..backends.onnxruntime.loop_limits import strange_to_loops
from ..backends.onnxruntime.lower import Variant, has_states, lower, piece_of
from ..backends.onnxruntime.routing import Router
from ..backends.onnxruntime.step_limits import refuse_ahead, refuse_inputs
from ..backends.onnxruntime.store import WeightFile, store
from ..backends.target import Target
from ..ir import Function, Program, State, UnsupportedError, type_of
from ..ir.plan import NoSource
from ..ir.plan.base import Record
from .folder import (
    Card,
    contract,
    describe,
    licence,
    write_folder,
    write_json,
)
from .plan_format import PlanFile

PLAN, SCHEMA, WEIGHTS = MARKS["onnx-plan"], "plan.schema.json", "weights.data"
RUNNERS = ("run.py", "plan_functions.py", "run.js")
_ADVICE = ("length",)
"""Slots that affect only speed: a runner may ignore them."""

_CARD = Card(
    "plan folder in ONNX",
    {
        PLAN: "how the functions become generation; plan.schema.json describes its format",
        "*.onnx": "functions, in the variants that plan.json names",
        WEIGHTS: "the weights of all of them",
        "run.py": "a reference runner: python run.py . 1,2,3 32",
        "plan_functions.py": "what it runs functions with",
        "run.js": "the same for Node: npm install onnxruntime-node; node run.js . 1,2,3 32",
    },
    """
from run import Runner  # onnxruntime and numpy are all it needs
print(Runner(".").generate([1, 2, 3], 32))
""",
)


def export_onnx_plan(program: Program, folder: Path) -> Path:
    """Write a program with its decode plan; returns the folder.

    Errors: `UnsupportedError` for a program without caches, or for an op without an ONNX Runtime
    lowering.
    """
    if not program.step.has_input("past"):
        raise UnsupportedError(
            f"{program.name} (stage {program.stage}) has no KV cache, so there is no step to run "
            f"again and again: run the pass insert_kv_cache, or a recipe, such as baseline"
        )
    refuse_ahead(program)
    refuse_inputs(program)

    def fill(new: Path) -> None:
        weights = WeightFile(new / WEIGHTS)
        functions = {
            name: _function(program, fn, number, new, weights)
            for number, (name, fn) in enumerate(program.functions.items())
        }
        plan = plan_of(program, functions, tables_of(program, weights))
        write_json(new / PLAN, plan.model_dump(mode="json"))
        seal(new / PLAN)
        write_json(new / SCHEMA, PlanFile.model_json_schema())
        for name in RUNNERS:
            text = files(f"{__package__}.runners").joinpath(name).read_text(encoding="utf-8")
            (new / name).write_text(text, encoding="utf-8")

    return write_folder(program, folder, fill, _CARD, ours=PLAN)


def seal(path: Path) -> None:
    """Set `PlanFile.sha256` in plan.json."""
    data = path.read_bytes()
    own = json.loads(data)["sha256"].encode()
    zeroed = data.replace(own, b"0" * 64, 1)
    made = hashlib.sha256(zeroed).hexdigest().encode()
    path.write_bytes(zeroed.replace(b"0" * 64, made, 1))


OWN = "graftwork itself runs it (save, and graftwork.load)"
"""The alternative for recipes that this format does not support."""


def plan_of(program: Program, functions: dict[str, Any], tables: dict[str, Any]) -> PlanFile:
    """The contents of plan.json."""
    info, plan = program.info, program.plan
    if plan.source.encoder is None:  # runners support no other sources
        plan = replace(plan, source=NoSource())
    slots: dict[str, Record] = {slot.name: getattr(plan, slot.name) for slot in fields(plan)}
    parts = [
        f"{name}:{part.kind}"
        for name, record in slots.items()
        # Drafters in the step need no support by runners.
        for part in ([record] if getattr(record, "in_step", False) else record.every)
        if name not in _ADVICE
    ]
    if program.recurrent:
        parts.append("states:recurrent")
    (fed, spare), read = plan.step.fed(argmax=True), plan.step.read(argmax=True)[0]
    contents = {
        "requires": list(dict.fromkeys(parts)),
        "instead": OWN if strange_to_loops(plan) else f"the format onnx-loop carries it, and {OWN}",
        "model": {
            "name": program.name,
            "model_type": info.model_type,
            "vocab_size": info.vocab_size,
            "context": info.context,
            "eos": list(info.eos),
            "bos": info.bos,
            "pad": info.pad,
            "generation": info.generation_config,
            "contract": contract(program),
            "license": licence(program),
        },
        "weights": WEIGHTS,
        "tables": tables,
        "states": {name: _state(state) for name, state in program.states.items()},
        "functions": functions,
        "step": {
            "decode": list(plan.step.parts) or [fed],
            "prompt": list(plan.step.parts) or [read],
            "plain": plan.step.plain,
            "most_columns": 1 + plan.columns,
            "spare_rows": spare,
            "chunk": piece_of(program.function(read)) or max(info.context, 1),
        },
        "derived": {
            SEQLENS: "i32[B]: past + T - 1",
            TOTAL: "i32[]: max(past) + T; in the variant tree at least T + 1",
        },
        "overhang": OVERHANG,
        "plan": {name: record_of(record) for name, record in slots.items()},
    }
    return PlanFile.model_validate(contents)


def _state(state: State) -> dict[str, Any]:
    return {
        "type": str(state.type),
        "layer": state.layer,
        "part": state.part,
        "next": f"{state.name}.next",
        "rows": state.capacity,
        "in_place": not state.recurrent,
    }


def record_of(value: Any) -> Any:
    """A plan record as JSON: its fields, and ``kind``."""
    if isinstance(value, Record):
        return {
            "kind": value.kind,
            **{f.name: record_of(getattr(value, f.name)) for f in fields(value)},
        }
    if isinstance(value, (tuple, list)):
        return [record_of(part) for part in value]
    return value


def tables_of(program: Program, weights: WeightFile) -> dict[str, Any]:
    """Offsets of weights that runners read themselves, in the file of weights."""
    names: set[str] = set()
    for slot in fields(program.plan):
        names |= getattr(program.plan, slot.name).weights
    tables = {}
    for name in sorted(names):
        offset, nbytes = weights.place(program.weights[name])
        type = str(program.weights[name].type)
        tables[name] = {"type": type, "offset": offset, "bytes": nbytes}
    return tables


def _function(
    program: Program, fn: Function, number: int, folder: Path, weights: WeightFile
) -> dict[str, Any]:
    """Write a function's variants. Returns its entry in plan.json."""
    router = Router(program, fn, Target(), native=False)
    variants: dict[Variant, Any] = {}
    for variant in _variants(fn, router):
        lowered = lower(program, fn.name, variant)
        emitted = emit(
            lowered.function(fn.name), lowered.weights, paired=router.pairs, standard=True
        )
        doc = f"Function {fn.name} of {program.name}, variant {variant}; see {PLAN}."
        describe(program, emitted.model, doc)
        path = folder / f"{number}.{variant}.onnx"
        store(emitted, path, weights)
        taken = [str(value.name) for value in emitted.model.graph.inputs]
        variants[variant] = described(path.name, lowered.function(fn.name), taken)
    return function_entry(fn, router, variants)


def function_entry(fn: Function, router: Router, variants: Mapping[Any, Any]) -> dict[str, Any]:
    """A function's entry in plan.json."""
    return {
        "role": fn.role.value,
        "layers": _layers(fn),
        "lone_token": "twice" if router.widens else "once",
        "variants": variants,
    }


def _variants(fn: Function, router: Router) -> tuple[Variant, ...]:
    if not router.cached:
        return ("chain",)
    if not router.tokenwise or not has_states(fn):
        return ("batch",)
    return (*sorted(router.counted), "batch")


def _layers(fn: Function) -> int:
    markers = fn.calls(torch.ops.graftwork.hidden.default)
    return sum(marker.kwargs["point"] == "block" for marker in markers)


def described(file: str, fn: Function, taken: Iterable[str]) -> dict[str, Any]:
    """A variant's entry in plan.json. fn: as lowered. taken: names of the graph's inputs."""
    types = {str(node.target): type_of(node) for node in fn.inputs}
    outputs = {output_name(fn, name): type_of(node) for name, node in fn.outputs.items()}
    return {
        "file": file,
        "inputs": {name: str(types[name]) for name in taken},
        "outputs": {name: str(type) for name, type in outputs.items()},
    }
