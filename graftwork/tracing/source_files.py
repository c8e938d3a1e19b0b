"""The files that a model is read from."""

from __future__ import annotations

import glob
import re
from pathlib import Path


def files_of(source: Path) -> list[Path]:
    """The files of a folder, or of a model in one or several .gguf files; none of other sources."""
    if source.suffix.lower() != ".gguf":
        return list(source.iterdir()) if source.is_dir() else []
    several = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", source.name)
    if several is None:
        return [source]
    return sorted(source.parent.glob(f"{glob.escape(several[1])}-*-of-{several[2]}.gguf"))
