"""Artifacts: folders of a saved program.

    manifest.json          format version, size and sha256 of every file, tools, provenance, report
    program.gw             the program as text
    weights.safetensors    (or weights-00001-of-0000N.safetensors)
    tokenizer.json, ...    the model's files

`save` replaces a folder atomically. `load` reads only files that the manifest lists, inside the
folder, opens each once, and checks size and sha256. Nothing is unpickled or executed. Hashes detect
damage, not tampering.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from ..backends.target import Target
from ..ir import (
    GraftworkError,
    InputError,
    Program,
    UnsupportedError,
    VerifyError,
    Weight,
    WeightStore,
    from_safetensors,
    program_text,
)
from ..ir.check.legality import unmet
from ..ir.check.verify import verify
from ..ir.support.discovery import versions_of
from ..ir.support.files import (
    LARGE,
    SealedPath,
    as_text,
    open_regular,
    plain_path,
    read_bytes,
    read_json,
    read_open,
)
from ..ir.support.scratch import replacing
from ..ir.text.lexer import MAX_BYTES
from ..ir.text.parser import parse_program
from ..ir.weight_files import open_safetensors
from ..report import Frozen, Report, plain_record
from .destinations import check_above
from .shards import SHARD_BYTES, write_weights

FORMAT: Literal["graftwork-artifact"] = "graftwork-artifact"
VERSION: Literal[2] = 2
MANIFEST = "manifest.json"
PROGRAM = "program.gw"
TOOLS = ("graftwork", "torch", "transformers", "onnx", "onnxruntime-gpu", "onnxruntime")

_TRIES = 8
"""Attempts to load an artifact that is being replaced."""

_AGAIN = "copy the artifact again, or save it again"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


class FileEntry(Frozen):
    """A file of the artifact: its role, size in bytes, and sha256 in hex."""

    role: Literal["program", "weights", "asset"]
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class RecordEntry(Frozen):
    """A `PassRecord` as JSON; the program's text contains it as well."""

    name: str
    options: dict[str, Any]
    contract: str
    matches: int
    seconds: float


class Manifest(Frozen):
    """The contents of manifest.json. files: by file name."""

    format: Literal["graftwork-artifact"]
    version: Literal[2]
    target: str
    recipe: dict[str, Any]
    tools: dict[str, str]
    provenance: tuple[RecordEntry, ...]
    report: Report | None
    files: dict[str, FileEntry]


class Saved(Frozen):
    """A loaded artifact."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    program: Program
    manifest: Manifest


def is_artifact(folder: Path) -> bool:
    """Whether a folder has an artifact's manifest; files may be damaged."""
    try:
        return bool(_read_json(folder / MANIFEST).get("format") == FORMAT)
    except InputError:
        return False


def is_saved(folder: Path) -> bool:
    """Whether a folder is an artifact, possibly damaged; `load` reports damage."""
    folder = plain_path("model", folder)
    return (folder / PROGRAM).exists() or is_artifact(folder)


def save(
    program: Program,
    folder: str | Path,
    *,
    target: Target,
    recipe: dict[str, Any],
    report: Report | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str], None] = lambda name: None,
) -> Path:
    """Write an artifact; an existing one is replaced. Holds one weight in memory at a time. Errors:
    `InputError` if the folder is no artifact, a weight holds NaN, or writing fails; the destination
    is then unchanged."""
    check_destination(folder)
    destination = Path(os.path.abspath(plain_path("save", folder)))
    with replacing(destination) as partial:
        files = _write_files(partial, program, shard_bytes, progress)
        manifest = _manifest(program, target, recipe, report, files)
        _write(partial / MANIFEST, manifest.model_dump_json(indent=1).encode())
    return destination


def load(folder: str | Path) -> Saved:
    """Read and check an artifact; weights are loaded on use. If another process replaces it
    meanwhile, the result is the old or the new one. Errors: `InputError` naming a file that is
    missing, damaged, too long or misplaced."""
    folder = plain_path("load", folder)
    for _ in range(_TRIES):
        before = _identity(folder)
        try:
            return _load(folder)
        except InputError:
            if _identity(folder) == before:
                raise
    raise InputError(f"{folder} is saved over again and again; load it when that has ended")


def _load(folder: Path) -> Saved:
    manifest = _read_manifest(folder)
    names: dict[str, list[str]] = {"program": [], "weights": [], "asset": []}
    for name, entry in manifest.files.items():
        names[entry.role].append(name)
    with contextlib.ExitStack() as stack:
        # Each file is opened once, so the checked contents are used.
        opened = {name: _opened(folder, name, entry) for name, entry in manifest.files.items()}
        for name in (*names["program"], *names["asset"]):
            stack.enter_context(opened[name])
        if names["program"] != [PROGRAM]:
            raise InputError(f"{folder / MANIFEST}: expected one program, {PROGRAM}")
        weights = _open_weights({folder / name: opened[name] for name in names["weights"]})
        sealed = {n: (folder.resolve() / n, manifest.files[n].sha256) for n in names["asset"]}
        try:
            text = as_text(read_open(opened[PROGRAM], MAX_BYTES))
            program = parse_program(text, weights)
            program = program.replace(assets={n: SealedPath.of(*s) for n, s in sealed.items()})
            verify(program)
            if fault := unmet(program):
                raise VerifyError(fault[0])
        except UnsupportedError:
            raise
        except (GraftworkError, OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{folder / PROGRAM} does not hold a valid program: {error}"
            ) from error
    return Saved(program=program, manifest=manifest)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of the folder at this path."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -- writing


