"""Where and in which dtype a program will run: ``backend[:device[:dtype[:columns=N]]]``.

>>> str(Target.parse("onnxruntime:cpu:float32"))
'onnxruntime:cpu:float32'
>>> Target.parse("torch").dtype
torch.float32
>>> Target.parse("torch:cpu:float32:columns=8").columns
8
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from ..ir import InputError

BACKENDS = {"eager": "torch", "torch": "torch", "onnxruntime": "onnxruntime"}
"""The folder of each backend."""

DEVICES = ("cpu", "cuda")
MOST_COLUMNS = 128
"""As far as a step may reach beyond the context on every backend."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Target:
    """backend: eager (torch, uncompiled), torch (inductor) or onnxruntime; device: cpu or cuda.

    dtype: of weights and activations, where no pass gave them another numeric layout. threads: CPU
    threads inside an op; None takes all cores that the process may use. columns: for the same bits
    with and without drafts where kernels of other sizes add up in another order, as a GPU's do:
    every step of the target has so many columns, and caches have room for the whole context, be
    there need or not. That serves chains; what a node of a tree sees lies in other rows than in a
    text. None: as many as are asked for.
    """

    backend: str = "onnxruntime"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    threads: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        _check("backend", self.backend, tuple(BACKENDS))
        _check("device", self.device, DEVICES)
        if self.dtype not in DTYPES.values():
            raise InputError(f"target dtype: expected one of {', '.join(DTYPES)}; got {self.dtype}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"target threads: expected a positive number; got {self.threads}")
        if self.columns is not None and not 1 <= self.columns <= MOST_COLUMNS:
            raise InputError(
                f"target columns: expected 1 to {MOST_COLUMNS} columns of a step; "
                f"got {self.columns}"
            )

    @classmethod
    def default(cls) -> Target:
        """onnxruntime:cpu:float32 without a GPU, torch:cuda:bfloat16 with one."""
        if torch.cuda.is_available():
            return cls("torch", "cuda", torch.bfloat16)
        return cls()

    @classmethod
    def parse(cls, text: str, threads: int | None = None) -> Target:
        """Read ``backend[:device[:dtype[:columns=N]]]``; device defaults to cpu, dtype to float32
        there.

        Errors: `InputError` naming the part that is unknown and the nearest known one.
        """
        parts = text.split(":")
        if len(parts) > 4 or not parts[0]:
            raise InputError(f"target {text!r}: expected backend[:device[:dtype[:columns=N]]]")
        device = parts[1] if len(parts) > 1 else "cpu"
        _check("device", device, DEVICES)
        name = parts[2] if len(parts) > 2 else ("float32" if device == "cpu" else "bfloat16")
        _check("dtype", name, tuple(DTYPES))
        return cls(parts[0], device, DTYPES[name], threads, _columns(*parts[3:]))

    def require_device(self) -> None:
        """Errors: `InputError` if the device is not on this machine."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"target {self}: no CUDA device is usable on this machine "
                f"(torch {torch.__version__}{_why_unusable()}); use {self.backend}:cpu"
            )

    def __str__(self) -> str:
        name = next(k for k, v in DTYPES.items() if v == self.dtype)
        columns = "" if self.columns is None else f":columns={self.columns}"
        return f"{self.backend}:{self.device}:{name}{columns}"


def _why_unusable() -> str:
    """What torch says of its CUDA: that it has none, that the driver is too old, ..."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f": {str(error).strip().splitlines()[0]}" if str(error).strip() else ""
    return ""


def _columns(text: str = "") -> int | None:
    if not text:
        return None
    name, _, number = text.partition("=")
    if name != "columns" or not (number.isascii() and number.isdigit()):
        raise InputError(f"target: expected columns=N after the dtype; got {text!r}")
    return int(number)


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    near = difflib.get_close_matches(value, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"target {what}: expected one of {', '.join(known)}; got {value!r}{hint}")
