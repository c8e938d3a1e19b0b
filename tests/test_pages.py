"""Huge pages: what is mapped inside is in them, what is written stays, all else is left be."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime_helpers import module_at

from graftwork.backends import pages
from graftwork.backends.onnxruntime import session
from graftwork.backends.pages import HUGE, added, huge_pages
from graftwork.backends.target import Target
from graftwork.exporting import runners

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def given_to_whom_asks() -> bool:
    version = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    return ENABLED.exists() and "[never]" not in ENABLED.read_text() and version >= (6, 1)


def in_huge_pages(address: int, nbytes: int) -> int:
    """Bytes of the regions under a range of memory that lie in huge pages. Advice splits a region
    where it starts, so that a range is in several."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *rest = line.split()
        if not field.endswith(":"):
            start, end = (int(part, 16) for part in field.split("-"))
            inside = start < address + nbytes and address < end
        elif inside and field == "AnonHugePages:":
            found += int(rest[0]) << 10
    return found


@pytest.mark.skipif(not given_to_whom_asks(), reason="this system gives no huge pages")
def test_what_is_mapped_inside_is_moved_and_stays_the_same() -> None:
    outside = mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE)
    there = np.frombuffer(outside, dtype=np.int64)
    there[:] = 1
    with huge_pages(HUGE):
        inside = mmap.mmap(-1, 16 * HUGE, flags=mmap.MAP_PRIVATE)
        written = np.frombuffer(inside, dtype=np.int64)
        written[:] = np.arange(written.size)
    assert in_huge_pages(written.ctypes.data, written.nbytes) >= 14 * HUGE
    assert (written == np.arange(written.size)).all() and (there == 1).all()


@pytest.mark.skipif(not given_to_whom_asks(), reason="this system gives no huge pages")
def test_tensors_are_moved_and_stay_the_same_and_those_of_files_are_left(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    np.arange(HUGE, dtype=np.int64).tofile(path)
    mapped = torch.from_file(str(path), size=HUGE, dtype=torch.int64)
    # Mapped, as the C library maps what is large: Linux does not always move parts of its heap.
    maps = [mmap.mmap(-1, n * HUGE + 64, flags=mmap.MAP_PRIVATE) for n in (3, 1, 5)]
    parts = [torch.frombuffer(part, dtype=torch.int64, offset=64) for part in maps]
    for part, n in zip(parts, (3, 1, 5), strict=True):
        part.fill_(n)
    pages.move_to_huge_pages([mapped, *parts])
    for part, n in zip(parts, (3, 1, 5), strict=True):
        assert in_huge_pages(part.data_ptr(), part.nbytes) >= (n - 1) * HUGE
    assert in_huge_pages(mapped.data_ptr(), mapped.nbytes) == 0
    assert (mapped == torch.arange(HUGE)).all()
    assert all((part == n).all() for part, n in zip(parts, (3, 1, 5), strict=True))


@pytest.mark.skipif(not given_to_whom_asks(), reason="this system gives no huge pages")
def test_runners_of_plan_folders_ask_for_them() -> None:
    runner = module_at(Path(runners.__file__).with_name("plan_functions.py"))
    before = runner.private_pages()
    inside = mmap.mmap(-1, 16 * HUGE, flags=mmap.MAP_PRIVATE)
    written = np.frombuffer(inside, dtype=np.int64)
    written[:] = np.arange(written.size)
    made = runner.private_pages() - before
    assert len(made) >= 15 and all(page % HUGE == 0 for page in made)
    runner.make_large(made)
    assert in_huge_pages(written.ctypes.data, written.nbytes) >= 14 * HUGE
    assert (written == np.arange(written.size)).all()


RANGES = st.lists(st.integers(0, 40), unique=True, max_size=12).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(before=RANGES, after=RANGES)
def test_what_is_added_is_a_difference_of_sets(before, after):
    points = lambda ranges: {p for start, end in ranges for p in range(start, end)}  # noqa: E731
    found = list(added(before, after))
    assert points(found) == points(after) - points(before)
    assert all(start < end for start, end in found)


def test_no_map_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems without a map of their memory, and those without such advice."""
    advised: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(pages, "MAPS", tmp_path / "maps")
        patch.setattr(pages, "_collapse", lambda *region: advised.append(region))
        with huge_pages(HUGE):
            pass
    assert advised == []
    with monkeypatch.context() as patch:
        patch.delattr(mmap, "MADV_HUGEPAGE")
        pages._collapse(0, HUGE)


def test_a_session_is_opened_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies of the weights are made while it is opened."""
    import onnxruntime as ort

    entered: list[str] = []

    class Recorder:
        def __init__(self, nbytes: int) -> None:
            assert nbytes == 5

        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *_: object) -> None:
            entered.append("out")

    monkeypatch.setattr(session, "huge_pages", Recorder)
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: entered.append("opened"))
    session.open_session(tmp_path / "model.onnx", Target.parse("onnxruntime:cpu"), weight_bytes=5)
    assert entered == ["in", "opened", "out"]


def test_freed_memory_is_given_back_now_and_then(monkeypatch):
    trimmer, asked = pages.Trimmer(), []
    monkeypatch.setattr(pages, "give_back", lambda: asked.append("asked"))
    for _ in range(4):
        trimmer.note(pages.Trimmer.EVERY // 2)
    assert len(asked) == 2
    trimmer.done()
    assert len(asked) == 3
