"""Training what was grafted onto a program: `fit`, its data, objectives and checkpoints."""

from .fit import FitOptions, FitState, Fitted, fit

__all__ = ["FitOptions", "FitState", "Fitted", "fit"]
