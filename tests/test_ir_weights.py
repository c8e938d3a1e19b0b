"""Weights stay on disk until they are loaded, and say what is wrong with a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graftwork.ir import (
    InputError,
    TensorType,
    Weight,
    WeightStore,
    derivation,
    derive,
    from_safetensors,
)
from graftwork.ir.weights import Call, derivation_of_parts, piece

MIB = 2**20


def anonymous_bytes() -> int:
    """Memory of this process that no file backs (RssAnon)."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the kernel does not report RssAnon here")
    line = next(ln for ln in status.read_text().splitlines() if ln.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A file with four tensors of 32 MiB."""
    path = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.full((8, MIB), float(i)) for i in range(4)}, path)
    return path


@pytest.mark.long
def test_nothing_is_read_before_load(big: Path) -> None:
    """In a process of its own: what other tests free would be counted here."""
    code = f"import pathlib, test_ir_weights as t; t.check_laziness(pathlib.Path({str(big)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def check_laziness(big: Path) -> None:
    start = anonymous_bytes()
    weights = [from_safetensors(big, f"w{i}") for i in range(4)]
    store = WeightStore({w.name: w for w in weights})
    halves = [w.cast(torch.bfloat16) for w in weights]
    joined = derive("joined", TensorType.parse("f32[32,1048576]"), _join, *weights)
    store = store.adding(joined, halves[0].renamed("half"))
    assert [str(w.type) for w in halves] == ["bf16[8,1048576]"] * 4
    assert anonymous_bytes() - start < 8 * MIB
    half = store["half"].load()
    assert half.dtype == torch.bfloat16 and half.shape == (8, MIB)
    held = anonymous_bytes() - start
    assert 12 * MIB < held < 60 * MIB, "one tensor of 16 MiB, and no other"
    del half
    assert joined.load()[16, 0] == 2.0
    assert anonymous_bytes() - start < 60 * MIB, "nothing is kept after load"


@derivation
def _join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def test_derivations_are_data() -> None:
    """Equal calls on the same weights give one weight, and a function without a name gives none."""
    w = Weight.of("w", torch.arange(6.0))
    type = TensorType.parse("f32[2]")
    one, same, other = (derive("p", type, piece, w, axis=0, start=s, end=s + 2) for s in (0, 0, 2))
    store = WeightStore({"w": w, "p": one})
    assert store.alike(same) is one and store.alike(other) is other
    assert one.made.kwargs == {"axis": 0, "start": 0, "end": 2}
    with pytest.raises(InputError, match="derives no weights"):
        derive("p", type, lambda t: t[:2], w)
    with pytest.raises(InputError, match="two functions that derive weights are called piece"):
        derivation(_named_piece())


def _named_piece() -> Callable[..., torch.Tensor]:
    def piece(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    return piece


CALLS: list[int] = []


@derivation_of_parts("end")
def both_ends(tensor: torch.Tensor, *, size: int) -> dict[str, torch.Tensor]:
    CALLS.append(size)
    return {"first": tensor[:size], "last": tensor[-size:]}


def _ends(name: str, source: Weight, size: int) -> list[Weight]:
    type = TensorType(torch.float32, (size,))
    return [derive(name + end, type, both_ends, source, end=end, size=size) for end in ENDS]


ENDS = ("first", "last")


def test_weights_that_are_made_together_are_made_once() -> None:
    """Loaded one after the other; again when they are loaded again, also of equal sources."""
    w = Weight.of("w", torch.arange(6.0))
    inner, outer = _ends("i", w, 4), _ends("o", _ends("i", w, 4)[1], 2)
    renewed = replace(outer[1], inputs=(_ends("i", w, 4)[1],))
    CALLS.clear()
    assert [outer[0].load().tolist(), renewed.load().tolist()] == [[2.0, 3.0], [4.0, 5.0]]
    assert CALLS == [4, 2]
    assert inner[0].load().tolist() == [0.0, 1, 2, 3] and CALLS == [4, 2]  # it was left
    assert inner[1].load().tolist() == [2.0, 3, 4, 5] and CALLS == [4, 2, 4]
    assert inner[0].load().tolist() == [0.0, 1, 2, 3] and CALLS == [4, 2, 4]


def test_loading_checks_the_type() -> None:
    liar = Weight("w", TensorType.parse("f32[3]"), Call(lambda: torch.ones(4)))
    with pytest.raises(InputError, match=r"weight w: expected f32\[3\], its source gave f32\[4\]"):
        liar.load()
    turned = Weight.of("w", torch.randn(3, 4).T)
    assert turned.load().is_contiguous()
    assert not Weight.of("p", torch.nn.Parameter(torch.ones(2))).load().requires_grad


def test_integers_are_not_cast() -> None:
    ids = Weight.of("ids", torch.arange(3))
    assert ids.cast(torch.bfloat16) is ids
    same = Weight.of("w", torch.ones(3))
    assert same.cast(torch.float32) is same


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read weights from .*none\.safetensors"):
        from_safetensors(tmp_path / "none.safetensors", "w")
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(64)}, path)
    with pytest.raises(InputError, match="holds no tensor 'v'"):
        from_safetensors(path, "v")
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    with pytest.raises(InputError, match="cannot read weights"):
        from_safetensors(path, "w")
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(InputError, match="cannot read weights"):
        from_safetensors(path, "w")


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(4)}, path)
    assert from_safetensors(path, "w").load().sum() == 4
    save_file({"w": torch.ones(4) * 2, "v": torch.ones(1)}, path)
    assert from_safetensors(path, "w").load().sum() == 8


def test_unsupported_dtypes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(4).to(torch.float8_e4m3fn)}, path)
    with pytest.raises(InputError, match="dtype F8_E4M3, not supported"):
        from_safetensors(path, "w")


def test_stores_are_immutable_and_refuse_to_overwrite() -> None:
    a, b = Weight.of("a", torch.ones(1)), Weight.of("b", torch.ones(2))
    store = WeightStore({"a": a})
    bigger = store.adding(b, a)
    assert list(store) == ["a"] and list(bigger) == ["a", "b"] and len(bigger) == 2
    assert list(bigger.only({"b"})) == ["b"] and "a" in bigger and 3 not in bigger
    with pytest.raises(InputError, match="a weight named 'a' exists already"):
        store.adding(Weight.of("a", torch.zeros(1)))
    with pytest.raises(InputError, match="no weight named 'c'"):
        store["c"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells memory as Linux does")
def test_what_was_copied_leaves_the_memory(tmp_path):
    """Of a file whose weights are all made into others nothing stays mapped in memory."""

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssFile"))
        return int(kilobytes) << 10

    path, size = tmp_path / "w.safetensors", 16 << 20
    save_file({f"w{i}": torch.ones(size // 4) for i in range(4)}, path)
    weights = [from_safetensors(path, f"w{i}") for i in range(4)]
    small = [
        derive(w.name, TensorType.parse("f32[8]"), piece, w, axis=0, start=0, end=8)
        for w in weights
    ]
    before = mapped()
    kept = [weight.load() for weight in small]
    whole = derive("sum", TensorType.parse("f32[]"), torch.ops.aten.sum.default, weights[0])
    assert float(whole.load()) == size // 4 and len(kept) == 4
    assert mapped() - before < size // 4
    held = weights[0].load()
    assert float(held.sum()) == size // 4
    assert mapped() - before >= size // 2, "a weight that is used as it is stays mapped"


def test_a_file_stays_what_it_was_when_another_takes_its_place(tmp_path):
    path, other = tmp_path / "w.safetensors", tmp_path / "other.safetensors"
    save_file({"w": torch.ones(3)}, path)
    weight = from_safetensors(path, "w")
    save_file({"w": torch.zeros(3)}, other)
    other.replace(path)
    assert weight.load().tolist() == [1, 1, 1]
    assert from_safetensors(path, "w").load().tolist() == [0, 0, 0]
