"""`graftwork generate`: continue a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..ready.key import ready_key
from .console import err, progress
from .options import (
    AnyModel,
    DataOption,
    DraftOption,
    MaybeRecipe,
    SetOption,
    StopOption,
    SystemOption,
    TargetOption,
    TemplateOption,
    decoding,
    require,
    require_tokenizer,
    template_text,
)

# Late imports: torch takes seconds, which `--help` does not need.

if TYPE_CHECKING:
    from ..ir import ModelInfo
    from ..runtime.stats import Stats

_NEED_TEMPERATURE = "--top-k and --top-p need --temperature above 0"


def generate(
    model: AnyModel,
    prompt: Annotated[
        str | None,
        typer.Option(help="The text to continue, or the source; - reads standard input."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Read the text from here; - as of --prompt.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a message: write it by the chat template.")
    ] = False,
    system: SystemOption = None,
    template: TemplateOption = None,
    stop: StopOption = [],  # noqa: B006  (typer copies it)
    max_new_tokens: Annotated[
        int | None, typer.Option(help="At most this many (default: the checkpoint's, else 128).")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy; above: sampling (default: the checkpoint's).")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of sampling.")] = None,
    num_return_sequences: Annotated[
        int, typer.Option(min=1, help="So many texts: sampled, or by a recipe such as superposed.")
    ] = 1,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="The text is JSON that fits this schema."),
    ] = None,
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    draft: DraftOption = [],  # noqa: B006
    target: TargetOption = None,
    data: DataOption = None,
    stream: Annotated[
        bool, typer.Option(help="Print text as it is generated, or all of it at the end.")
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="Text, ids and statistics.")] = False,
) -> None:
    """Continue a text, or answer a message (--chat)."""
    require(chat or (system is None and template is None), "--system and --template need --chat")
    from ..chat.text_stream import check_stop

    stops, given = [check_stop(text) for text in stop], template_text(template)
    set_ = [*set_, *draft]
    alike = stream and not (json_ or chat or stop or data or top_k or top_p or seed is not None)
    alike = alike and json_schema is None and num_return_sequences == 1
    text, schema = _text(prompt, file), _schema(json_schema)
    key = ready_key(model, recipe, set_, target) if alike else None
    greedy = None if temperature is None else not temperature
    if key is not None and greedy is not False and _write_ready(key, text, max_new_tokens, greedy):
        return
    with ExitStack() as stages:
        show = stages.enter_context(progress())
        show("load torch")
        from ..data.prompts import as_ids
        from ..ir.support.errors import GraftworkWarning
        from ..ir.support.tokenizer import encode
        from ..runtime.asking.options import check_keywords
        from ..runtime.generation import check_request
        from .open_model import open_model

        options = {"top_k": top_k, "top_p": top_p, "seed": seed, "max_new_tokens": max_new_tokens}
        options["json_schema"] = schema
        if num_return_sequences > 1:
            options["num_return_sequences"] = num_return_sequences
            require(not stop, "--stop ends one text: leave it out, or --num-return-sequences")
            stream = False
        keywords: dict[str, Any] = {n: value for n, value in options.items() if value is not None}
        keywords |= decoding(temperature)
        check_keywords(keywords)
        warned = GraftworkWarning.count
        known = _known(model, None if chat else text, keywords, given)
        opened = open_model(model, recipe, set_, target, show, data=data, known=known, runs=True)
        info = opened.program.info
        if chat:
            ids, keywords["eos_token_id"] = _asked(opened, text, system, given)
        else:
            ids = encode(opened.tokenizer.backend_tokenizer, text)
        begun = opened.program.plan.source.beginning(ids)
        require(bool(ids), "--prompt: expected some text; it has no tokens")
        known(info, opened.program.assets, False)
        if info.defaults.supported.keys().isdisjoint(("max_new_tokens", "max_length")):
            keywords.setdefault("max_new_tokens", max(1, min(128, info.context - len(begun))))
        keywords["return_dict_in_generate"] = True
        check_request(as_ids([ids]), keywords, opened.program)
        show("compile")
        _ = opened.executable
        show("compile the steps and read the prompt")
        _write(opened, ids, len(begun), keywords, stops, stream and not json_, json_, stages.close)
    if key is not None and GraftworkWarning.count == warned:  # what was said is said each time
        from ..artifact.saved import is_saved
        from ..ready.keep import keep
        from .open_model import with_settings

        loaded = is_saved(Path(model))
        keep(key, opened, None if loaded else with_settings(recipe or "baseline", set_))


def _asked(
    opened: Any, text: str, system: str | None, given: str | None
) -> tuple[list[int], list[int] | None]:
    """A message as a prompt, and the tokens that end its answer."""
    from ..chat.conversation import Conversation, ends_of_turn
    from ..chat.files import template_of

    chosen = template_of(opened.program, given=given)
    before = [] if system is None else [{"role": "system", "content": system}]
    talk = Conversation(opened, chosen, [*before, {"role": "user", "content": text}])
    return talk.prompt()[1], [*ends_of_turn(opened, chosen)] or None


def _known(
    model: str, text: str | None, keywords: Mapping[str, Any], given: str | None
) -> Callable[[ModelInfo, Mapping[str, Path], bool], None]:
    """What is asked of a model's facts and files, see `open_model`. text: the prompt; None: a
    message, of which `given` or the model's own chat template makes one."""
    shapes = bool(keywords.get("top_k")) or "top_p" in keywords
    require(not shapes or keywords.get("do_sample", True), _NEED_TEMPERATURE)
    from ..chat.files import check_template

    def known(info: ModelInfo, assets: Mapping[str, Path], room: bool) -> None:
        sampled = keywords.get("do_sample", info.defaults.do_sample)
        require(not shapes or bool(sampled), _NEED_TEMPERATURE)
        require_tokenizer(model, assets, "--prompt")
        if text is None:
            check_template(assets, model, given)
        elif room:
            _check_room(text, keywords, info, assets["tokenizer.json"])

    return known


