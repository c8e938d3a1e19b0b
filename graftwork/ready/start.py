"""Starting from what was kept: ONNX Runtime, numpy and the plan runner; no torch."""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..backends.cached_library import SHARED, library
from ..backends.cores import default_threads
from ..ir.support.tokenizer import encode, read_tokenizer
from ..runtime.speculate.costs import Costs
from ..runtime.speculate.ready_chains import ChainKnowledge, MeasuredChains
from ..runtime.stats import Stats
from . import entries

TOKENIZER = "tokenizer.json"
USUAL = 128
"""New tokens at most, where neither the user nor the checkpoint says how many."""


class Ready:
    """A model that was kept, with its sessions. tokenizer: as in `Model`. runner: of its plan."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.tokenizer = read_tokenizer(folder / TOKENIZER)
        self.runner = runner_module("run").Runner(folder, default_threads())
        functions = self.runner.functions
        register(functions.options, about["ops"])
        for name in functions.plan["functions"]:  # now: whoever makes room may remove the files
            functions.session(name, "chain")
        self.stats = Stats()
        if about["loss"] is not None:
            most = self.runner.plan["draft"]["tokens"]
            known = ChainKnowledge(most)
            timed(self.runner, MeasuredChains(about["loss"], Costs(), range(1, most + 2), known))

    @property
    def contract(self) -> str:
        """Of the recipe: whether the target itself may write another text."""
        return str(self.runner.model["contract"])

    def fits(self, text: str, count: int | None, greedy: bool | None) -> tuple[list[int], int]:
        """The tokens of a prompt, and how many new ones are asked for: 0 if something else than the
        runner has to say what is wrong, or has to sample. greedy: None: as the checkpoint says."""
        model, ids = self.runner.model, encode(self.tokenizer, text)
        said = model["generation"]
        sampled = said.get("do_sample", False) if greedy is None else not greedy
        room = model["context"] - len(ids)
        usual = said.get("max_new_tokens") or max(1, min(USUAL, room))
        new = int(usual if count is None else count)
        return ids, new if ids and 0 < new <= room and not sampled else 0

    def generate(self, ids: Sequence[int], new: int, put: Callable[[Any], None]) -> None:
        """Write `new` tokens, or up to the end of the text. put: called with those of each step."""
        start, stats = time.perf_counter(), self.stats
        for tokens in self.runner.stream(ids, new):
            put(tokens)
            stats.new_tokens += len(tokens)
            if stats.new_tokens == len(tokens):
                stats.prefill_seconds = time.perf_counter() - start
                start = time.perf_counter()
            else:
                stats.decoded_tokens += len(tokens)
        stats.count(self.runner.steps, 1)
        stats.decode_seconds = time.perf_counter() - start


def timed(runner: Any, chains: MeasuredChains) -> None:
    """Let a runner verify as much of each chain as pays."""
    verify = runner.verify

    def measured(nodes: list[int], parents: list[int], *rest: Any) -> list[int]:
        """As the runner's `verify`."""
        size = chains.size([len(nodes)], [0])
        start = time.perf_counter()
        tokens: list[int] = verify(nodes[:size], parents[:size], *rest)
        chains.learn([size], [0], [len(tokens) - 1], time.perf_counter() - start)
        return tokens

    runner.verify = measured


def ready(key: str) -> Ready | None:
    """What was kept under a key; None where nothing is, or it is damaged."""
    with entries.entry(key) as folder:
        about = entries.read(folder)
        try:
            return None if about is None else Ready(folder, about)
        except (Exception, SystemExit):  # whatever it is, the model itself is still there
            return None


def register(options: Any, ops: Sequence[Sequence[str]]) -> None:
    """Let sessions of these options run graftwork's own ops. ops: see `declarations`."""
    kernels = library(SHARED)
    for name, described, kernel in ops:
        found = ctypes.addressof(ctypes.c_char.in_dll(kernels, f"{kernel}_kernel"))
        kernels.declare_op(name.encode(), described.encode(), ctypes.c_void_p(found))
    options.register_custom_ops_library(kernels._name)


def runner_module(name: str) -> ModuleType:
    """A file of `exporting.runners`, as plan folders have it."""
    folder = str(Path(__file__).parents[1] / "exporting" / "runners")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
