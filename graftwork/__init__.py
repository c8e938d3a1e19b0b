"""graftwork: graph transformations that make language models generate faster.

import graftwork as gw

fast = gw.optimize(model, "copyspec")       # a transformers model or a local checkpoint folder
ids = fast.generate(input_ids, max_new_tokens=128)
fast.save("out/"); fast = gw.load("out/")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._clone import install as _install
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .backends.target import Target
    from .ir.support.errors import GraftworkError
    from .measuring.exit_thresholds import calibrate_exits
    from .measuring.tuning import tune
    from .model import Model, load
    from .optimizing import optimize
    from .recipe import Recipe, recipes
    from .runtime.asking.samplers import LookBack, Mirostat, Momentum
    from .training.early_exit import train_exits
    from .training.fit import fit
    from .training.heal import heal
    from .training.learner import Learner
    from .training.tuned import train_target

_install()

__all__ = [
    "GraftworkError",
    "Learner",
    "LookBack",
    "Mirostat",
    "Model",
    "Momentum",
    "Recipe",
    "Target",
    "calibrate_exits",
    "fit",
    "heal",
    "load",
    "optimize",
    "recipes",
    "train_exits",
    "train_target",
    "tune",
]

# Loaded on first use: `import graftwork` and `graftwork --help` then cost milliseconds, not torch.
_HOMES = {
    "GraftworkError": ".ir.support.errors",
    "Learner": ".training",
    "LookBack": ".runtime.asking.samplers",
    "Mirostat": ".runtime.asking.samplers",
    "Model": ".model",
    "Momentum": ".runtime.asking.samplers",
    "Recipe": ".recipe",
    "Target": ".backends.target",
    "calibrate_exits": ".measuring.exit_thresholds",
    "fit": ".training",
    "heal": ".training",
    "load": ".model",
    "optimize": ".optimizing",
    "recipes": ".recipe",
    "train_exits": ".training",
    "train_target": ".training",
    "tune": ".measuring.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
