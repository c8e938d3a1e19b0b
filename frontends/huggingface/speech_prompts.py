"""What a generation config says of languages and tasks of speech: see `Encoded.opening`."""

from __future__ import annotations

from typing import Any

from ...ir import InputError
from ...ir.plan.source import HEARD


def spoken(generation: Any, config: Any) -> dict[str, Any]:
    """Fields of `Encoded`. Errors: `InputError` for forced tokens with gaps between them."""
    many = getattr(generation, "is_multilingual", True) is not False
    languages = dict(getattr(generation, "lang_to_id", None) or {}) if many else {}
    tasks = dict(getattr(generation, "task_to_id", None) or {}) if many else {}
    untimed = getattr(generation, "no_timestamps_token_id", None)
    codes = {name.removeprefix("<|").removesuffix("|>"): id for name, id in languages.items()}
    named = {name: codes[code] for name, code in _codes(bool(codes)).items() if code in codes}
    known = {**codes, **named}
    usual, stays = _usual(generation, config, languages, tasks)
    found = {
        "languages": tuple(known),
        "language_tokens": tuple(known.values()),
        "tasks": tuple(tasks),
        "task_tokens": tuple(tasks.values()),
        "usual": usual,
        "stays": stays,
        "untimed": () if untimed is None else (untimed,),
    }
    return {name: value for name, value in found.items() if value}


def _codes(wanted: bool) -> dict[str, str]:
    """What languages are called, and their codes."""
    if not wanted:
        return {}
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return {name: code for name, code in TO_LANGUAGE_CODE.items() if " " not in name}


def _usual(
    generation: Any, config: Any, languages: dict[str, int], tasks: dict[str, int]
) -> tuple[tuple[int, ...], bool]:
    """What follows on the start unless a call says otherwise; see `Encoded.stays`."""
    language, task = (getattr(generation, name, None) for name in ("language", "task"))
    if language is not None or task is not None:
        first = languages.get(f"<|{language}|>", languages.get(str(language), HEARD))
        default = "transcribe" if language is not None else None
        second = tasks.get(str(task or default), HEARD)
        return (first, second), True
    forced = getattr(generation, "forced_decoder_ids", None)
    forced = getattr(config, "forced_decoder_ids", None) if forced is None else forced
    for place, (index, _) in enumerate(forced or (), 1):
        if index != place:
            raise InputError(
                f"the model's generation config: forced_decoder_ids={forced}: expected places "
                f"1, 2, 3, ..., got {index} as number {place}"
            )
    return tuple(HEARD if token is None else int(token) for _, token in forced or ()), False
