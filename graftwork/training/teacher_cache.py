"""On-disk cache of teacher activations for training windows.

The target's forward pass runs once per window. When a window is used again, only logits are
computed, from the narrowest value that determines them. A file holds a few windows, which bounds
memory. `TeacherCache` prepares windows before training, `Lessons` keeps what training meets.
"""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..backends import Target, compile
from ..ir import Function, Program, UnsupportedError, Weight, type_of
from ..ir.execution.analysis import dominating_chain
from ..ir.execution.executable import Executable
from ..ir.rewrite.cleanup import sweep
from ..ir.rewrite.subgraph import beyond
from ..ir.support.scratch import replacing_file
from ..runtime.scoring import read
from .net import Net

__all__ = ["CachedWindows", "Kept", "Lessons", "Teacher", "TeacherCache"]

A = torch.ops.aten

FOLDER = "lessons"

PIECE_TOKENS = 4096
"""Tokens per forward pass of the target."""

READER_ROWS = 4
"""Windows that a compiled target reads at once: what it works with then stays near."""

Windows = tuple[torch.Tensor, torch.Tensor]
"""Tokens i64[N,T]; i64[N], the index of the last token that the target did not generate."""

ARGMAX = "argmax"
"""Output of the step: the target's best tokens."""

CHOSEN = "chosen"
"""Name of the target's best tokens among cached activations."""

BOTTLENECK = "bottleneck"
"""Output name of the value that determines the logits, unless a draft reads that value anyway."""


