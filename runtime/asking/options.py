"""What a user may ask of `generate`: transformers' keyword names, validated up front."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Protocol, get_type_hints

import torch

from ...ir import Defaults, GraftworkWarning, InputError, ModelInfo
from ...ir.plan.defaults import NEUTRAL
from . import checks
from .checks import OF_MODEL, Biases, Check, FromModel, Hook
from .other_keywords import FACTS, INSTEAD, refuse

MOST_SEED = 2**64 - 1
"""The largest that torch takes."""

MOST_BEAMS = 1024
"""Texts that a prompt may be continued by at once."""

DEFAULT_NEW_TOKENS = 20
"""What transformers generates when no length is given."""

BEST: dict[str, Any] = {
    **{name: next(iter(values), None) for name, values in NEUTRAL.items()},
    "do_sample": False,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Keywords that take the likeliest token each time, whatever the checkpoint's own defaults are."""

WHOLE = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
"""Options of sampling that are processors of whole rows."""

RESHAPING = (
    *("repetition_penalty", "min_new_tokens", "min_length", "suppress_tokens"),
    *("begin_suppress_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "bad_words_ids", "sequence_bias", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "watermarking_config", "logits_processor"),
    *("prefix_allowed_tokens_fn", "renormalize_logits", "json_schema", "regex", "grammar"),
    "num_beams",
)
"""Options under which even a greedy choice needs processed logits instead of their argmax."""


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

    Lengths. max_new_tokens: tokens after the prompt (default 20, or what the context leaves).
    max_length: the same counted with the (padded) prompt. min_new_tokens, min_length: before so
    many no `eos_token_id`, counted in the same two ways. max_time: seconds, after which no token
    follows.

    Sampling. do_sample: sample instead of taking the best token; the next eight count only then.
    temperature > 0. top_k (default 50; 0 or None for none). top_p in 0..1. min_p in 0..1. top_h in
    0..1 (Baghaei Potraghloo et al. 2025). typical_p in 0..1 (Meister et al. 2022). epsilon_cutoff,
    eta_cutoff in 0..1 (Hewitt et al. 2022). num_return_sequences: of each prompt, one after the
    other (without sampling out of one row, where the recipe is superposed: see
    `graftwork.runtime.asking.superposed`); first_finish: the first of them that ends, other than by
    its length, ends the rest (Agarwal et al. 2025, arXiv 2505.18149). generator or seed: where
    random numbers come from (default: torch's global generator); a seed repeats its text as long as
    the drafts are the same, and some drafters learn from call to call (recycling, goodput).

    Beams. num_beams: texts of each prompt that are decoded side by side, for the likeliest whole
    one; num_return_sequences: of these, best first. length_penalty: power of the length that a
    text's score is divided by. early_stopping: end when so many texts have ended (True), when no
    other is likely to be better (False), or when none can be ("never"). With do_sample the
    candidates are drawn. A recipe's drafts have no part in it.

    Scores; all of it is applied to every node of a draft, so drafts change no text.
    repetition_penalty > 0 divides positive and multiplies negative logits of tokens seen so far;
    encoder_repetition_penalty multiplies those that the source (or the prompt) lacks.
    no_repeat_ngram_size: no n-gram twice; encoder_no_repeat_ngram_size: none of the source (or
    prompt). bad_words_ids: token sequences that never come up. sequence_bias: added to the score of
    the last token of a sequence, ``{(ids): bias}`` or ``[[ids, bias]]``. suppress_tokens: never
    generated; begin_suppress_tokens: not as the first new token. forced_bos_token_id: what a text
    of one token goes on with; forced_eos_token_id: what a text that is full ends with.
    prefix_allowed_tokens_fn: (index of the sequence, ids i64[L]) -> ids that may follow.
    exponential_decay_length_penalty: (start, factor), from when on an end grows likelier.
    remove_invalid_values: replace NaN and infinite scores. renormalize_logits: return scores as
    logarithms of probabilities. watermarking_config: transformers' `WatermarkingConfig`.
    logits_processor: functions (ids i64[R,L], scores f32[R,V]) -> scores, such as transformers'
    `LogitsProcessor`: see `graftwork.runtime.asking.processors` for what they may rely on; or
    samplers that follow a text (`graftwork.Mirostat`, `Momentum`, `LookBack`).
    guidance_scale: how far scores are led away from those behind negative_prompt_ids i64[B,S]
    (negative_prompt_attention_mask [B,S]: 0 for padding; default: the prompt's last token), which
    a second row of the batch is decoded for (Sanchez et al. 2023). guidance_plausible in 0..1: only
    tokens as likely as this share of the text's likeliest one. guidance_uncertain in 0..1: only
    where the text's own entropy is at least this share of the largest.
    json_schema (a mapping or its text), regex, grammar (rules in Lark's notation): what the new
    text, up to its end token, has to fit; one of them, with llguidance.

    Ends. eos_token_id: an id, several, or none ([] or None). stop: token sequences that end a
    sequence when its new tokens end with one (kept in the output). stop_strings: the same as texts;
    tokenizer: for them, transformers' (default: the model's own). stopping_criteria: functions
    (input_ids i64[1,L] without padding, scores None) -> bool, called after every committed token
    of a sequence. pad_token_id fills finished sequences (default: the model's, else the first eos).

    Inputs. attention_mask [B,S]: 0 for padding. position_ids [B,S]: only those that follow from it.
    inputs_embeds f[B,S,H]: the prompts as rows, what the model's get_input_embeddings() makes of
    tokens; without input_ids only new tokens are returned and seen by processors.
    decoder_input_ids i64[B,S]: what texts begin with that are written from a source; input_ids and
    attention_mask are then the source's. decoder_start_token_id: the token that begins them;
    decoder_attention_mask: ones. language, task: of speech, what the text is in, or one for each
    source, and what it is ("transcribe", "translate"), by the checkpoint's names; without a
    language it is detected first. image_embeds f[N,H]: what the model's own tower makes of
    pictures, a row for each of the prompts' image tokens, in order; image_grid_thw i64[P,3]: of
    each picture, patches in time, height and width, for models in which rows have such places.

    Results. return_dict_in_generate: return `.sequences` and `.stats`; with output_scores and
    output_logits also `.scores` and `.logits`, of beams `.sequences_scores` and `.beam_indices`.
    streamer: `put` and `end`.

    generation_config (transformers' object, or a mapping) is not held: its values count as
    keywords of the call, which overrule them. given: the options that the call itself gave; the
    rest are defaults. An option's annotation names what checks it.
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
    stopping_criteria: Annotated[
        Hook | Sequence[Hook], checks.functions("(input_ids, scores) -> bool")
    ] = ()
    streamer: Annotated[Streamer | None, checks.has("put", "end")] = None
    generator: Annotated[torch.Generator | None, checks.generator] = None
    seed: Annotated[int | None, checks.integer(0, MOST_SEED)] = None
    num_return_sequences: Annotated[int, checks.integer(1)] = 1
    first_finish: Annotated[bool, checks.flag] = False
    return_dict_in_generate: Annotated[bool, checks.flag] = False
    suppress_tokens: Annotated[Sequence[int], checks.tokens] = ()
    begin_suppress_tokens: Annotated[Sequence[int], checks.tokens] = ()
    forced_bos_token_id: Annotated[int | None, checks.token] = None
    forced_eos_token_id: Annotated[int | None, checks.token] = None
    decoder_input_ids: Annotated[torch.Tensor | None, checks.mask] = None
    decoder_start_token_id: Annotated[int | None, checks.token] = None
    decoder_attention_mask: Annotated[torch.Tensor | None, checks.mask] = None
    language: Annotated[str | tuple[str, ...] | None, checks.languages] = None
    task: Annotated[str | None, checks.word] = None
    inputs_embeds: Annotated[torch.Tensor | None, checks.mask] = None
    image_embeds: Annotated[torch.Tensor | None, checks.mask] = None
    image_grid_thw: Annotated[torch.Tensor | None, checks.mask] = None
    min_length: Annotated[int, checks.integer(0)] = 0
    max_time: Annotated[float | None, checks.number(0.0, math.inf)] = None
    num_beams: Annotated[int, checks.integer(1, MOST_BEAMS)] = 1
    length_penalty: Annotated[float, checks.number(-100.0, 100.0)] = 1.0
    early_stopping: Annotated[bool | str, checks.early] = False
    top_h: Annotated[float | None, checks.number(0.0, 1.0, open_low=True)] = None
    typical_p: Annotated[float, checks.number(0.0, 1.0, open_low=True)] = 1.0
    epsilon_cutoff: Annotated[float, checks.number(0.0, 1.0)] = 0.0
    eta_cutoff: Annotated[float, checks.number(0.0, 1.0)] = 0.0
    encoder_repetition_penalty: Annotated[float, checks.number(0.0, math.inf, open_low=True)] = 1.0
    no_repeat_ngram_size: Annotated[int, checks.integer(0)] = 0
    encoder_no_repeat_ngram_size: Annotated[int, checks.integer(0)] = 0
    bad_words_ids: Annotated[Sequence[Sequence[int]], checks.stop] = ()
    sequence_bias: Annotated[Biases, checks.biases] = ()
    exponential_decay_length_penalty: Annotated[tuple[int, float] | None, checks.decay] = None
    remove_invalid_values: Annotated[bool, checks.flag] = False
    renormalize_logits: Annotated[bool, checks.flag] = False
    watermarking_config: Annotated[Any, checks.watermark] = None
    prefix_allowed_tokens_fn: Annotated[Hook | None, checks.function] = None
    logits_processor: Annotated[
        Hook | Sequence[Hook], checks.functions("(input_ids, scores) -> scores")
    ] = ()
    stop_strings: Annotated[str | Sequence[str], checks.texts] = ()
    tokenizer: Annotated[Any, checks.anything] = None
    output_scores: Annotated[bool, checks.flag] = False
    output_logits: Annotated[bool, checks.flag] = False
    guidance_scale: Annotated[float | None, checks.number(0.0, math.inf)] = None
    guidance_plausible: Annotated[float, checks.number(0.0, 1.0)] = 0.0
    guidance_uncertain: Annotated[float, checks.number(0.0, 1.0)] = 0.0
    negative_prompt_ids: Annotated[torch.Tensor | None, checks.mask] = None
    negative_prompt_attention_mask: Annotated[torch.Tensor | None, checks.mask] = None
    position_ids: Annotated[torch.Tensor | None, checks.mask] = None
    json_schema: Annotated[str | Mapping[str, Any] | bool | None, checks.schema] = None
    regex: Annotated[str | None, checks.word] = None
    grammar: Annotated[str | None, checks.word] = None
    given: frozenset[str] = frozenset()

    def asks(self, name: str) -> bool:
        """Whether an option has another value than the one that asks for nothing."""
        return bool(getattr(self, name) != getattr(type(self), name))

    @property
    def records(self) -> bool:
        """Whether scores or logits are returned."""
        return self.return_dict_in_generate and (self.output_scores or self.output_logits)

    @property
    def warps_whole(self) -> bool:
        """Whether temperature and filters are processors of whole rows: some have to be."""
        late = self.beams or any(map(self.asks, WHOLE))
        return self.do_sample and (late or (self.return_dict_in_generate and self.output_scores))

    @property
    def beams(self) -> bool:
        """Whether texts are searched for, several of a prompt at once."""
        return self.num_beams > 1

    @property
    def copies(self) -> int:
        """Texts that each prompt is continued by."""
        return self.num_beams if self.beams else self.num_return_sequences

    def least(self, length: int, width: int) -> int:
        """Tokens that a text must have before an end may follow. length: of its prompt; width: of
        the prompts with padding."""
        return length + (self.min_new_tokens or self.min_length - width)

    @property
    def reshapes_logits(self) -> bool:
        """Whether even a greedy choice needs the logits instead of their argmax."""
        return self.records or self.guided or any(map(self.asks, RESHAPING))

    @property
    def guided(self) -> bool:
        """Whether each text is led away from another one, which is decoded beside it."""
        return self.guidance_scale not in (None, 1.0)

    @property
    def by_argmax(self) -> bool:
        """Whether the target's best token is always the one that is kept."""
        return not (self.do_sample or self.reshapes_logits)

    @property
    def repeats(self) -> bool:
        """Whether sampled texts are asked for that a seed says."""
        return self.do_sample and not (self.seed is None and self.generator is None)

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

LENGTHS = ("max_new_tokens", "max_length")

ALTERNATIVES = (LENGTHS, ("generator", "seed"))

SAMPLING = {"temperature": (1.0,), "top_k": (None, 0, 50), "top_p": (1.0,), "min_p": (0.0,)}
SAMPLING |= {"top_h": (None,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,)}
SAMPLING["num_return_sequences"] = (1,)
"""Options that only sampling looks at, and the values at which they do nothing."""

SEARCHING: dict[str, tuple[object, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}
"""The same of beam search."""


def read_options(
    keywords: Mapping[str, Any], info: ModelInfo, *, several: bool = False
) -> GenerationOptions:
    """Validate keywords, and the checkpoint's defaults for what they leave open.

    several: whether one row may stand for several texts, which then need no sampling. Errors:
    `InputError` naming the keyword or default, what it takes, what came.
    """
    keywords = _with_config(keywords)
    known: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in SUPPORTED:
            refuse(name, value, SUPPORTED, beams=keywords.get("num_beams") not in (None, 1))
        elif value is not None or name in ("top_k", "eos_token_id"):
            known[name] = CHECKS[name](name, value, info)
    given = frozenset(known)
    known = _defaults(keywords, known, info) | known
    _refuse_contradictions(given, known, several)
    return GenerationOptions(**known, given=given)


def _defaults(
    keywords: Mapping[str, Any], given: Mapping[str, Any], info: ModelInfo
) -> dict[str, Any]:
    """What the checkpoint says of options that are not given, as far as it matters then."""
    others: dict[str, Any] = {}
    for text in info.defaults.unsupported:
        name, _, value = text.partition("=")
        if name in SUPPORTED and name not in keywords:
            others[name] = _literal(text, value)
        elif name not in keywords:
            instead = f", or take {INSTEAD[name]} besides" if name in INSTEAD else ""
            raise InputError(
                f"the checkpoint's generation config asks for {text}, which is not supported; "
                f"give {name}={BEST[name]!r} to generate without{instead}"
            )
    said = {n: v for n, v in info.defaults.supported.items() if n not in given} | others
    both = {**said, **given}
    searched = both.get("num_beams") not in (None, 1)
    if not both.get("do_sample"):
        kept = {"num_return_sequences"} if searched else set()
        said = {name: v for name, v in said.items() if name not in SAMPLING or name in kept}
    if not searched:
        said = {name: value for name, value in said.items() if name not in SEARCHING}
    if "max_new_tokens" in {**said, **given} and "max_length" not in given:
        said.pop("max_length", None)
    if "max_length" in given:
        said.pop("max_new_tokens", None)
    where = "the checkpoint's generation config, "
    return {name: CHECKS[name](where + name, value, info) for name, value in said.items()}


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Before there is a model: whether one that samples unless told otherwise, and drafts several
    texts at once where it does not, may take these.

    Errors: as `read_options`.
    """
    anything = ModelInfo("", vocab_size=1 << 62, context=1 << 62, defaults=Defaults(do_sample=True))
    read_options(keywords, anything, several=True)


def check_defaults(info: ModelInfo) -> None:
    """Errors: `InputError` naming what of a checkpoint's defaults is no legal option."""
    read_options(dict.fromkeys(NEUTRAL), info)


def _with_config(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords, and what their `generation_config` says of others.

    Errors: `InputError` for what is no configuration."""
    if keywords.get("generation_config") is None:
        return {name: value for name, value in keywords.items() if name != "generation_config"}
    config = keywords["generation_config"]
    if not isinstance(config, Mapping) and not hasattr(config, "to_diff_dict"):
        raise checks.expected(
            "transformers' GenerationConfig, or a mapping", "generation_config", config
        )
    said = dict(config if isinstance(config, Mapping) else vars(config))
    call = {name: value for name, value in keywords.items() if name != "generation_config"}
    for one, other in (LENGTHS, LENGTHS[::-1]):
        if call.get(one) is not None:
            said.pop(other, None)
    said = {n: v for n, v in said.items() if v is not None and n not in FACTS}
    if said.get("max_new_tokens") is not None:  # as in transformers: that one counts
        said.pop("max_length", None)
    return {**said, **call}


def _literal(text: str, value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise InputError(f"the checkpoint's generation config: {text} has no value") from error


def _refuse_contradictions(given: frozenset[str], known: Mapping[str, Any], several: bool) -> None:
    for one, other in ALTERNATIVES:
        if one in given and other in given:
            raise InputError(f"both {one} and {other} are given; give one")
    beams = known.get("num_beams", 1) > 1
    idle = {} if known.get("do_sample") else dict.fromkeys(SAMPLING, "do_sample=True")
    if beams or several:
        idle.pop("num_return_sequences", None)
    if not beams:
        idle |= dict.fromkeys(SEARCHING, "num_beams")
    for name, cure in idle.items():
        if name not in given or known[name] in {**SAMPLING, **SEARCHING}[name]:
            continue
        what = "without beams" if name in SEARCHING else "on greedy decoding"
        message = f"{name}={known[name]} has no effect {what}; add {cure}"
        if name == "num_return_sequences":  # all would be alike: transformers refuses that, too
            raise InputError(message)
        warnings.warn(message, GraftworkWarning, stacklevel=4)
