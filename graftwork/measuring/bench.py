"""Benchmarks of recipes against each other and against other systems.

All contestants continue the same prompts greedily at batch 1, taking turns, so that noise of the
machine affects all. tokens/s: new tokens by the time of the whole call, prompt included; median
over repeats. Outputs are compared token by token with the first contestant's, and a speculative
recipe's with its own plain decoding. For approximate recipes, agreement with the target's text is
reported. A first difference is a near tie if the two logits are equal up to rounding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from ..frontends.huggingface.model import load_model
from ..ir import InputError
from ..ir.execution.executable import Executable, Planned
from ..ir.support.packages import installing
from ..ir.support.threads import settle
from ..model import Model
from ..passes.engine.base import Effect, all_passes
from ..passes.engine.validate import reference_logits
from ..runtime.generation import Generated, forget, generate
from .agreement import OwnText, is_approximate, plain_plan

NEAR_TIE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Maximum difference of two logits, relative to the largest, that counts as rounding."""


@dataclass(frozen=True)
class Run:
    """One continued prompt: new token ids, seconds, and tokens per decode step."""

    ids: tuple[int, ...]
    seconds: float
    accepted: float = 1.0


class Contestant(Protocol):
    """A system that continues prompts greedily."""

    @property
    def name(self) -> str:
        """Name in the table."""

    @property
    def target(self) -> str:
        """Its target."""

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """Continue one prompt by at most `tokens` tokens."""


@dataclass(frozen=True)
class Optimized:
    """A recipe's model. pool: executables of one checkpoint, shared if only plans differ. own: the
    model without approximate passes, if these change the step."""

    name: str
    model: Model
    pool: dict[object, Executable] = field(default_factory=dict)
    own: Model | None = None

    @property
    def target(self) -> str:
        return str(self.model.target)

    @property
    def contract(self) -> str:
        """The recipe's promise."""
        return str(self.model.recipe.get("contract", ""))

    @property
    def speculative(self) -> bool:
        """Whether its plan drafts tokens."""
        return self.model.program.plan.speculates

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        return _generate(self._planned, prompt, tokens)

    @property
    def approximate(self) -> bool:
        """Whether its text may differ from the target's."""
        return is_approximate(self.model.program)

    def run_own(self, prompt: Sequence[int], tokens: int) -> Run:
        """Continue the prompt with the target's own model."""
        if self.own is None:
            return _generate(self._plain, prompt, tokens)
        return Optimized(self.name, self.own, self.pool).run_own(prompt, tokens)

    def run_plain(self, prompt: Sequence[int], tokens: int) -> Run:
        """The same graphs and numerics without drafts."""
        return _generate(self._plain, prompt, tokens)

    # Cached, because policies keep learned state per executable.
    @cached_property
    def _planned(self) -> Planned:
        return Planned(self.executable, self.model.program.plan)

    @cached_property
    def _plain(self) -> Planned:
        return Planned(self.executable, plain_plan(self.model.program.plan))

    @property
    def executable(self) -> Executable:
        """The first executable in the pool with this model's graphs, else its own."""
        key = _graphs(self.model)
        if key not in self.pool:
            self.pool[key] = self.model.executable
        return self.pool[key]


def _graphs(model: Model) -> object:
    """Key of a model's graphs and weights: all passes but those that only change the plan."""
    known = all_passes()
    plan_only = {name for name, p in known.items() if p.effects == {Effect.DECODE_PLAN}}
    records = [r for r in model.program.provenance if r.name not in plan_only]
    return str(model.target), tuple((record.name, repr(record.options)) for record in records)


