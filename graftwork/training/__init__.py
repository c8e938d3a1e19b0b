"""Training of inserted weights (`fit`), or of the target itself (`train_exits`, `heal`)."""

from .early_exit import ExitsTrained, train_exits
from .fit import FitOptions, FitState, Fitted, Report, fit
from .heal import Healed, heal
from .layerskip import LayerSkip

__all__ = [
    "ExitsTrained",
    "FitOptions",
    "FitState",
    "Fitted",
    "Healed",
    "LayerSkip",
    "Report",
    "fit",
    "heal",
    "train_exits",
]
