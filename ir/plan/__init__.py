"""The decode plan: how a program's functions become a generation loop, as data.

Each record is frozen and typed; a pass replaces records, the runtime looks up the class that
carries one out, the text form prints ``kind(field=value)``. Every record of every file here can be
imported from this package and is known to the text form: the lines below tell type checkers, a test
holds them to the files of this folder.

    >>> str(DecodePlan(tree=Chain(depth=6)).tree)
    'chain(depth=6)'
"""

# ruff: noqa: F403
from __future__ import annotations

from ..support.discovery import import_all
from .base import *
from .cache import *
from .combined import *
from .continued import *
from .decode import *
from .depth import *
from .draft import *
from .drawn import *
from .iterated import *
from .length import *
from .skipping import *
from .source import *
from .step import *
from .superposed import *
from .translated import *
from .tree import *
from .verify import *

import_all(__name__)
