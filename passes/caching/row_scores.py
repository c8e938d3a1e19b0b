"""What tells rows of a cache apart: the scores by which `evict_cache` keeps some of them.

A method is a class: what it must know beyond keys, and the nodes that make a layer's scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.fx

from ...ir import Function, TensorType, type_of

A, G = torch.ops.aten, torch.ops.graftwork


@dataclass
class Layer:
    """One layer in the function that evicts.

    keys: f[B,G,C,D] and values f[B,G,C,E], the rows; past: i64[B] of them are valid. queries:
    f[B,H,W,D] of the last `block` rows, and sums f32[B,G,C,1], where the method wants them. kept:
    the first `sinks` and the last `recent` rows are kept in any case. options: `scale` and
    `softcap` of the layer's attention. rotation: the tables of what rotates queries, and
    `interleaved`, where the method looks `ahead`. opening: the first queries f[B,H,P,D], turned to
    the end, where the method asks them. summed: what the sums have become.
    """

    fn: Function
    keys: torch.fx.Node
    values: torch.fx.Node
    past: torch.fx.Node
    block: int
    sinks: int
    recent: int
    ahead: int
    queries: torch.fx.Node | None = None
    sums: torch.fx.Node | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rotation: tuple[torch.fx.Node | None, torch.fx.Node | None, bool] = (None, None, False)
    opening: torch.fx.Node | None = None
    summed: torch.fx.Node | None = None

    def attention(self, last: int) -> torch.fx.Node:
        """What the last `last` queries gave to each row: f32[B,G,C], their mean."""
        return self.given(self.queries, self.block, last)

    def given(self, queries: torch.fx.Node | None, block: int, last: int) -> torch.fx.Node:
        """What the last `last` of `block` queries, which stand for as many last rows, would give
        to each row: f32[B,G,C], their mean."""
        return self.fn.call(
            G.row_attention.default,
            queries,
            self.keys,
            self.past,
            block=block,
            last=last,
            **self.options,
        )

    def ranked(self, attention: torch.fx.Node, pool: int = 1, recent: int = 0) -> torch.fx.Node:
        """Scores of attention."""
        call = G.row_scores_attention.default
        return self.fn.call(call, attention, self.past, pool=pool, recent=recent)


class RowScores(ABC):
    """A way to score rows.

    queries: whether it needs those of the last block. looks_ahead: whether it turns them to where
    the text goes on. opening: whether it asks those of the text's first tokens. sums: whether it
    adds up over the whole text what rows were worth. softcap: whether it can weigh rows whose
    products are bounded. sinks, recent: rows at the start and the end that are kept in any case; a
    share of the budget below 1.
    """

    queries: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    opening: ClassVar[bool] = False
    softcap: ClassVar[bool] = True
    sums: ClassVar[bool] = False
    sinks: ClassVar[int] = 0
    recent: ClassVar[float] = 0

    @abstractmethod
    def scores(self, layer: Layer) -> torch.fx.Node:
        """f32[B,G,C], whole numbers: the higher, the more a row counts."""


SCORES: dict[str, RowScores] = {}
R = TypeVar("R", bound=type[RowScores])


def method(name: str) -> Any:
    """Decorator: the class is the method of that name."""

    def enter(cls: R) -> R:
        SCORES[name] = cls()
        return cls

    return enter


@method("window")
class Window(RowScores):
    """The first rows and the latest. Source: Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks" (2024): 4 sinks."""

    sinks = 4

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`."""
        return layer.fn.call(G.row_scores_age.default, layer.keys)


@method("norm")
class Norm(RowScores):
    """Rows with small keys. Source: Devoto et al. (2024), see `row_scores_norm`."""

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`."""
        return layer.fn.call(G.row_scores_norm.default, layer.keys)


@method("keydiff")
class KeyDiff(RowScores):
    """Rows whose keys are unlike the others. Source: Park et al. (2025), `row_scores_keydiff`."""

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`."""
        return layer.fn.call(G.row_scores_keydiff.default, layer.keys, layer.past)


@method("tova")
class Tova(RowScores):
    """Rows that the last query looks at, all heads of a layer alike. Source: Oren et al.,
    "Transformers are Multi-State RNNs" (2024)."""

    queries = True

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`: the mean over all heads is that over the groups' means."""
        attention = layer.attention(last=1)
        mean = layer.fn.call(A.mean.dim, attention, [1], True)
        same = layer.fn.call(A.expand.default, mean, list(type_of(attention).dims))
        return layer.ranked(same)


@method("snapkv")
class SnapKv(RowScores):
    """Rows that the last queries look at, or near which they do; those queries' own rows stay.
    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024): pooled
    over 5 rows."""

    queries = True
    recent = 32

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`."""
        return layer.ranked(layer.attention(last=layer.recent), pool=5, recent=layer.recent)


@method("h2o")
class HeavyHitters(RowScores):
    """Rows that all queries so far looked at, half of the budget; the latest rows are the rest.
    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models" (2023)."""

    queries = True
    sums = True
    recent = 0.5

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`: the block's queries add to what rows were given before."""
        fn, attention = layer.fn, layer.attention(last=layer.block)
        sums = fn.call(G.row_sums.default, layer.sums, attention, layer.past, count=layer.block)
        layer.summed = sums
        return layer.ranked(fn.call(A.squeeze.dim, sums, -1))


@method("expected")
class Expected(RowScores):
    """Rows that queries to come are expected to look at, by how long their values are. Source:
    Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution" (2025)."""

    queries = True
    looks_ahead = True
    softcap = False
    sinks = 4

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`."""
        fn, (cos, sin, interleaved) = layer.fn, layer.rotation
        how: dict[str, Any] = {"block": layer.block, "ahead": layer.ahead}
        how["interleaved"] = interleaved
        queries = fn.call(G.expected_queries.default, layer.queries, cos, sin, **how)
        given = fn.call(
            G.expected_attention.default,
            *(queries, layer.keys, layer.values, layer.past),
            sinks=layer.sinks,
            scale=layer.options["scale"],
        )
        return layer.ranked(given)


@method("opening")
class Opening(RowScores):
    """Rows that the text's first tokens would look at, were they said again at its end. Source: Bai
    et al., "CItruS: Chunked Instruction-aware State Eviction for Long Sequence Modeling" (2024)."""

    queries = True
    opening = True
    recent = 32

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`."""
        assert layer.opening is not None
        count = int(str(type_of(layer.opening).dims[2]))
        return layer.ranked(layer.given(layer.opening, count, count))


@method("probe")
class Probe(RowScores):
    """Rows that one query looks at which stands for those of the last block, each weighing as much
    as it is unlike their mean. Source: Xiao et al., "Activation-aware Probe-Query: Effective
    Key-Value Retrieval for Long-Context LLMs Inference" (2025)."""

    queries = True
    sinks = 4
    recent = 32

    def scores(self, layer: Layer) -> torch.fx.Node:
        """See `RowScores.scores`."""
        probe = layer.fn.call(G.probe_query.default, layer.queries, block=layer.block)
        return layer.ranked(layer.given(probe, 1, 1), recent=layer.recent)


def sum_type(keys: TensorType) -> TensorType:
    """The type of the sums of a layer with such keys."""
    return TensorType(torch.float32, (*keys.dims[:3], 1))
