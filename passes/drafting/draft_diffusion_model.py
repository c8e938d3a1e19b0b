"""Draft with a masked language model, or masked diffusion model, that reads the text both ways.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path", levels=8, steps=2)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func draft(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S])
        -> draft_logits f32[B,S,V], draft_tokens i64[B,S,10], draft_scores f32[B,S,10]
    decode {
      draft = diffusion(function="draft", levels=8, steps=2, token=..., window=256, ...)

The last `window` tokens of the text and a block of masks behind them are fed together, all of which
see each other; the block is denoised in `steps` calls (Christopher et al., "Speculative Diffusion
Decoding", 2024; Li et al., "DiffuSpec", 2025, drafts with Dream in one). So the guest's attention
to all tokens becomes attention to what it is told to see::

    %y = graftwork.source_attention(%q, %k, %v, %lengths, layer=0, scale=0.125)
    %y = graftwork.attention(%q, %k, %v, layer=6, scale=0.125)

with a cache that holds one call's tokens and nothing of the text, because every row changes with
what is said behind it. A mask is no token of a text, so it is never predicted::

    %logits = aten.add.Tensor(%logits, @draft.mask.never)

Which id is the mask, the model's files say, or `token`. The path is traced by whoever starts the
passes (`Program.guests`). Refuses what `draft_model` refuses of other models and vocabularies, a
model that hides later tokens, one that says no mask, a window with the masks beyond its positions,
and more steps than levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from ...ir import PassError, Program, Role, TensorType, arguments, derivation, derive, type_of
from ...ir.plan.bounds import Nodes, Place
from ...ir.plan.translated import TOKENIZER
from ...ir.rewrite.cleanup import sweep
from ...ir.support.files import read_json
from ...ir.support.tokenizer import read_tokenizer
from ..engine.base import Effect, Outcome
from ..engine.plan_edits import with_draft
from ..policies import RecordPass, builds
from .diffusion import DiffusionDraft
from .draft_model import NAME, as_draft
from .guest_step import guest_of, tokenizer_remarks, with_step_of

A, G = torch.ops.aten, torch.ops.graftwork
EARLY = ("dream",)
"""Models that predict a place's token one place before it, as what they were made from did."""


@builds(DiffusionDraft, "rollout", "decay", "aim", "token")
class DraftDiffusionModel(RecordPass):
    """model: the draft, a checkpoint folder. window: tokens of the text that it reads. token: the
    id that is a mask; none: as its files say. early: whether a place's token is predicted one place
    before it; none: as models of its kind do. candidates: best tokens that it returns. The rest:
    see the record."""

    model: str = ""
    window: Nodes = 256
    token: Place | None = None
    early: bool | None = None
    candidates: Nodes = 10

    name: ClassVar[str] = "draft_diffusion_model"
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    @property
    def models_are(self) -> Literal["masked"]:
        return "masked"

    def run(self, program: Program) -> Outcome:
        beside = program.guests.get(self.model)
        token = 0 if beside is None else self._mask(beside)
        guest = self._told_what_to_see(guest_of(program, self.model, self.name, NAME))
        early = guest.info.model_type in EARLY if self.early is None else self.early
        filled = {"window": self.window, "early": early, "trained": True, "aim": "distribution"}
        draft = self.made(function=NAME, token=token, **filled)
        most = guest.info.context
        if self.window + draft.levels > most:
            raise PassError(
                f"{self.name}: window={self.window} and levels={draft.levels} are more than the "
                f"{most} positions of {guest.name}: give a shorter window"
            )
        guest = as_draft(_never(guest, token), self.candidates)
        merged = with_step_of(program, guest, self.model, NAME, Role.DRAFT)
        return Outcome(with_draft(merged, draft), 1, remarks=tokenizer_remarks(program, guest))

    def _told_what_to_see(self, guest: Program) -> Program:
        """The guest with attention that a call says what to see of."""
        fn = guest.step.copy()
        found = fn.calls(G.source_attention.default)
        if not found or fn.calls(G.attention.default):
            raise PassError(
                f"{self.name}: {guest.name} hides later tokens: expected a masked language model, "
                f"which reads both ways; one that writes from left to right drafts by draft_model"
            )
        for node in found:
            given = arguments(node)
            options = {name: given[name] for name in ("layer", "scale")}
            if given["distances"] is not None or given["softcap"] is not None:
                raise PassError(
                    f"{self.name}: {guest.name} has attention with a bias or a bound on scores: "
                    f"not supported yet"
                )
            with fn.graph.inserting_before(node):
                qkv = [given[name] for name in "qkv"]
                seen = fn.call(G.attention.default, *qkv, **options)
            node.replace_all_uses_with(seen)
            fn.graph.erase_node(node)
        fn.graph.erase_node(fn.input("lengths"))
        sweep(fn)
        return guest.with_function(fn)

    def _mask(self, guest: Program) -> int:
        """The id that the guest reads as a mask. Errors: `PassError` where nothing says one."""
        token = mask_of(guest.assets) if self.token is None else self.token
        if token is None:
            raise PassError(
                f"{self.name}: neither config.json nor the tokenizer's files of {guest.name} say "
                f"what its mask is: set {self.name}.token to the id"
            )
        if not 0 <= token < guest.info.vocab_size:
            raise PassError(
                f"{self.name}: the mask {token} is no token: {guest.name} has "
                f"{guest.info.vocab_size}"
            )
        return token


def mask_of(files: Any) -> int | None:
    """The id of a model's mask, by its files: config.json's mask_token_id, or what the tokenizer's
    call mask_token; None: they say none."""
    said = _object(files.get("config.json")).get("mask_token_id")
    if isinstance(said, int) and not isinstance(said, bool):
        return said
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object(files.get(name)).get("mask_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and TOKENIZER in files:
            return read_tokenizer(files[TOKENIZER]).token_to_id(token)
    return None


def _object(path: Path | None) -> dict[str, Any]:
    """What a file says, if it is an object."""
    said = {} if path is None else read_json(path)
    return said if isinstance(said, dict) else {}


def _never(guest: Program, token: int) -> Program:
    """The guest, which never predicts this id."""
    fn, size = guest.step.copy(), guest.info.vocab_size
    if token >= size:
        return guest
    logits = fn.outputs["logits"]
    dtype = type_of(logits).dtype
    options = {"size": size, "token": token, "dtype": dtype}
    weight = derive("mask.never", TensorType(dtype, (size,)), never, **options)
    with fn.graph.inserting_before(fn.output_node):
        logits = fn.call(A.add.Tensor, logits, fn.weight(weight))
    fn.set_outputs({**fn.outputs, "logits": logits})
    return guest.with_function(fn, weights=guest.weights.adding(weight))


@derivation
def never(*, size: int, token: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to logits [size] so that this id is never the best."""
    found = torch.zeros(size, dtype=dtype)
    found[token] = torch.finfo(dtype).min / 2
    return found
