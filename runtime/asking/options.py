"""What a user may ask of `generate`: transformers' keyword names, validated up front."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Protocol, get_type_hints

import torch

from ...ir import Defaults, InputError, ModelInfo, TensorType
from ...ir.plan.defaults import NEUTRAL
from . import checks
from .checks import OF_MODEL, Check, FromModel, Hook

MOST_SEED = 2**64 - 1
"""The largest that torch takes."""

DEFAULT_NEW_TOKENS = 20
"""What transformers generates when no length is given."""

IDLE: dict[str, tuple[object, ...]] = {
    **NEUTRAL,
    "use_cache": (True,),
    "length_penalty": (1.0,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}
"""Keywords that are not supported, and the values at which they ask for nothing."""

FACTS = frozenset({"transformers_version", "_from_model_config", "bos_token_id"})
"""Keywords that ask for nothing whatever they say: a generation config has them of itself."""

BEST: dict[str, Any] = {
    **{name: next(iter(values), None) for name, values in NEUTRAL.items()},
    "do_sample": False,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Keywords that take the likeliest token each time, whatever the checkpoint's own defaults are."""

INSTEAD = {
    "inputs": "input_ids, the first argument",
    "inputs_embeds": "input_ids, the first argument",
    "stop_strings": "stopping_criteria=[StopStringCriteria(tokenizer, texts)] with transformers' "
    "class of that name, or stop (lists of token ids)",
    "min_length": "min_new_tokens",
    "assistant_model": "a recipe with a drafter",
    "prompt_lookup_num_tokens": "a recipe with a drafter, such as copyspec",
    "logits_processor": "repetition_penalty, temperature, top_k, top_p, min_p",
    "input_features": "input_ids: the model's source is a text",
    "return_timestamps": "decoder_input_ids, without the token that turns timestamps off",
    "decoder_attention_mask": "decoder_input_ids of one length",
    "encoder_outputs": "the source itself",
    "pixel_values": "image_embeds: what the model's tower makes of them, one row an image token "
    "(transformers' get_image_features)",
    "generation_config": "its values as keywords: **generation_config.to_diff_dict()",
    "decoder_start_token_id": "decoder_input_ids, which begins with it",
}


