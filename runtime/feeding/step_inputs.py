"""Inputs of the step function in memory of their own, and the calls that are made on them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...ir import InputError
from ...ir.plan.inputs import MIXED, SHARES, nothing_mixed
from ..asking.text import Mixture
from .calls import Calls
from .draft import Draft, Topology


def memory(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous int64 tensor, to be read and written."""
    return tensor.view(-1).numpy().data.cast("B").cast("q")


def strange_ids(tokens: Sequence[int], vocabulary: int, what: str = "a draft") -> InputError:
    """The error about tokens of which one is outside the vocabulary."""
    strange = next(token for token in tokens if not 0 <= token < vocabulary)
    return InputError(
        f"{what} has the token {strange}, outside the vocabulary of {vocabulary}: a table of ids "
        f"that belongs to it is damaged, or another model's; optimize the model again"
    )


class StepInputs:
    """Inputs of one width, and the memory behind them to write lists into.

    A step's lists are short: writing them number by number through memoryviews costs a fraction of
    what numpy, or an array, does right after a model has run through the processor's caches.
    functions: see `Calls`. ids: the model has those below. Drafts may come from tables that came
    with a file. context: the positions that there are. count: tokens of all rows together, for
    functions that pack them; those of a step whose rows are all full never change. mixed: tokens
    that may be mixed into each; nothing is, until `mix`.
    """

    def __init__(
        self,
        functions: tuple[str, ...],
        batch: int,
        width: int,
        names: frozenset[str],
        ids: int,
        context: int,
        count: int = 0,
        mixed: int = 0,
    ) -> None:
        self.functions, self.batch, self.width, self.ids = functions, batch, width, ids
        self.last = context - 1
        every = torch.arange(width).repeat(batch, 1)
        tensors = {"tokens": every.clone(), "positions": every.clone(), "select": every}
        tensors["past"] = torch.zeros(batch, dtype=torch.int64)
        tensors["certain"] = torch.ones(batch, dtype=torch.int64)
        column = torch.zeros(batch, 1, dtype=torch.int64)
        whole = torch.arange(batch * width)
        packed, places = whole[None, : count or None].clone(), whole.reshape(batch, width).clone()
        tensors |= {"packed": packed, "picked": packed, "places": places, "shown": places}
        tensors |= nothing_mixed(batch, width, mixed)
        self.parts, self.mixes = [tensors[name].numpy() for name in (MIXED, SHARES)], False
        self.packs = 0 < count < len(whole)
        self.packed, self.places = memory(packed), memory(places)
        self.tokens, self.positions = memory(tensors["tokens"]), memory(tensors["positions"])
        self.past, self.column = memory(tensors["past"]), memory(column)
        self.certain = memory(tensors["certain"]) if "certain" in names else None
        self.filler = memoryview(array("q", [0] * width))
        inputs = {name: tensor for name, tensor in tensors.items() if name in names}
        self.chain, self.tree = Calls(functions, inputs), Calls(functions, {})
        texts = torch.arange(batch)
        one = {"select": column, "picked": texts[None], "shown": texts[:, None]}
        self.one_row = {**inputs, **{name: one[name] for name in one if name in names}}
        self.shapes: list[Topology | None] = [None] * batch

    def fill(
        self, rows: Sequence[Sequence[int]], past: Sequence[int], *, for_good: bool = False
    ) -> None:
        """Left-align the rows; behind them are zeros, which nothing reads.

        for_good: no token of them will be taken back; else that is known of each row's first one.
        Errors: `InputError` for ids that the model has not.
        """
        tokens, width, begin = self.tokens, self.width, 0
        for index, row in enumerate(rows):
            if row and not 0 <= min(row) <= max(row) < self.ids:
                raise strange_ids(row, self.ids)
            place = begin
            for token in row:
                tokens[place] = token
                place += 1
            begin += width
            if place < begin:
                tokens[place:begin] = self.filler[: begin - place]
            self.past[index] = past[index]
            if self.certain is not None:
                self.certain[index] = len(row) if for_good else min(len(row), 1)
        if self.packs:
            self._pack(rows)

    def mix(self, mixes: Sequence[Mixture]) -> None:
        """Mix tokens into each row's first one."""
        ids, shares = self.parts
        ids[:], shares[:], self.mixes = 0, 0, True
        for index, mixture in enumerate(mixes):
            for place, (token, share) in enumerate(mixture):
                ids[index, 0, place], shares[index, 0, place] = token, share

    def unmix(self) -> None:
        """Every token is itself again."""
        if self.mixes:
            self.mix(())
            self.mixes = False

    def _pack(self, rows: Sequence[Sequence[int]]) -> None:
        """Say which columns have a token. The place of others is the first token's."""
        packed, places, place, begin = self.packed, self.places, 0, 0
        packed[0] = 0  # where no row has a token
        for row in rows:
            size = len(row)
            for column in range(begin, begin + size):
                packed[place] = column
                places[column] = place
                place += 1
            begin += self.width
            if size < self.width:
                places[begin - self.width + size : begin] = self.filler[: self.width - size]

    def chains(self, starts: Sequence[int]) -> Calls:
        """For rows that are chains from these positions on, after `fill`. Positions that there are
        not are filler's: they become the last one there is."""
        positions, place, last = self.positions, 0, self.last
        for start in starts:
            for position in range(start, start + self.width):
                positions[place] = position
                place += 1
            if position > last:
                for beyond in range(place - (position - last), place):
                    positions[beyond] = last
        return self.chain

    def picked(
        self, starts: Sequence[int], column: Sequence[int], places: Sequence[Sequence[int]] = ()
    ) -> Mapping[str, torch.Tensor]:
        """Inputs for rows that are chains, after `fill`, with one column chosen of each. places:
        each row's positions, () where they follow one another."""
        self.chains(starts)
        for index, row in enumerate(places):
            begin = index * self.width
            self.positions[begin : begin + len(row)] = array("q", row)
        self.column[:] = array("q", column)
        return self.one_row

    def trees(self, starts: Sequence[int], drafts: Sequence[Draft]) -> Calls:
        """For trees, after `fill`: positions by depth, and who continues whom.

        A column that no node fills continues nothing: it sees the past and itself.
        """
        if not self.tree.inputs:
            ancestors = torch.empty(self.batch, self.width, self.width, dtype=torch.bool)
            self.tree = Calls(self.functions, {**self.chain.inputs, "ancestors": ancestors})
            self.seen, self.alone = ancestors.numpy(), np.eye(self.width, dtype=np.bool_)
        for index, (start, draft) in enumerate(zip(starts, drafts, strict=True)):
            shape = draft.shape
            depths, begin = shape.depths, index * self.width
            after = [start] * (self.width - 1 - len(depths))
            deep = [min(start + depth, self.last) for depth in depths]
            row = array("q", [start, *deep, *after])
            self.positions[begin : begin + self.width] = row
            if shape is not self.shapes[index]:
                size = len(depths) + 1
                self.seen[index] = self.alone
                self.seen[index, :size, :size] = shape.ancestors
                self.shapes[index] = shape
        return self.tree
