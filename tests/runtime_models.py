"""Executables for the runtime's tests: small models whose every cache mistake shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from graftwork.ir import Function, InputError, ModelInfo, Program, TensorType, WeightStore
from graftwork.ir.execution.executable import ANY, HeldCall, Widths
from graftwork.ir.plan import DecodePlan, DraftRecord, Record, TreeRecord
from graftwork.ir.support.threads import Turn
from graftwork.runtime.asking.options import GenerationOptions
from graftwork.runtime.speculate.setting import Setting

POISON = -(10**9)


def program(
    vocab: int,
    *,
    context: int = 64,
    draft: DraftRecord | None = None,
    tree: TreeRecord | None = None,
    verify: Record | None = None,
    outputs: Sequence[str] = ("logits", "argmax"),
    inputs: Sequence[str] = ("tokens", "positions", "past", "select"),
    eos: tuple[int, ...] = (),
    pad: int | None = None,
) -> Program:
    """A program whose step has these inputs and outputs and computes nothing.

    A `tree` adds the input ``ancestors``.
    """
    fn = Function("step")
    shapes = {"past": "i64[B]", "select": "i64[B,S]", "ancestors": "bool[B,T,T]"}
    inputs = [*inputs, *(["ancestors"] if tree is not None else [])]
    nodes = [fn.add_input(n, TensorType.parse(shapes.get(n, "i64[B,T]"))) for n in inputs]
    fn.set_outputs({name: nodes[0] for name in outputs})
    slots = {"draft": draft, "tree": tree, "verify": verify}
    plan = DecodePlan(**{slot: record for slot, record in slots.items() if record is not None})
    info = ModelInfo("table", vocab, context, eos=eos, pad=pad)
    return Program("table", {"step": fn}, WeightStore({}), info, plan=plan, stage="cached")


def setting(executable: Any) -> Setting:
    """A generation that asks for nothing, for a drafter that looks at no length policy."""
    nobody: Any = None
    return Setting(executable, GenerationOptions(), nobody)


class Recorder:
    """A streamer that keeps what it is handed."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.values.append(value.clone())

    def end(self) -> None:
        self.ended += 1

    def streamed(self) -> tuple[list[object], int]:
        """Everything as lists, and how often it ended."""
        return [value.tolist() for value in self.values], self.ended


