"""Not the package, which is in the folder `graftwork`, but what Python finds above a clone.

A clone that is called `graftwork` is, to Python in the folder above it, a package of that name, and
without this file an empty one that shadows the one that is installed. So this one hands over to it.
"""

import importlib.util
import sys
from pathlib import Path

if __name__ == "graftwork":
    _inside = Path(__file__).parent / "graftwork"
    _spec = importlib.util.spec_from_file_location(
        __name__, _inside / "__init__.py", submodule_search_locations=[str(_inside)]
    )
    _package = importlib.util.module_from_spec(_spec)
    sys.modules[__name__] = _package
    _spec.loader.exec_module(_package)
