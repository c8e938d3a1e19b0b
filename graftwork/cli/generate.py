"""`graftwork generate`: continue a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..ready.key import ready_key
from .console import err, progress
from .options import AnyModel, DataOption, MaybeRecipe, SetOption, TargetOption, require

# Late imports: torch takes seconds, which `--help` does not need.

if TYPE_CHECKING:
    from ..ir import ModelInfo
    from ..runtime.stats import Stats

_GREEDY = {"do_sample": False}
_NEED_TEMPERATURE = "--top-k and --top-p need --temperature above 0"


def generate(
    model: AnyModel,
    prompt: Annotated[
        str | None,
        typer.Option(help="The text to continue, or the source; - reads standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the text from here.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="At most this many (default: the checkpoint's, else 128).")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy; above: sampling (default: the checkpoint's).")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of sampling.")] = None,
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: TargetOption = None,
    data: DataOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Text, ids and statistics.")] = False,
) -> None:
    """Continue a text."""
    text, alike = _text(prompt, file), not (json_ or data or top_k or top_p or seed is not None)
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
        keywords = {name: value for name, value in options.items() if value is not None}
        if temperature is not None:
            keywords |= {"do_sample": True, "temperature": temperature} if temperature else _GREEDY
        check_keywords(keywords)
        warned, known = GraftworkWarning.count, _known(model, text, keywords)
        opened = open_model(model, recipe, set_, target, show, data=data, known=known, runs=True)
        ids, info = encode(opened.tokenizer, text), opened.program.info
        begun = opened.program.plan.source.beginning(ids)
        require(bool(ids), "--prompt: expected some text; it has no tokens")
        known(info, {}, False)
        if info.defaults.supported.keys().isdisjoint(("max_new_tokens", "max_length")):
            keywords.setdefault("max_new_tokens", max(1, min(128, info.context - len(begun))))
        keywords["return_dict_in_generate"] = True
        check_request(as_ids([ids]), keywords, opened.program)
        show("compile")
        _ = opened.executable
        show("read the prompt")
        _write(opened, ids, len(begun), keywords, json_, stages.close)
    if key is not None and GraftworkWarning.count == warned:  # what was said is said each time
        from ..artifact.saved import is_saved
        from ..ready.keep import keep
        from .open_model import with_settings

        loaded = is_saved(Path(model))
        keep(key, opened, None if loaded else with_settings(recipe or "baseline", set_))


def _known(
    model: str, text: str, keywords: Mapping[str, Any]
) -> Callable[[ModelInfo, Mapping[str, Path], bool], None]:
    """What is asked of a model's facts and files, see `open_model`."""
    shapes = bool(keywords.get("top_k")) or "top_p" in keywords
    require(not shapes or keywords.get("do_sample", True), _NEED_TEMPERATURE)

    def known(info: ModelInfo, assets: Mapping[str, Path], room: bool) -> None:
        sampled = keywords.get("do_sample", info.defaults.do_sample)
        require(not shapes or bool(sampled), _NEED_TEMPERATURE)
        if not assets:
            return
        require(
            "tokenizer.json" in assets,
            f"{model}: expected a model with a tokenizer.json, which --prompt needs; there is none",
        )
        if room:
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
    _say(kept.stats, kept.approximate)
    return True


def _say(stats: Stats, approximate: bool) -> None:
    """Print what a generation cost."""
    err.print(
        f"{stats.new_tokens} tokens in {stats.steps + 1} steps, "
        f"{stats.accepted_per_step:.2f} a step, {stats.tokens_per_second:.0f} tokens/s"
        f"{'; approximate: the target itself may write another text' if approximate else ''}"
    )


def _write(
    opened: Any,
    ids: list[int],
    begun: int,
    keywords: dict[str, Any],
    json_: bool,
    first: Callable[[], None],
) -> None:
    """Generate and print. begun: number of tokens before the new ones. first: called before
    anything is printed."""
    from ..ir.support.tokenizer import decode
    from .text_printer import TextPrinter

    printer = None if json_ else TextPrinter(opened.tokenizer, first)
    result = opened.generate([ids], streamer=printer, **keywords)
    first()
    stats: Stats = result.stats
    approximate = opened.recipe.get("contract") == "approximate"
    if not json_:
        _say(stats, approximate)
        return
    new = result.sequences[0, begun:].tolist()
    text = decode(opened.tokenizer, new)
    print(json.dumps({"text": text, "ids": new, "stats": stats.to_dict()}))


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
    try:
        read = sys.stdin.buffer.read(LARGE + 1) if file is None else read_bytes(file, LARGE)
        text = read.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot read text in UTF-8: {error}") from error
    require(len(read) <= LARGE, f"{where}: more than {LARGE >> 20} MB")
    text = text.removesuffix("\n")
    require(bool(text), f"{where}: expected some text, and there is none")
    return text


def _check_room(text: str, keywords: Mapping[str, Any], info: ModelInfo, tokenizer: Path) -> None:
    """Errors: `InputError` if the prompt and the new tokens exceed the context."""
    from ..ir.support.tokenizer import encode, read_tokenizer
    from ..runtime.asking.options import read_options

    count = len(encode(read_tokenizer(tokenizer), text))
    anything = replace(info, vocab_size=info.vocab_size or 1 << 62)  # unknown for ONNX graphs
    read_options(keywords, anything).new_tokens(count, count, info)
