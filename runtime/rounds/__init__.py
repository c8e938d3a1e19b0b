"""Ways to run decode steps: one class a file."""

from .base import Decoding, Round
from .chained import ChainedRound
from .general import GeneralRound
from .led import LedRound
from .plain import PlainRound, RestingRound
from .staged import StagedRound

ROUNDS: tuple[type[Round], ...] = (
    StagedRound,
    PlainRound,
    ChainedRound,
    RestingRound,
    LedRound,
    GeneralRound,
)
"""Those that touch least come first: of the rounds that fit a generation, the first that wants to
make steps does. The last always can."""

__all__ = ["ROUNDS", "Decoding", "Round"]
