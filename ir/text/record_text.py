"""Reading a single plan record, as options of passes name it."""

from __future__ import annotations

from ..plan import Record
from .parser import Parser


def parse_record(text: str, slot: str) -> Record:
    """Read one record of a slot, such as ``suffix(tokens=4)``; fields left out have defaults.

    Errors: `ParseError` with line, column and what was expected.

    >>> str(parse_record("suffix(tokens=4)", "draft"))
    'suffix(tokens=4, longest=16, shortest=2)'
    """
    parser = Parser(text, None)
    found = parser.plan_record(slot)
    parser.cursor.skip_lines()
    if parser.cursor.here.kind != "end":
        parser.cursor.fail("nothing more")
    return found
