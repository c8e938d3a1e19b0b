"""Runs a program with ONNX Runtime: owns the states and one session a function and variant."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...ir import InputError, Program, UnsupportedError, type_of
from ...ir.plan import Chain
from ..target import Target
from .attention import SEQLENS, TOTAL
from .buffers import StateBuffers
from .emit import emit
from .lower import ANCESTORS, Variant, has_attention, lower
from .session import open_session
from .step import Step
from .store import WeightFile, store

KEPT_WIDTH = 128
"""Chains up to this many tokens keep their ancestor mask."""


class OnnxExecutable:
    """See `ir.executable.Executable`. Any width runs equally well; sessions are made when needed.

    Weights lie in a temporary folder that lives as long as the executable; sessions map them.
    """

    def __init__(self, program: Program, target: Target) -> None:
        _require_dtypes(program, target)
        self.program, self.target = program, target
        self._folder = tempfile.TemporaryDirectory(prefix="graftwork-")
        self._cleanup = weakref.finalize(self, self._folder.cleanup)
        self._weights = WeightFile(Path(self._folder.name) / "weights.data")
        device = target.device
        self._buffers = StateBuffers(program.states, program.info.context, device)
        self._buffers.begin(1, 1)
        self._steps: dict[tuple[str, Variant], Step] = {}
        self._cached = {n: has_attention(f) for n, f in program.functions.items()}
        self._trees = {n: f.has_input(ANCESTORS) for n, f in program.functions.items()}
        self._chains: dict[int, torch.Tensor] = {}
        self._counts = _Counts()

    @property
    def capacity(self) -> int:
        """Rows that each sequence's caches hold now."""
        return self._buffers.capacity

    def begin(self, batch: int, rows: int) -> None:
        """Start `batch` sequences; room for `rows` rows takes memory only once it is written."""
        self._buffers.begin(batch, min(rows, self._buffers.limit))

    def reserve(self, rows: int) -> None:
        """Grow the caches, keeping their rows. Errors: `InputError` past the model's context."""
        self._buffers.reserve(rows)

    def widths(self, function: str) -> tuple[int, ...] | None:
        """None: shapes are dynamic."""
        return None

    def run(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Run a function; states change in place; outputs live until the next call."""
        if not self._cached.get(function, False):
            return self._step(function, "chain").run(inputs, fetch)
        batch, width = inputs["tokens"].shape
        past = inputs["past"].tolist()
        longest = max(past)
        if longest + width > self._buffers.capacity:
            raise InputError(
                f"{function}: {width} tokens after {longest} do not fit into "
                f"{self._buffers.capacity} cache rows; reserve({longest + width}) first"
            )
        variant = self._variant(function, inputs, batch, width, longest)
        feeds = dict(inputs)
        if variant != "chain" and self._trees[function] and feeds.get(ANCESTORS) is None:
            feeds[ANCESTORS] = self._ancestors(batch, width)
        if variant != "batch":
            feeds.update(self._counts.of(past, width, variant))
        return self._step(function, variant).run(feeds, fetch)

    def _variant(
        self,
        function: str,
        inputs: Mapping[str, torch.Tensor],
        batch: int,
        width: int,
        longest: int,
    ) -> Variant:
        """Which lowering can take the step; see `lower`."""
        tree = inputs.get(ANCESTORS) is not None
        if tree and not self._trees[function]:
            raise InputError(
                f"{function} takes no ancestors: the program was made without trees "
                f"(pass insert_kv_cache, option trees)"
            )
        if batch == 1 and (self._grows_trees(function) or (tree and width > 1)):
            return "tree"
        if width == 1 or (not tree and (batch == 1 or longest == 0)):
            return "chain"
        return "batch"

    def _grows_trees(self, function: str) -> bool:
        """Whether chains also go through the tree's session.

        They cost the same there, and a second session would hold its weights a second time.
        """
        if not self._trees[function]:
            return False
        return (function, "tree") in self._steps or self.program.plan.tree != Chain()

    def _ancestors(self, batch: int, width: int) -> torch.Tensor:
        """The ancestor mask of a chain; narrow ones are kept."""
        mask = self._chains.get(width)
        if mask is None:
            mask = torch.ones(width, width, dtype=torch.bool).tril()[None]
            if width <= KEPT_WIDTH:
                self._chains[width] = mask
        return mask.expand(batch, width, width)

    def _step(self, function: str, variant: Variant) -> Step:
        key = (function, variant)
        if key not in self._steps:
            self._steps[key] = self._compile(function, variant)
        return self._steps[key]

    def _compile(self, function: str, variant: Variant) -> Step:
        lowered = lower(self.program, function, variant)
        fn = lowered.function(function)
        path = Path(self._folder.name) / f"{function}.{variant}.onnx"
        store(emit(fn, lowered.weights), path, self._weights)
        size = sum(weight.type.nbytes for weight in lowered.weights.values())
        session = open_session(path, self.target, weight_bytes=size)
        return Step(fn, session, self._buffers)

    def keep_rows(self, past: torch.Tensor, source: torch.Tensor) -> None:
        """Commit a path of the last step."""
        self._buffers.keep_rows(past, source)

    def state_bytes(self) -> int:
        """Bytes that the state buffers take (memory that was never written is not there yet)."""
        return self._buffers.nbytes()


class _Counts:
    """The two numbers that GroupQueryAttention takes instead of `past`."""

    def __init__(self) -> None:
        self.resize(1)

    def resize(self, batch: int) -> None:
        """Tensors for a batch. They are written through numpy: torch takes 10 us an addition."""
        tensors = {SEQLENS: torch.zeros(batch, dtype=torch.int32)}
        tensors[TOTAL] = torch.zeros((), dtype=torch.int32)
        self.tensors, self.batch = tensors, batch
        self.seqlens, self.total = (tensor.numpy() for tensor in tensors.values())

    def of(self, past: list[int], width: int, variant: Variant) -> dict[str, torch.Tensor]:
        """seqlens i32[B] and total i32[]."""
        if self.batch != len(past):
            self.resize(len(past))
        for b, rows in enumerate(past):
            self.seqlens[b] = rows + width - 1
        longest = max(past)
        # With total == T the kernel takes its first-prompt path, which knows chains only.
        self.total[()] = longest + width + (variant == "tree" and longest == 0)
        return self.tensors


def _require_dtypes(program: Program, target: Target) -> None:
    """Errors: `UnsupportedError` for bfloat16 on the CPU, which has no kernels for it."""
    if target.device != "cpu":
        return
    types = [state.type for state in program.states.values()]
    types += [type_of(n) for f in program.functions.values() for n in f.outputs.values()]
    if any(t.dtype == torch.bfloat16 for t in types):
        raise UnsupportedError(
            f"target {target}: ONNX Runtime has no bfloat16 kernels on the CPU; "
            f"import the model in float32 (target onnxruntime:cpu:float32)"
        )
