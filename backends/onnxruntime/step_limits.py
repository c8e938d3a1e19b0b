"""What the decode graph that other loaders run has no form for."""

from __future__ import annotations

from ...ir import Program, UnsupportedError
from ...ir.plan.inputs import PACKED, SHARES


def refuse_moves(program: Program) -> None:
    """Errors: `UnsupportedError` for a program whose caches lose or move rows."""
    if program.plan.cache.moves:
        raise UnsupportedError(
            f"{program.name} moves or drops rows of its caches between steps "
            f"(cache={program.plan.cache.brief}), and the graph that other loaders run has no "
            f"place for it: they would keep every row. The format onnx-plan carries it, for "
            f"runners that know it; or export another recipe, such as baseline"
        )


def refuse_inputs(program: Program) -> None:
    """Errors: `UnsupportedError` for a step that is told which of its columns have tokens, or what
    they are mixed of."""
    if program.step.has_input(PACKED):
        raise UnsupportedError(
            f"{program.name} packs the tokens of a batch (pass pack_tokens), which graphs that are "
            f"exported are not fed with: save it and load it with graftwork, or export the recipe "
            f"without pack_tokens, whose texts are the same"
        )
    if program.step.has_input(SHARES):
        raise UnsupportedError(
            f"{program.name} is fed mixtures of tokens (pass superpose), which graphs that are "
            f"exported are not: save it and load it with graftwork, or export the recipe without "
            f"superpose, whose greedy texts are the same"
        )


def refuse_more(program: Program) -> None:
    """Errors: `UnsupportedError` for a program that is more than its step."""
    if program.plan.depth.stops:
        raise UnsupportedError(
            f"{program.name} does not run every token through every layer "
            f"(depth={program.plan.depth.brief}), and the decode graph that other loaders run has "
            f"no place for that. The formats onnx-loop and onnx-plan carry it; or export the whole "
            f"step by name (plain=True, --plain on the command line), or another recipe, such as "
            f"baseline"
        )
    _refuse_two_steps(program)
    if program.plan.step.along:
        raise UnsupportedError(
            f"{program.name} has another model read along and decide on tokens (verify="
            f"{program.plan.verify.brief}), and the decode graph that other loaders run has no "
            f"place for it: save it and load it with graftwork, or export the model's own step by "
            f"name (plain=True, --plain on the command line), which nobody checks"
        )
    if not program.plan.speculates:
        return
    raise UnsupportedError(
        f"{program.name} drafts (draft={program.plan.draft.kind}), and the decode graph that other "
        f"loaders run has no place for it: they would decode token by token. The formats onnx-loop "
        f"and onnx-plan carry drafts; or export that graph by name (plain=True, --plain on the "
        f"command line), export another recipe, such as baseline, or give trained heads to vLLM "
        f"(the formats vllm-medusa and speculators)"
    )


def _refuse_two_steps(program: Program) -> None:
    """Errors: `UnsupportedError` for prompts that run through another function than steps do."""
    refuse_ahead(program)
    (fed, _), (read, _) = program.plan.step.fed(argmax=True), program.plan.step.read(argmax=True)
    if fed != read:
        raise UnsupportedError(
            f"{program.name} runs prompts through more layers than other tokens "
            f"(step={program.plan.step.brief}), and the decode graph that other loaders run has "
            f"one step for both. The formats onnx-loop and onnx-plan carry both; or export the "
            f"step alone by name (plain=True, --plain on the command line), for prompts, too"
        )


def refuse_ahead(program: Program) -> None:
    """Errors: `UnsupportedError` for prompts that run through another function up to their last
    token."""
    if name := program.plan.step.ahead:
        raise UnsupportedError(
            f"{program.name} runs prompts through {name} up to their last token (step="
            f"{program.plan.step.brief}), which no format that is exported carries: save it and "
            f"load it with graftwork, or export the step alone by name (plain=True, --plain on the "
            f"command line), for prompts, too"
        )
