"""Checks of single options of `generate`.

A check takes an option's name, for the message, its value and the model, and returns the value as
`GenerationOptions` holds it. Errors: `InputError` with what the option takes and what came.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...ir import InputError, ModelInfo

Check: TypeAlias = Callable[[str, Any, ModelInfo], Any]
Hook: TypeAlias = Callable[..., Any]
Biases: TypeAlias = Sequence[tuple[tuple[int, ...], float]]


class FromModel:
    """A value that the model says."""

    def __repr__(self) -> str:
        return "the model's"


OF_MODEL = FromModel()
"""Default of `eos_token_id`: what the model says. With None or [] no token ends a sequence."""


def expected(what: str, name: str, value: object) -> InputError:
    return InputError(f"{name}: expected {what}, got {value!r}")


def bad_logits() -> InputError:
    """The error for logits that no token can be chosen by."""
    return InputError(
        "the model's logits hold NaN or are all -inf: expected finite numbers; check the weights, "
        "or use a wider dtype (float16 overflows in some models: try bfloat16 or float32)"
    )


def integer(low: int, high: int | None = None) -> Callable[[str, Any, ModelInfo], int]:
    what = f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}"

    def check(name: str, value: Any, info: ModelInfo) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise expected(what, name, value)
        number = operator.index(value)
        if number < low or (high is not None and number > high):
            raise expected(what, name, value)
        return number

    return check


def number(low: float, high: float, *, open_low: bool = False) -> Check:
    bound = f"a number {'above' if open_low else 'from'} {low:g}"
    what = bound + (f" to {high:g}" if math.isfinite(high) else "")

    def check(name: str, value: Any, info: ModelInfo) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise expected(what, name, value)
        number = float(value)
        inside = low < number if open_low else low <= number
        if not (inside and number <= high and math.isfinite(number)):
            raise expected(what, name, value)
        return number

    return check


def flag(name: str, value: Any, info: ModelInfo) -> bool:
    if not isinstance(value, bool):
        raise expected("True or False", name, value)
    return value


def token(name: str, value: Any, info: ModelInfo) -> int:
    token = integer(0)(name, value, info)
    if token >= info.vocab_size:
        raise expected(f"a token id below the vocabulary size {info.vocab_size}", name, value)
    return token


def tokens(name: str, value: Any, info: ModelInfo) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    items = value if isinstance(value, Sequence | set | frozenset) else [value]
    return tuple(token(name, item, info) for item in items)


def eos(name: str, value: Any, info: ModelInfo) -> tuple[int, ...] | FromModel:
    if value is None or isinstance(value, FromModel):
        return value or ()
    return tokens(name, value, info)


def top_k(name: str, value: Any, info: ModelInfo) -> int | None:
    return None if value is None else integer(0)(name, value, info)


def stop(name: str, value: Any, info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise expected("a list of lists of token ids, such as [[13, 198]]", name, value)
    if any(isinstance(item, str | int) or len(item) == 0 for item in value):
        raise expected("a list of non-empty lists of token ids, such as [[13]]", name, value)
    return tuple(tokens(name, item, info) for item in value)


def functions(kind: str) -> Check:
    """A function, or several: transformers' lists of them are both lists and callable."""

    def check(name: str, value: Any, info: ModelInfo) -> tuple[Hook, ...]:
        given = tuple(value) if isinstance(value, Sequence) else (value,)
        if not all(callable(each) for each in given):
            raise expected(f"a function {kind}, or a list of them", name, value)
        return given

    return check


def function(name: str, value: Any, info: ModelInfo) -> Hook:
    if not callable(value):
        raise expected("a function", name, value)
    return value  # type: ignore[no-any-return]


def biases(name: str, value: Any, info: ModelInfo) -> Biases:
    """``{(ids): bias}`` or ``[[ids, bias]]``, as in transformers."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    what = "{(token ids): bias} or [[token ids, bias]], with finite numbers or -inf as biases"
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise expected(what, name, value)
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or isinstance(pair[1], bool):
            raise expected(what, name, value)
        if not isinstance(pair[1], int | float) or not pair[1] < math.inf:
            raise expected(what, name, value)
    sequences = stop(name, [ids for ids, _ in pairs], info)
    return tuple(zip(sequences, (float(bias) for _, bias in pairs), strict=True))


def early(name: str, value: Any, info: ModelInfo) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise expected("True, False or 'never'", name, value)
    return value  # type: ignore[no-any-return]


def decay(name: str, value: Any, info: ModelInfo) -> tuple[int, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise expected("(start, factor): tokens, and a number above 0", name, value)
    start = integer(0)(name, value[0], info)
    return start, float(number(0.0, math.inf, open_low=True)(name, value[1], info))


def texts(name: str, value: Any, info: ModelInfo) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(t, str) and t for t in given):
        raise expected("a text, or a list of texts, none of them empty", name, value)
    return tuple(given)


def watermark(name: str, value: Any, info: ModelInfo) -> Any:
    """Errors: also for SynthID's, whose state grows with each token that is asked for."""
    synthid = "ngram_len" in value if isinstance(value, dict) else hasattr(value, "ngram_len")
    if synthid or not (isinstance(value, dict) or hasattr(value, "construct_processor")):
        raise expected("transformers' WatermarkingConfig, or its values as a dict", name, value)
    return value


def schema(name: str, value: Any, info: ModelInfo) -> Any:
    if not isinstance(value, str | Mapping | bool):
        raise expected("a JSON schema, as a dict or its text", name, value)
    return value


def anything(name: str, value: Any, info: ModelInfo) -> Any:
    return value


def has(*methods: str) -> Check:
    def check(name: str, value: Any, info: ModelInfo) -> Any:
        if not all(callable(getattr(value, method, None)) for method in methods):
            raise expected(f"an object with {' and '.join(methods)}", name, value)
        return value

    return check


def generator(name: str, value: Any, info: ModelInfo) -> torch.Generator:
    if not isinstance(value, torch.Generator) or value.device.type != "cpu":
        raise expected("a torch.Generator on the CPU (sampling happens there)", name, value)
    return value


def mask(name: str, value: Any, info: ModelInfo) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise expected("a tensor [B,S]", name, type(value).__name__)
    return value


def word(name: str, value: Any, info: ModelInfo) -> str:
    if not isinstance(value, str):
        raise expected("text", name, value)
    return value


def languages(name: str, value: Any, info: ModelInfo) -> str | tuple[str, ...]:
    """Codes as transformers takes them: de, or <|de|>."""
    if isinstance(value, (list, tuple)):
        return tuple(str(languages(name, each, info)) for each in value)
    return word(name, value, info).lower().removeprefix("<|").removesuffix("|>")
