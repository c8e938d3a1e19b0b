"""What a model's files say: its configuration, chat template and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..ir.support.errors import InputError
from ..ir.support.files import read_json, read_text
from .templates import MOST_TEMPLATE, ChatTemplate

if TYPE_CHECKING:
    from ..ir import Program

JINJA, PROCESSOR, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
NAMES = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Special tokens by the names that templates know."""


def template_of(program: Program, *, given: str | None = None, tools: bool = False) -> ChatTemplate:
    """A model's chat template: chat_template.jinja, chat_template.json, or what
    tokenizer_config.json calls chat_template; a .gguf's key tokenizer.chat_template is the first.

    given: another template's text, or the name of one of several. tools: prefer the template called
    tool_use. Errors: `InputError` if there is none, or none of that name.
    """
    assets = program.assets
    several, where = check_template(assets, program.name, given)
    if given is not None and given not in several:
        return ChatTemplate(given, "the given chat template", special_tokens(assets))
    wanted = given or ("tool_use" if tools and "tool_use" in several else "default")
    if wanted not in several:
        known = ", ".join(sorted(several))
        raise InputError(
            f"{where} has several chat templates and none called default: choose one of {known} "
            f"(chat_template=)"
        )
    return ChatTemplate(several[wanted], str(where), special_tokens(assets))


def has_template(program: Program) -> bool:
    """Whether a model's files hold a chat template."""
    return bool(_templates(program.assets)[0])


def check_template(
    assets: Mapping[str, Path], name: str, given: str | None = None
) -> tuple[dict[str, str], Path | None]:
    """Templates by name, and the file that holds them. name: the model's. Errors: `InputError` if
    there is none, and none is given."""
    several, where = _templates(assets)
    if not several and given is None:
        raise InputError(
            f"{name} has no chat template: none of its files is a {JINJA} or {PROCESSOR}, and its "
            f"{CONFIG} names no chat_template. A base model continues texts (graftwork generate); "
            f"to chat, give one (--template FILE, or chat_template= in Python), or take the "
            f"model's instruct version"
        )
    return several, where


class Config(SimpleNamespace):
    """A configuration's values as attributes; those of its parts (``text_config``) likewise."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {n: v.to_dict() if isinstance(v, Config) else v for n, v in vars(self).items()}


class Settings(dict[str, Any]):
    """Options of `generate` by name."""

    def to_diff_dict(self) -> dict[str, Any]:
        """As transformers' pipelines ask a generation config for them."""
        return dict(self)


def config_of(program: Program) -> Config:
    """What config.json says, or the program knows: ``model_type``, ``vocab_size``, ..."""
    info = program.info
    known = {
        **{"model_type": info.model_type, "vocab_size": info.vocab_size},
        "max_position_embeddings": info.context,
        **{n: v for n, v in info.generation_config.items() if n.endswith("_token_id")},
    }
    return _config(_object(program.assets, "config.json") or known)


def _config(said: Mapping[str, Any]) -> Config:
    parts = {n: _config(v) for n, v in said.items() if n.endswith("_config") and type(v) is dict}
    return Config(**{**said, **parts})


def special_tokens(assets: Mapping[str, Path]) -> dict[str, str]:
    """Special tokens of tokenizer_config.json and special_tokens_map.json by name, such as
    ``eos_token``. Errors: `InputError` for files that are not JSON."""
    said = {**_object(assets, SPECIAL), **_object(assets, CONFIG)}
    found = {name: _token(said.get(name)) for name in NAMES}
    return {name: token for name, token in found.items() if token is not None}


def _templates(assets: Mapping[str, Path]) -> tuple[dict[str, str], Path | None]:
    """Templates by name, and the file that holds them."""
    if (path := assets.get(JINJA)) is not None:
        try:
            return {"default": read_text(path, 4 * MOST_TEMPLATE)}, path
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {error}") from error
    for file in (PROCESSOR, CONFIG):
        said = _object(assets, file).get("chat_template")
        if isinstance(said, list):
            said = {str(e.get("name")): e.get("template") for e in said if isinstance(e, dict)}
        named = said if isinstance(said, dict) else {"default": said} if said else {}
        if strange := [n for n, text in named.items() if not isinstance(text, str)]:
            raise InputError(f"{assets[file]}: chat_template {strange[0]!r}: expected text")
        if named:
            return named, assets[file]
    return {}, None


def _token(said: Any) -> str | None:
    """A token as its text, or as an object that has it as content."""
    text = said.get("content") if isinstance(said, dict) else said
    return text if isinstance(text, str) else None


def _object(assets: Mapping[str, Path], name: str) -> dict[str, Any]:
    """What a JSON file says; nothing if it is not there."""
    if (path := assets.get(name)) is None:
        return {}
    try:
        said = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return said if isinstance(said, dict) else {}
