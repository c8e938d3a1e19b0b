"""Which lowering takes a step, and with which inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from ...ir import Function, InputError, Program, Role, Sym, type_of
from ...ir.plan.inputs import ANCESTORS, PACKED
from ..base import rounds_activations
from ..target import Target
from .attention import SEQLENS, TOTAL, Counted
from .lower import Variant, has_states
from .pairs import only_attention_needs_pairs
from .probe import attention_kernel_works, own_attention_available
from .rows_own import runs_own

G = torch.ops.graftwork
ATTENTION = (
    G.attend.default,
    G.attend_part.default,
    G.attend_rows.default,
    G.attend_quantized.default,
    G.attend_grouped.default,
)
WIDTH = Sym("T")
KEPT_WIDTH = 128
"""Chains up to this many tokens keep their ancestor mask."""

COUNTED: frozenset[Counted] = frozenset(("chain", "tree"))
"""Variants that take `Counts`."""

Inputs = Mapping[str, torch.Tensor]


class Route(NamedTuple):
    """variant: the lowering. feeds: its inputs. rows: cache rows that the step needs.

    overhang: rows behind those that the kernels overwrite. widened: the step has a column more than
    was asked for.
    """

    variant: Variant
    feeds: Inputs
    rows: int = 0
    overhang: int = 0
    widened: bool = False


class Router:
    """Routes the steps of one function.

    A token's result must not depend on what shares its step. graftwork's own kernels see to that
    bit for bit, all others where a step has two tokens or more; products and attention of a single
    token add up in another order, and where activations are rounded to integers, a last bit can
    move a value to the next integer. So a function of the target that rounds takes a lone token as
    the first of two columns: in attention only, if nothing else needs it (see `pairs`), else all
    through the step. What other functions make is only proposed: their last bits may differ. On a
    GPU no kernel promises bits, and nothing is doubled.

    native: whether graftwork's own ops may run. own: whether attention is one of them, so that one
    variant takes every step. counted: otherwise, the variants whose attention is one kernel.
    widens: whether a lone token is fed twice.
    """

    def __init__(
        self, program: Program, function: Function, target: Target, *, native: bool = True
    ) -> None:
        self.name = function.name
        self.cached = has_states(function) and function.has_input("past")
        self.trees = function.has_input(ANCESTORS)
        self.drafts_trees = self.trees and program.plan.tree.branches
        counts_here = function.role is Role.TARGET and target.device == "cpu"
        self.rounds = counts_here and rounds_activations(function)
        # Of a step that also drafts, the plain step's part is what counts.
        counts = program.step if self.name in program.plan.step.variants else function
        dtypes = {s.type.dtype for s in program.states.values() if s.grows}
        # Of few bits are states that only own attention writes and reads in one kernel; steps and
        # outliers of groups are halves.
        reads = list(function.calls(*ATTENTION))
        known = dtypes <= {torch.float32, torch.uint8} or bool(reads and all(map(runs_own, reads)))
        plain = bool(dtypes) and known and native and target.device == "cpu"
        self.own = plain and not own_attention_available()
        # ONNX Runtime's kernel lets no token see those behind it, whatever bias it is given.
        mutual = self.name in program.plan.draft.mutual
        counted = () if mutual else COUNTED
        self.counted = frozenset(v for v in counted if self._has_kernel(v, target, dtypes))
        self.pairs = self.rounds and only_attention_needs_pairs(counts, own=self.own)
        self.widens = self.cached and self.rounds and not self.pairs
        self.tokenwise = {
            str(node.target): type_of(node).dims.index(WIDTH)
            for node in function.inputs
            if WIDTH in type_of(node).dims and str(node.target) != ANCESTORS
        }
        self.counts = Counts()
        self.chains: dict[int, torch.Tensor] = {}

    def _has_kernel(
        self, variant: Counted, target: Target, dtypes: Collection[torch.dtype]
    ) -> bool:
        if self.own or (variant == "tree" and not self.trees):
            return False
        return all(attention_kernel_works(target.device, dtype, variant) for dtype in dtypes)

    def route(self, inputs: Inputs, made: Collection[Variant]) -> Route:
        """The route of a step. made: variants that have a session already.

        Errors: `InputError` for ancestors where the program takes none, or missing tokens or past.
        """
        if not self.cached:
            return Route("chain", inputs)
        if not self.tokenwise:
            return Route("batch", inputs)  # it moves rows and has no attention to lower
        rows = inputs.get("past")
        if missing := [name for name in ("past", *self.tokenwise) if name not in inputs]:
            raise InputError(f"{self.name} needs the input {missing[0]!r}")
        assert rows is not None
        ancestors = inputs.get(ANCESTORS)
        if ancestors is not None and not self.trees:
            raise InputError(
                f"{self.name} takes no ancestors: the program was made without trees "
                f"(pass accept_trees)"
            )
        width = self._columns(inputs)
        alone = self.rounds and width == 1
        widened = alone and self.widens
        feeds = self._doubled(inputs) if widened else dict(inputs)
        if widened:
            width, ancestors = 2, None
        past: list[int] = rows.tolist()
        longest = max(past)
        variant = self._variant(ancestors is not None, len(past), width, longest, made)
        if ancestors is None and self.trees and variant != "chain":
            feeds[ANCESTORS] = self._chain(len(past), width)
        if variant in COUNTED:
            feeds.update(self.counts.of(past, longest, width, variant))
        asked = longest + (1 if widened else width)
        overhang = int(alone and (widened or not self.own))
        return Route(variant, feeds, asked, overhang, widened)

    def _columns(self, inputs: Inputs) -> int:
        """Tokens of a step."""
        name, axis = next(iter(self.tokenwise.items()))
        return inputs[name].shape[axis]

    def _variant(
        self, tree: bool, batch: int, width: int, longest: int, made: Collection[Variant]
    ) -> Variant:
        if self.own:
            return "own"
        if batch == 1:
            # Chains cost the same in the tree's session; another would hold the weights once more.
            shared = self.drafts_trees or (self.trees and "tree" in made)
            wanted: Counted = "tree" if shared or (tree and width > 1) else "chain"
            return wanted if wanted in self.counted else "batch"
        if self.rounds or (width > 1 and (tree or longest > 0)):
            return "batch"
        return "chain" if "chain" in self.counted else "batch"

    def _doubled(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """A step of one token as a chain of two; the second is forgotten with the next step."""
        kept = {name: tensor for name, tensor in inputs.items() if name != ANCESTORS}
        for name, axis in self.tokenwise.items():
            if name in kept:
                kept[name] = kept[name].repeat_interleave(2, axis)
        if PACKED in kept:
            pair = torch.arange(2)
            kept["places"] = 2 * kept["places"] + pair
            kept[PACKED] = (2 * kept[PACKED][..., None] + pair).flatten(1)
        return kept

    def _chain(self, batch: int, width: int) -> torch.Tensor:
        """The ancestor mask of a chain."""
        mask = self.chains.get(width)
        if mask is None:
            mask = torch.ones(width, width, dtype=torch.bool).tril()[None]
            if width <= KEPT_WIDTH:
                self.chains[width] = mask
        return mask.expand(batch, width, width)


class Counts:
    """The two numbers that GroupQueryAttention takes instead of `past`."""

    def __init__(self) -> None:
        self.resize(1)

    def resize(self, batch: int) -> None:
        """Tensors for a batch, written through their memory: torch takes 10 us an addition."""
        seqlens, total = torch.zeros(batch, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
        self.tensors, self.batch = {SEQLENS: seqlens, TOTAL: total}, batch
        self.seqlens, self.total = (
            tensor.view(-1).numpy().data.cast("B").cast("i") for tensor in (seqlens, total)
        )

    def of(
        self,
        past: Sequence[int],
        longest: int,
        width: int,
        variant: Variant,
        total: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """seqlens i32[B] and total i32[], or a larger one that is given."""
        if self.batch != len(past):
            self.resize(len(past))
        for b, rows in enumerate(past):
            self.seqlens[b] = rows + width - 1
        # With total == T the kernel takes its first-prompt path, which knows chains only.
        self.total[0] = total or longest + width + (variant == "tree" and longest == 0)
        return self.tensors
