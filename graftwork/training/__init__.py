"""Training of inserted weights (`fit`, `Learner`), of the target with them (`train_target`), or of
the target itself (`train_exits`, `heal`)."""

from .early_exit import ExitsTrained, train_exits
from .fit import FitOptions, FitState, Fitted, Report, fit
from .heal import Healed, heal
from .layerskip import LayerSkip
from .learner import Learner, LearnerOptions, Update
from .tuned import Tuned, train_target

__all__ = [
    "ExitsTrained",
    "FitOptions",
    "FitState",
    "Fitted",
    "Healed",
    "LayerSkip",
    "Learner",
    "LearnerOptions",
    "Report",
    "Tuned",
    "Update",
    "fit",
    "heal",
    "train_exits",
    "train_target",
]
