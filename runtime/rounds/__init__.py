"""Ways to run decode steps: one class a file."""

from .base import Decoding, Round
from .chained import ChainedRound
from .general import GeneralRound
from .plain import PlainRound, RestingRound
from .shallow import ShallowRound
from .staged import StagedRound

ROUNDS: tuple[type[Round], ...] = (
    StagedRound,
    PlainRound,
    ChainedRound,
    RestingRound,
    ShallowRound,
    GeneralRound,
)
"""Those that touch least come first: of the rounds that fit a generation, the first that wants to
make steps does. The last always can."""

__all__ = ["ROUNDS", "Decoding", "Round"]
