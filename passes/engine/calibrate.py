"""Replays a program over text, block by block, for passes that choose weights by what they see.

A block's weights are in memory, and a matrix of moments for each value that its products read; what
stands between two blocks lies in files, a few windows each, and so does what mixtures of experts
read (see `routed`). The blocks after it see the weights that were chosen for a block, not those
that they replace (the order of Frantar et al., "GPTQ" (2022)); products of one block all see its
inputs as they come, and its own weights as they were.

What is chosen for a block is written before the next begins, under a name that says what it depends
on: program, options, text, the code at work and the weights so far. A run that was killed goes on
where it was, and makes the same bits as one that was not: both read from the files what they go on
with.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.fx
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...ir import Function, Program, Weight, WeightStore, derivation, derive, run
from ...ir.support.discovery import sources_of
from ...ir.support.scratch import replacing_file
from ...ir.text.printer import function_lines
from ...ir.weight_files import from_safetensors
from .blocks import Block, blocks_of, expert_weights
from .evidence import Evidence, TextSample, WorkFolder
from .feed import empty_inputs
from .moments import Moments, Sums
from .routed import Mixture


@derivation
def calibrated(tensor: Tensor, *, work: WorkFolder) -> Tensor:
    """What a calibration has written into a folder, which stays while this is known."""
    return tensor


CHUNK_TOKENS = 512
"""Tokens that run through a block at once."""


@dataclass(frozen=True)
class Seen:
    """A block as a solver is given it.

    name: for people. products: of the step, by the name of the value that they read. moments: of
    these values; a solver removes those that it has done with. weights: the block's, by name.
    progress: told which share of the solver's work is done. mixtures: of experts.
    """

    name: str
    products: Mapping[str, Sequence[torch.fx.Node]]
    moments: dict[str, Moments]
    weights: Mapping[str, Tensor]
    progress: Callable[[float], None]
    mixtures: Sequence[Mixture] = ()


class Solver(Protocol):
    """What is to be found out of each block."""

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        """Tensors to keep of a block, by names that no other block's have."""

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights that the blocks after it see in the place of those of these names, made of
        what is kept alone; one by one, because each takes the memory of the one it replaces."""


def calibrate(
    program: Program,
    products: Sequence[torch.fx.Node],
    evidence: Evidence,
    sample: TextSample,
    solver: Solver,
    mark: str,
) -> dict[str, Weight]:
    """What a solver keeps of each block that leads to products of the step, by name: in the work
    folder, and read when it is loaded.

    mark: names the solver, its options, and code that is no pass's (`sources`). Errors: `PassError`
    for activations that are not finite, and what the solver raises.
    """
    windows = evidence.sampled(sample, program)
    text = "\n".join(line.text for line in function_lines(program.step))
    chosen = " ".join(node.name for node in products)
    code = code_of(type(solver))  # sums in another order have other bits
    digest = hashlib.sha256(f"{code} {mark} {sample} {chosen} {text}".encode())
    digest.update(_bytes(windows))
    replay = _Replay(program, products, windows, evidence, digest)
    done = replay.done()
    for number in range(len(replay.blocks)):
        replay.run(number, solver, number < done)
    return replay.results()


class _Replay:
    """A folder of results for one program, text and solver; `digest` knows them but for weights."""

    def __init__(
        self,
        program: Program,
        products: Sequence[torch.fx.Node],
        windows: Tensor,
        evidence: Evidence,
        digest: hashlib._Hash,
    ) -> None:
        self.program, self.evidence, self.digest = program, evidence, digest
        self.blocks = blocks_of(program.step, products)
        self.chunks = windows.split(max(1, CHUNK_TOKENS // windows.shape[1]))
        self.marks: list[str] = []
        self.folder = evidence.work.path / digest.hexdigest()[:24]
        self.folder.mkdir(exist_ok=True)

    def done(self) -> int:
        """How many blocks need not be run any more."""
        for number in range(len(self.blocks), 0, -1):
            if self._is_done(number):
                return number
        return 0

    def _is_done(self, count: int) -> bool:
        """Whether the results of the first blocks are there, and what stands behind them."""
        between = [self._path("before", count, i) for i in range(len(self.chunks))]
        needed = between if count < len(self.blocks) else []
        kept = [self._path("block", i) for i in range(count) if self.blocks[i].is_asked_for]
        if not all(path.exists() for path in (*kept, *needed)):
            return False  # without reading weights
        marks = [self._mark(i) for i in range(count)]
        marked = [marks[i] for i in range(count) if self.blocks[i].is_asked_for]
        return all(map(_is_whole, kept, marked)) and all(_is_whole(p, marks[-1]) for p in needed)

    def results(self) -> dict[str, Weight]:
        """What is kept of all blocks, by name."""
        paths = [
            self._path("block", i) for i, block in enumerate(self.blocks) if block.is_asked_for
        ]
        return {name: self._weight(path, name) for path in paths for name in _names(path)}

    def run(self, number: int, solver: Solver, done: bool) -> None:
        """Solve a block, and run the text through it; what is there already is used."""
        block, count = self.blocks[number], len(self.blocks)

        def said(share: float) -> None:
            self.evidence.progress(block.name, (number + share) / count)

        if not done:
            self._run(number, solver, said)
        for i in range(len(self.chunks)):  # nobody reads these any more
            self._path("before", number, i).unlink(missing_ok=True)
            self._path("routed", number, i).unlink(missing_ok=True)
        said(1.0)

    def _run(self, number: int, solver: Solver, said: Callable[[float], None]) -> None:
        block = self.blocks[number]
        weights = self._weights(block)
        mark = self._mark(number, weights)
        if block.is_asked_for and not _is_whole(self._path("block", number), mark):
            moments, mixtures = self._seen(number, weights, lambda share: said(share * 0.4))
            seen = Seen(
                block.name,
                block.products,
                moments,
                weights,
                lambda share: said(0.4 + 0.3 * share),
                mixtures,
            )
            _write(self._path("block", number), solver.solve(seen), mark)
        if block.passed.outputs:
            kept = _read(self._path("block", number)) if block.is_asked_for else {}
            for name, tensor in solver.replaced(kept):
                weights[name] = tensor.to(weights[name].dtype)
            self._pass_on(number, weights, mark, said)

    def _weights(self, block: Block) -> dict[str, Tensor]:
        names = block.read.weights | block.passed.weights | block.multiplied
        return {name: self.program.weights[name].load() for name in sorted(names)}

    def _mark(self, number: int, weights: Mapping[str, Tensor] | None = None) -> str:
        """What a block's results depend on: all that the digest knows, and weights so far."""
        while len(self.marks) <= number:
            at = len(self.marks)
            given = weights if at == number and weights else self._weights(self.blocks[at])
            for name, tensor in given.items():
                self.digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                self.digest.update(_bytes(tensor))
            self.marks.append(self.digest.hexdigest())
        return self.marks[number]

    def _path(self, what: str, number: int, chunk: int | None = None) -> Path:
        """The file with what is kept of a block ("block"), or, of a part of the text, with what
        stands before it ("before") or what its mixtures read ("routed")."""
        part = "" if chunk is None else f"-{chunk:05d}"
        return self.folder / f"{what}-{number:04d}{part}.safetensors"

    def _weight(self, path: Path, name: str) -> Weight:
        weight, work = from_safetensors(path, name), self.evidence.work
        assert work is not None  # a folder of its own is there while it is held
        return derive(name, weight.type, calibrated, weight, work=work)

    def _seen(
        self,
        number: int,
        weights: Mapping[str, Tensor],
        said: Callable[[float], None],
    ) -> tuple[dict[str, Moments], list[Mixture]]:
        """The moments of every value that the block's products read, and what its mixtures read,
        in files."""
        block = self.blocks[number]
        sums: dict[str, Sums] = {}
        routed = {name for names in block.mixtures.values() for name in names}
        tokens_of = {
            node: torch.zeros(len(weights[expert_weights(node)[0]]), dtype=torch.int64)
            for node in block.mixtures
        }
        step = self._runner(block.read, weights)
        for i, tokens in enumerate(self.chunks):
            out = step(tokens, self._given(number, i))
            for tap in block.products:
                sums.setdefault(tap, Sums(out[tap].shape[-1])).add(out[tap])
            for node, (_, chosen) in block.mixtures.items():
                count = tokens_of[node]
                count += torch.bincount(out[chosen].flatten(), minlength=len(count))
            if routed:
                _write(self._path("routed", number, i), {name: out[name] for name in routed}, "")
            said((i + 1) / len(self.chunks))
        files = [self._path("routed", number, i) for i in range(len(self.chunks))]
        moments = {
            tap: sums.pop(tap).moments(f"{block.name}: what %{tap} holds") for tap in block.products
        }
        mixtures = [
            Mixture(block.name, node, names, files, weights, tokens_of[node])
            for node, names in block.mixtures.items()
        ]
        return moments, mixtures

    def _pass_on(
        self,
        number: int,
        weights: Mapping[str, Tensor],
        mark: str,
        said: Callable[[float], None],
    ) -> None:
        """Write what stands behind the block, unless it is there."""
        step = self._runner(self.blocks[number].passed, weights)
        for i, tokens in enumerate(self.chunks):
            path = self._path("before", number + 1, i)
            if not _is_whole(path, mark):
                _write(path, step(tokens, self._given(number, i)), mark)
            said(0.7 + 0.3 * (i + 1) / len(self.chunks))

    def _given(self, number: int, chunk: int) -> dict[str, Tensor]:
        return _read(self._path("before", number, chunk)) if number else {}

    def _runner(
        self, fn: Function, weights: Mapping[str, Tensor]
    ) -> Callable[[Tensor, Mapping[str, Tensor]], dict[str, Tensor]]:
        """What runs a part of the step on windows i64[B,T] that begin their texts."""
        held = WeightStore({n: Weight.of(n, weights[n]) for n in sorted(fn.weights)})
        program = self.program.replace(functions={fn.name: fn}, weights=held)

        def step(tokens: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return run(program, fn.name, empty_inputs(program, fn.name, tokens) | dict(given))

        return step


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data


def _write(path: Path, tensors: Mapping[str, Tensor], mark: str) -> None:
    apart = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    with replacing_file(path) as part:
        save_file(apart, part, metadata={"mark": mark})


def _is_whole(path: Path, mark: str) -> bool:
    """Whether a file is there, whole, and made of what `mark` stands for."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("mark") == mark
    except (OSError, SafetensorError):
        return False


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


PASSES = Path(__file__).parents[1]


def code_of(*kinds: type) -> str:
    """A digest of torch's version, every pass and what these classes' modules say: whatever may
    change the bits of what they work out."""
    digest = hashlib.sha256(f"{torch.__version__} {sources_of(PASSES)}".encode())
    for path in filter(None, map(_source, kinds)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _source(kind: type) -> Path | None:
    """Where a class is written; none for one that was typed at a prompt."""
    try:
        path = inspect.getsourcefile(kind)
    except TypeError:
        return None
    return Path(path) if path else None
