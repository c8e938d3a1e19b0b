"""Training what was grafted onto a program: `fit`, its data, objectives and checkpoints."""

from .fit import FitOptions, fit

__all__ = ["FitOptions", "fit"]