def _generate(executable: Any, prompt: Sequence[int], tokens: int) -> Run:
    ids = torch.tensor([list(prompt)])
    # The whole call is timed. Drafters keep what they learned.
    forget(executable, learnt=False)
    start = time.perf_counter()
    result = generate(
        executable,
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    seconds = time.perf_counter() - start
    assert isinstance(result, Generated)
    new = tuple(int(token) for token in result.sequences[0, len(prompt) :])
    return Run(new, seconds, float(result.stats.accepted_per_step))


class Transformers:
    """transformers' own greedy generate, eager, with its dynamic cache."""

    name = "transformers"

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        try:
            self.model = load_model(folder, dtype=dtype).to(device)
        except ImportError as error:
            raise InputError(
                f"comparing with transformers needs it: {installing('huggingface')}"
            ) from error
        self.model.eval()
        self.device = device
        self.target = f"eager:{device}:{str(dtype).removeprefix('torch.')}"

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """See `Contestant`."""
        ids = torch.tensor([list(prompt)], device=self.device)
        start = time.perf_counter()
        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        new = tuple(int(token) for token in out[0, len(prompt) :].cpu())
        return Run(new, time.perf_counter() - start)


class Genai:
    """onnxruntime-genai on the folder that `Model.export_genai` wrote."""

    name = "onnxruntime-genai"
    target = "onnxruntime:cpu"

    def __init__(self, folder: Path) -> None:
        try:
            import onnxruntime_genai
        except ImportError as error:
            raise InputError(
                "comparing with onnxruntime-genai needs it: pip install onnxruntime-genai-cuda "
                "(not onnxruntime-genai, which brings a second onnxruntime)"
            ) from error
        self.library = onnxruntime_genai
        self.model = onnxruntime_genai.Model(str(folder))

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """See `Contestant`."""
        start = time.perf_counter()
        params = self.library.GeneratorParams(self.model)
        params.set_search_options(max_length=len(prompt) + tokens, do_sample=False)
        generator = self.library.Generator(self.model, params)
        generator.append_tokens(list(prompt))
        while not generator.is_done():
            generator.generate_next_token()
        new = tuple(int(token) for token in generator.get_sequence(0)[len(prompt) :])
        return Run(new, time.perf_counter() - start)


@dataclass(frozen=True)
class Agreement:
    """Numbers of prompts whose outputs are equal, first differ at a near tie, or differ."""

    equal: int
    near_ties: int
    different: int

    @property
    def total(self) -> int:
        """Prompts compared."""
        return self.equal + self.near_ties + self.different

    def __str__(self) -> str:
        if self.different:
            return f"NO: {self.different} of {self.total} differ"
        return f"yes ({self.near_ties} near ties)" if self.near_ties else "yes"


@dataclass(frozen=True)
class Row:
    """One contestant's figures. tokens_per_second: of every repeat. accepted: new tokens per decode
    step, including the verifier's. same: agreement with the reference; plain: with its own plain
    decoding; own: of an approximate recipe with the target's text."""

    name: str
    target: str
    contract: str
    tokens_per_second: tuple[float, ...]
    ratio: float
    accepted: float | None
    same: Agreement | None
    plain: Agreement | None = None
    own: OwnText | None = None

    @property
    def median(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.tokens_per_second)


@dataclass(frozen=True)
class Bench:
    """A comparison. prompts: token ids. tokens: maximum new tokens per prompt. repeats: timed
    rounds after warm-up."""

    prompts: Sequence[Sequence[int]]
    tokens: int = 128
    repeats: int = 3
    progress: Callable[[str], None] = lambda what: None

    def run(self, contestants: Sequence[Contestant]) -> list[Row]:
        """Measure; ratios and agreement refer to the first contestant."""
        # Speculative ones first: a shared executable then has the widths that they need.
        for contestant in sorted(contestants, key=_drafts, reverse=True):
            self.progress(f"warming up {contestant.name} on {contestant.target}")
            contestant.run(self.prompts[0], self.tokens)
        runs: list[list[list[Run]]] = [[] for _ in contestants]
        for repeat in range(self.repeats):
            for i, contestant in enumerate(contestants):
                what = f"{contestant.name} on {contestant.target}"
                self.progress(f"round {repeat + 1} of {self.repeats}: {what}")
                settle()
                runs[i].append([contestant.run(p, self.tokens) for p in self.prompts])
        reference = runs[0]
        base = statistics.median(_speeds(reference))
        return [
            self._row(contestant, runs[i], base, reference[-1] if i else None)
            for i, contestant in enumerate(contestants)
        ]

    def _row(
        self,
        contestant: Contestant,
        rounds: list[list[Run]],
        base: float,
        reference: list[Run] | None,
    ) -> Row:
        speeds, last = _speeds(rounds), rounds[-1]
        model = contestant if isinstance(contestant, Optimized) else None
        plain = None
        if model is not None and model.speculative:
            self.progress(f"checking {model.name} on {model.target} against plain decoding")
            undrafted = [model.run_plain(p, self.tokens) for p in self.prompts]
            plain = self._agreement(undrafted, last, model)
        own = None
        if model is not None and model.approximate:
            self.progress(f"comparing {model.name} on {model.target} with the target's own text")
            texts = [model.run_own(p, self.tokens).ids for p in self.prompts]
            own = OwnText.of(zip(texts, (run.ids for run in last), strict=True))
        return Row(
            name=contestant.name,
            target=contestant.target,
            contract=model.contract if model else "",
            tokens_per_second=tuple(speeds),
            ratio=statistics.median(speeds) / base,
            accepted=statistics.mean(run.accepted for run in last) if model else None,
            same=None if reference is None else self._agreement(reference, last, model),
            plain=plain,
            own=own,
        )

    def _agreement(
        self, expected: Sequence[Run], got: Sequence[Run], model: Optimized | None
    ) -> Agreement:
        counts = {"equal": 0, "near_ties": 0, "different": 0}
        for prompt, a, b in zip(self.prompts, expected, got, strict=True):
            counts[_compare(prompt, a.ids, b.ids, model)] += 1
        return Agreement(**counts)


def _drafts(contestant: Contestant) -> bool:
    return isinstance(contestant, Optimized) and contestant.speculative


def _speeds(rounds: Sequence[Sequence[Run]]) -> list[float]:
    return [sum(len(run.ids) for run in r) / sum(run.seconds for run in r) for r in rounds]


def _compare(
    prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], model: Optimized | None
) -> str:
    if tuple(expected) == tuple(got):
        return "equal"
    pairs = zip(expected, got, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None or model is None:
        return "different"
    prefix = torch.tensor([[*prompt, *expected[:first]]])
    logits = reference_logits(model.model.program, prefix)[0, -1]
    near = NEAR_TIE[model.model.target.dtype] * float(logits.abs().max())
    top = logits.float().topk(2)
    tie = float(top.values[0] - top.values[1]) <= near
    tied = {int(token) for token in top.indices} == {expected[first], got[first]}
    return "near_ties" if tie and tied else "different"


def as_json(rows: Sequence[Row], bench: Bench, tools: Mapping[str, str]) -> dict[str, Any]:
    """The figures as plain data, with machine and settings."""
    return {
        "prompts": len(bench.prompts),
        "prompt_tokens": [len(prompt) for prompt in bench.prompts],
        "new_tokens": bench.tokens,
        "repeats": bench.repeats,
        "tools": dict(tools),
        "rows": [_row_json(row) for row in rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "target": row.target,
        "contract": row.contract,
        "tokens_per_second": round(row.median, 2),
        "tokens_per_second_all": [round(speed, 2) for speed in row.tokens_per_second],
        "ratio": round(row.ratio, 3),
        "accepted_per_step": None if row.accepted is None else round(row.accepted, 3),
        "same_tokens": None if row.same is None else vars(row.same),
        "same_as_plain": None if row.plain is None else vars(row.plain),
        "own_text": None if row.own is None else {**asdict(row.own), "share": row.own.share},
    }
