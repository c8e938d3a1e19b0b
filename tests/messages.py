"""What commands print where they fail."""

from __future__ import annotations


def error_message(printed: str) -> str:
    """The message of a command that failed, from "error: " on; before it nothing is printed but
    stages that took long."""
    stages, error, message = printed.partition("error: ")
    assert error, printed
    assert all(line.endswith(" s") for line in stages.splitlines()), printed
    return error + message
