"""A tour of graftwork's core, from one typed value to a model that speculates. Run it, read along.

    python docs/tour.py

Every section does what it says and asserts it. Nothing here is special to the tour: these are the
calls that frontends, passes and backends make.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # this clone's graftwork, installed or not

console = Console(highlight=False, soft_wrap=True)


def section(title: str) -> None:
    console.rule(f"[bold]{title}", align="left")


def show(text: object) -> None:
    console.print(str(text), markup=False)


# ---------------------------------------------------------------------------------------------
section("1. A value has a type: a dtype, and dims that are numbers or symbols")

from graftwork.ir import Sym, TensorType  # noqa: E402

hidden = TensorType.parse("f32[B,T,64]")
show(f"{hidden}   with B=2, T=5: {hidden.bind({'B': 2, 'T': 5})}")
assert hidden.dims[:2] == (Sym("B"), Sym("T"))
assert str(Sym("B") * Sym("T") + 1) == "B*T + 1"

# ---------------------------------------------------------------------------------------------
section("2. A function is a torch.fx graph under our rules: typed calls of ops, and one output")

from graftwork.ir import Function, Weight  # noqa: E402

aten, gw_ops = torch.ops.aten, torch.ops.graftwork

torch.manual_seed(0)
weights = {
    "norm": Weight.of("norm", torch.rand(64)),
    "up": Weight.of("up", torch.randn(16, 64)),
}
fn = Function("step")
x = fn.add_input("x", hidden)
normed = fn.call(gw_ops.rms_norm.default, x, fn.weight(weights["norm"]), eps=1e-6)
y = fn.call(aten.linear.default, normed, fn.weight(weights["up"]))
fn.set_outputs({"y": y})

# Nobody wrote the result types: `call` ran the op's fake kernel on the argument types.
from graftwork.ir import type_of  # noqa: E402

show(f"rms_norm gives {type_of(normed)}, linear gives {type_of(y)}")
assert str(type_of(y)) == "f32[B,T,16]"

# A call that does not type is refused on the spot, with what was expected and what came.
from graftwork.ir import VerifyError  # noqa: E402

try:
    fn.call(aten.linear.default, y, fn.weight(weights["up"]))
except VerifyError as error:
    show(f"refused: {str(error).splitlines()[0]}")
else:
    raise AssertionError("a linear over 16 columns took a weight of 64")
fn.graph.eliminate_dead_code()

# ---------------------------------------------------------------------------------------------
section("3. A program adds weights, states, a decode plan; it prints, and the print parses")

from graftwork.ir import ModelInfo, Program, WeightStore  # noqa: E402
from graftwork.ir.text.parser import parse_program  # noqa: E402

info = ModelInfo("example", vocab_size=16, context=128)
program = Program("example", {"step": fn}, WeightStore(weights), info)
text = str(program)
show(text)
assert str(parse_program(text)) == text

# ---------------------------------------------------------------------------------------------
section("4. One op is one block: declaration, documentation, meaning, samples")

from graftwork.ir.ops import Sample, op  # noqa: E402


def _samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 4),), {"at": 1.0}


@op("x: ...H -> x", samples=_samples)
def tour_clip(x: torch.Tensor, *, at: float) -> torch.Tensor:
    """x limited to -at .. at."""
    return x.clamp(-at, at)


# The meaning is the reference semantics and what backends inline; schema, checks and result types
# follow from the declaration. The printer, the parser, type inference and the interpreter know it:
clipped = fn.copy()
with clipped.graph.inserting_before(clipped.output_node):
    node = clipped.call(gw_ops.tour_clip.default, clipped.outputs["y"], at=0.5)
clipped.set_outputs({"y": node})

from graftwork.ir import run  # noqa: E402

inputs = {"x": torch.randn(2, 5, 64)}
out = run(program.with_function(clipped), "step", inputs)["y"]
assert out.abs().max() <= 0.5
show(f"interpreted: {tuple(out.shape)}, largest magnitude {out.abs().max():.2f}")

# ---------------------------------------------------------------------------------------------
section("5. Rewriting: a pattern in plain torch code, a replacement, no visitor")

from graftwork.ir.rewrite.rules import Builder, Match, Rule, apply_rules  # noqa: E402


def clip_replacement(build: Builder, match: Match) -> torch.fx.Node:
    return build.call(gw_ops.tour_clip.default, match["x"], at=match.number("high"))


def symmetric(match: Match) -> str | None:
    """A guard says why a match may not be rewritten, or None."""
    low, high = match.number("low"), match.number("high")
    return None if low == -high else f"the bounds {low} and {high} are not symmetric"


CLIP = Rule(
    "clip",
    inputs={"x": "F[...]", "low": "float", "high": "float"},
    pattern=lambda x, low, high: torch.clamp(x, low, high),
    replace=clip_replacement,
    guard=symmetric,
)

for low, high in ((-2.0, 2.0), (0.0, 6.0)):
    bounded = fn.copy()
    with bounded.graph.inserting_before(bounded.output_node):
        node = bounded.call(aten.clamp.default, bounded.outputs["y"], low, high)
    bounded.set_outputs({"y": node})
    rewritten = apply_rules(bounded, [CLIP])
    show(f"clamp({low}, {high}): {rewritten.count} rewritten {rewritten.near_miss}")
    assert rewritten.count == (low == -high)

# ---------------------------------------------------------------------------------------------
section("6. A pass declares what it needs, changes and promises; the manager derives the order")

from graftwork.passes import Contract, Effect, Outcome, Pass  # noqa: E402
from graftwork.passes.engine.manager import Step, run_passes  # noqa: E402


class SoftenHead(Pass):
    """Multiply the logits by a factor. factor: between 0 and 1."""

    factor: float = 0.5

    name: ClassVar[str] = "soften_head"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.LOGITS})

    def run(self, program: Program) -> Outcome:
        copy = program.function("step").copy()
        outputs = copy.outputs
        with copy.graph.inserting_before(copy.output_node):
            outputs["logits"] = copy.call(aten.mul.Tensor, outputs["logits"], self.factor)
        copy.set_outputs(outputs)
        return Outcome(program.with_function(copy), matches=1)


# ---------------------------------------------------------------------------------------------
section("7. A real model goes in: the bundled llama, traced, without a cache")

from importlib.resources import as_file, files  # noqa: E402

import graftwork as gw  # noqa: E402
from graftwork.frontends import import_model  # noqa: E402

with as_file(files("graftwork.demo_model")) as folder:
    traced = import_model(folder, dtype=torch.float32)
attentions = traced.function("step").calls(gw_ops.attention.default)
markers = traced.function("step").calls(gw_ops.hidden.default)
show(f"{len(traced.function('step').calls())} calls, {len(attentions)} attentions, ")
show(f"{len(markers)} markers on the residual stream, {len(traced.weights)} weights, all on disk")
assert not traced.states

# ---------------------------------------------------------------------------------------------
section("8. The KV cache is a pass like any other; a recipe is a list of passes")

baseline = gw.Recipe.load("baseline")
program, reports = run_passes(traced, baseline.steps)
for report in reports:
    record = report.record
    show(
        f"  {record.name:<20} {record.contract:<12} {record.matches:>4} matches "
        f"{report.nodes_before:>5} -> {report.nodes_after} calls, {1e3 * record.seconds:.0f} ms"
    )
layer = [line for line in str(program).splitlines() if ".0.key" in line or "attend" in line]
show("\n".join(layer[:4]))
assert len(program.states) == 2 * len(attentions)

# A pass that asks for what is not there is refused before anything runs:
from graftwork.ir import PassError  # noqa: E402
from graftwork.passes.stepping.pick_logits import PickLogits  # noqa: E402

try:
    run_passes(traced, [Step(PickLogits())])
except PassError as error:
    show(f"refused: {error}")
else:
    raise AssertionError("pick_logits ran without a cache")

# ---------------------------------------------------------------------------------------------
section("9. A contract is not a claim: the manager measures it")

from graftwork.passes.engine.validate import Validator  # noqa: E402

prompts = torch.randint(1, traced.info.vocab_size, (2, 12))
_, reports = run_passes(program, [Step(SoftenHead(factor=0.5))], validator=Validator(prompts))
show(f"soften_head measured: {reports[0].check}")


class Liar(SoftenHead):
    """The same change under a false promise."""

    name: ClassVar[str] = "liar"
    contract: ClassVar[Contract] = Contract.EXACT


try:
    run_passes(program, [Step(Liar())], validator=Validator(prompts))
except PassError as error:
    show(f"refused: {error}")
else:
    raise AssertionError("a false promise went through")

# ---------------------------------------------------------------------------------------------
section("10. Backends run it; the loop drafts, verifies and commits")

import json  # noqa: E402

lines = (files("graftwork.demo_model") / "prompts.jsonl").read_text().splitlines()
prompt = torch.tensor([json.loads(lines[0])["ids"]])
texts = {}
for recipe in ("baseline", "copyspec"):
    with as_file(files("graftwork.demo_model")) as folder:
        optimized = gw.optimize(folder, recipe)
    for target in ("eager", "onnxruntime"):
        fast = replace(optimized, target=gw.Target.parse(target))  # the program is the same
        result = fast.generate(prompt, max_new_tokens=64, return_dict_in_generate=True)
        texts[target, recipe] = result.sequences.tolist()
        stats = result.stats
        show(
            f"  {target:<12} {recipe:<10} {stats.new_tokens} tokens in {stats.steps} steps, "
            f"{stats.draft_tokens} drafted, {stats.accepted_tokens} of them accepted"
        )
assert len({str(ids) for ids in texts.values()}) == 1
show("Four runs, one text: the draft changes how many steps it takes, never what comes out.")
