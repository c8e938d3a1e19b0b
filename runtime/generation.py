"""The entry: validate a request, run the decode loop, return sequences as transformers does."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir import GraftworkWarning, Program
from ..ir.execution.analysis import part_of
from ..ir.execution.executable import Executable, Planned, fact
from ..ir.ops.parallel import agreed_seed
from ..ir.plan import DecodePlan, Encoded, Record, untrained
from ..ir.plan.depth import DepthRecord, ThresholdDepth
from .asking.request import Request, filled, read_request
from .asking.speech import listens, to_hear
from .cache.conversations import Conversations
from .loop import decode
from .memo import LEARNT
from .stats import Stats


@dataclass(frozen=True)
class Generated:
    """What `generate` returns with ``return_dict_in_generate=True``. sequences: i64[B,S+N].

    sequences_scores, beam_indices: of beams, with ``output_scores``: what each text was chosen by,
    f32[B], and in which row of `scores` each of its tokens was, i64[B,N], -1 behind its end.
    scores, logits: with ``output_scores`` and ``output_logits``, f32[B,V] for each of the N new
    tokens: what it was chosen by, behind and before processors and filters; 0 for sequences that
    were finished then.
    """

    sequences: torch.Tensor
    stats: Stats
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    sequences_scores: torch.Tensor | None = None
    beam_indices: torch.Tensor | None = None


def forget(executable: Executable, *, learnt: bool = True) -> None:
    """Nothing is held of earlier calls any more: the next ones feed their prompts whole, and, with
    `learnt`, draft and leave early as if no text had taught them how."""
    with executable.turn:
        Conversations.of(executable).forget()
        if learnt:
            executable.scratch(LEARNT, shared=True).clear()


def drafted_so_far(executable: Executable) -> dict[int, int]:
    """`Stats.accepted_runs` of all generations with an executable together."""
    found: dict[int, int] = executable.scratch("drafted", shared=True)
    return found


def check_request(input_ids: torch.Tensor, options: Mapping[str, Any], program: Program) -> None:
    """Errors: those of `generate` for bad input and options."""
    read_request(input_ids, options, program)


@torch.no_grad()
def generate(
    executable: Executable, /, input_ids: torch.Tensor, **options: Any
) -> torch.Tensor | Generated:
    """Continue each prompt as the executable's plan says.

    input_ids: i64[B,S], ragged prompts padded on the left; options: `GenerationOptions`, by
    transformers' keyword names. Returns i64[B,S+N]: the prompts as given, then each sequence's new
    tokens, filled up with the pad token to the longest; on the device of `input_ids`. With
    ``return_dict_in_generate=True`` a `Generated`. Of several threads one generates at a time, the
    others wait. Errors: `InputError` for bad input or options (before anything runs), for a call
    from a streamer or stopping criterion of this executable's own generation, and for logits that
    are NaN; `UnsupportedError` for a program or plan that the runtime cannot carry out. Warns
    (`GraftworkWarning`) of untrained drafters.
    """
    asked = _seeded(options, executable)
    request = read_request(input_ids, asked, executable.program)
    _remark(executable.program.plan, request)
    if request.search is not None:
        executable = Planned(executable, executable.program.plan.undrafted())
    with executable.turn:
        if plan := listens(asked, executable.program):
            heard = _heard(executable, input_ids, plan)
            request = read_request(input_ids, asked, executable.program, heard)
        open_ = not all(text.done for text in request.texts)
        stats = decode(executable, request) if open_ else Stats()
        drafted = drafted_so_far(executable)
        for run, count in stats.accepted_runs.items():
            drafted[run] = drafted.get(run, 0) + count
    sequences = request.sequences().to(input_ids.device)
    if not request.options.return_dict_in_generate:
        return sequences
    scores = _steps([text.scores for text in request.own], request.options.output_scores)
    logits = _steps([text.logits for text in request.own], request.options.output_logits)
    if request.search is None:
        return Generated(sequences, stats, scores, logits)
    found = request.search.best
    stats.new_tokens = sum(len(text.tokens) for text in found)
    wanted = scores or request.beams is None
    chosen = torch.tensor([text.score for text in found]) if wanted else None
    beams = filled([text.beams for text in found], -1) if scores else None
    return Generated(sequences, stats, scores, logits, chosen, beams)


def _steps(rows: Sequence[Sequence[torch.Tensor]], wanted: bool) -> tuple[torch.Tensor, ...] | None:
    """Rows f32[V] of each text's tokens, token by token, f32[B,V]; None if they are not wanted."""
    if not wanted:
        return None
    longest = max(rows, key=len)
    return tuple(
        torch.stack([row[i] if i < len(row) else torch.zeros_like(one) for row in rows])
        for i, one in enumerate(longest)
    )


def _heard(executable: Executable, sources: torch.Tensor, plan: Encoded) -> list[str]:
    """The languages of some sources: of the tokens that stand for one, the likeliest first."""
    program = executable.program
    request = read_request(sources, to_hear(plan, len(sources), program.info.vocab_size), program)
    decode(executable, request)
    tokens = [text.tokens[text.prompt] for text in request.texts]
    return [plan.languages[plan.language_tokens.index(token)] for token in tokens]


def _seeded(options: Mapping[str, Any], executable: Executable) -> Mapping[str, Any]:
    """The options; where processes share a program, with one seed, so that all draw alike."""
    _, parts = fact(executable, part_of)
    chosen = options.keys() & {"seed", "generator"}
    return options if parts == 1 or chosen else {**options, "seed": agreed_seed()}


def _without(record: Record, plan: DecodePlan) -> str:
    """What a record does while it is untrained."""
    if plan.untaught and record.slot != "depth":
        return "nothing is drafted until they do"
    if isinstance(record, DepthRecord):
        return "until they do, all tokens run through all layers"
    return "using them costs more than it brings"


def _remark(plan: DecodePlan, request: Request) -> None:
    """Warn of untrained weights, and of texts longer than what may leave early."""
    depth, most = plan.depth, max(text.limit - text.prompt for text in request.texts)
    if isinstance(depth, ThresholdDepth) and 0 < depth.tokens < most:
        warnings.warn(
            f"depth={depth.kind} has a threshold for texts of {depth.tokens} new tokens, and "
            f"{most} may come: those behind the first {depth.tokens} run through all layers; find "
            f"a threshold for such texts (graftwork calibrate --tokens {most})",
            GraftworkWarning,
            stacklevel=3,
        )
    if request.search is not None:
        if plan.speculates:
            warnings.warn(
                f"num_beams={request.options.num_beams}: the target decodes alone, the recipe's "
                f"draft={plan.draft.brief} has no part in beams",
                GraftworkWarning,
                stacklevel=3,
            )
        return
    asked = (plan.draft, plan.length, plan.verify) if plan.speculates else ()
    for record in untrained((*asked, plan.depth)):
        warnings.warn(
            f"{record.slot}={record.kind} is untrained: its weights know nothing, and "
            f"{_without(record, plan)}; train them (graftwork train, or graftwork.fit) and set the "
            f"pass's option weights",
            GraftworkWarning,
            stacklevel=2,
        )
