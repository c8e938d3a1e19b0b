"""Another model's reading of the source, taken into the function that reads it for the program.

Before::

    func encode(tokens: i64[B,T], positions, lengths) -> cross.0.key f32[B,H,T,D], ...

After, with a guest that becomes the function ``draft`` and whose layers are called 6 and on::

    func encode(tokens: i64[B,T], positions, lengths) -> cross.0.key, ..., cross.6.key, ...
    func draft(tokens, positions, lengths, cross.6.key: f32[B,H,N,D], ...) -> ...

So one call reads a source for both, and what steps look at of it are states like any others. What
both compute alike is computed once: a small model that was distilled from the program's own often
kept its encoder (Xia et al., "Speculative Decoding: Exploiting Speculative Execution for
Accelerating Seq2seq Generation", 2023, draft with a model of their own; Gandhi et al., "Distil-
Whisper: Robust Knowledge Distillation via Large-Scale Pseudo Labelling", 2023, keep it).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx

from ...ir import Function, PassError, Program, Weight, arguments, type_of
from ...ir.plan import Encoded
from ...ir.rewrite.cleanup import merge_equal

G = torch.ops.graftwork


def check_source(program: Program, guest: Program, owner: str) -> None:
    """That a guest which writes from a source can be given the program's.

    Errors: `PassError` naming `owner` where there is none, and for one of another kind.
    """
    theirs, ours = guest.plan.source, program.plan.source
    if theirs.encoder is None:
        return
    if ours.encoder is None:
        raise PassError(
            f"{owner}: {guest.name} writes from a source, and {program.name} has none that it "
            "could read; choose a decoder-only model"
        )
    reads, given = _what_it_reads(guest), _what_it_reads(program)
    if reads != given:
        raise PassError(
            f"{owner}: {guest.name} reads {reads}, and {program.name} reads {given}: one source "
            "must serve both; choose a model of the same family"
        )


def _what_it_reads(program: Program) -> str:
    """The source of a program, for people."""
    source = program.plan.source
    assert isinstance(source, Encoded)
    encode = program.function(source.function)
    if encode.has_input("features"):
        return f"features {type_of(encode.input('features'))}"
    return f"texts of a vocabulary of {source.vocabulary} tokens"


def with_encoder_of(program: Program, guest: Program, name: str, first: int) -> Program:
    """The program whose encoder does what the guest's does, too.

    name: that of the guest's step, which the program has already, and what its weights' names begin
    with. first: the number of its first layer there. A source may have as many rows as both allow.
    """
    ours, theirs = program.plan.source, guest.plan.source
    assert isinstance(ours, Encoded) and isinstance(theirs, Encoded)
    merged = _Merged(program, guest, name)
    made = merged.copied(guest.function(theirs.function))
    merged.fn.set_outputs(
        {**merged.fn.outputs, **{_numbered(key, first): node for key, node in made.items()}}
    )
    merge_equal(merged.fn)
    source = replace(ours, most=min(ours.most, theirs.most))
    weights = program.weights.adding(*merged.weights.values())
    program = program.replace(plan=replace(program.plan, source=source))
    return program.with_function(merged.fn, weights=weights)


def renumber_sources(fn: Function, first: int) -> None:
    """Have a guest's step read what `with_encoder_of` makes for it; edits the function."""
    read: set[torch.fx.Node] = set()
    for node in fn.calls(G.source_attention.default):
        given = arguments(node)
        read |= {given["k"], given["v"]}
        node.kwargs = {**node.kwargs, "layer": first + int(given["layer"])}
    for made in read:
        made.target = _numbered(str(made.target), first)


def _numbered(name: str, first: int) -> str:
    """``cross.0.key`` as that of a layer which counts from `first`."""
    cross, layer, part = name.split(".")
    return f"{cross}.{first + int(layer)}.{part}"


class _Merged:
    """A copy of the program's encoder that nodes of a guest's are added to."""

    def __init__(self, program: Program, guest: Program, name: str) -> None:
        self.program, self.guest, self.name = program, guest, name
        self.fn = program.function(program.plan.source.encoder or "").copy()
        self.weights: dict[str, Weight] = {}

    def copied(self, encode: Function) -> dict[str, torch.fx.Node]:
        """What the guest's encoder makes, computed here."""
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in encode.inputs:
            name = str(node.target)
            known = self.fn.has_input(name)
            copies[node] = self.fn.input(name) if known else self.fn.add_input(name, type_of(node))
        with self.fn.graph.inserting_before(self.fn.output_node):
            for node in encode:
                if node.op == "get_attr":
                    copies[node] = self.fn.weight(self._weight(str(node.target)))
                elif node.op == "call_function":
                    copies[node] = self.fn.graph.node_copy(node, lambda n: copies[n])
        return {name: copies[node] for name, node in encode.outputs.items()}

    def _weight(self, name: str) -> Weight:
        """A weight of the guest: the program's own where that holds the same numbers."""
        theirs = self.guest.weights[name]
        if name in self.program.weights:
            ours = self.program.weights[name]
            if ours.type == theirs.type and torch.equal(ours.load(), theirs.load()):
                return ours
        own = theirs.renamed(f"{self.name}.{name}")
        if own.name in self.program.weights:
            return self.program.weights[own.name]  # the step has it, too
        return self.weights.setdefault(own.name, own)
