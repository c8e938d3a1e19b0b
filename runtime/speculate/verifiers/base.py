"""What a verifier is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from ....ir import Program, Weight, WeightStore
from ...asking.options import GenerationOptions
from ...asking.request import Request
from ...registry import Registry
from ..noise import Noise
from ..sampling import Scorer, StepToVerify

GREEDY, SAMPLING, BEAMS, SUPERPOSED = "greedy", "sampling", "beams", "superposed"


class Verdict(NamedTuple):
    """path: accepted draft nodes from the root down. tokens: theirs, and one of the target's."""

    path: Sequence[int]
    tokens: list[int]


NOTHING_GAINED = Verdict((), [])
"""The verdict on a finished sequence."""


class Verifier(ABC):
    """Decides, from the target's outputs for a step, which tokens each sequence gains.

    fetch: outputs of the step function that `verify` needs during decoding; the prefill always
    brings ``logits``. begins: those that it needs of prompts, too. takes_argmax: whether a sequence
    that nothing was drafted for gains the step's ``argmax``. beyond: how many levels of a draft it
    asks for beyond those that it may accept. parents: of the last step, by sequence, the one whose
    text it goes on from; None: its own. noise: by which a text's tokens are drawn, place by place;
    None: they are drawn otherwise, or not at all. Register a subclass with
    ``@VERIFIERS.register(ItsRecord, GREEDY or SAMPLING)`` in its own file of this folder.
    """

    fetch: tuple[str, ...] = ("logits",)
    begins: tuple[str, ...] = ()
    takes_argmax: bool = False
    beyond: ClassVar[int] = 0
    parents: Sequence[int] | None = None
    noise: Noise | None = None

    def __init__(
        self, record: Any, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        self.record, self.program, self.options = record, program, options
        self.scorer = Scorer(options)

    def begin(self, request: Request) -> None:  # noqa: B027
        """The generation that this verifies is about to start."""

    @abstractmethod
    def verify(self, step: StepToVerify) -> list[Verdict]:
        """The verdict on each sequence's draft; `NOTHING_GAINED` on finished sequences. Errors:
        `InputError` if the model returned no usable logits."""


def on_host(program: Program, function: str) -> Program:
    """The program of a small function alone, such as a head of few rows, with its weights on the
    host, where the interpreter runs it."""
    fn = program.function(function)
    kept = {n: Weight.of(n, program.weights[n].load().to("cpu")) for n in fn.weights}
    return program.replace(functions={fn.name: fn}, weights=WeightStore(kept))


VERIFIERS: Registry[Verifier] = Registry(__package__)
