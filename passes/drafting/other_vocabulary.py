"""A model with tokens of its own becomes one that predicts the target's.

Of the tokens that both vocabularies have, D in all, the model's head keeps the rows, and what it
says of them is said of the target's ids. As IR (V tokens of the target)::

    %l: f32[B,S,D] = aten.linear(%state, @head.shared)       # rows @theirs of the head
    %p: i64[B,S,K] = embedding(@ours, ...)                   # ids of its best ones, the target's
    %a: f32[B,S,D+1] = cat([%l, absent], -1)
    %w: f32[B,S,V] = index_select(%a, -1, @places)           # what it lacks is all but impossible

So its distribution is that of the tokens of both, scaled to add up to 1, and verifiers, trees and
lengths see nothing but the target's tokens (Timor et al., "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.fx

from ...ir import (
    Function,
    InputError,
    PassError,
    Program,
    TensorType,
    Weight,
    derivation,
    derive,
)
from ...ir.plan.translated import TOKENIZER, tokenizer_of
from ...ir.support.spelling import Spelling, shared_tokens
from .draft_vocabulary import ABSENT
from .grafts import candidates, picked_rows
from .guest_step import other_tokens

A, G = torch.ops.aten, torch.ops.graftwork

Vocabulary = Literal["auto", "same", "shared", "text"]
"""Whose tokens a draft model's are: "same": the target's. "shared": others, and it predicts those
that both have. "text": others, and what it writes is encoded again. "auto": the first two, by what
the tokenizers are."""


Predicting = Callable[[Function, torch.fx.Node, int], Mapping[str, torch.fx.Node]]
"""What a draft function returns, by its logits, with so many best tokens."""


class SharedTokens(NamedTuple):
    """Tokens that a target and a model have, weights i64[D]: ids in either, the target's rising."""

    ours: Weight
    theirs: Weight


def which(program: Program, guest: Program, asked: Vocabulary, owner: str) -> Vocabulary:
    """What "auto" is. Errors: `PassError` naming `owner` for other tokens than were asked for, and
    for models without the tokenizers that others take."""
    if asked in ("auto", "same"):
        why = other_tokens(program, guest)
        if why and asked == "same":
            raise PassError(
                f"{owner}: {why}, and vocabulary=same; choose a model of the same family, or set "
                f"vocabulary=shared"
            )
        return "shared" if why else "same"
    without = [one.name for one in (program, guest) if TOKENIZER not in one.assets]
    if without:
        raise PassError(
            f"{owner}: vocabulary={asked} translates between two tokenizers, and "
            f"{' and '.join(without)} came without a {TOKENIZER}: give a checkpoint folder or "
            f".gguf file that has one"
        )
    return asked


def tokens_of_both(program: Program, guest: Program, owner: str) -> SharedTokens:
    """The tokens that a program and a guest have. Errors: `PassError` naming `owner` where there
    are none, and for tokenizers of which it is not known what their tokens write."""
    try:
        ours, theirs = (Spelling(one.assets[TOKENIZER]) for one in (program, guest))
    except InputError as error:
        raise PassError(
            f"{owner}: the tokenizers of {program.name} and {guest.name} differ, and of one it is "
            f"not known what its tokens write: {error}; choose a model of the same family"
        ) from error
    sizes = program.info.vocab_size, guest.info.vocab_size
    ids = shared_tokens(ours, theirs, sizes)
    if not ids[0]:
        raise PassError(
            f"{owner}: {program.name} and {guest.name} have no token in common, of {sizes[0]} and "
            f"{sizes[1]}: choose another model"
        )
    return SharedTokens(
        Weight.of("ours", torch.tensor(ids[0])), Weight.of("theirs", torch.tensor(ids[1]))
    )


def said_of(program: Program, guest: Program, shared: SharedTokens) -> str:
    """A remark."""
    return (
        f"{guest.name} has tokens of its own: of its {guest.info.vocab_size:,} and the "
        f"{program.info.vocab_size:,} of {program.name} {shared.ours.type.dims[0]} are the same"
    )


