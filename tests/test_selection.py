"""What the everyday run leaves out is there."""

from __future__ import annotations

import re
from pathlib import Path

from selection import RARE

HERE = Path(__file__).parent


def test_rare_tests_are_there() -> None:
    """In their files, under their names; a parameter that has gone makes nothing run less."""
    for name in RARE:
        file, _, test = name.partition("::")
        function = re.escape(test.partition("[")[0])
        assert re.search(rf"^def {function}\(", (HERE / file).read_text(), re.MULTILINE), name