class TableExecutable:
    """A model given by `rule(tokens so far) -> logits [V]`; its cache is the tokens it was fed.

    What a column sees is read back from the cache, so a row that is wrong, forgotten or overwritten
    changes the text. Every input is checked against the protocol, results handed out are poisoned
    at the next run, and cache rows at the next step or once a path is kept, if they are none of
    what was committed.
    """

    def __init__(
        self,
        rule: Callable[[tuple[int, ...]], torch.Tensor],
        program: Program,
        widths: tuple[int, ...] | None = None,
        roomy: bool = True,
    ) -> None:
        self.rule, self.program, self._widths, self.roomy = rule, program, widths, roomy
        self.capacity = 0
        self.limit = program.info.context + max(widths or (128,))
        self.preparing = 0.0
        self.turn = Turn()
        self.given: list[torch.Tensor] = []
        self.fed: list[tuple[int, list[int], tuple[str, ...]]] = []
        self.memo: dict[tuple[int, ...], torch.Tensor] = {}
        self.trees: set[bytes] = set()
        self.kept: dict[Hashable, dict[Any, Any]] = {}

    def begin(self, batch: int, rows: int) -> None:
        assert 0 < rows <= self.limit
        self.capacity = 0
        self.cache = torch.empty(batch, 0, dtype=torch.int64)
        self.reserve(rows if self.roomy else 1)

    def reserve(self, rows: int) -> None:
        if rows > self.limit:
            raise InputError(f"{rows} rows exceed the limit")
        grown = torch.full((self.cache.shape[0], rows), POISON)
        grown[:, : self.capacity] = self.cache
        self.cache, self.capacity = grown, rows

    def widths(self, function: str) -> Widths:
        return ANY if self._widths is None else Widths(self._widths)

    def run(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        step = self.program.function(function)
        names = {str(node.target) for node in step.inputs}
        assert names - {"ancestors"} <= set(inputs) <= names
        assert set(fetch) <= set(step.outputs)
        tokens, past = inputs["tokens"], inputs["past"]
        batch, width = tokens.shape
        self._check(inputs, batch, width)
        for row in range(batch):
            self.cache[row, past[row] :] = POISON
            self.cache[row, past[row] : past[row] + width] = tokens[row]
        self.last = (past.clone(), width)
        self.fed.append((width, past.tolist(), tuple(fetch)))
        select = inputs.get("select", torch.arange(width).expand(batch, width))
        chain = torch.ones(width, width, dtype=torch.bool).tril().expand(batch, width, width)
        seen = inputs.get("ancestors", chain)
        logits = torch.stack(
            [self._columns(b, int(past[b]), select[b], seen[b]) for b in range(batch)]
        )
        for old in self.given:
            old.fill_(POISON)
        results = {"logits": logits, "argmax": self.best(logits)}
        self.given = [results[name] for name in fetch]
        return {name: results[name] for name in fetch}

    def hold(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> HeldCall:
        return lambda: self.run(function, inputs, fetch)

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def _check(self, inputs: Mapping[str, torch.Tensor], batch: int, width: int) -> None:
        tokens, past = inputs["tokens"], inputs["past"]
        assert batch == self.cache.shape[0]
        assert self._widths is None or width in self._widths
        assert int(past.max()) + width <= self.capacity <= self.limit
        assert int(tokens.min()) >= 0 and int(tokens.max()) < self.program.info.vocab_size
        depths = torch.arange(width)
        if "ancestors" in inputs:
            depths = self._depths(inputs["ancestors"], batch, width)
        last = self.program.info.context - 1
        assert (inputs["positions"] == (past[:, None] + depths).clamp(max=last)).all()
        select = inputs.get("select")
        assert select is None or (int(select.min()) >= 0 and int(select.max()) < width)

    def _depths(self, ancestors: torch.Tensor, batch: int, width: int) -> torch.Tensor:
        """Of each column; ancestors must be those of trees whose parents come first."""
        assert ancestors.shape == (batch, width, width) and ancestors.dtype == torch.bool
        assert ancestors.diagonal(dim1=1, dim2=2).all() and not ancestors.triu(1).any()
        for tree in ancestors:
            key = tree.numpy().tobytes()
            if key not in self.trees:
                _check_tree(tree.tolist())
                self.trees.add(key)
        return ancestors.sum(-1) - 1

    def _columns(
        self, row: int, past: int, select: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        before, step = self.cache[row, :past], self.cache[row, past : past + len(seen)]
        return torch.stack(
            [self._logits(torch.cat([before, step[seen[i]]])) for i in select.tolist()]
        )

    def _logits(self, seen: torch.Tensor) -> torch.Tensor:
        key = tuple(seen.tolist())
        assert POISON not in key, f"rows that were never written are visible: {key}"
        if key not in self.memo:
            self.memo[key] = self.rule(key)
        return self.memo[key].clone()

    def commit(self, states: Collection[str], past: torch.Tensor, source: torch.Tensor) -> None:
        began, width = self.last
        assert torch.equal(past, began), "a path is kept where the last step began"
        assert self.program.function("step").has_input("ancestors")
        assert source.shape[0] == len(past) and int(source.min()) >= 0
        assert int(source.max()) < width and source.shape[1] <= width
        kept = self.cache.gather(1, past[:, None] + source)
        for row, start in enumerate(past.tolist()):
            self.cache[row, start:] = POISON
            self.cache[row, start : start + source.shape[1]] = kept[row]

    def scratch(self, owner: Hashable, *, shared: bool = False) -> dict[Any, Any]:
        return self.kept.setdefault(owner, {})

    def state_bytes(self) -> int:
        return int(self.cache.nbytes)


def _check_tree(ancestors: list[list[bool]]) -> None:
    """Each column continues what its parent continues, and the parent, and itself."""
    for column, row in enumerate(ancestors):
        above = [other for other in range(column) if row[other]]
        continued = [c for c, seen in enumerate(ancestors[above[-1]]) if seen] if above else []
        assert above == continued


def markov(vocab: int, seed: int = 0, scale: float = 1.0) -> Callable[..., torch.Tensor]:
    """Logits that depend on the last two tokens: small enough for exact distributions."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab + 1, vocab, vocab, generator=generator) * scale

    def rule(seen: tuple[int, ...]) -> torch.Tensor:
        before = seen[-2] if len(seen) > 1 else vocab
        return table[before, seen[-1]]

    return rule


def whole(vocab: int, period: int = 5) -> Callable[..., torch.Tensor]:
    """Logits that depend on every token seen, and often continue the text's period."""

    def rule(seen: tuple[int, ...]) -> torch.Tensor:
        digest = 0
        for token in seen:
            digest = (digest * 1000003 + token + 1) % (2**61 - 1)
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(digest))
        if digest % 4 and len(seen) >= period:
            logits[seen[-period]] += 6.0
        return logits

    return rule


def plain(rule: Callable[..., torch.Tensor], prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation of a prompt straight from the rule: what every loop must produce."""
    seen = list(prompt)
    for _ in range(count):
        seen.append(int(rule(tuple(seen)).argmax()))
    return seen[len(prompt) :]