class Teacher:
    """The target in training: computes activations, and logits from them.

    reader: a program of the target and its drafts in another form, such as int8, which computes the
    activations if its step gives them all out. taps: names of the step's outputs that drafts read.
    shared: of its states that they read.
    """

    def __init__(self, net: Net, reader: tuple[Program, Target] | None = None) -> None:
        self.net = net
        program = net.program
        self.step, self.bottleneck = _telling(program.step)
        outputs = self.step.outputs
        self.taps = tuple(name for name in outputs if name.split(".")[0] == "hidden")
        named = {name for fn in program.functions for name in program.shared_with(fn)}
        self.shared = tuple(name for name in outputs if name in named)
        self.rest = beyond(self.step, {self.bottleneck: outputs[self.bottleneck]}, ("logits",))
        self.kept = tuple(dict.fromkeys((*self.taps, *self.shared, self.bottleneck)))
        self.some: list[tuple[torch.Tensor, Function]] = []
        self.reader: Executable | None = None
        if reader is not None:
            program, target = reader
            step, bottleneck = _telling(program.step)
            # What is cut runs as its parts, and states are no outputs of what is compiled.
            whole = not program.plan.step.parts and not self.shared
            alike = bottleneck == self.bottleneck and {*self.kept, ARGMAX} <= step.outputs.keys()
            if whole and alike:
                self.reader = compile(program.with_function(step), target)

    def states(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cached activations of tokens i64[N,T], by name, each [N,T,...], states [N,G,T,D], and
        `CHOSEN`."""
        made = []
        with torch.no_grad():
            if self.reader is not None:
                made = [self._read(self.reader, p) for p in tokens.split(READER_ROWS)]
                return {name: torch.cat([part[name] for part in made]) for name in made[0]}
            for part in tokens.split(max(1, PIECE_TOKENS // tokens.shape[1])):
                given = {"tokens": part.to(self.net.device)}
                found = self.net.outputs(self.step, self.kept, given)
                best = [self.logits(one).argmax(-1) for one in _windows_of(found)]
                made.append({**found, CHOSEN: torch.cat(best)})
        return {name: torch.cat([part[name].cpu() for part in made]) for name in made[0]}

    def _read(self, reader: Executable, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        found = read(reader, tokens, (*self.kept, ARGMAX))
        return {CHOSEN if name == ARGMAX else name: value for name, value in found.items()}

    def logits(
        self, states: dict[str, torch.Tensor], known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The target's logits f[N,T,V]; known: of these tokens i64[D] alone, f[N,T,D]."""
        rest = self.rest if known is None else self._narrow(known)
        with torch.no_grad():
            inputs = {self.bottleneck: states[self.bottleneck]}
            logits = self.net.outputs(rest, ("logits",), inputs)["logits"]
        whole = known is not None and logits.shape[-1] != len(known)
        return logits[..., known] if whole else logits

    def _narrow(self, known: torch.Tensor) -> Function:
        """The rest with a head of some tokens; as it is where its head is no plain product."""
        for tokens, made in self.some:
            if torch.equal(tokens, known):
                return made
        rest, vocab = self.rest.copy(), self.net.program.info.vocab_size
        rest.name = f"{rest.name}.some.{len(self.some)}"
        products = [n for n in rest.calls(A.linear.default) if type_of(n).dims[-1] == vocab]
        if len(products) == 1:
            for node in products[0].all_input_nodes[1:]:
                name = f"{node.target}.some.{len(self.some)}"
                rows = self.net.tensors[str(node.target)].detach()[known]
                self.net.tensors[name] = rows
                with rest.graph.inserting_before(products[0]):
                    products[0].replace_input_with(node, rest.weight(Weight.of(name, rows)))
            rest.retype()
            sweep(rest)
        self.some.append((known, rest))
        return rest


def _windows_of(states: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """One window at a time: logits are large."""
    for row in range(len(next(iter(states.values())))):
        yield {name: value[row : row + 1] for name, value in states.items()}


def _telling(step: Function) -> tuple[Function, str]:
    """A step that gives out, beside its outputs, the value that alone determines the logits, and
    that output's name."""
    named = {name: node for name, node in step.outputs.items() if name.split(".")[0] == "hidden"}
    bottleneck = _bottleneck(step, set(named.values()))
    known = [name for name, node in named.items() if node is bottleneck]
    told = step.copy()
    if not known:
        copied = {node.name: node for node in told}
        told.set_outputs({**told.outputs, BOTTLENECK: copied[bottleneck.name]})
    return told, known[0] if known else BOTTLENECK


def _bottleneck(step: Function, taps: set[torch.fx.Node]) -> torch.fx.Node:
    """The value that alone determines the logits: a tap, else the narrowest one."""
    found = []
    for node in reversed(dominating_chain(step)[1:-1]):
        if not isinstance(node.meta["type"], tuple) and isinstance(type_of(node).dims[-1], int):
            rest = beyond(step, {BOTTLENECK: node}, ("logits",))
            if {str(i.target) for i in rest.inputs} - {BOTTLENECK, "select"}:
                break
            found.append(node)
    if not found:
        raise UnsupportedError(
            "training: expected a value of the step that alone determines the logits, and "
            "each also needs inputs"
        )
    return min(found, key=lambda node: (node not in taps, type_of(node).dims[-1]))


class CachedWindows(NamedTuple):
    """Windows of a training step. tokens i64[N,T]; firsts i64[N], see `Windows`; states: cached
    activations by name, each [N,T,...], and under `CHOSEN` the target's best tokens i64[N,T]."""

    tokens: torch.Tensor
    firsts: torch.Tensor
    states: dict[str, torch.Tensor]


class Kept:
    """Files of tensors in a folder, which runs may share. made: what they depend on; its hash is in
    their names and in them, and files of others stay. shared: `remove` leaves them, too."""

    def __init__(self, folder: Path, *made: object, shared: bool = False) -> None:
        self.mark = hashlib.sha256(repr(made).encode()).hexdigest()
        self.folder, self.shared = folder, shared
        self.open: Callable[[Path], Any] = lru_cache(maxsize=64)(partial(safe_open, framework="pt"))

    def path(self, name: str) -> Path:
        """Where the file of that name is."""
        return self.folder / f"{self.mark[:12]}.{name}.safetensors"

    def valid(self, name: str) -> bool:
        """Whether the file is there and whole."""
        try:
            with safe_open(self.path(name), "pt") as file:
                return (file.metadata() or {}).get("mark") == self.mark
        except (OSError, SafetensorError):
            return False

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a file."""
        whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
        with replacing_file(self.path(name)) as part:
            save_file(whole, part, metadata={"mark": self.mark})

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """All tensors of a valid file."""
        file = self.open(self.path(name))
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)

    def remove(self) -> None:
        """Delete the folder, unless it is shared."""
        self.open = partial(safe_open, framework="pt")
        if not self.shared:
            shutil.rmtree(self.folder, ignore_errors=True)


class TeacherCache:
    """Windows with the target's activations in bfloat16. files: keeps them; mark: what the windows
    depend on.
    held: windows of the first file that `batch` leaves out, for measuring."""

    def __init__(
        self, folder: Path, teacher: Teacher, *mark: object, seed: int, shared: bool = False
    ) -> None:
        self.teacher, self.seed = teacher, seed
        self.files = Kept(folder / FOLDER, *mark, teacher.kept, "bf16", seed, shared=shared)
        self.names: list[str] = []
        self.ends: list[int] = []
        self.turn, self.order, self.held = -1, torch.empty(0), 0

    @property
    def count(self) -> int:
        """Number of windows."""
        return self.ends[-1] if self.ends else 0

    def add(self, number: int, windows: Callable[[], Windows]) -> None:
        """Add file `number`; write it from `windows()` unless it exists."""
        name = f"{number:06d}"
        if not self.files.valid(name):
            tokens, firsts = windows()
            states = map(_stored, self.teacher.states(tokens).items())
            self.files.write(name, {"tokens": tokens, "firsts": firsts, **dict(states)})
        size = self.files.open(self.files.path(name)).get_slice("tokens").get_shape()[0]
        self.names.append(name)
        self.ends.append(self.count + int(size))

    def has(self, number: int) -> bool:
        """Whether file `number` exists and is valid."""
        return self.files.valid(f"{number:06d}")

    def batch(self, step: int, count: int) -> CachedWindows:
        """The windows of step `step`: a new permutation of all windows per epoch."""
        return self._joined([self._place(step * count + index) for index in range(count)])

    def held_out(self) -> CachedWindows:
        """The windows that `batch` leaves out."""
        return self._joined(self._held)

    @property
    def _held(self) -> list[int]:
        """Places all over the first file: windows of a kind lie together."""
        return [place * self.ends[0] // self.held for place in range(self.held)]

    def _joined(self, places: Iterable[int]) -> CachedWindows:
        rows = [self._read(place) for place in places]
        joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return CachedWindows(joined.pop("tokens"), joined.pop("firsts"), joined)

    def _place(self, visit: int) -> int:
        turn, place = divmod(visit, self.count - self.held)
        if turn != self.turn:
            generator = torch.Generator().manual_seed(self.seed * 7_919 + turn)
            count = self.count - self.held
            self.turn, self.order = turn, torch.randperm(count, generator=generator)
        chosen = int(self.order[place])
        for held in self._held:
            chosen += chosen >= held
        return chosen

    def _read(self, place: int) -> dict[str, torch.Tensor]:
        index = bisect_right(self.ends, place)
        row = place - (self.ends[index - 1] if index else 0)
        file = self.files.open(self.files.path(self.names[index]))
        names = ("tokens", "firsts", *self.teacher.kept, CHOSEN)
        return {name: _floats(file.get_slice(name)[row : row + 1]) for name in names}

    def remove(self) -> None:
        """Delete the files, unless they are shared."""
        self.files.remove()


def _stored(named: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """An activation in 16 bits: half as many bytes to write and to read in each step."""
    name, value = named
    return name, value.bfloat16() if value.is_floating_point() else value


def _floats(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


class Lessons:
    """Activations of a teacher by the tokens that it read, one file a batch. Runs on the same
    texts may share a folder. more: what else they depend on."""

    def __init__(self, folder: Path, teacher: Teacher, more: Sequence[object] = ()) -> None:
        digest = hashlib.sha256()
        for name in sorted(teacher.step.weights):
            # Some of each: training changes all of a weight, or nothing.
            some = teacher.net.tensors[name].detach().flatten()[:256].float()
            digest.update(some.cpu().numpy().tobytes())
        self.files = Kept(folder, teacher.kept, *more, digest.hexdigest())
        self.teacher = teacher

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The teacher's logits f[N,T,V] of tokens i64[N,T]."""
        name = hashlib.sha256(tokens.cpu().contiguous().numpy().tobytes()).hexdigest()[:32]
        if not self.files.valid(name):
            self.files.write(name, self.teacher.states(tokens))
        states = self.files.read(name)
        device = self.teacher.net.device
        return self.teacher.logits({name: state.to(device) for name, state in states.items()})
