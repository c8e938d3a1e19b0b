"""Attention and experts as transformers' own registries let us define them.

A model whose configuration says ``graftwork`` calls these functions in place of its attention, its
mask builders and its experts. Masks are not built: the mask function returns what the mask *means*
(`MaskKind`), the model hands that through to attention, and the op states it. So the sliding window
of every layer is the one that the model's mask would have had, however its configuration spells it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ir import UnsupportedError
from ...ir.ops.attention import SPANS
from .. import source_attention  # noqa: F401  (defines traced_attention)
from .experts import experts_forward
from .lengths import context_of

NAME = "graftwork"

_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)
"""Keyword arguments of attention functions that do not change what the op computes here."""


_SOURCES: ContextVar[bool] = ContextVar("_SOURCES", default=False)
"""Whether what is traced reads a source, all of which every token may see."""


@contextlib.contextmanager
def reading_sources() -> Iterator[None]:
    """Inside, this thread traces models whose attention may be to a source."""
    before = _SOURCES.set(True)
    try:
        yield
    finally:
        _SOURCES.reset(before)


@dataclass(frozen=True)
class MaskKind:
    """What a mask lets a token see. window: of the last so many tokens, None for all.

    chunk: only of those of its own chunk of so many. causal: whether later tokens are hidden.
    Decoders that may read a source make a mask for it that is not, and use it only where there is
    a source.
    """

    window: int | None = None
    chunk: int | None = None
    causal: bool = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model computes with its attention mask (its {name}), so attention is not plain"
        )


def mask_kind(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskKind:
    """Registered as a mask builder: reads the rules of a mask off transformers' mask function."""
    return MaskKind(**dict(_rules(mask_function)))


def _rules(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The elementary rules that a mask function demands together."""
    name = function.__qualname__.partition(".")[0]
    captured = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    numbers = [value for value in captured if isinstance(value, int)]
    if name == "causal_mask_function":
        return [("causal", True)]
    if name == "bidirectional_mask_function":
        return [("causal", False)]
    if name == "sliding_window_overlay" and len(numbers) == 1:
        return [("window", numbers[0])]
    if name == "chunked_overlay" and len(numbers) == 1:
        return [("chunk", numbers[0])]
    if name == "and_masks" and len(captured) == 1:
        return [rule for part in captured[0] for rule in _rules(part)]
    raise UnsupportedError(
        f"the attention mask {function.__qualname__} is not supported yet; expected a causal mask, "
        "possibly with a sliding window or in chunks"
    )


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskKind | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Registered as an attention function: one ``graftwork.attention``, or one `traced_attention`
    where it goes to a source or has a bias.

    query [B,H,T,D], key [B,G,N,D], value [B,G,N,E], s_aux (sinks) [H], position_bias [B,H,T,N]; the
    result is [B,T,H,E]. Errors: `UnsupportedError` naming an argument that would change the result,
    or the mask.
    """
    given = [name for name, item in kwargs.items() if item is not None]
    unknown = sorted(set(given) - _HARMLESS)
    if unknown:
        raise UnsupportedError(f"attention with the argument {unknown[0]!r} is not supported yet")
    kind = MaskKind(causal=getattr(module, "is_causal", True))
    if attention_mask is not None:
        kind = attention_mask
    if not isinstance(kind, MaskKind):
        raise UnsupportedError("the model changes its attention mask before attention uses it")
    if not kind.causal and not _SOURCES.get():
        raise UnsupportedError(
            "attention to later tokens is not supported: expected a causal mask, got one that "
            "hides nothing (bidirectional_mask_function, is_causal=False)"
        )
    spans = {name: getattr(kind, name) for name in SPANS}
    options: dict[str, Any] = {name: size for name, size in spans.items() if size is not None}
    if "chunk" in options and options["chunk"] >= context_of(module.config):
        options.pop("chunk", None)  # there is one alone
    if softcap is not None:
        options["softcap"] = float(softcap)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    how: dict[str, Any] = {"layer": 0, "scale": scale}  # numbered in the program
    if kind.causal and position_bias is None:
        out = torch.ops.graftwork.attention(query, key, value, s_aux, **how, **options)
    elif options or s_aux is not None:
        raise UnsupportedError(
            f"attention with {next(iter(options), 'sinks')} and a bias, or to a source, is not "
            "supported yet"
        )
    else:
        traced = torch.ops.graftwork.traced_attention
        out = traced(query, key, value, position_bias, causal=kind.causal, **how)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the name known to transformers. Safe to repeat."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_kind)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


@contextlib.contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Keep transformers from looking for several sequences packed into one row of positions.

    Its search is arithmetic on positions that would end up in every trace. Other threads may be
    using models meanwhile: for them it goes on.
    """
    from transformers import masking_utils

    search, here = masking_utils.find_packed_sequence_indices, threading.get_ident()

    def only_elsewhere(position_ids: Any) -> Any:
        return None if threading.get_ident() == here else search(position_ids)

    masking_utils.find_packed_sequence_indices = only_elsewhere
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search
