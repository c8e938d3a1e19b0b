"""What a call asks for, settled once against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...ir import InputError, ModelInfo, Program, Role
from ...ir.plan import Encoded, SuperposedStep
from ...ir.support.tokenizer import read_tokenizer
from .beams import Search, check_beams
from .grammar import grammar_asked, grammars_for
from .guides import guides_for
from .image_embeds import PlacedRows, read_pictures
from .input_embeds import place_embeds, read_embeds
from .input_ids import aligned, check_positions, read_prompts
from .options import GenerationOptions, read_options
from .processors import Processor, Subject, processors_for
from .samplers import Sampler
from .sources import Sources, read_sources, takes_features
from .speech import openings
from .stopping import Stopping
from .streaming import Emitter
from .superposed import Superposition, superposed
from .text import Race, Text

OF_TOKENS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
"""Options that look at the tokens of the source."""

OWN = (*OF_TOKENS, "prefix_allowed_tokens_fn")
"""Options whose processors are each text's own."""

OF_SOURCES = (
    "decoder_input_ids",
    "decoder_start_token_id",
    "decoder_attention_mask",
    "language",
    "task",
)
"""Options of models that read a source."""

ENDLESS = 2**31 - 1
"""Tokens that a text may have whose rows are dropped and turned."""


@dataclass(frozen=True)
class Request:
    """prompts: i64[B,S] on the CPU, padded on the left, each as often as it is continued. texts:
    the sequences without padding, with their limits, and behind them their guides, if they have
    any. stopping: what ends one. pad: the token that
    fills finished ones. sources: what the texts are written from, where the model reads that first.
    pictures: of each text, where some have any. embeds: of each text the rows f[R,H] that stand for
    its prompt, where the call gave rows. search: what chooses the texts' tokens and ends
    them, if the call asks for beams, or for several texts of a row."""

    prompts: torch.Tensor
    texts: Sequence[Text]
    options: GenerationOptions
    stopping: Stopping
    pad: int
    sources: Sources | None = None
    pictures: Sequence[PlacedRows] = ()
    embeds: Sequence[torch.Tensor] = ()
    search: Search | Superposition | None = None

    @property
    def beams(self) -> Search | None:
        """What chooses the texts' tokens, if these are beams."""
        return self.search if isinstance(self.search, Search) else None

    @property
    def own(self) -> Sequence[Text]:
        """The texts that are continued."""
        return self.texts[: len(self.prompts)]

    def emitter(self) -> Emitter | None:
        """Who hands tokens to the streamer, if there is one; it is shown the prompts at once."""
        streamer = self.options.streamer
        return None if streamer is None else Emitter(streamer, self.prompts, self.pad)

    def sequences(self) -> torch.Tensor:
        """i64[B,S+N]: prompts with their padding, new tokens, padding to the longest."""
        prompts, found = self.prompts, [text.tokens[text.prompt :] for text in self.own]
        if self.search is not None:
            found = [text.tokens for text in self.search.best]
            places = torch.arange(0, len(prompts), self.options.copies)
            prompts = prompts[places.repeat_interleave(len(found) // len(places))]
        return torch.cat([prompts, filled(found, self.pad)], dim=1)


def filled(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """i64[R,N]: rows, with `value` behind those that are shorter than the longest."""
    whole = torch.full((len(rows), max(map(len, rows))), value, dtype=torch.int64)
    for index, row in enumerate(rows):
        whole[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return whole


def read_request(
    input_ids: torch.Tensor,
    keywords: Mapping[str, Any],
    program: Program,
    heard: Sequence[str] = (),
) -> Request:
    """What `generate` is asked for. heard: the languages of the sources, where the call does not
    say them. Errors: `InputError` for bad input or options."""
    info = program.info
    if program.plan.cache.endless:  # positions stay in the caches, so texts may leave the context
        info = replace(info, context=ENDLESS)
    step = program.plan.step
    several = step if isinstance(step, SuperposedStep) else None
    options = read_options(keywords, info, several=several is not None)
    if options.beams:
        check_beams(options, program.plan)
    drafts = 0
    if several is not None:
        drafts, options = superposed(options, several)
    sources, known = None, True
    if program.plan.source.encoder is not None:
        if options.position_ids is not None:
            raise InputError("position_ids: expected none where texts are written from a source")
        sources = read_sources(input_ids, options.attention_mask, program)
        input_ids = _beginnings(options, len(sources.tokens), program, heard)
        options = replace(options, attention_mask=torch.ones_like(input_ids))
        sources = sources.repeated(options.copies)
    else:
        for name in OF_SOURCES:
            if getattr(options, name) is not None:
                raise InputError(
                    f"{name}: {program.name} reads no source; its prompts are input_ids"
                )
        if options.inputs_embeds is not None:
            known = bool(input_ids.numel())
            input_ids, options = read_embeds(input_ids, options, program)
        if isinstance(input_ids, torch.Tensor):
            check_positions(input_ids, options)
            input_ids, mask = aligned(input_ids, options.attention_mask)
            options = replace(options, attention_mask=mask)
    texts = read_prompts(input_ids, options, info)
    pictures = read_pictures(options, texts, program)
    embeds: Sequence[torch.Tensor] = ()
    if options.inputs_embeds is not None:
        embeds = place_embeds(options, texts, program.ids, known=known)
    if sources is not None:
        for text, tokens in zip(texts, sources.tokens, strict=True):
            text.source = tokens
    if options.first_finish:
        _race(texts, options)
    asked = [name for name in OF_TOKENS if options.asks(name)]
    if asked and sources is not None and not all(sources.tokens):
        raise InputError(f"{asked[0]}: {program.name} reads a source that has no tokens of its own")
    tokenizer = _tokenizer(options, program)
    _process(texts, options, info, input_ids.shape[1], tokenizer)
    if not options.beams:  # of beams the token counts as one that was chosen
        _force_first(texts, options)
    if options.guided and _contrasts(program):
        raise InputError(
            f"guidance_scale: {program.name} contrasts logits in its step (pass contrast_layers or "
            f"contrast_model), and tokens that this rules out behind the one prompt would win "
            f"behind the other: leave it out, or take a recipe that does not contrast, such as "
            f"baseline"
        )
    guides = guides_for(texts, options, info)
    if guides and (sources is not None or any(picture.rows.numel() for picture in pictures)):
        raise InputError("guidance_scale: expected prompts that are texts alone, without a source")
    stopping = Stopping(options, info, tokenizer)
    pad = options.pad(info)
    if pad is None and stopping.early and len(texts) > 1:
        raise InputError(
            "sequences of this batch may end at different lengths, and neither pad_token_id nor an "
            "end token is known: give pad_token_id"
        )
    shown = input_ids.cpu() if known else torch.zeros(len(input_ids), 0, dtype=torch.int64)
    prompts = shown.repeat_interleave(options.copies, 0)
    pad = 0 if pad is None else pad
    search: Search | Superposition | None = None
    if options.beams:
        search = Search(texts, options, stopping)
    elif drafts and several is not None:
        search = Superposition(texts, drafts, several, stopping)
    texts = [*texts, *guides]
    return Request(prompts, texts, options, stopping, pad, sources, pictures, embeds, search)


def _process(
    texts: Sequence[Text],
    options: GenerationOptions,
    info: ModelInfo,
    width: int,
    tokenizer: Any,
) -> None:
    """Give each text its processors, the same to all that may share them."""
    eos, made = options.eos(info), dict[int, tuple[Processor, ...]]()
    prompts = [len(text.known) for text in texts]
    grammars = grammars_for(options, prompts, tokenizer, eos, info.vocab_size)
    hooks: Sequence[Any] = options.logits_processor  # type: ignore[assignment]
    own = bool(grammars) or any(map(options.asks, OWN))
    own = own or any(isinstance(hook, Sampler) for hook in hooks)
    beams = options.num_beams
    for index, text in enumerate(texts):
        text.grammar = grammars[index] if grammars else None
        source = text.source or text.known
        facts = width, eos, info.vocab_size, text.grammar, text.limit - text.unknown
        subject = Subject(index // beams, text.known, source, *facts)
        key = index if own else prompts[index]
        if key not in made:
            made[key] = processors_for(options, subject)
        text.processors = made[key]


def _tokenizer(options: GenerationOptions, program: Program) -> Any:
    """What reads and writes texts, if an option needs it. Errors: `InputError` if none does."""
    name = "stop_strings" if options.stop_strings else grammar_asked(options)
    if name is None or options.tokenizer is not None:
        return options.tokenizer
    path = program.assets.get("tokenizer.json")
    if path is None:
        instead = ", or stop (lists of token ids)" if name == "stop_strings" else ""
        raise InputError(
            f"{name}: {program.name} came without a tokenizer.json; give tokenizer={instead}"
        )
    return read_tokenizer(path)


def _beginnings(
    options: GenerationOptions, batch: int, program: Program, heard: Sequence[str]
) -> torch.Tensor:
    """What the texts begin with, i64[B,S]: what the plan says, unless a call says otherwise."""
    plan, given = program.plan.source, options.decoder_input_ids
    assert isinstance(plan, Encoded)
    start = (
        plan.start if options.decoder_start_token_id is None else [options.decoder_start_token_id]
    )
    if given is None and options.decoder_start_token_id is None:
        return torch.tensor(openings(options, batch, plan, heard))
    if options.language is not None or options.task is not None:
        raise InputError("both decoder_input_ids and a language or task are given; give one")
    first = torch.tensor([start] * batch)
    if given is None:
        return first
    if given.dtype != torch.int64 or given.dim() != 2 or len(given) != batch or not given.numel():
        raise InputError(
            f"decoder_input_ids: expected i64[{batch},S], one row a source, got {given.dtype} of "
            f"shape {list(given.shape)}"
        )
    mask = options.decoder_attention_mask
    if mask is not None and (mask.shape != given.shape or not bool(mask.all())):
        raise InputError(
            "decoder_attention_mask: expected ones, in the shape of decoder_input_ids: give "
            "beginnings of one length"
        )
    given = given.cpu()
    # As transformers: texts always begin with the token that starts them.
    begun = takes_features(program) or bool((given[:, 0] == start[0]).any())
    return given if begun else torch.cat([first, given], 1)


def _contrasts(program: Program) -> bool:
    """Whether logits of the target are contrasts, which rule tokens out by a large number."""
    op, functions = torch.ops.graftwork.contrast_layers.default, program.functions.values()
    return any(fn.calls(op) for fn in functions if fn.role is Role.TARGET)


def _race(texts: Sequence[Text], options: GenerationOptions) -> None:
    """Let each prompt's texts know when one of them has ended. Errors: `InputError` for one text,
    and for beams."""
    if options.beams or options.copies < 2:
        raise InputError(
            "first_finish: expected several texts of a prompt, without beams: give "
            "num_return_sequences and do_sample=True"
        )
    for first in range(0, len(texts), options.copies):
        race = Race()
        for text in texts[first : first + options.copies]:
            text.race = race


def _force_first(texts: Sequence[Text], options: GenerationOptions) -> None:
    """A text of one token goes on with `forced_bos_token_id`; the step is not asked."""
    first, last = options.forced_bos_token_id, options.forced_eos_token_id
    for text in texts:
        if first is not None and len(text.tokens) == 1:
            text.done = text.limit == 2
            text.tokens.append(last if text.done and last is not None else first)
