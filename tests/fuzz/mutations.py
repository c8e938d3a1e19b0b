"""Ways to damage a saved artifact: each changes a folder in place and says what it did."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftwork.artifact.saved import MANIFEST, PROGRAM

WEIGHTS = "weights.safetensors"
NUMBERS = (
    "0",
    "1",
    "2",
    "-1",
    "3",
    "7",
    "31",
    "33",
    "4096",
    "9" * 11,
    "2**63",
    "0.5",
    "1e308",
)
NAMES = ('"../../x"', "None", '"a b"', "self", "logits", "step", '"\\ud800"', "tokens", "kv.0.key")
OPS = (
    "aten.mul.Tensor",
    "aten.sub.Tensor",
    "aten.linear",
    "aten.silu",
    "aten.embedding",
    "aten.transpose.int",
    "aten.view",
    "aten.cumsum",
    "aten.argmax",
    "aten.empty.memory_format",
    "aten.native_dropout",
    "aten.max_pool2d_with_indices_backward",
    "graftwork.rms_norm",
    "graftwork.attend",
    "graftwork.glu",
)
JUNK = (None, -1, 0, 2**70, "", "x" * 1000, [], {}, True, 1e400, "../x", "\ud800")


def in_text(rng: random.Random, folder: Path) -> str:
    """One to three edits of the program's text."""
    path = folder / PROGRAM
    text = path.read_text()
    edits = [rng.choice(EDITS) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    for edit in edits:
        text = edit(rng, text)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return "+".join(edit.__name__ for edit in edits)


def token(rng: random.Random, text: str, pattern: str, others: Callable[[str], Any]) -> str:
    """One match of a pattern exchanged for another text."""
    found = list(re.finditer(pattern, text))
    if not found:
        return text
    match = rng.choice(found)
    new = others(match.group())
    return text[: match.start()] + str(new) + text[match.end() :]


def number(rng: random.Random, text: str) -> str:
    """A number becomes another one."""
    close = rng.random() < 0.4

    def other(old: str) -> str:
        return str(int(old) + rng.choice((-1, 1, 2))) if close else rng.choice(NUMBERS)

    return token(rng, text, r"(?<![\w.])\d+(?![\w.])", other)


def swapped(pattern: str, name: str) -> Callable[[random.Random, str], str]:
    """One match becomes another match."""

    def edit(rng: random.Random, text: str) -> str:
        known = re.findall(pattern, text)
        return token(rng, text, pattern, lambda old: rng.choice(known)) if known else text

    edit.__name__ = name
    return edit


def op(rng: random.Random, text: str) -> str:
    """An op becomes another one."""
    return token(rng, text, r"(?:aten|graftwork)\.[\w.]+", lambda old: rng.choice(OPS))


def name(rng: random.Random, text: str) -> str:
    """A word becomes a strange name."""
    return token(rng, text, r"\b[a-z][\w.]*\b", lambda old: rng.choice(NAMES))


def plan(rng: random.Random, text: str) -> str:
    """A number of the plan or of the facts."""
    block = text.rfind("decode {")  # none where the plan is the default one
    begin = block if block >= 0 and rng.random() < 0.7 else text.find("info(")
    end = text.find("}" if begin == block else "\n", begin)
    return text[:begin] + number(rng, text[begin:end]) + text[end:]


def line(rng: random.Random, text: str) -> str:
    """A line dropped, doubled or moved."""
    lines = text.split("\n")
    place, where = rng.randrange(len(lines)), rng.randrange(len(lines))
    moved = lines.pop(place)
    if kind := rng.randrange(3):
        lines.insert(where if kind == 1 else place, moved)
        if kind == 2:
            lines.insert(place, moved)
    return "\n".join(lines)


def character(rng: random.Random, text: str) -> str:
    """A character dropped, put in or exchanged."""
    place, new = rng.randrange(len(text)), rng.choice('()[]{}",=%@.-#\n\0 aé0\u202e')
    kept = rng.randrange(2)
    return text[:place] + rng.choice((new, "")) + text[place + kept :]


EDITS: tuple[Callable[[random.Random, str], str], ...] = (
    number,
    plan,
    swapped(r"%[\w.]+", "value"),
    swapped(r"@[\w.]+", "weight"),
    swapped(r"\b(?:f32|f16|i64|i32|i8|bool|bf16)\b", "dtype"),
    swapped(r"\[[\w,]*\]", "sizes"),
    swapped(r"\b[a-z_]+=", "keyword"),
    op,
    name,
    line,
    character,
)


def in_weights(rng: random.Random, folder: Path, name: str = WEIGHTS) -> str:
    """Bytes of the weights, or what their header says."""
    path = folder / name
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    kind = rng.choice(("bytes", "values", "header", "length", "cut"))
    if kind == "bytes":
        for _ in range(rng.choice((1, 8, 64))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "values":
        place = 8 + size + 4 * rng.randrange((len(data) - 8 - size) // 4)
        data[place : place + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4))
    elif kind == "header":
        text = rng.choice(EDITS)(rng, data[8 : 8 + size].decode())
        header = text.encode("utf-8", "surrogatepass")
        data[: 8 + size] = len(header).to_bytes(8, "little") + header
    elif kind == "length":
        data[:8] = rng.choice((0, size - 1, size + 8, 2**40, 2**64 - 1)).to_bytes(8, "little")
    else:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(data)
    return f"weights {kind}"


def in_manifest(rng: random.Random, folder: Path) -> str:
    """A field of the manifest, or its bytes."""
    path = folder / MANIFEST
    if rng.random() < 0.3:
        text = character(rng, path.read_text())
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return "manifest bytes"
    return f"manifest {in_json(rng, path)}"


def in_json(rng: random.Random, path: Path, junk: Sequence[Any] = JUNK, *under: str) -> str:
    """A value somewhere in a JSON file, or in its part under these keys, dropped or exchanged; says
    where and for what."""
    whole = json.loads(path.read_text())
    at: Any = whole
    for key in under:
        at = at[key]
    keys = list(under)
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        keys.append(str(key))
        if not at[key] or not isinstance(at[key], (dict, list)) or rng.random() < 0.3:
            break
        at = at[key]
    if rng.random() < 0.3:
        del at[key]
        said = "dropped"
    else:
        at[key] = rng.choice(junk)
        said = repr(at[key])[:40]
    path.write_text(json.dumps(whole))
    return f"{'.'.join(keys)} {said}"


def reseal(folder: Path) -> None:
    """Sizes and hashes of the manifest put right."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for file, entry in manifest["files"].items():
        data = (folder / file).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def mutate(rng: random.Random, folder: Path) -> tuple[str, str]:
    """(what was done, what must hold: "sealed", "damaged" or "same")."""
    kind = rng.choice(("text",) * 7 + ("weights",) * 2 + ("manifest",))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    makers = {"text": in_text, "weights": in_weights, "manifest": in_manifest}
    done = makers[kind](rng, folder)
    changed = any(before[path.name] != path.read_bytes() for path in folder.iterdir())
    if kind == "manifest" or not changed:
        return done, "same"
    if rng.random() < 0.15:
        return f"{done}, unsealed", "damaged"
    reseal(folder)
    return done, "sealed"
