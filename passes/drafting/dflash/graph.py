"""Draft a block of tokens in one call, with layers that read the target's features (DFlash).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After, with a layer of five shown (masks=7, depth=5)::

    func step(tokens: ..., positions: ...) -> logits f32[B,T,V], hidden.2.4.5.7.9.joined f32[B,T,5H]
    func dflash_entry(hidden: f32[B,T,5H]) -> hidden f32[B,T,H]
    func dflash(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ... {
      %c: bool[B,T,1] = aten.unsqueeze(aten.ge.Scalar(%tokens, V + 1), -1)
      %x: f32[B,T,H] = ...                    the target's embedding, or @dflash.mask for the id V
      %n: f32[B,T,H] = graftwork.rms_norm(%x, @dflash.layers.0.input_layernorm.weight, eps=1e-06)
      %r: f32[B,T,H] = aten.where.self(%c, %hidden, %n)
      %y: f32[B,H,T,D] = graftwork.attention(q(%n), k(%r), v(%r), layer=8, scale=0.125)
    decode {
      draft = block(function="dflash", output="hidden.2.4.5.7.9.joined", levels=7, ...)

The states after some of the target's layers, as many as the draft has, evenly spread, go through
one linear layer and a norm, once for each committed token; every draft layer makes its keys and
values of that, so what the target knows of a text is injected into each of them, and no draft state
of the text exists. The last token and `masks` mask tokens behind it are a block: each sees the
text's rows and the whole block, before and behind, and what the final norm and the target's head
make of a mask token is the guess for its own place (Chen et al., "DFlash: Block Diffusion for Flash
Speculative Decoding", 2026). Layers are Qwen3's in the target's proportions. `weights` may also be
a published draft (``fc``, ``hidden_norm``, ``layers.i.*``, ``norm``) as safetensors; `token` is
then the id that it reads as a mask. Refuses what `draft_eagle` refuses, layers that the target does
not have, ids that are no token, published tensors that do not fit, by name, and a config.json
beside them that says other layers, taps or another mask.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ....ir import PassError, Program
from ....ir.plan.bounds import Levels, Place
from ...engine.base import Outcome
from ...policies import builds
from ..decoder_layer import LayerShape, angles_at, decoder_layer
from ..draft_pass import DraftHeadPass
from ..grafts import Graft
from . import BlockDraft

A = torch.ops.aten
NAME, ENTRY, MASK = "dflash", "dflash_entry", "dflash.mask"


@builds(BlockDraft, "levels", "rollout", "token", decay=0.7788)
class DraftDflash(DraftHeadPass):
    """masks: tokens drafted, a block's but for its first. depth: draft layers. layers: of the
    target, whose outputs are read; none given: as many as `depth`, evenly spread from the second to
    the third last. token: the id that is a mask; none: a new one beyond the vocabulary. decay:
    exp(-1 / 4), as the paper has it for blocks of eight. The rest: see `DraftHeadPass` and the
    record."""

    masks: Levels = 7
    depth: Levels = 5
    layers: tuple[int, ...] = ()
    token: Place | None = None

    name: ClassVar[str] = "draft_dflash"

    def insert(self, program: Program) -> Outcome:
        if self.token is not None and self.token >= program.info.vocab_size:
            raise PassError(
                f"{self.name}: token={self.token} is no token: {program.name} has "
                f"{program.info.vocab_size}"
            )
        program, output = self._entry(program)
        graft = self.graft(program, NAME)
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        tokens, positions, hidden = graft.text_inputs()
        x = self._block(graft, tokens)
        text = graft.call(A.ge.Scalar, tokens, graft.vocab + 1)
        text = graft.call(A.unsqueeze.default, text, -1)
        angles = angles_at(graft, positions, shape.dim)
        for index in range(self.depth):
            layer = f"{NAME}.layers.{index}"
            normed = graft.rms_norm(x, f"{layer}.input_layernorm", shape.eps)
            x = decoder_layer(
                graft,
                x,
                angles,
                layer,
                shape,
                source=normed,
                rows=graft.call(A.where.self, text, hidden, normed),
                head_norms=True,
            )
        logits = graft.head(graft.rms_norm(x, f"{NAME}.norm", shape.eps))
        outputs = graft.picked(x, graft.candidates(logits, self.candidates))
        draft = self.made(
            function=NAME,
            output=output,
            levels=self.masks,
            entry=ENTRY,
            token=graft.vocab if self.token is None else self.token,
            blank=graft.vocab + 1,
            weight=MASK if self.token is None else None,
        )
        return Outcome(graft.drafted(outputs, draft), 1)

    def _entry(self, program: Program) -> tuple[Program, str]:
        """The features' layer and norm, a function of its own, and the step's output it takes."""
        graft = self.graft(program, ENTRY)
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        layers = self._layers(graft)
        # An input of the layer after: states are called by what reads them.
        output = graft.tap_inputs([layer + 1 for layer in layers])
        given = graft.trained
        own = given.config.get("dflash_config") or {}
        if not isinstance(own, dict):
            raise PassError(
                f"{self.name}: config.json: dflash_config: expected an object, got {own!r}"
            )
        given.config |= own
        given.check_config(
            target_layer_ids=list(layers), num_hidden_layers=self.depth, mask_token_id=self.token
        )
        hidden = graft.input("hidden", len(layers) * graft.hidden)
        joined = graft.linear(hidden, f"{NAME}.fc", graft.hidden, bias=False)
        normed = graft.rms_norm(joined, f"{NAME}.hidden_norm", shape.eps)
        return graft.done({"hidden": normed}), output

    def _layers(self, graft: Graft) -> tuple[int, ...]:
        """The layers whose outputs are read."""
        have = list(graft.blocks)
        if not self.layers:
            return spread(have, self.depth)
        graft.check_layers(self.layers, have, "layers of the target")
        return self.layers

    def _block(self, graft: Graft, tokens: torch.fx.Node) -> torch.fx.Node:
        """The embeddings [B,T,H] of a block's tokens, masks among them."""
        known = graft.call(A.clamp.default, tokens, 0, graft.vocab - 1)
        embedded = graft.embed(known)
        if self.token is not None:
            return embedded
        masked = graft.call(A.eq.Scalar, tokens, graft.vocab)
        masked = graft.call(A.unsqueeze.default, masked, -1)
        mask = graft.parameter(MASK, 1, graft.hidden)
        return graft.call(A.where.self, masked, mask, embedded)


def spread(have: list[int], count: int) -> tuple[int, ...]:
    """`count` layers, evenly from the second to the third last; the middle one for one; of three
    or fewer layers, all."""
    last = len(have) - 3
    if last < 1:
        return tuple(have)
    if count == 1:
        return (have[len(have) // 2],)
    places = {round(1 + i * (last - 1) / (count - 1)) for i in range(count)}
    return tuple(have[place] for place in sorted(places))
