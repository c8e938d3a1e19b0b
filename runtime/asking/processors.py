"""Logits processors: functions of a text so far that change the scores of its next token.

Each is called as ``processor(input_ids i64[R,L], scores f32[R,V]) -> scores f32[R,V]``, as
transformers calls its own, with rows of one length: nodes of a draft that are equally deep, and
texts that are equally long and share all processors. A row is a text without padding. Drafts are
verified against processed scores, so a processor must be a function of its arguments: it sees every
row anew, in no particular order, and rows that are never kept.

Order and meaning are those of transformers' `generate`. What is not written here is transformers'
own class, which is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from ...ir import InputError
from ...ir.support.packages import require
from ...ir.support.tokenizer import refusing
from .filters import NOTHING, keep_min_p, keep_top_k, keep_top_p, penalize_repetition
from .options import GenerationOptions
from .samplers import Sampler

Processor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Subject(NamedTuple):
    """What the processors of a text may depend on.

    place: in the call; of beams, that of the prompt. prompt: its tokens, without padding. source:
    what the model reads first, or the prompt. width: of the prompts with padding. eos: ids that end
    a text. vocabulary: of scores. grammar: what the text has to fit. limit: the text's length when
    it is full.
    """

    place: int
    prompt: Sequence[int]
    source: Sequence[int]
    width: int
    eos: Sequence[int]
    vocabulary: int
    grammar: Processor | None = None
    limit: int = 0


class Rule(NamedTuple):
    """One processor: the keyword that asks for it, transformers' class that means it, and either
    what that class is made of or a function that does the same."""

    keyword: str
    named: str
    made: Processor | tuple[Any, ...]


def processors_for(options: GenerationOptions, subject: Subject) -> tuple[Processor, ...]:
    """The processors of a text, in transformers' order; () for none.

    As in transformers, one of the call's `logits_processor` takes the place of the same class
    that keywords ask for. Errors: `InputError` for values that a class refuses, and where
    transformers is missing.
    """
    own: list[Any] = list(options.logits_processor)  # type: ignore[arg-type]
    before = [_made(rule, own) for rule in _rules(options, subject)]
    after = [_made(rule, own) for rule in _last_rules(options, subject)]
    custom = [partial(_checked, _bound(hook, options, subject)) for hook in own]
    rules = [] if subject.grammar is None else [subject.grammar]
    return (*before, *custom, *rules, *after)


def _made(rule: Rule, own: list[Any]) -> Processor:
    for hook in own:
        if type(hook).__name__ == rule.named:
            own.remove(hook)
            return partial(_checked, hook)
    if not isinstance(rule.made, tuple):
        return rule.made
    cls = from_transformers(rule.keyword, rule.named)
    with refusing(rule.keyword):
        made: Processor = cls(*rule.made)
    return made


def _bound(hook: Any, options: GenerationOptions, subject: Subject) -> Any:
    """A processor of the call; of those that follow a text, what follows this one. Errors:
    `InputError` for beams, whose texts change."""
    if not isinstance(hook, Sampler):
        return hook
    if options.beams:
        name = type(hook).__name__
        raise InputError(f"{name} follows one text, and num_beams has several: take one of them")
    return hook.of(len(subject.prompt))


def from_transformers(keyword: str, name: str) -> Any:
    """A class of transformers. Errors: `InputError` if it is not installed, or has no such."""
    require("transformers", keyword, "huggingface")
    import transformers

    if not hasattr(transformers, name):
        raise InputError(
            f"{keyword}: transformers {transformers.__version__} has no {name}: take a newer one"
        )
    return getattr(transformers, name)


def _rules(o: GenerationOptions, s: Subject) -> Iterator[Rule]:
    """What comes before the call's own processors."""
    own: Processor
    made: tuple[Any, ...]
    source, eos = torch.tensor([list(s.source)]), torch.tensor(list(s.eos), dtype=torch.int64)
    length = len(s.prompt)
    if o.sequence_bias:
        bias = [[list(tokens), value] for tokens, value in o.sequence_bias]
        yield Rule("sequence_bias", "SequenceBiasLogitsProcessor", (bias,))
    if o.asks("encoder_repetition_penalty"):
        made = o.encoder_repetition_penalty, source
        yield Rule("encoder_repetition_penalty", "EncoderRepetitionPenaltyLogitsProcessor", made)
    if o.asks("repetition_penalty"):
        own = partial(_penalized, o.repetition_penalty)
        yield Rule("repetition_penalty", "RepetitionPenaltyLogitsProcessor", own)
    if o.no_repeat_ngram_size:
        made = (o.no_repeat_ngram_size,)
        yield Rule("no_repeat_ngram_size", "NoRepeatNGramLogitsProcessor", made)
    if o.encoder_no_repeat_ngram_size:
        made = o.encoder_no_repeat_ngram_size, source
        yield Rule("encoder_no_repeat_ngram_size", "EncoderNoRepeatNGramLogitsProcessor", made)
    if o.bad_words_ids:
        made = list(map(list, o.bad_words_ids)), eos
        yield Rule("bad_words_ids", "NoBadWordsLogitsProcessor", made)
    if (until := o.least(length, s.width)) > length and s.eos:
        own = partial(_never, tuple(s.eos), until)
        yield Rule("min_new_tokens", "MinNewTokensLengthLogitsProcessor", own)
    if o.prefix_allowed_tokens_fn is not None:
        own = partial(_allowed, o.prefix_allowed_tokens_fn, s.place)
        yield Rule("prefix_allowed_tokens_fn", "PrefixConstrainedLogitsProcessor", own)
    if o.beams and o.forced_bos_token_id is not None:
        made = (o.forced_bos_token_id,)
        yield Rule("forced_bos_token_id", "ForcedBOSTokenLogitsProcessor", made)
    if o.beams and o.forced_eos_token_id is not None:
        made = s.limit, o.forced_eos_token_id, "cpu"
        yield Rule("forced_eos_token_id", "ForcedEOSTokenLogitsProcessor", made)
    if o.remove_invalid_values:
        yield Rule("remove_invalid_values", "InfNanRemoveLogitsProcessor", ())
    if o.exponential_decay_length_penalty is not None and s.eos:
        made = o.exponential_decay_length_penalty, eos, length
        yield Rule("exponential_decay_length_penalty", "ExponentialDecayLengthPenalty", made)
    if o.suppress_tokens:
        own = partial(_never, tuple(o.suppress_tokens), None)
        yield Rule("suppress_tokens", "SuppressTokensLogitsProcessor", own)
    if o.begin_suppress_tokens:
        forced = length == 1 and o.forced_bos_token_id is not None
        own = partial(_never, tuple(o.begin_suppress_tokens), length + 1 + forced)
        yield Rule("begin_suppress_tokens", "SuppressTokensAtBeginLogitsProcessor", own)