def _write_ready(key: str, text: str, count: int | None, greedy: bool | None) -> bool:
    """Generate with what an earlier run of the command kept. False: nothing is kept, or it cannot
    do what is asked, and nothing was printed. count: of new tokens."""
    from ..ready.start import ready
    from .text_printer import TextPrinter

    kept = ready(key)
    if kept is None:
        return False
    ids, new = kept.fits(text, count, greedy)
    if not new:
        return False
    printer = TextPrinter(kept.tokenizer)
    kept.generate(ids, new, printer.show)
    printer.end()
    _say(kept.stats, kept.contract)
    return True


OTHER_TEXT = {
    "approximate": "; approximate: the target itself may write another text",
    "tuned": "; tuned: the target as it was may write another text",
}
"""What is said of recipes by contract."""


def _say(stats: Stats, contract: str) -> None:
    """Print what a generation cost."""
    err.print(
        f"{stats.new_tokens} tokens in {stats.steps + 1} steps, "
        f"{stats.accepted_per_step:.2f} a step, {stats.tokens_per_second:.0f} tokens/s"
        f"{OTHER_TEXT.get(contract, '')}"
    )


def _write(
    opened: Any,
    ids: list[int],
    begun: int,
    keywords: dict[str, Any],
    stops: list[str],
    stream: bool,
    json_: bool,
    first: Callable[[], None],
) -> None:
    """Generate and print. begun: number of tokens before the new ones. first: called before
    anything is printed."""
    from ..chat.text_stream import StopTexts, cut
    from ..ir.support.tokenizer import decode
    from .text_printer import TextPrinter

    ends = keywords.get("eos_token_id", opened.program.info.eos) or ()
    tokenizer = opened.tokenizer.backend_tokenizer
    printer = TextPrinter(tokenizer, first, stops=stops, ends=ends, silent=not stream)
    if stops:
        keywords["stopping_criteria"] = [StopTexts(tokenizer, stops, begun)]
    # Whoever streams gets each step's tokens at once, which costs a little.
    result = opened.generate([ids], streamer=printer if stream else None, **keywords)
    first()
    stats: Stats = result.stats
    contract = str(opened.recipe.get("contract", ""))
    found = []
    for new in result.sequences[:, begun:].tolist():
        if len(result.sequences) > 1:
            new = _without_filler(new, ends)
        ended = bool(new) and new[-1] in ends
        text, stopped = cut(decode(tokenizer, new[:-1] if ended else new), stops)
        finish = "stop" if ended or stopped else "length"
        found.append({"text": text, "ids": new, "finish_reason": finish})
    if result.sequences_scores is not None:
        for each, score in zip(found, result.sequences_scores.tolist(), strict=True):
            each["score"] = score
    if json_:
        several = {"texts": found} if len(found) > 1 else found[0]
        print(json.dumps({**several, "stats": stats.to_dict()}))
        return
    if not stream:
        for each in found:
            print(each["text"] if len(found) == 1 else f"- {each['text']!r}")
    _say(stats, contract)


def _without_filler(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to the first one that ends a text."""
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def _text(prompt: str | None, file: Path | None) -> str:
    """The prompt. Errors: `InputError` for none, both, or invalid UTF-8."""
    from ..ir.support.errors import InputError
    from ..ir.support.files import LARGE, read_bytes

    require(
        (prompt is None) != (file is None),
        "expected some text: give either --prompt TEXT or --file FILE",
    )
    if prompt not in (None, "-"):
        require(bool(prompt), "--prompt: expected some text")
        return str(prompt)
    where = "--prompt -" if file is None else f"--file {file}"
    file = None if file == Path("-") else file
    try:
        read = sys.stdin.buffer.read(LARGE + 1) if file is None else read_bytes(file, LARGE)
        text = read.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot read text in UTF-8: {error}") from error
    require(len(read) <= LARGE, f"{where}: more than {LARGE >> 20} MB")
    text = text.removesuffix("\n")
    require(bool(text), f"{where}: expected some text, and there is none")
    return text


def _schema(given: str | None) -> Any:
    """--json-schema. Errors: `InputError` for what cannot be read, and without llguidance."""
    if given is None:
        return None
    from ..ir.support.errors import InputError
    from ..ir.support.files import read_text
    from ..ir.support.packages import require as require_package

    where = "--json-schema" if given.lstrip().startswith("{") else f"--json-schema {given}"
    try:
        found = json.loads(given if where == "--json-schema" else read_text(Path(given)))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected a JSON schema, or a file of one: {error}") from error
    require_package("llguidance", "--json-schema", "grammar")
    return found


def _check_room(text: str, keywords: Mapping[str, Any], info: ModelInfo, tokenizer: Path) -> None:
    """Errors: `InputError` if the prompt and the new tokens exceed the context."""
    from ..ir.support.tokenizer import check_length, encode, read_tokenizer
    from ..runtime.asking.options import read_options

    read = read_tokenizer(tokenizer)
    check_length(read, text, info.context)
    count = len(encode(read, text))
    anything = replace(info, vocab_size=info.vocab_size or 1 << 62)  # unknown for ONNX graphs
    read_options(keywords, anything, several=True).new_tokens(count, count, info)
