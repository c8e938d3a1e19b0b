"""Tokens beyond the vocabulary, with trained embeddings."""

from __future__ import annotations

import zlib

import torch
import torch.fx

from ...ir import (
    Function,
    PassError,
    Program,
    TensorType,
    Weight,
    arguments,
    derivation,
    derive,
    type_of,
)
from ...ir.rewrite.stored import values_of
from ..engine.functions import token_look_ups
from .trained import TrainedWeights

A = torch.ops.aten


def reading_prompts(
    fn: Function, program: Program, name: str, count: int, owner: str, weights: str
) -> Weight:
    """Let a function look up the ids V, V + 1, ... in a table of its own, f[count,H], in place.

    name: of the table, which knows nothing unless the file `weights` has it. Errors: `PassError`
    naming `owner` for functions that use tokens for more than looking them up in one table.
    """
    if name in program.weights:
        raise PassError(f"{owner}: the step drafts already")
    vocabulary = program.info.vocab_size
    looked_up = _lookup(fn, owner)
    tokens = fn.input("tokens")
    if looked_up.target is A.embedding.default:
        table = program.weights[str(arguments(looked_up)["weight"].target)]
    else:
        table = values_of(looked_up, program.weights)
    type = TensorType(type_of(looked_up).dtype, (count, *table.type.dims[1:]))
    fresh = derive(name, type, rows_like, table, count=count, seed=zlib.crc32(name.encode()))
    weight = TrainedWeights(weights, owner, program).of(fresh)
    with fn.graph.inserting_before(looked_up):
        ours = fn.call(A.ge.Scalar, tokens, vocabulary)
        ours = fn.call(A.unsqueeze.default, ours, -1)
        place = fn.call(A.sub.Tensor, tokens, vocabulary)
        place = fn.call(A.clamp.default, place, 0)
        trained = fn.call(A.embedding.default, fn.weight(weight), place)
        known = fn.call(A.clamp.default, tokens, 0, vocabulary - 1)
        looked_up.update_arg(looked_up.args.index(tokens), known)
    users = list(looked_up.users)
    with fn.graph.inserting_after(looked_up):
        either = fn.call(A.where.self, ours, trained, looked_up)
    for user in users:
        user.replace_input_with(looked_up, either)
    return weight


def clamped_tokens(fn: Function, vocabulary: int, owner: str) -> torch.fx.Node:
    """Let a function take ids beyond the vocabulary, whose embeddings are some of it, in place: the
    ids that are looked up. Errors: as `reading_prompts`."""
    looked_up, tokens = _lookup(fn, owner), fn.input("tokens")
    with fn.graph.inserting_before(looked_up):
        known = fn.call(A.clamp.default, tokens, 0, vocabulary - 1)
    looked_up.update_arg(looked_up.args.index(tokens), known)
    return known


def _lookup(fn: Function, owner: str) -> torch.fx.Node:
    """The one node that looks the tokens up."""
    users, found = list(fn.input("tokens").users), token_look_ups(fn)
    if users != found or len(found) != 1:
        raise PassError(
            f"{owner}: expected a step that uses its tokens to look them up in one "
            f"embedding table, got {', '.join(str(user.target) for user in users) or 'no use'}"
        )
    return found[0]


@derivation
def rows_like(rows: torch.Tensor, *, count: int, seed: int) -> torch.Tensor:
    """`count` random rows as large as those of a table [V,H] are."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, *rows.shape[1:], generator=generator)
    return (noise * rows.float().std()).to(rows.dtype)