def with_words(
    program: Program, guest: Program, shared: SharedTokens, function: str
) -> tuple[Program, tuple[str, ...]]:
    """The program with what translates for a function that a guest has become: its tokenizer among
    the assets, and the shared tokens; and the names of these."""
    named = {f"{function}.{weight.name}": weight for weight in shared}
    more = [w.renamed(name) for name, w in named.items() if name not in program.weights]
    assets = {**program.assets, tokenizer_of(function): guest.assets[TOKENIZER]}
    return program.replace(assets=assets, weights=program.weights.adding(*more)), tuple(named)


def best(fn: Function, logits: torch.fx.Node, count: int) -> Mapping[str, torch.fx.Node]:
    """`Predicting` of best tokens alone."""
    found = candidates(fn, logits, count)
    return {name: found[name] for name in ("draft_tokens", "draft_scores")}


def predicting(guest: Program, shared: SharedTokens, vocab: int) -> tuple[Program, Predicting]:
    """The guest with logits [B,T,D] of the shared tokens, and what makes of them predictions of
    the target's `vocab` tokens."""
    ours = shared.ours
    places = derive("places", TensorType(torch.int64, (vocab,)), shared_places, ours, vocab=vocab)
    guest = guest.replace(weights=guest.weights.adding(*shared, places))

    def outputs(fn: Function, logits: torch.fx.Node, count: int) -> Mapping[str, torch.fx.Node]:
        found = candidates(fn, logits, count)
        table = fn.call(A.unsqueeze.default, fn.weight(ours), -1)
        tokens = fn.call(A.embedding.default, table, found["draft_tokens"])
        first = fn.call(A.slice.Tensor, logits, -1, 0, 1)
        whole = fn.call(A.cat.default, [logits, fn.call(A.full_like.default, first, ABSENT)], -1)
        return {
            **found,
            "draft_logits": fn.call(A.index_select.default, whole, -1, fn.weight(places)),
            "draft_tokens": fn.call(A.squeeze.dim, tokens, -1),
        }

    return _narrowed(guest, shared.theirs), outputs


def _narrowed(guest: Program, theirs: Weight) -> Program:
    """The guest with logits of some of its tokens."""
    fn, weights = guest.step.copy(), guest.weights
    logits, product = fn.outputs["logits"], _head(fn)
    if product is None:
        with fn.graph.inserting_before(fn.output_node):
            logits = fn.call(A.index_select.default, logits, -1, fn.weight(theirs))
        fn.set_outputs({**fn.outputs, "logits": logits})
        return guest.with_function(fn)
    for node in [n for n in product.all_input_nodes if n.op == "get_attr"]:
        whole = weights[str(node.target)]
        if whole.type.dims[:1] != (guest.info.vocab_size,):
            continue
        type = TensorType(whole.type.dtype, (*theirs.type.dims, *whole.type.dims[1:]))
        some = derive(f"{whole.name}.shared", type, picked_rows, whole, theirs)
        weights = weights.adding(some)
        with fn.graph.inserting_before(product):
            product.replace_input_with(node, fn.weight(some))
    fn.retype()
    return guest.with_function(fn, weights=weights)


def _head(fn: Function) -> torch.fx.Node | None:
    """The product that makes a step's logits, if each of them is made of one of its rows alone."""
    node = fn.outputs["logits"]
    while node.target not in (A.linear.default, G.quantized_linear.default):
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if not pointwise or len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    inner = [given for given in node.all_input_nodes if given.op != "get_attr"]
    return node if len(inner) == 1 else None


@derivation
def shared_places(ours: torch.Tensor, *, vocab: int) -> torch.Tensor:
    """The place of each of `vocab` tokens among the ids i64[D], or D for none, i64[V]."""
    places = torch.full((vocab,), len(ours))
    return places.index_copy(0, ours, torch.arange(len(ours)))
