"""What a verifier is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...ir import Program
from ..drafters.base import Draft
from ..options import GenerationOptions
from ..registry import Registry
from ..sampling import Scorer
from ..text import Text

GREEDY, SAMPLING = "greedy", "sampling"


class Verifier(ABC):
    """Decides, from the target's outputs for a step, which tokens each sequence gains.

    fetch: outputs of the step function that `verify` needs during decoding; the prefill always
    brings ``logits``. Register a subclass with ``@VERIFIERS.register(ItsRecord, GREEDY or
    SAMPLING)`` in its own file of this folder.
    """

    fetch: tuple[str, ...] = ("logits",)

    def __init__(
        self, record: Any, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        self.record, self.program, self.options = record, program, options
        self.scorer = Scorer(options, program.info, batch)

    @abstractmethod
    def verify(
        self, outputs: Mapping[str, torch.Tensor], texts: Sequence[Text], drafts: Sequence[Draft]
    ) -> list[list[int]]:
        """New tokens of each sequence: the accepted prefix of its draft, then one token more.

        outputs: ``logits`` [B,S,V] or ``argmax`` i64[B,S]; column i of a sequence is the target's
        view after its last committed token and i draft tokens. Finished sequences get []. Errors:
        `InputError` if the model returned no usable logits.
        """


VERIFIERS: Registry[Verifier] = Registry(__package__)
