"""A model's tokenizer as users of transformers and of tokenizers expect it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..ir.support.errors import InputError
from ..ir.support.names import shown
from ..ir.support.tokenizer import encoded, read_tokenizer, refusing
from .files import special_tokens, template_of

if TYPE_CHECKING:
    import tokenizers

    from ..ir import Program
    from .templates import Message


class Ids(list[int]):
    """A text's token ids; also what tokenizers calls an Encoding: ``.ids``, ``.tokens``,
    ``.offsets``, ..."""

    def __init__(self, encoding: tokenizers.Encoding) -> None:
        super().__init__(encoding.ids)
        self.encoding = encoding

    @property
    def ids(self) -> list[int]:
        """The ids as a plain list."""
        return list(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.encoding, name)


class Batch(dict[str, Any]):
    """Encoded texts by the names of `generate`: ``fast.generate(**batch)``; values are attributes,
    too, as of transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: torch.device | str) -> Batch:
        """This, its tensors on a device."""
        moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in self.items()}
        return Batch(moved)


class Tokenizer:
    """What `Model.tokenizer` is: the model's tokenizer.json, with the methods that transformers'
    tokenizers are used by. It needs no transformers.

    ``encode`` gives a list of ids (with ``.ids`` and the rest of tokenizers' Encoding), ``decode``
    takes a tensor, an array, a list or one id, and a batch of them. As in tokenizers, ``decode``
    leaves special tokens out unless told. Special tokens go by name (``eos_token``,
    ``eos_token_id``, ``pad_token``, ...). What is not here is `backend_tokenizer`'s, a
    `tokenizers.Tokenizer`: ``token_to_id``, ``id_to_token``, ``get_vocab``, ...
    """

    padding_side = "left"

    def __init__(self, program: Program) -> None:
        path = program.assets.get("tokenizer.json")
        if path is None:
            raise InputError(
                f"{program.name} came without a tokenizer.json; pass token ids instead of text"
            )
        self.program, self.backend_tokenizer = program, read_tokenizer(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "backend_tokenizer":
            raise AttributeError(name)
        if name.endswith("_token") and name in _NAMES:
            return self.special_tokens_map.get(name)
        if name.endswith("_token_id") and name[:-3] in _NAMES:
            return self._special_id(name[:-3])
        return getattr(self.backend_tokenizer, name)

    @overload
    def encode(
        self, text: str, *, add_special_tokens: bool = True, return_tensors: None = None
    ) -> Ids: ...

    @overload
    def encode(
        self, text: str, *, add_special_tokens: bool = True, return_tensors: Literal["pt"]
    ) -> torch.Tensor: ...

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        return_tensors: Literal["pt"] | None = None,
    ) -> Ids | torch.Tensor:
        """A text's ids; with ``return_tensors="pt"`` as i64[1,S]. Errors: `InputError`."""
        if not isinstance(text, str):
            raise InputError(f"encode: expected a text, got {shown(text)}")
        _check_tensors(return_tensors)
        made = encoded(self.backend_tokenizer, text, marked=add_special_tokens)
        return Ids(made) if return_tensors is None else torch.tensor([made.ids])

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool = False,
        return_tensors: Literal["pt"] | None = None,
    ) -> Batch:
        """A text, or texts, as ``input_ids`` and ``attention_mask``.

        return_tensors: "pt" makes them i64[B,S]. padding: fill texts on the left to the longest.
        Errors: `InputError`, also for texts of unequal lengths as a tensor without padding.
        """
        _check_tensors(return_tensors)
        single = isinstance(text, str)
        rows = [
            list(self.encode(one, add_special_tokens=add_special_tokens))
            for one in ([text] if isinstance(text, str) else text)
        ]
        longest = max(map(len, rows), default=0)
        if return_tensors and not padding and any(len(row) < longest for row in rows):
            raise InputError(
                "these texts have different numbers of tokens, and a tensor has rows of one "
                "length: add padding=True"
            )
        fill = next((i for n in ("pad", "eos") if (i := self._special_id(f"{n}_token"))), 0)
        gaps = [longest - len(row) if padding else 0 for row in rows]
        ids: Any = [[fill] * gap + row for gap, row in zip(gaps, rows, strict=True)]
        mask: Any = [[0] * gap + [1] * len(row) for gap, row in zip(gaps, rows, strict=True)]
        if return_tensors:
            ids, mask = torch.tensor(ids), torch.tensor(mask)
        elif single:
            ids, mask = ids[0], mask[0]
        return Batch(input_ids=ids, attention_mask=mask)

    def decode(
        self,
        token_ids: Any,
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Ids as text: one id, a list, a tensor or an array; of rows, a list of texts.

        clean_up_tokenization_spaces: of older tokenizers, whose texts were mended afterwards; here
        it changes nothing. Errors: `InputError`."""
        ids = _plain(token_ids)
        if ids and isinstance(ids[0], list):
            return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in ids]
        with refusing(f"the tokenizer cannot decode {len(ids)} tokens"):
            return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool = True) -> list[str]:
        """Each row as text, as `generate` returns them. Errors: `InputError`."""
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_tensors: Literal["pt"] | None = None,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Messages by the model's chat template, with the meaning and defaults of transformers'
        method: a `Batch`, ids if not `return_dict`, text if not `tokenize`.

        `Model.apply_chat_template` says what the rest is. Errors: `InputError`.
        """
        _check_tensors(return_tensors)
        template = template_of(self.program, given=chat_template, tools=tools is not None)
        text = template.render(
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        if not tokenize:
            return text
        made = self(text, add_special_tokens=False, return_tensors=return_tensors)
        return made if return_dict else made["input_ids"]

    @property
    def chat_template(self) -> str | None:
        """The template's text; None if the model has none."""
        try:
            return template_of(self.program).source
        except InputError:
            return None

    @cached_property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by name: ``eos_token``, ..."""
        return special_tokens(self.program.assets)

    @property
    def vocab_size(self) -> int:
        """Tokens, without those that were added."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """A token's id, or those of several; None for what is no token."""
        if isinstance(tokens, str):
            return self.backend_tokenizer.token_to_id(tokens)
        return [self.backend_tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """An id's token, or those of several; None for what is no id."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(id) for id in _plain(ids)]

    def _special_id(self, name: str) -> int | None:
        """The id of a special token; of those that files do not name, what `generate` knows."""
        token = self.special_tokens_map.get(name)
        if token is not None:
            return self.backend_tokenizer.token_to_id(token)
        said = self.program.info.generation_config.get(f"{name}_id")
        said = said[0] if isinstance(said, list | tuple) and said else said
        return said if isinstance(said, int) else None

    def __repr__(self) -> str:
        return f"Tokenizer of {self.program.name}: {len(self)} tokens"


_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def _check_tensors(return_tensors: object) -> None:
    if return_tensors not in (None, "pt"):
        raise InputError(f'return_tensors: expected "pt" or None, got {shown(return_tensors)}')


def _plain(ids: Any) -> list[Any]:
    """Ids as a list, of rows as a list of lists. Errors: `InputError` for what are none."""
    found = ids.tolist() if hasattr(ids, "tolist") else ids
    found = [found] if isinstance(found, int) else found
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Sequence):
        raise InputError(f"decode: expected token ids, a list or a tensor, got {shown(ids)}")
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in found]
    deep = {isinstance(row, list | tuple) for row in rows}
    whole = [row for row in rows for row in (row if isinstance(row, list | tuple) else [row])]
    if len(deep) > 1 or any(type(id) is not int or id < 0 for id in whole):
        raise InputError(f"decode: expected token ids, a list or a tensor, got {shown(ids)}")
    return [list(row) if isinstance(row, list | tuple) else row for row in rows]
