"""Draft with a layer of its own that reads three layers of the target (EAGLE-3).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After, in a model of eight layers::

    func step(tokens: ..., positions: ...) -> logits f32[B,T,V], hidden.2.4.5.joined f32[B,T,3H]
    func eagle3_entry(hidden: f32[B,T,3H]) -> hidden f32[B,T,H]
    func eagle3(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    decode {
      draft = cached(function="eagle3", output="hidden.2.4.5.joined", entry="eagle3_entry", ...)

The inputs of layers 2, L / 2 and L - 3 go through a linear layer 3H -> H, once for each committed
token. A decoder layer whose attention reads [norm(e); norm(h)], e the embedding of the token after
it, makes the next state; its norm goes to a head of its own, over all tokens or a draft vocabulary,
and below the first level of a tree the state itself stands in for the target's features: nothing
makes it resemble them, training only asks for the right tokens several levels down (Li et al.,
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025).
`weights` may also be a published draft (``midlayer.*``, or vLLM's ``speculators`` with
``layers.0.*``), as safetensors. Refuses what `draft_eagle` refuses, a draft vocabulary that is not
part of the target's, and published tensors that do not fit, by name.
"""

from __future__ import annotations

from typing import ClassVar

from ...ir import Program
from ...ir.plan import CachedDraft
from ...ir.plan.bounds import Levels
from ..engine.base import Outcome
from ..policies import builds
from .decoder_layer import LayerShape, angles_at, decoder_layer
from .draft_pass import DraftHeadPass
from .grafts import Graft
from .trained import as_published


@builds(CachedDraft, "rollout", aim="distribution")
class DraftEagle3(DraftHeadPass):
    """layers: whose inputs are read (the number of layers:
    the last one's output); none given: 2, L / 2, L - 3, as far as there are so many.
    norm_before_residual: whether the layer adds to normed states. rollout: levels on its own states
    in training; each costs more than the one before (the paper has 7). The rest: see
    `DraftHeadPass` and the record."""

    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    rollout: Levels = 3

    name: ClassVar[str] = "draft_eagle3"
    # They repeat the target's, or each other.
    unread: ClassVar[tuple[str, ...]] = (
        "embed_tokens.weight",
        "t2d",
        "d2t",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    )

    def insert(self, program: Program) -> Outcome:
        program, output = self._entry(program)
        graft = self.graft(program, "eagle3")
        graft.trained.check_config(
            norm_before_residual=self.norm_before_residual,
            eagle_aux_hidden_state_layer_ids=list(self._layers(graft)),
            norm_before_fc=False,
            fc_norm=False,
            norm_output=False,
        )
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        tokens, positions, hidden = graft.text_inputs()
        layer = "eagle3.midlayer"
        embedded = graft.embed(tokens)
        first = graft.rms_norm(embedded, f"{layer}.input_layernorm", shape.eps)
        normed = graft.rms_norm(hidden, f"{layer}.hidden_norm", shape.eps)
        x = decoder_layer(
            graft,
            normed if self.norm_before_residual else hidden,
            angles_at(graft, positions, shape.dim),
            layer,
            shape,
            source=graft.concat(first, normed),
        )
        last = graft.rms_norm(x, "eagle3.norm", shape.eps)
        logits = graft.head(last, "eagle3.lm_head.weight")
        outputs = graft.picked(x, graft.candidates(logits, self.candidates))
        draft = self.made(
            function="eagle3",
            output=output,
            entry="eagle3_entry",
            rollout=self.rollout,
        )
        return Outcome(graft.drafted(outputs, draft), 1)

    def published(self, name: str) -> tuple[str, ...]:
        """Without our prefix; in vLLM's layout the layer has another name."""
        (bare,) = as_published(name)
        return bare, bare.replace("midlayer.", "layers.0.")

    def _entry(self, program: Program) -> tuple[Program, str]:
        """The linear layer, a function of its own, and the step's output that it takes."""
        graft = self.graft(program, "eagle3_entry")
        layers = self._layers(graft)
        output = graft.tap_inputs(layers)
        hidden = graft.input("hidden", len(layers) * graft.hidden)
        joined = graft.linear(hidden, "eagle3.fc", graft.hidden, bias=False)
        return graft.done({"hidden": joined}), output

    def _layers(self, graft: Graft) -> tuple[int, ...]:
        fed = [layer + 1 for layer in graft.blocks]
        most = len(fed)
        if not self.layers:
            return tuple(sorted({fed[min(max(n, 1), most) - 1] for n in (2, most // 2, most - 3)}))
        graft.check_layers(self.layers, fed, "layers whose inputs other layers made")
        return self.layers