class Streamer(Protocol):
    """Takes tokens as they are committed (transformers' `BaseStreamer`)."""

    def put(self, value: torch.Tensor) -> None:
        """The prompt i64[B,S] first, then new tokens: see `runtime.streaming`."""

    def end(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options of one generation, as transformers names and means them.

    Defaults are the checkpoint's own (its generation_config.json), where it has any, and else
    those that follow. ``do_sample=False`` takes the likeliest token whatever the checkpoint says.

    max_new_tokens: tokens after the prompt (default 20, or what the context leaves). max_length:
    the same counted with the (padded) prompt. min_new_tokens: before this many, no `eos_token_id`.
    do_sample: sample instead of taking the best token; then temperature > 0, top_k (default 50 as
    in transformers; 0 or None for none), top_p in 0..1, min_p in 0..1. repetition_penalty > 0
    divides positive and multiplies negative logits of tokens seen so far. eos_token_id: an id,
    several, or none ([] or None). pad_token_id fills finished sequences (default: the model's,
    else the first eos). attention_mask [B,S]: 0 for left padding. stop: token sequences that end a
    sequence when its new tokens end with one (kept in the output). stopping_criteria: functions
    (input_ids i64[1,L] without padding, scores None) -> bool, called after every committed token
    of a sequence. streamer: `put` and `end`. generator or seed: where random numbers come from
    (default: torch's global generator); a seed repeats its text as long as the drafts are the same,
    and some drafters learn from call to call (recycling, goodput). num_return_sequences: of each
    prompt, one after the other; sampled. return_dict_in_generate: return `.sequences` and `.stats`.
    suppress_tokens: never generated; begin_suppress_tokens: not as the first new token.
    forced_bos_token_id: what a text of one token goes on with; forced_eos_token_id: what a text
    that is full ends with. decoder_input_ids i64[B,S]: what texts begin with that are written from
    a source; input_ids and attention_mask are then the source's. language, task: of speech, what
    the text is in, or one for each source, and what it is ("transcribe", "translate"), by the
    checkpoint's names; without a language it is detected first. image_embeds f[N,H]: what the
    model's own tower makes of pictures, a row for each of the prompts' image tokens, in order;
    image_grid_thw i64[P,3]: of each picture, patches in time, height and width, for models in which
    rows have such places.

    given: the options that the call itself gave; the rest are defaults. An option's annotation
    names what checks it.
    """

    max_new_tokens: Annotated[int | None, checks.integer(1)] = None
    max_length: Annotated[int | None, checks.integer(1)] = None
    min_new_tokens: Annotated[int, checks.integer(0)] = 0
    do_sample: Annotated[bool, checks.flag] = False
    temperature: Annotated[float, checks.number(0.0, math.inf, open_low=True)] = 1.0
    top_k: Annotated[int | None, checks.top_k] = 50
    top_p: Annotated[float, checks.number(0.0, 1.0)] = 1.0
    min_p: Annotated[float, checks.number(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, checks.number(0.0, math.inf, open_low=True)] = 1.0
    eos_token_id: Annotated[int | Sequence[int] | FromModel | None, checks.eos] = OF_MODEL
    pad_token_id: Annotated[int | None, checks.token] = None
    attention_mask: Annotated[torch.Tensor | None, checks.mask] = None
    stop: Annotated[Sequence[Sequence[int]], checks.stop] = ()
    stopping_criteria: Annotated[Hook | Sequence[Hook], checks.hooks] = ()
    streamer: Annotated[Streamer | None, checks.has("put", "end")] = None
    generator: Annotated[torch.Generator | None, checks.generator] = None
    seed: Annotated[int | None, checks.integer(0, MOST_SEED)] = None
    num_return_sequences: Annotated[int, checks.integer(1)] = 1
    return_dict_in_generate: Annotated[bool, checks.flag] = False
    suppress_tokens: Annotated[Sequence[int], checks.tokens] = ()
    begin_suppress_tokens: Annotated[Sequence[int], checks.tokens] = ()
    forced_bos_token_id: Annotated[int | None, checks.token] = None
    forced_eos_token_id: Annotated[int | None, checks.token] = None
    decoder_input_ids: Annotated[torch.Tensor | None, checks.mask] = None
    language: Annotated[str | tuple[str, ...] | None, checks.languages] = None
    task: Annotated[str | None, checks.word] = None
    image_embeds: Annotated[torch.Tensor | None, checks.mask] = None
    image_grid_thw: Annotated[torch.Tensor | None, checks.mask] = None
    given: frozenset[str] = frozenset()

    @property
    def reshapes_logits(self) -> bool:
        """Whether even a greedy choice needs the logits instead of their argmax."""
        suppressed = bool(self.suppress_tokens) or bool(self.begin_suppress_tokens)
        return self.repetition_penalty != 1.0 or self.min_new_tokens > 0 or suppressed

    @property
    def by_argmax(self) -> bool:
        """Whether the target's best token is always the one that is kept."""
        return not (self.do_sample or self.reshapes_logits)

    def random(self) -> torch.Generator | None:
        """The generator to draw from; None is torch's global one.

        Always the same one: who drafts and who verifies must not draw the same numbers.
        """
        return self.generator if self.seed is None else self._seeded

    @cached_property
    def _seeded(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed or 0)

    def eos(self, info: ModelInfo) -> tuple[int, ...]:
        """Ids that end a sequence."""
        if isinstance(self.eos_token_id, FromModel):
            return info.eos
        return self.eos_token_id or ()  # type: ignore[return-value]  # validated: a tuple or None

    def pad(self, info: ModelInfo) -> int | None:
        """The id that fills finished sequences; None if there is none."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        if info.pad is not None:
            return info.pad
        return next(iter(self.eos(info)), None)

    def new_tokens(self, width: int, longest: int, info: ModelInfo) -> int:
        """Most tokens to generate after prompts `width` wide, `longest` without padding.

        Errors: `InputError` with the numbers if the prompt or the request exceeds the context.
        """
        left = info.context - longest
        if left < 1:
            raise InputError(
                f"the prompt has {longest} tokens, and the model's context {info.context}, "
                "one of which must be free: shorten the prompt"
            )
        asked = self.max_new_tokens
        if asked is None and self.max_length is not None:
            asked = self.max_length - width
            if asked < 1:
                whose = "" if "max_length" in self.given else " (the checkpoint's default)"
                raise InputError(
                    f"max_length={self.max_length}{whose} leaves no room: the prompt is {width} "
                    f"wide; raise max_length or use max_new_tokens"
                )
        if asked is None:
            asked = max(min(DEFAULT_NEW_TOKENS, left), self.min_new_tokens)
        elif self.given.isdisjoint(("max_new_tokens", "max_length")):
            asked = min(asked, left)
        if asked > left:
            raise InputError(
                f"{longest} prompt tokens + {asked} new tokens exceed the model's context of "
                f"{info.context} tokens: at most {left} new tokens fit"
            )
        if asked < self.min_new_tokens and "min_new_tokens" in self.given:
            raise InputError(
                f"min_new_tokens={self.min_new_tokens} is more than the {asked} new tokens allowed"
            )
        return asked


_HINTS = get_type_hints(GenerationOptions, include_extras=True)
CHECKS: dict[str, Check] = {n: t.__metadata__[0] for n, t in _HINTS.items() if n != "given"}

SUPPORTED = tuple(CHECKS)

ALTERNATIVES = (("max_new_tokens", "max_length"), ("generator", "seed"))

SAMPLING = {"temperature": (1.0,), "top_k": (None, 0, 50), "top_p": (1.0,), "min_p": (0.0,)}
SAMPLING["num_return_sequences"] = (1,)
"""Options that only sampling looks at, and the values at which they do nothing."""


def read_options(keywords: Mapping[str, Any], info: ModelInfo) -> GenerationOptions:
    """Validate keywords, and the checkpoint's defaults for what they leave open.

    Errors: `InputError` naming the keyword or default, what it takes, what came.
    """
    known: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in SUPPORTED:
            _refuse(name, value)
        elif value is not None or name in ("top_k", "eos_token_id"):
            known[name] = CHECKS[name](name, value, info)
    given = frozenset(known)
    known = _defaults(keywords, known, info) | known
    _refuse_contradictions(given, known)
    return GenerationOptions(**known, given=given)


def _defaults(
    keywords: Mapping[str, Any], given: Mapping[str, Any], info: ModelInfo
) -> dict[str, Any]:
    """What the checkpoint says of options that are not given, as far as it matters then."""
    for text in info.defaults.unsupported:
        name = text.partition("=")[0]
        if name not in keywords:
            instead = f", or take {INSTEAD[name]} besides" if name in INSTEAD else ""
            raise InputError(
                f"the checkpoint's generation config asks for {text}, which is not supported; "
                f"give {name}={BEST[name]!r} to generate without{instead}"
            )
    said = {n: v for n, v in info.defaults.supported.items() if n not in given}
    if not {**said, **given}.get("do_sample"):
        said = {name: value for name, value in said.items() if name not in SAMPLING}
    if "max_new_tokens" in {**said, **given} and "max_length" not in given:
        said.pop("max_length", None)
    if "max_length" in given:
        said.pop("max_new_tokens", None)
    where = "the checkpoint's generation config, "
    return {name: CHECKS[name](where + name, value, info) for name, value in said.items()}


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Before there is a model: whether one that samples unless told otherwise may take these.

    Errors: as `read_options`.
    """
    anything = ModelInfo("", vocab_size=1 << 62, context=1 << 62, defaults=Defaults(do_sample=True))
    read_options(keywords, anything)


def check_defaults(info: ModelInfo) -> None:
    """Errors: `InputError` naming what of a checkpoint's defaults is no legal option."""
    read_options(dict.fromkeys(NEUTRAL), info)


def _refuse(name: str, value: object) -> None:
    plain = isinstance(value, bool | int | float | str)
    if value is None or name in FACTS or (plain and value in IDLE.get(name, ())):
        return
    close = difflib.get_close_matches(name, SUPPORTED, n=1)
    instead = INSTEAD.get(name, close[0] if close else None)
    shown = TensorType.of(value) if isinstance(value, torch.Tensor) else repr(value)
    shown = shown if "\n" not in str(shown) else type(value).__name__
    raise InputError(
        f"generate does not support {name}={shown}"
        + (f"; nearest: {instead}" if instead else "")
        + f". Supported: {', '.join(SUPPORTED)}"
    )


def _refuse_contradictions(given: frozenset[str], known: Mapping[str, Any]) -> None:
    for one, other in ALTERNATIVES:
        if one in given and other in given:
            raise InputError(f"both {one} and {other} are given; give one")
    if known.get("do_sample"):
        return
    for name, neutral in SAMPLING.items():
        if name in given and known[name] not in neutral:
            raise InputError(
                f"{name}={known[name]} has no effect on greedy decoding; add do_sample=True"
            )
