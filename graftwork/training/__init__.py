"""Training of inserted weights (`fit`), or of the target itself (`train_exits`)."""

from .early_exit import ExitsTrained, train_exits
from .fit import FitOptions, FitState, Fitted, Report, fit
from .layerskip import LayerSkip

__all__ = [
    "ExitsTrained",
    "FitOptions",
    "FitState",
    "Fitted",
    "LayerSkip",
    "Report",
    "fit",
    "train_exits",
]