def _last_rules(o: GenerationOptions, s: Subject) -> Iterator[Rule]:
    """What comes after the call's own processors."""
    own: Processor
    if o.warps_whole:
        yield from _warpers(o, max(2, 1 + len(s.eos)) if o.beams else 1)
    if o.watermarking_config is not None:
        config = o.watermarking_config
        if isinstance(config, dict):
            with refusing("watermarking_config"):
                config = from_transformers("watermarking_config", "WatermarkingConfig")(**config)
        marks = config.construct_processor(s.vocabulary, "cpu")
        yield Rule("watermarking_config", "WatermarkLogitsProcessor", marks)
    if o.renormalize_logits:
        own = partial(_on_scores, partial(torch.log_softmax, dim=-1))
        yield Rule("renormalize_logits", "LogitNormalization", own)


def _warpers(o: GenerationOptions, least: int) -> Iterator[Rule]:
    """Temperature and filters on whole rows. least: tokens that each filter leaves at least, which
    are more for beams: not all of them may have to end."""
    own: Processor
    if o.asks("temperature"):
        own = partial(_on_scores, lambda scores: scores / o.temperature)
        yield Rule("temperature", "TemperatureLogitsWarper", own)
    if o.top_h is not None:
        yield Rule("top_h", "TopHLogitsWarper", (o.top_h,))
    if top := o.top_k:
        own = partial(_on_scores, lambda scores: keep_top_k(scores, max(top, least)))
        yield Rule("top_k", "TopKLogitsWarper", own)
    if o.top_p < 1.0:
        own = partial(_on_scores, lambda scores: keep_top_p(scores, o.top_p, least))
        yield Rule("top_p", "TopPLogitsWarper", own)
    if o.min_p > 0.0:
        own = partial(_on_scores, lambda scores: keep_min_p(scores, o.min_p, least))
        yield Rule("min_p", "MinPLogitsWarper", own)
    if o.typical_p < 1.0:
        yield Rule("typical_p", "TypicalLogitsWarper", (o.typical_p, NOTHING, least))
    if 0.0 < o.epsilon_cutoff < 1.0:
        yield Rule("epsilon_cutoff", "EpsilonLogitsWarper", (o.epsilon_cutoff, NOTHING, least))
    if 0.0 < o.eta_cutoff < 1.0:
        yield Rule("eta_cutoff", "EtaLogitsWarper", (o.eta_cutoff, NOTHING, least))


def _on_scores(
    change: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    return change(scores)


def _penalized(penalty: float, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, True)
    return penalize_repetition(scores, seen, penalty)


def _never(
    tokens: tuple[int, ...], until: int | None, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """None of these tokens, in a text shorter than `until`."""
    if until is None or ids.shape[1] < until:
        scores[:, list(tokens)] = NOTHING
    return scores


def _allowed(
    asked: Callable[[int, torch.Tensor], Sequence[int]],
    index: int,
    ids: torch.Tensor,
    scores: torch.Tensor,
) -> torch.Tensor:
    """Only the tokens that a function of the text allows."""
    kept = torch.full_like(scores, NOTHING)
    for row, text in enumerate(ids):
        tokens = list(asked(index, text))
        if not tokens:
            raise InputError(
                f"prefix_allowed_tokens_fn allows no token after {text.tolist()[-8:]} of sequence "
                f"{index}: expected at least one, such as the token that ends texts"
            )
        kept[row, tokens] = scores[row, tokens]
    return kept


def _checked(hook: Processor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What a processor of the call returns. Errors: `InputError` for what are no scores."""
    changed = hook(ids, scores)
    if not isinstance(changed, torch.Tensor) or changed.shape != scores.shape:
        got = list(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
        raise InputError(
            f"logits_processor: {type(hook).__name__} returned {got}; expected scores of shape "
            f"{list(scores.shape)}, as it was given"
        )
    return changed
