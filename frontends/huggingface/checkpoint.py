"""A checkpoint folder as lazy weights under the names of the model's parameters.

Checkpoints on disk do not always hold what the model's code calls its parameters: names changed, a
base model has no prefix, every expert of a layer is a tensor of its own. transformers keeps rules
for that (`conversion_mapping`); they are applied here to *names* only, and to tensors when somebody
loads the weight.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...ir import GraftworkWarning, InputError, TensorType, UnsupportedError, Weight
from ...ir.support.files import read_json
from ...ir.weight_files import from_safetensors, open_safetensors
from ...ir.weights import Call, derivation, derive
from ..stored_weights import StoredWeight, warn_of_dequantized
from .computed import computed

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def tensors_of(folder: Path) -> dict[str, Path]:
    """The shard that holds each tensor of a checkpoint, by name.

    Errors: `InputError` naming a missing or damaged index, a missing shard, or a shard that lacks
    a tensor.
    """
    if (folder / _INDEX).exists():
        return _located(folder, _shards(folder / _INDEX))
    if (folder / _SINGLE).exists():
        names = open_safetensors(folder / _SINGLE).keys()
        return {name: folder / _SINGLE for name in names}
    others = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; convert {others[0]} to safetensors first" if others else ""
    raise InputError(f"{folder} holds neither {_SINGLE} nor {_INDEX}{hint}")


def _shards(index: Path) -> dict[str, str]:
    """Which shard the index says holds each tensor."""
    try:
        shards = read_json(index)["weight_map"]
        if not all(isinstance(shard, str) for shard in shards.values()):
            raise TypeError("a shard's name is no text")
        return {str(name): shard for name, shard in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"cannot read {index}: expected a JSON object whose weight_map names a shard for each "
            f"tensor ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _located(folder: Path, shards: Mapping[str, str]) -> dict[str, Path]:
    held = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise InputError(
                f"{folder}: {_INDEX} names the shard {shard!r}; expected the name of a file in the "
                f"folder, without a path"
            )
        if not os.path.exists(folder / shard):
            lost = sum(1 for name in shards.values() if name == shard)
            raise InputError(
                f"{folder}: the shard {shard} is missing ({lost} tensors, according to {_INDEX}); "
                "fetch it again"
            )
        held[shard] = set(open_safetensors(folder / shard).keys())
    for name, shard in shards.items():
        if name not in held[shard]:
            raise InputError(f"{folder}: {_INDEX} says {shard} holds {name!r}, but it does not")
    return {name: folder / shard for name, shard in shards.items()}


Tensors = dict[str, Callable[[], Weight]]
"""What opens each tensor of a checkpoint, by name."""


def opened(folder: Path) -> Tensors:
    """The tensors of a checkpoint as they are in its files. Errors: as `tensors_of`."""
    return {
        name: partial(from_safetensors, path, name) for name, path in tensors_of(folder).items()
    }


@dataclass
class _Recipe:
    """How a parameter is made of checkpoint tensors. rule: a transformers converter, or None."""

    rule: Any = None
    parts: list[tuple[str, Weight]] = field(default_factory=list)
    first: str = ""


class Checkpoint:
    """Weights of a model on disk.

    twin: the model with fake parameters, whose names, shapes and dtypes are expected; not tied yet:
    what its configuration ties is tied here, unless the files hold it apart. tensors: what the
    folder (or file) holds. kept: those of them that it holds in few bits. optional: parameters that
    it may lack, beside those that a model computes. Errors: `InputError` naming others that the
    checkpoint lacks. Warns (`GraftworkWarning`) of what is not tied although its configuration says
    so.
    """

    def __init__(
        self,
        folder: Path,
        twin: nn.Module,
        tensors: Tensors,
        kept: Mapping[str, StoredWeight] | None = None,
        optional: Collection[str] = (),
    ) -> None:
        self.folder, self.twin, self.kept = folder, twin, kept or {}
        self.expected: dict[str, torch.Tensor] = dict(twin.state_dict(keep_vars=True))
        self.recipes: dict[str, _Recipe] = {}
        for name, open in sorted(tensors.items(), key=lambda item: _natural(item[0])):
            self._assign(name, open)
        self._tie()
        self._share_tied()
        missing = [n for n in self.expected if n not in self.recipes and n not in optional]
        for name, tensor in computed(twin, missing).items():
            self.recipes[name] = _Recipe(None, [(name, Weight.of(name, tensor))], name)
        missing = [name for name in missing if name not in self.recipes]
        if missing:
            listing = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise InputError(
                f"{folder}: the checkpoint lacks {len(missing)} of the {len(self.expected)} "
                f"tensors that {type(twin).__name__} has: {listing}"
            )

    def _assign(self, name: str, open: Callable[[], Weight]) -> None:
        """Find out which parameter a tensor of the checkpoint belongs to."""
        target, pattern = self._target(name)
        if target not in self.expected:
            return
        weight = open()
        if pattern is None:
            self.recipes[target] = _Recipe(None, [(name, weight)], target)
            return
        rule = self._rules[pattern]
        recipe = self.recipes.setdefault(target, _Recipe(rule, [], target))
        recipe.parts.append((pattern, weight))
        for other in rule.target_patterns[1:]:
            self.recipes[target.replace(rule.target_patterns[0], other)] = recipe

    def _target(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = getattr(self.twin, "base_model_prefix", "")
        renamings, converters = self._transforms
        found: tuple[str, str | None] = rename_source_key(
            name, renamings, converters, prefix, self.expected
        )
        if found[0] not in self.expected and name in self.expected:
            return name, None
        return found

    @cached_property
    def _transforms(self) -> tuple[list[Any], list[Any]]:
        """transformers' renamings and converters for this model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules = get_model_conversion_mapping(self.twin)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        return [rule for rule in rules if rule not in converters], converters

    @cached_property
    def _rules(self) -> dict[str, Any]:
        return {pattern: rule for rule in self._transforms[1] for pattern in rule.source_patterns}

    def _tie(self) -> None:
        """Tie the twin's parameters as its configuration says, and as transformers loads them:
        those that the files hold with values of their own stay apart, and of a group whose source
        is missing the first that is there takes its place."""
        said: dict[str, str] = self.twin.all_tied_weights_keys  # type: ignore[assignment]
        groups: dict[str, list[str]] = {}
        for target, source in said.items():
            groups.setdefault(source, [source]).append(target)
        tied, apart = {}, []
        for source, names in groups.items():
            first = next((name for name in names if name in self.recipes), source)
            for name in names:
                if name == first:
                    continue
                if name not in self.recipes or self._alike(name, first):
                    self.recipes.pop(name, None)
                    tied[name] = first
                else:
                    apart.append(f"{name} and {first}")
        self.twin.all_tied_weights_keys = tied  # type: ignore[assignment]
        self.twin.tie_weights(recompute_mapping=False)  # type: ignore[operator]
        self.expected = dict(self.twin.state_dict(keep_vars=True))
        if apart:
            warnings.warn(
                f"{self.folder}: the configuration ties {apart[0]}, but the files hold other "
                "values for each: they are used as they are in the files",
                GraftworkWarning,
                stacklevel=2,
            )

    def _alike(self, name: str, other: str) -> bool:
        """Whether the files hold the same values for two parameters. Reads them."""
        held = [part.name for n in (name, other) for _, part in self.recipes[n].parts]
        if any(part in self.kept for part in held):
            return False  # each in its own bits
        return torch.equal(self.weight(name).load(), self.weight(other).load())

    def _share_tied(self) -> None:
        """A parameter that the checkpoint lacks may be another name of one that it has."""
        held = {id(self.expected[name]): name for name in self.recipes if name in self.expected}
        for name, tensor in self.expected.items():
            if name not in self.recipes and id(tensor) in held:
                self.recipes[name] = self.recipes[held[id(tensor)]]

    def __contains__(self, name: str) -> bool:
        return name in self.recipes

    def weight(self, name: str) -> Weight:
        """A parameter or buffer, in the dtype that the twin has it in.

        Errors: `InputError` when its shape is not the one that the configuration implies.
        """
        expected = TensorType.of(self.expected[name])
        recipe = self.recipes[name]
        if recipe.rule is None:
            held = recipe.parts[0][1]
            if held.type.dims != expected.dims:
                raise InputError(
                    f"{self.folder}: tensor {held.name!r} is {held.type}, but the "
                    f"configuration asks for {expected}"
                )
            return held.renamed(name).cast(expected.dtype)
        parts = [weight for _, weight in recipe.parts]
        made = Call(partial(self._made, recipe, name, parts, expected.dtype))
        return _joined(recipe, name, expected) or Weight(name, expected, made)

    def stored(self) -> dict[str, StoredWeight]:
        """Parameters that the checkpoint holds in few bits.

        Experts that transformers' rules make one stack of are stacked as they are stored. Warns of
        what else those rules make of several tensors: it is floats. Errors: `UnsupportedError` for
        a module that has a weight which is laid in another way.
        """
        found: dict[str, StoredWeight] = {}
        left: list[str] = []
        for name, recipe in self.recipes.items():
            if recipe.rule is not None:
                stack = self._stack(name, recipe)
                if stack is not None:
                    found[name] = stack
                    continue
                left += [held.name for _, held in recipe.parts if held.name in self.kept]
            elif recipe.parts[0][0] in self.kept:
                self._check_rows(name)
                found[name] = self.kept[recipe.parts[0][0]]
        warn_of_dequantized(sorted(set(left)), "several make one weight here")
        return found

    def _stack(self, name: str, recipe: _Recipe) -> StoredWeight | None:
        """A parameter [E,N,K] of which each expert's weights are stored alike, as a stack of them;
        None for what has no stack: other formats side by side, codebooks, columns in an order of
        their own, or a rule that does not leave rows as they are."""
        known = [self.kept.get(held.name) for _, held in recipe.parts]
        stored = [part for part in known if part is not None]
        formats = {(part.numeric, part.rounded, part.span) for part in stored}
        plain = all(part.codebook is None and part.order is None for part in stored)
        expected = TensorType.of(self.expected[name])
        if len(stored) < len(known) or len(formats) != 1 or not plain or len(expected.dims) != 3:
            return None
        experts, rows, columns = expected.shape
        numeric = stored[0].numeric
        packed, scale = numeric.types(rows, columns)
        parts: dict[str, Weight | None] = {}
        for field_, type in (("weight", packed), ("scale", scale), ("offset", scale)):
            single = [getattr(part, field_) for part in stored]
            if single[0] is None:
                parts[field_] = None
                continue
            made = TensorType(single[0].type.dtype, (experts, *type.dims))
            fakes = [torch.empty(part.type.shape, device="meta") for part in single]
            try:
                fits = self._converted(recipe, name, fakes).shape == made.shape
            except (
                Exception
            ):  # rules may ask for the sizes of floats; they raise whatever they like
                return None
            if not fits:
                return None
            stacked = partial(self._made, recipe, name, single, made.dtype)
            parts[field_] = Weight(f"{name}.{field_}", made, Call(stacked))
        weight, scales = parts["weight"], parts["scale"]
        assert weight is not None and scales is not None
        stack = StoredWeight(numeric, weight, scales, parts["offset"])
        return replace(stack, rounded=stored[0].rounded, span=stored[0].span)

    def _check_rows(self, name: str) -> None:
        module = self.twin.get_submodule(name.rpartition(".")[0])
        experts = self.expected[name].dim() == 3 and hasattr(module, "_apply_gate")
        if not experts and not isinstance(module, (nn.Linear, nn.Embedding)):
            raise UnsupportedError(
                f"{self.folder}: {name} is quantized, and its module is a {type(module).__name__}; "
                f"expected a Linear or an Embedding"
            )

    def _made(
        self, recipe: _Recipe, name: str, parts: Sequence[Weight], dtype: torch.dtype
    ) -> torch.Tensor:
        """What a rule makes of a weight for each part, loaded."""
        return self._converted(recipe, name, (part.load() for part in parts)).to(dtype)

    def _converted(
        self, recipe: _Recipe, name: str, tensors: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """What a rule makes of a tensor for each part."""
        rule = deepcopy(recipe.rule)
        for (pattern, _), tensor in zip(recipe.parts, tensors, strict=True):
            rule.collected_tensors[pattern].append(tensor)
        made = rule.convert(recipe.first, model=self.twin, config=self.twin.config)
        if name not in made:
            raise InputError(f"{self.folder}: converting {recipe.first} did not give {name}")
        tensor = made[name]
        result: torch.Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return result

    def dtypes(self) -> Iterator[torch.dtype]:
        """The floating dtypes of the tensors that are used."""
        for recipe in self.recipes.values():
            for _, weight in recipe.parts:
                if weight.type.dtype.is_floating_point:
                    yield weight.type.dtype


@derivation
def stacked(*tensors: torch.Tensor, dim: int) -> torch.Tensor:
    """Tensors of one shape along a new axis."""
    return torch.stack(tensors, dim)


@derivation
def concatenated(*tensors: torch.Tensor, dim: int) -> torch.Tensor:
    """Tensors one after the other along an axis."""
    return torch.cat(tensors, dim)


_JOINS: dict[str, Callable[..., torch.Tensor]] = {
    "MergeModulelist": stacked,
    "Concatenate": concatenated,
}


def _joined(recipe: _Recipe, name: str, expected: TensorType) -> Weight | None:
    """A parameter whose rule only stacks and concatenates tensors; None for other rules."""
    rule = recipe.rule
    joins = [(_JOINS.get(type(step).__name__), getattr(step, "dim", 0)) for step in rule.operations]
    given = ([w for p, w in recipe.parts if p == pattern] for pattern in rule.source_patterns)
    lists = [weights for weights in given if weights]
    for join, dim in joins:
        if join is None or len(rule.target_patterns) > 1:
            return None
        if join is concatenated:
            lists = [[weight for weights in lists for weight in weights]]
        metas = [
            [torch.empty(w.type.shape, dtype=w.type.dtype, device="meta") for w in weights]
            for weights in lists
        ]
        try:
            types = [TensorType.of(join(*meta, dim=dim)) for meta in metas]
        except (RuntimeError, IndexError):
            return None
        lists = [[derive(name, t, join, *w, dim=dim)] for t, w in zip(types, lists, strict=True)]
    whole = lists[0][0]
    fits = len(lists) == 1 and whole.type.dims == expected.dims
    return whole.cast(expected.dtype) if fits else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts expert 10 behind expert 9. ("²" is a digit, and no number.)"""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
