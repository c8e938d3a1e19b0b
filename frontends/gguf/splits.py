"""How byte-level vocabularies split a text before pairs of its bytes are merged.

A GGUF file says it by a name, ``tokenizer.ggml.pre``; a row here says what it means: the regular
expressions of the tokenizer that the name stands for, as that one has them. They are applied one
after the other, each to the pieces that the last one left; what none matches is a piece, too.
"""

# ruff: noqa: RUF001  (the letters are meant)

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """patterns: in the syntax of Oniguruma. whole: whether a piece that is a token of its own is
    one, whatever the merges say. begins: whether texts begin with the token for that, if the file
    does not say."""

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_ENDS = f"(?i:{_SHORT})"
_SPACES = r"\s+(?!\S)|\s+"
GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_DIGIT = r"\p{N}"
_HAN = "[一-龥぀-ゟ゠-ヿ]+"


def _words(digits: str, *, words: str = r"\p{L}+", marks: str = "") -> str:
    """Words with the character before them, digits, other characters and spaces."""
    other = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    return rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?{words}|{digits}|{other}|{_SPACES}"


def _cased(digits: str, ends: str = "") -> str:
    """Words that end where a small letter is followed by a capital."""
    large, small = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}[{large}]*[{small}]+{ends}|{before}[{large}]+[{small}]*{ends}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"


_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = "[一-龥ࠀ-一가-퟿]+"

_LLAMA3 = Split((_words(r"\p{N}{1,3}"),), whole=True, begins=True)
_QWEN2 = Split((_words(_DIGIT),))
_GPT_2 = Split((GPT2,))
_STARCODER = Split((_DIGIT, GPT2))
_GPT_4O = Split((_cased(r"\p{N}{1,3}", f"{_ENDS}?"),))
_GLM = (_words(r"\p{N}{1,3}"),)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    rf"|\s*[\r\n]|{_SPACES}"
)

SPLITS: dict[str, Split] = {
    "bloom": Split((_BLOOM,)),
    "chatglm-bpe": Split(_GLM),
    "dbrx": Split(_LLAMA3.patterns),
    "deepseek-coder": Split(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)),
    "deepseek-llm": Split(
        (
            "[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _ASIAN,
            r"\p{N}+",
        )
    ),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "exaone-moe": Split(
        (
            rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "qwen35": Split((_words(_DIGIT, words=r"[\p{L}\p{M}]+", marks=r"\p{M}"),)),
    "seed-coder": Split(
        (
            rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
            rf"|\s*[\r\n]+|{_SPACES}",
        )
    ),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "tekken": Split((_cased(_DIGIT),), whole=True, begins=True),
    "viking": Split((_BLOOM, _DIGIT)),
    **dict.fromkeys(("glm4", "glm5"), Split(_GLM, whole=True)),
    **dict.fromkeys(("poro-chat", "gpt3-finnish"), Split((_BLOOM,))),
    **dict.fromkeys(("smaug-bpe",), Split(_LLAMA3.patterns)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Split((_BAILING,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT_4O),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"), Split((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT_4O.patterns))
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"), Split((r"\p{N}{1,3}", _HAN, _DEEPSEEK))
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3,
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"),
        _QWEN2,
    ),
    **dict.fromkeys(("grok-2", "f2llmv2"), _QWEN2),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion"),
        _GPT_2,
    ),
    **dict.fromkeys(("granite-docling", "exaone4"), _GPT_2),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        _STARCODER,
    ),
    **dict.fromkeys(("mellum2",), _STARCODER),
}
"""By the name that a file has in tokenizer.ggml.pre."""
