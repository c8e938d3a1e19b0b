"""On-disk cache of teacher activations for training windows.

The target's forward pass runs once per window. When a window is used again, only logits are
computed, from the narrowest value that determines them. A file holds a few windows, which bounds
memory. `TeacherCache` prepares windows before training, `Lessons` keeps what training meets.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..ir import Function, UnsupportedError, type_of
from ..ir.execution.analysis import dominating_chain
from ..ir.rewrite.subgraph import beyond
from ..ir.support.scratch import replacing_file
from .net import Net

__all__ = ["CachedWindows", "Lessons", "Teacher", "TeacherCache"]

FOLDER = "lessons"

PIECE_TOKENS = 4096
"""Tokens per forward pass of the target."""

Windows = tuple[torch.Tensor, torch.Tensor]
"""Tokens i64[N,T]; i64[N], the index of the last token that the target did not generate."""

BOTTLENECK = "bottleneck"
"""Output name of the value that determines the logits, unless a draft reads that value anyway."""


class Teacher:
    """The target in training: computes activations, and logits from them.

    taps: names of the step's outputs that drafts read.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        step = net.program.step
        self.taps = tuple(name for name in step.outputs if name.split(".")[0] == "hidden")
        named = {name: step.outputs[name] for name in self.taps}
        bottleneck = _bottleneck(step, set(named.values()))
        known = [name for name, node in named.items() if node is bottleneck]
        self.bottleneck = known[0] if known else BOTTLENECK
        self.step = step.copy()
        if not known:
            copied = {node.name: node for node in self.step}
            self.step.set_outputs({**self.step.outputs, BOTTLENECK: copied[bottleneck.name]})
        self.rest = beyond(step, {self.bottleneck: bottleneck}, ("logits",))
        self.kept = tuple(dict.fromkeys((*self.taps, self.bottleneck)))

    def states(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cached activations of tokens i64[N,T], by name, each [N,T,...]."""
        pieces = max(1, PIECE_TOKENS // tokens.shape[1])
        with torch.no_grad():
            made = [
                self.net.outputs(self.step, self.kept, {"tokens": part.to(self.net.device)})
                for part in tokens.split(pieces)
            ]
        return {name: torch.cat([part[name].cpu() for part in made]) for name in self.kept}

    def logits(self, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """The target's logits, f[N,T,V]."""
        with torch.no_grad():
            inputs = {self.bottleneck: states[self.bottleneck]}
            return self.net.outputs(self.rest, ("logits",), inputs)["logits"]


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
    activations by name, each [N,T,...]."""

    tokens: torch.Tensor
    firsts: torch.Tensor
    states: dict[str, torch.Tensor]


class TeacherCache:
    """Windows with the target's activations, stored in `folder`.

    mark: what the files depend on; files with another mark are written again.
    """

    def __init__(self, folder: Path, teacher: Teacher, mark: dict[str, Any], seed: int) -> None:
        self.folder, self.teacher, self.seed = folder / FOLDER, teacher, seed
        described = json.dumps({**mark, "kept": teacher.kept, "seed": seed}, sort_keys=True)
        self.mark = hashlib.sha256(described.encode()).hexdigest()
        self.files: list[Path] = []
        self.ends: list[int] = []
        self.turn, self.order = -1, torch.empty(0)
        self.open: Callable[[Path], Any] = lru_cache(maxsize=64)(partial(safe_open, framework="pt"))

    @property
    def count(self) -> int:
        """Number of windows."""
        return self.ends[-1] if self.ends else 0

    def add(self, number: int, windows: Callable[[], Windows]) -> None:
        """Add file `number`; write it from `windows()` unless it exists."""
        path = self.folder / f"{number:06d}.safetensors"
        size = self._kept(path)
        if size is None:
            tokens, firsts = windows()
            size = len(tokens)
            tensors = {"tokens": tokens, "firsts": firsts, **self.teacher.states(tokens)}
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            with replacing_file(path) as part:
                save_file(contiguous, part, metadata={"mark": self.mark})
        self.files.append(path)
        self.ends.append(self.count + size)

    def has(self, number: int) -> bool:
        """Whether file `number` exists and is valid."""
        return self._kept(self.folder / f"{number:06d}.safetensors") is not None

    def _kept(self, path: Path) -> int | None:
        """Number of windows in a valid file; None if it is damaged or has another mark."""
        try:
            with safe_open(path, "pt") as file:
                same = (file.metadata() or {}).get("mark") == self.mark
                return int(file.get_slice("tokens").get_shape()[0]) if same else None
        except (OSError, SafetensorError):
            return None

    def batch(self, step: int, count: int) -> CachedWindows:
        """The windows of step `step`: a new permutation of all windows per epoch."""
        places = [self._place(step * count + index) for index in range(count)]
        rows = [self._read(place) for place in places]
        joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return CachedWindows(joined.pop("tokens"), joined.pop("firsts"), joined)

    def _place(self, visit: int) -> int:
        turn, place = divmod(visit, self.count)
        if turn != self.turn:
            generator = torch.Generator().manual_seed(self.seed * 7_919 + turn)
            self.turn, self.order = turn, torch.randperm(self.count, generator=generator)
        return int(self.order[place])

    def _read(self, place: int) -> dict[str, torch.Tensor]:
        index = bisect_right(self.ends, place)
        row = place - (self.ends[index - 1] if index else 0)
        file = self.open(self.files[index])
        names = ("tokens", "firsts", *self.teacher.kept)
        return {name: file.get_slice(name)[row : row + 1] for name in names}

    def remove(self) -> None:
        """Delete the files."""
        self.open = partial(safe_open, framework="pt")
        shutil.rmtree(self.folder, ignore_errors=True)


class Lessons:
    """Activations of a teacher by the tokens that it read, one file a batch. Runs on the same
    texts may share a folder; files of other teachers are written again. more: what else they
    depend on."""

    def __init__(self, folder: Path, teacher: Teacher, more: Sequence[object] = ()) -> None:
        self.folder, self.teacher = folder, teacher
        digest = hashlib.sha256(repr([teacher.kept, *more]).encode())
        for name in sorted(teacher.step.weights):
            # Some of each: training changes all of a weight, or nothing.
            some = teacher.net.tensors[name].detach().flatten()[:256].float()
            digest.update(some.cpu().numpy().tobytes())
        self.mark = digest.hexdigest()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The teacher's logits f[N,T,V] of tokens i64[N,T]."""
        name = hashlib.sha256(tokens.cpu().contiguous().numpy().tobytes()).hexdigest()[:32]
        path = self.folder / f"{name}.safetensors"
        states = self._read(path)
        if states is None:
            states = {n: t.contiguous() for n, t in self.teacher.states(tokens).items()}
            with replacing_file(path) as part:
                save_file(states, part, metadata={"mark": self.mark})
        device = self.teacher.net.device
        return self.teacher.logits({name: state.to(device) for name, state in states.items()})

    def _read(self, path: Path) -> dict[str, torch.Tensor] | None:
        """What a file holds; None if there is none, or it is damaged or another teacher's."""
        try:
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("mark") == self.mark:
                    return {name: file.get_tensor(name) for name in self.teacher.kept}
        except (OSError, SafetensorError):
            pass
        return None