def check_destination(folder: str | Path) -> None:
    """Check that `save` may write there. Errors: `InputError`."""
    destination = Path(os.path.abspath(plain_path("save", folder)))
    check_above(destination)
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_symlink() or not destination.is_dir():
        raise InputError(f"{destination} exists and is not a folder; choose another place")
    if is_artifact(destination) or not any(destination.iterdir()):
        return
    raise InputError(
        f"{destination} exists and is not a graftwork artifact; "
        f"choose another place, or empty it yourself"
    )


def _write_files(
    folder: Path, program: Program, shard_bytes: int, progress: Callable[[str], None]
) -> dict[str, FileEntry]:
    files = {}
    for name, source in program.assets.items():
        ours = name in (MANIFEST, PROGRAM) or name.endswith(".safetensors")
        if ours or not _PLAIN_NAME.fullmatch(name):
            raise InputError(f"an artifact cannot hold a model file called {name!r}")
        data = read_bytes(source, LARGE)
        files[name] = _write(folder / name, data, "asset")
    files[PROGRAM] = _write(folder / PROGRAM, program_text(program, made=True).encode(), "program")
    weights = list(program.weights.values())
    for done in write_weights(folder, weights, shard_bytes, progress):
        files[done.name] = FileEntry(role="weights", bytes=done.bytes, sha256=done.sha256)
    return files


def _write(
    path: Path, data: bytes, role: Literal["program", "weights", "asset"] = "asset"
) -> FileEntry:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(role=role, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _manifest(
    program: Program,
    target: Target,
    recipe: dict[str, Any],
    report: Report | None,
    files: dict[str, FileEntry],
) -> Manifest:
    return Manifest(
        format=FORMAT,
        version=VERSION,
        target=str(target),
        recipe=recipe,
        tools=tool_versions(),
        provenance=tuple(RecordEntry(**plain_record(r)) for r in program.provenance),
        report=report,
        files=files,
    )


def tool_versions() -> dict[str, str]:
    """Versions of the installed packages that a result depends on."""
    return versions_of(*TOOLS)


# -- reading


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = read_json(path, follow=False)
    except FileNotFoundError as error:
        lost = f"; {_AGAIN}" if (path.parent / PROGRAM).exists() else ""
        raise InputError(
            f"{path.parent} is not a graftwork artifact: no {path.name}{lost}"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}; {_AGAIN}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object")
    return data


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    data = _read_json(path)
    if data.get("format") != FORMAT:
        raise InputError(f"{folder} is not a graftwork artifact: {path} has another format")
    if data.get("version") != VERSION:
        raise InputError(
            f"{path}: format version {data.get('version')!r}; this graftwork reads {VERSION}. "
            f"Optimize the model again, or use the graftwork that wrote it: {data.get('tools')}"
        )
    try:
        return Manifest.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where}: {first['msg']}") from error


def _opened(folder: Path, name: str, entry: FileEntry) -> BufferedReader:
    """Open a file of the manifest, check it, and rewind it."""
    # Plain names have no separators and no leading dot: no file outside the folder.
    if not _PLAIN_NAME.fullmatch(name):
        raise InputError(f"{folder / MANIFEST}: {name!r} is not a plain file name")
    path = folder / name
    try:
        file = open_regular(path, follow=False)
        size = os.fstat(file.fileno()).st_size
        digest = "" if size != entry.bytes else hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing from the artifact; {_AGAIN}") from error
    except OSError as error:
        raise InputError(f"cannot read the artifact's files: {error}; {_AGAIN}") from error
    if digest == entry.sha256:
        return file
    file.close()
    if size != entry.bytes:
        raise InputError(
            f"{path} is damaged: {size} bytes, the manifest says {entry.bytes}; {_AGAIN}"
        )
    raise InputError(f"{path} is damaged: its sha256 is not the manifest's; {_AGAIN}")


def _open_weights(files: Mapping[Path, BufferedReader]) -> WeightStore:
    weights: dict[str, Weight] = {}
    for path, opened in files.items():
        file = open_safetensors(path, opened)
        for name in file.keys():  # noqa: SIM118  (the file is not a mapping)
            if name in weights:
                raise InputError(f"{path}: the weight {name!r} is in another file too")
            weights[name] = from_safetensors(file, name)
    return WeightStore(weights)
