"""The intermediate representation: programs, functions, types, ops, plans and weights.

Its names are those of `api`, which loads torch when the first of them is used; files of `support`
do without.
"""

from typing import TYPE_CHECKING

from .support.lazy import names_of

if TYPE_CHECKING:
    from .api import *  # noqa: F403
else:
    __getattr__ = names_of(f"{__name__}.api")
